"""The package's own rounds over checkpoints in transformers: what an engine must answer.

Randomness is a hash of (seed, round, position, particle, purpose), so that an engine's text equals
the text of these rounds, token by token, unless it hands rounds other logits: of another token,
slot, position or model. Here a model reads each text anew, from the tokens in the slots that the
ledger leads to; nothing of SGLang's layers, caches, schedules or attention takes part.
"""

import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from head_laws import BLOCKS, Draft, PairDraft, left_out
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from toy_request import PROMPT
from toy_worker import Language, SlotModel, ToyDraft, ToyWorker
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

from sglang_smc import upstream
from sglang_smc.models.chains import Chains
from sglang_smc.options.server import SMCConfig
from sglang_smc.patches.request_state import update_finish_state
from sglang_smc.proposers.base import DraftSlots
from sglang_smc.proposers.dflash import BlockHead
from sglang_smc.proposers.eagle3 import EagleHead
from sglang_smc.proposers.ngram import Corpus, UniformDraft
from sglang_smc.round.prefill import Prefill
from sglang_smc.state.request import state_of

WIDTH = 128  # tokens of the longest prompt and answer


class Answer(NamedTuple):
    output_ids: list[int]
    meta_info: dict[str, Any]  # SMC's own


IN_8_BITS = {"fp8_e5m2": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}


def attend_in(kind: str) -> str:
    """Attention over keys and values that are kept in 8 bits, by the name of their type."""

    def attend(module: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        dtype = IN_8_BITS[kind]
        key, value = (part.to(dtype).to(part.dtype) for part in (key, value))
        return eager_attention_forward(module, query, key, value, *rest, **more)

    if kind in IN_8_BITS:
        AttentionInterface.register(kind, attend)
        AttentionMaskInterface.register(kind, eager_mask)
    return kind


def attend_within(limit: tuple[int, int]) -> str:
    """Attention to a window, and to first keys; see `left_out`."""
    name = "within {} and {}".format(*limit)

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        hidden = left_out(key.shape[2], *limit)
        mask = mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
        return eager_attention_forward(module, query, key, value, mask, **more)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    return name


def load(path: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    """A checkpoint in plain torch; faster attention would leave a cap on scores out."""
    config = AutoConfig.from_pretrained(path)
    if config.model_type == "cohere2":  # SGLang lets it attend to one key more (commandr.py:208)
        config.sliding_window += 1
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    options = {"attn_implementation": attend_in(attention), "experts_implementation": "eager"}
    return auto.from_pretrained(path, config=config, dtype=dtype, **options).eval()


class Checkpoint:
    """A model's logits behind each token of texts.

    Args:
        model: of transformers.
        width: V, of the target's logits: a draft's get -inf where it has none, or are cut.
        hot: the only tokens that a draft has mass on; None for all.
    """

    def __init__(self, model: Any, width: int | None = None, hot: list[int] | None = None) -> None:
        self.model = model
        self.hot = hot
        self.own = int(model.get_input_embeddings().weight.shape[0])
        self.width = width or self.own

    @torch.no_grad()
    def logits(self, texts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Behind the tokens at ``places`` ``[R, C]`` of ``texts`` ``[R, L]``, ``[R, C, V]``."""
        different, which = texts[:, : int(places.max()) + 1].unique(dim=0, return_inverse=True)
        read = different.clamp_max(self.own - 1)  # what it has no embedding for reads as the last
        found = self.model(input_ids=read, use_cache=False).logits
        found = torch.nn.functional.pad(found, (0, self.width - self.own), value=-torch.inf)
        if self.hot is not None:
            every = torch.full_like(found, -torch.inf)
            every[..., self.hot] = found[..., self.hot]
            found = every
        return found[which.unsqueeze(1), places].float()


class CheckpointSlots(SlotModel):
    """A checkpoint that reads the tokens in the slots of each particle."""

    def __init__(self, checkpoint: Checkpoint, rows: torch.Tensor, num_slots: int) -> None:
        super().__init__(Language(torch.zeros(1, checkpoint.width)), rows, num_slots)
        self.checkpoint = checkpoint

    def read(self, tokens: list[int] | torch.Tensor, slots: torch.Tensor) -> None:
        self._tokens[slots.long()] = torch.as_tensor(tokens)

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        tokens, starts, slots, locations = chains[:4]
        self._tokens[slots] = tokens
        places = starts.flatten().unsqueeze(1) + torch.arange(tokens.shape[2])
        texts = self.texts(locations).flatten(0, 1)
        return self.checkpoint.logits(texts, places).view(*tokens.shape, -1)


class HeadSlots(CheckpointSlots):
    """A head, which knows where its round began."""

    head: Draft | PairDraft
    anchors: torch.Tensor  # [G, N]

    def chain_logits(self, chains: Chains) -> torch.Tensor:
        tokens, starts, slots, locations = chains[:4]
        self._tokens[slots] = tokens
        texts = self.texts(locations).flatten(0, 1)
        anchors = self.anchors.flatten()
        steps = starts.flatten() + tokens.shape[2] - 1 - anchors
        laws = self.head.laws(texts[:, : int(anchors.max()) + self.head.num_steps + 1], anchors)
        found = laws[torch.arange(len(laws)), steps].log().float()
        return found.view(*tokens.shape[:2], 1, -1)


class HeadDrafts(ToyDraft):
    """Drafts by a head, through the calls that a language model gets."""

    least_temperature = EagleHead.least_temperature

    def first_logits(self, last_two: torch.Tensor, at: DraftSlots) -> torch.Tensor:
        slots: Any = self.forward
        slots.anchors = at.positions[1]
        return super().first_logits(last_two, at)


class CheckpointRounds(ToyWorker):
    """A server in this process; all requests run at once.

    Args:
        target: a checkpoint.
        draft: another one, or a head's law; None: n-gram matches.
        settings: of the server, as `SMCConfig` has them.
        num_requests: that it has rows for.
        hot: the only tokens that the draft has mass on; None for all.
        limit: of a checkpoint's attention that drafts, as `left_out` takes it; None: all keys.
    """

    def __init__(
        self,
        target: str,
        draft: str | Draft | PairDraft | None,
        settings: dict[str, Any],
        num_requests: int,
        *,
        corpus: Corpus | None = None,
        attention: str = "eager",
        hot: list[int] | None = None,
        limit: tuple[int, int] | None = None,
    ) -> None:
        self.models = Checkpoint(load(target, attention=attention)), draft
        width = self.models[0].width
        if isinstance(draft, str):
            attention = attention if limit is None else attend_within(limit)
            self.models = self.models[0], Checkpoint(load(draft, attention=attention), width, hot)
        self.tokenizer = AutoTokenizer.from_pretrained(target)
        self.tokenizer.additional_stop_token_ids = None  # as SGLang's own loader leaves it
        blank = Language(torch.zeros(1, width))
        self.num_begun = 0
        longest = WIDTH - len(PROMPT)
        super().__init__(
            SMCConfig(**settings),
            blank,
            blank,
            num_requests=num_requests,
            max_new_tokens=longest,
            eos=self.tokenizer.eos_token_id,
            corpus=corpus,
        )

    def _make_worker(self, num_slots: int) -> Any:
        rows = self.target._table
        target, draft = self.models
        self.target = CheckpointSlots(target, rows, num_slots)
        own: Any = HeadSlots(target, rows, num_slots)
        if isinstance(draft, Checkpoint):
            own = CheckpointSlots(draft, rows, num_slots)
        self.draft = own
        worker: Any = super()._make_worker(num_slots)
        if draft is None:
            worker._round.draft = UniformDraft(None, self.vocab_size)  # type: ignore[arg-type]
        elif isinstance(draft, Draft | PairDraft):
            own.head = draft
            drafts = HeadDrafts(own, None)  # type: ignore[arg-type]
            if isinstance(draft, Draft) and draft.kind in BLOCKS:
                drafts.least_temperature = BlockHead.least_temperature
            worker._round.draft = drafts
        self.prefill = Prefill.__new__(Prefill)
        self.prefill._states = worker._states
        self.prefill._tables = worker._tables
        self.prefill._draft = worker._prefill._draft = worker._round.draft
        return worker

    def generate(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> list[Answer]:
        """Answer requests, in one batch; keywords of `sampling_params` as an engine takes them."""
        reqs = [self.begin_request(*each) for each in zip(prompts, params, strict=True)]
        width = max(map(len, prompts))
        texts = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
        ends = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        logits = self.models[0].logits(texts, ends)[:, 0]
        output = LogitsProcessorOutput(next_token_logits=logits)
        tokens, _ = self.prefill.begin(self.batch(reqs), output, None, None)
        for req, token in zip(reqs, tokens.tolist(), strict=True):
            self.book(req, [token])
        while running := [req for req in reqs if not req.finished()]:
            result = self.play_round(running)
            for req, new in zip(running, self.emitted(result, running), strict=True):
                upstream.kv_of(req).kv_committed_len += len(new)
                self.book(req, new)
        return [self.answer(req) for req in reqs]

    def begin_request(self, prompt: list[int], asked: dict[str, Any]) -> Any:
        """A request in the next row, whose prompt both models have read."""
        self.num_begun += 1
        params = SamplingParams(**asked)
        params.normalize(self.tokenizer)
        req = Req(str(self.num_begun), "", prompt, params, vocab_size=self.vocab_size)  # type: ignore[arg-type]
        req.tokenizer = self.tokenizer
        kv = upstream.kv_of(req)
        kv.req_pool_idx = self.num_begun
        kv.kv_committed_len = len(prompt)
        for model in (self.target, self.draft):
            model.read(prompt, self.table[self.num_begun, : len(prompt)])
        return req

    def emitted(self, result: Any, reqs: list[Any]) -> list[list[int]]:
        """What a round has emitted, by request, once it is booked."""
        stride = len(result.next_token_ids) // len(reqs)

        def resolve() -> list[list[int]]:
            rows = result.next_token_ids.view(-1, stride).tolist()
            return [row[:num] for row, num in zip(rows, result.accept_lens.tolist(), strict=True)]

        return result.resolve(SimpleNamespace(reqs=reqs), resolve)

    def book(self, req: Any, new: list[int]) -> None:
        """Give a request its tokens, as SGLang does, and let it look for an end."""
        req.output_ids.extend(new)
        update_finish_state(inspect.unwrap(Req.update_finish_state), req, len(new))

    def answer(self, req: Any) -> Answer:
        output = list(req.output_ids)[: req.finished_len]
        return Answer(output, state_of(req).meta_info(output, None))


def check(answers: list[dict[str, Any]], expected: list[Answer], *, tolerance: float = 1e-4) -> int:
    """Compare an engine's answers, with their evidence, but for requests that were retracted.

    What follows a retraction is drawn anew. Engines compute in float32, so a log-evidence of
    hundreds is rounded by more than ``tolerance``. Returns how many were compared.
    """
    compared = 0
    different = []
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        if not answer["meta_info"]["num_retractions"]:
            compared += 1
            infos = answer["meta_info"], wanted.meta_info
            found, evidence = (info["spec_smc_log_evidence"] for info in infos)
            same = evidence == found or pytest.approx(evidence, rel=5e-6, abs=tolerance) == found
            same &= len({info["spec_smc_watched_ct"] for info in infos}) == 1
            if answer["output_ids"] != wanted.output_ids or not same:
                texts = answer["output_ids"], wanted.output_ids
                different.append((number, *texts, found, evidence))
    assert not different, different
    return compared
