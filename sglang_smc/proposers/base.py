"""Define `DraftProposer`, the interface of a draft to a round, and implement it for draft models.

A round takes from the proposer the distribution q of the first draft token after each particle's
sequence, samples a token, and takes the distribution after that token, K times. A proposer stores
its own state by KV slot: a slot belongs to one token of one sequence, and the ledger passes slots
on as particles are resampled. So resampling, cuts and emission need no calls to the proposer.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_smc import upstream
from sglang_smc.models import vocabulary
from sglang_smc.models.attention import Implementation, ParticleAttention
from sglang_smc.models.chains import Chains
from sglang_smc.models.draft_layers import fuse_draft, fuse_layers
from sglang_smc.models.forward import ParticleForward
from sglang_smc.models.recorder import PassRecording
from sglang_smc.models.windows import is_limited
from sglang_smc.proposers.hot_tokens import cut_head, lm_head_of, read_map
from sglang_smc.proposers.layer_choice import LayerChoice
from sglang_smc.proposers.prompt_attention import PromptAttention
from sglang_smc.smc.ledger import Ledger, Slots

ANY = sys.maxsize
"""Tokens that may wait for a draft which reads texts whenever they are needed."""


class DraftSlots(Slots):
    """KV slots of a round, as models read them."""

    def chains(self, tokens: torch.Tensor, first: int) -> Chains:
        """Return tokens ``[G, N, C]`` as chains that begin in the column ``first``."""
        slots = self.slots[first : first + tokens.shape[2]].permute(1, 2, 0)
        return Chains(tokens, self.positions[first], slots, self.locations)


class DraftContext(NamedTuple):
    """Hold what a drafter is built from, once the server's pools exist."""

    target: TpModelWorker
    draft: TpModelWorker | None  # of --speculative-draft-model-path
    passes: ParticleForward  # of the target over particles; a `ReadTarget` where states are wanted
    ledger: Ledger
    kernels: Implementation
    num_particles: int  # N of the server
    num_columns: int  # K + 1
    skinny: Callable[..., torch.Tensor] | None  # of a draft's layers; None: SGLang's run
    layer_choice: LayerChoice | None = None  # which of their passes are fused; None: all

    @property
    def vocab_size(self) -> int:
        """Return V, the width of the target's logits."""
        return self.target.model_runner.model_config.vocab_size

    @property
    def runner(self) -> ModelRunner:
        """Return SGLang's runner of the draft's model."""
        assert self.draft is not None, "a drafter with `runs_model` has one"
        return self.draft.model_runner

    def fuse(self, forward: ParticleForward) -> None:
        """Fuse the layers of the draft's model where this is asked; ValueError if it cannot be."""
        if self.skinny is None:
            return
        model = self.runner.model
        attention = forward.attn_backend
        choice = self.layer_choice
        if choice is None:
            fuse_draft(model, attention, self.skinny)
        elif not fuse_layers(model, attention, self.skinny, choice.fuses):
            choice.leave("the draft's layers are of no kind and size that can be fused")


class DraftProposer(ABC):
    """A draft: a language model, a head over the target's hidden states, or a class of a user's.

    A server builds it in this order: `problems` as it starts, `connect` once the models are loaded,
    `build` once the KV pools exist.
    """

    runs_model = False
    """Whether it runs the model of --speculative-draft-model-path; else none may be given."""

    drafts_all = True
    """Whether it gives every token a probability above 0, so that weights alone reach all texts."""

    needs: tuple[str, ...] = ()
    """Names that SGLang's class of the target must have for `connect` and `build`."""

    captures_by = ""
    """The method of the target's class by which it gives out states of several layers, if any."""

    is_block = False
    """Whether the attention of its model sees a block in both directions."""

    has_stock_passes = False
    """Whether SGLang may capture its own passes, over prompts."""

    wants_states = False
    """Whether it takes the target's hidden states: in `read_prompts`, and after each pass of the
    target in `read_chains`, as `hidden_states.StatesReader` has it."""

    least_temperature = 0.0
    """Least temperature at which N chains of one multi-draft are drawn, over 1 - 1 / N.

    A draft may be sure of other tokens than the target, which nearly equal chains would all miss.
    """

    layer_choice: LayerChoice | None = None
    """Which passes run by fused layers, where the server chooses."""

    attn_backend: ParticleAttention
    """What its passes attend with; that of `DraftContext.passes` where it has no passes."""

    @classmethod
    def problems(cls, config: ModelConfig, target: ModelConfig, num_steps: int) -> Iterable[str]:
        """Yield what of a checkpoint it cannot run, as phrases that follow its path."""
        return ()

    @classmethod
    def captured_layers(cls, config: Any, num_layers: int) -> list[int] | None:
        """Return which of the target's layers give out states; None: SGLang's default.

        They are counted as by SGLang.

        Args:
            config: SGLang's `ModelConfig` of the draft's model; None where none is run.
            num_layers: of the target.
        """
        return None

    @classmethod
    def connect(cls, target: TpModelWorker, draft: TpModelWorker) -> torch.nn.Module | None:
        """Share the target's tables with the draft's model, before pools and graphs are built.

        Returns the LM head that is the draft's own; None where it is the target's, or unknown.

        Raises ValueError for models that do not fit together.
        """
        return None

    @classmethod
    @abstractmethod
    def build(cls, context: DraftContext) -> "DraftProposer":
        """Build the drafter; raise ValueError for a model that it cannot run."""

    @property
    def state_bytes(self) -> int:
        """Return the bytes that the proposer keeps from round to round beside KV."""
        return 0

    @property
    def late_tokens(self) -> int:
        """Return how many tokens of a request are read at once, later than in their round.

        They are of rounds of single chains without drafts. 0: each round's are read in it; `ANY`:
        `read_prompts` reads them as it does prompts, which may wait, too.
        """
        return 0

    @abstractmethod
    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return the logits ``[G, N, V]`` of the first draft token.

        Args:
            last_two: ``[G, N, 2]`` the token that each particle continues from, which neither model
                has processed, and the token before it.
        """

    @abstractmethod
    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        """Return the logits ``[G, N, V]`` after the tokens ``[G, N]`` sampled at ``step - 1``."""

    def read_without_logits(self, last_two: torch.Tensor, at: DraftSlots) -> None:
        """Read the last tokens in a round without drafts; arguments as in `first_logits`."""
        return None

    def read_deferred(self, rows: Sequence[int | None]) -> bool:
        """Read what it has kept of the requests in ``rows``; return False if it keeps nothing."""
        return False

    def recorded(self, recording: PassRecording) -> "DraftProposer":
        """Return a proposer with captured passes, for rounds that are launched from the host."""
        return self

    def read_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run over the new tokens of prompts, after the target's pass.

        Args:
            target: the batch of the target's pass, T new tokens in all.
            states: ``[T, F]`` hidden states of the target at these tokens; None where not wanted.

        Returns:
            Logits ``[G, V]`` after the prompts; None for heads, which need the next token first.
        """
        return None


class LanguageModel(DraftProposer):
    """A draft model: it runs over its own draft tokens, and over those that the target appends.

    The last draft token is not run in its own round: if it is kept, the next round runs it together
    with the token after it, in one pass. Rounds of single chains without drafts do not run the
    model, nor do their prompts: it reads their texts once drafts are asked for.

    Tokens of the target alone, and all but ``hot`` ones, get -inf, so that they are never drafted:
    as for any token outside of q's support, p's mass there is left to bonus tokens and to
    rejections in verification. Where tokens of the target alone are read (special tokens that the
    draft lacks, as those of images in Gemma 3, token ids of a prompt, or padding that the target
    sampled) the draft reads its last id, which changes q alone. Those of the draft alone are cut.

    Args:
        forward: the draft model over particles.
        runner: SGLang's, which runs over prompts.
        num_missing: ids that the target's logits have beyond the draft's; below 0: the draft's.
        hot: ``[H]`` int64 the only tokens that its LM head has rows of; None for all.
        prompt_attention: for prompts, where `models.windows.limit` is on; None: SGLang's backend.
    """

    runs_model = has_stock_passes = True
    least_temperature = 1.14

    @classmethod
    def connect(cls, target: TpModelWorker, draft: TpModelWorker) -> torch.nn.Module | None:
        """Cut the LM head to the tokens of a map, if one is given."""
        model: Any = draft.model_runner.model
        path = upstream.resolved(draft.server_args).speculative_token_map
        if path is None:
            return lm_head_of(model)
        both = (draft, target)
        hot = read_map(path, min(one.model_runner.model_config.vocab_size for one in both))
        return cut_head(model, hot.to(draft.model_runner.device))

    @classmethod
    def build(cls, context: DraftContext) -> "LanguageModel":
        runner = context.runner
        assert context.draft is not None
        num_missing = vocabulary.num_missing(context.target, context.draft)
        tails = context.ledger.tails
        forward = ParticleForward(runner, tails, context.kernels, context.num_columns)
        context.fuse(forward)
        hot = vars(runner.model).get("hot_token_id")
        attention = None
        if is_limited(runner.model):
            attention = PromptAttention(runner, first_key=0, keys_alone=False)
        return cls(forward, runner, num_missing, hot, attention)

    def __init__(
        self,
        forward: ParticleForward,
        runner: ModelRunner,
        num_missing: int = 0,
        hot: torch.Tensor | None = None,
        prompt_attention: PromptAttention | None = None,
    ) -> None:
        self.forward = forward
        self._prompt_attention = prompt_attention
        self._runner = runner
        self._missing = num_missing
        self._hot = hot
        self.attn_backend = forward.attn_backend

    @property
    def late_tokens(self) -> int:
        return ANY

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._logits(last_two, at, 0)  # the first of both may not have been run

    def next_logits(self, step: int, tokens: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        return self._logits(tokens.unsqueeze(2), at, step + 1)

    def read_without_logits(self, last_two: torch.Tensor, at: DraftSlots) -> None:
        if last_two.shape[1] > 1:  # else it reads them later
            self.first_logits(last_two, at)

    def _logits(self, tokens: torch.Tensor, at: DraftSlots, first: int) -> torch.Tensor:
        logits = self.forward.next_logits(at.chains(self._readable(tokens), first))
        if self._hot is None and not self._missing:
            return logits
        width = self._runner.model_config.vocab_size + self._missing
        return to_full_vocabulary(logits, self._hot, width).contiguous()  # for the kernels

    def _readable(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._missing <= 0:
            return tokens
        return tokens.clamp_max(self._runner.model_config.vocab_size - 1)

    def recorded(self, recording: PassRecording) -> DraftProposer:
        recorded = copy(self)
        recorded.forward = recording.of(self.forward, "next_logits", (2, 1))
        return recorded

    def read_prompts(
        self, batch: ScheduleBatch, target: ForwardBatch, states: torch.Tensor | None
    ) -> torch.Tensor:
        forward_batch = ForwardBatch.init_new(
            batch, self._runner, return_hidden_states_before_norm=False
        )
        forward_batch.return_logprob = False
        # Tokens of an image have ids of its content, beyond any vocabulary.
        most = self._runner.model_config.vocab_size - 1
        forward_batch.input_ids = forward_batch.input_ids.clamp_max(most)
        forward_batch.mm_inputs = None
        if forward_batch.mrope_positions is not None:
            forward_batch.mrope_positions = forward_batch.positions.expand(3, -1)
        output = self._run_prompts(batch, forward_batch)
        assert isinstance(output, LogitsProcessorOutput)
        assert output.next_token_logits is not None
        return output.next_token_logits

    def _run_prompts(self, batch: ScheduleBatch, forward_batch: ForwardBatch) -> Any:
        attention = self._prompt_attention
        if attention is None:
            return self._runner.forward(forward_batch).logits_output
        attention.plan(batch)
        with forward_context(ForwardContext(attn_backend=attention)), torch.no_grad():
            return self._runner.model.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            )


def to_full_vocabulary(
    logits: torch.Tensor, hot: torch.Tensor | None, vocab_size: int
) -> torch.Tensor:
    """Return logits ``[..., V]`` of a draft's ``[..., H]``, cut or with -inf for tokens it lacks.

    Args:
        hot: ``[H]`` int64 token ids, behind whose logits there may be padding; None for the first.
    """
    missing = vocab_size - logits.shape[-1]
    if hot is None:
        return (
            torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
        )
    every = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return every.index_copy_(-1, hot, logits[..., : len(hot)])
