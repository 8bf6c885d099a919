"""Read prompts, sample the target's answers to them, and run the target on these texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    StoppingCriteriaList,
)

from sglang_smc_tools.commands import prompts_in
from sglang_smc_tools.distill.checkpoints import loaded


class Example(NamedTuple):
    """Token ids of a prompt and its answer, and the prompt's length."""

    ids: list[int]
    prompt: int


class TextBatch(NamedTuple):
    """Texts padded on the right, which causal attention ignores."""

    ids: torch.Tensor  # [B, L] int64
    prompts: torch.Tensor  # [B] int64: prompt lengths
    lengths: torch.Tensor  # [B] int64: total lengths


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        path: ``.jsonl``, each line with ``prompt`` (a string to continue) or
            ``messages`` (a chat to answer); any other suffix: one prompt per line.
        tokenizer: the target's.

    Raises ValueError if the file or a line has no prompt.
    """
    lines = prompts_in(path)
    if path.suffix != ".jsonl":
        return [tokenizer(line)["input_ids"] for line in lines]
    return [_prompt(path, number, line, tokenizer) for number, line in enumerate(lines, 1)]


def _prompt(path: Path, number: int, line: str, tokenizer: Any) -> list[int]:
    where = f"--prompts {path}, line {number}"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    found = entry if isinstance(entry, dict) else {}
    if isinstance(found.get("prompt"), str):
        return tokenizer(found["prompt"])["input_ids"]
    if not isinstance(found.get("messages"), list):
        raise ValueError(f'{where} has neither "prompt", a string, nor "messages", a list.')
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{where} has messages, but the target's tokenizer has no chat template; give it as a "
            "prompt."
        )
    how = {"add_generation_prompt": True, "tokenize": False}
    text = tokenizer.apply_chat_template(found["messages"], **how)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def write_texts(path: Path, texts: Sequence[Example], temperature: float) -> None:
    """Write texts to a file for `read_texts`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"temperature": temperature}, *(text._asdict() for text in texts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_texts(path: Path, temperature: float) -> list[Example]:
    """Read texts of `write_texts`; raise ValueError if they have another temperature."""
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    if head["temperature"] != temperature:
        raise ValueError(
            f"--texts {path} was sampled at temperature {head['temperature']}, and --temperature "
            f"is {temperature}; name another file, which is then written."
        )
    return [Example(**line) for line in lines]


def collate(texts: Sequence[Example], device: torch.device) -> TextBatch:
    """Return ``texts`` as one padded batch."""
    ids = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True)
    prompts = torch.tensor([text.prompt for text in texts])
    lengths = torch.tensor([len(text.ids) for text in texts])
    return TextBatch(ids.to(device), prompts.to(device), lengths.to(device))


def batches(texts: Sequence[Example], size: int, rng: torch.Generator) -> Iterator[list[Example]]:
    """Yield endless batches of ``size`` texts of similar lengths, which reduces padding."""
    by_length = sorted(texts, key=lambda text: len(text.ids))
    while True:
        # The grouping varies a little between epochs.
        shift = int(torch.randint(size, (), generator=rng))
        turned = by_length[shift:] + by_length[:shift]
        chunks = [turned[start : start + size] for start in range(0, len(turned), size)]
        for index in torch.randperm(len(chunks), generator=rng).tolist():
            yield chunks[index]


# --- The target


class Lesson(NamedTuple):
    """The target's hidden states on a batch."""

    batch: TextBatch
    states: torch.Tensor  # [B, L, D]: of the last layer, normed, which the LM head reads
    features: torch.Tensor  # [B, L, layers * D] float32: of ``layer_ids``


class Teacher:
    """A target at a temperature, with frozen weights.

    Raises ValueError if more than a product with the LM head makes its logits.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.model = model.eval().requires_grad_(False)
        self.temperature = temperature
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(model.config, name, None) not in (None, 1.0):
                raise ValueError(
                    f"The target's configuration has {name}, and its logits are not those of the "
                    "LM head alone. Train with a target without it."
                )

    @torch.no_grad()
    def teach(self, batch: TextBatch, layer_ids: tuple[int, ...]) -> Lesson:
        """Run the target on ``batch``; features are hidden states of ``layer_ids``, from 0 on."""
        found = self.model.base_model(
            input_ids=batch.ids, output_hidden_states=bool(layer_ids), use_cache=False
        )
        # hidden_states[0] is the embedding.
        states = [found.hidden_states[layer + 1].float() for layer in layer_ids]
        none = found.last_hidden_state.new_zeros(*batch.ids.shape, 0)
        return Lesson(batch, found.last_hidden_state, torch.cat(states, -1) if states else none)

    @torch.no_grad()
    def log_p(self, states: torch.Tensor, hot: torch.Tensor | None = None) -> torch.Tensor:
        """Return log-probabilities ``[..., V]`` float32 of the tokens behind ``states``.

        With ``hot``, ids of tokens, the distribution is restricted to them and renormalized.
        """
        return (self.head(states, hot).float() / self.temperature).log_softmax(-1)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings ``[..., D]`` float32 of ``ids`` ``[...]`` int64."""
        return self.model.get_input_embeddings()(ids).float()

    def head(self, states: torch.Tensor, hot: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits ``[..., V]`` of normed states ``[..., D]``; gradients flow through.

        With ``hot``, ids of tokens, those of these alone.
        """
        rows = slice(None) if hot is None else hot
        head = self.model.get_output_embeddings()
        bias = None if head.bias is None else head.bias[rows]
        return functional.linear(states.to(self.model.dtype), head.weight[rows], bias)


class Lessons:
    """The target's hidden states on texts, computed once where ``room`` holds them.

    Args:
        layer_ids: as for `Teacher.teach`.
        device: of the target.
        room: bytes.
    """

    def __init__(
        self,
        teacher: Teacher,
        layer_ids: tuple[int, ...],
        device: torch.device,
        room: int = 2 << 30,
    ) -> None:
        self._teacher = teacher
        self._layer_ids = layer_ids
        self._device = device
        self._room = room
        self._stored: dict[int, list[torch.Tensor]] = {}  # by the id of a text

    def of(self, texts: Sequence[Example]) -> Lesson:
        """Return the lesson of a batch of texts; the caller holds on to them."""
        found = self._taught([text for text in texts if id(text) not in self._stored])
        for text, parts in found.items():
            size = sum(part.nbytes for part in parts)
            if size <= self._room:
                self._room -= size
                self._stored[text] = parts
        all_parts = [(found.get(id(text)) or self._stored[id(text)]) for text in texts]
        states, features = (
            pad_sequence(list(parts), batch_first=True) for parts in zip(*all_parts, strict=True)
        )
        return Lesson(collate(texts, self._device), states, features.float())

    def _taught(self, texts: Sequence[Example]) -> dict[int, list[torch.Tensor]]:
        if not texts:
            return {}
        lesson = self._teacher.teach(collate(texts, self._device), self._layer_ids)
        parts = (lesson.states, lesson.features.to(lesson.states.dtype))
        return {
            id(text): [part[row, : len(text.ids)].clone() for part in parts]
            for row, text in enumerate(texts)
        }


def load_model(folder: str | Path, dtype: torch.dtype | str, device: torch.device) -> Any:
    """Load a causal language model."""
    return loaded(AutoModelForCausalLM, folder, "model", dtype=dtype).to(device)


def load_tokenizer(folder: str | Path) -> Any:
    """Load a tokenizer."""
    return loaded(AutoTokenizer, folder, "tokenizer")


# --- Its answers


class Sampling(NamedTuple):
    """Set how answers are sampled."""

    temperature: float
    max_new_tokens: int
    batch: int  # prompts at a time
    ends: frozenset[int]  # tokens that end an answer


def sample_answers(target: Any, prompts: Sequence[list[int]], how: Sampling) -> list[Example]:
    """Sample an answer to each prompt from the target's own distribution, in their order.

    By torch's global generator.
    """
    target.generation_config = GenerationConfig()  # of a checkpoint: its filters and penalties
    settings = GenerationConfig(
        do_sample=True,
        temperature=how.temperature,
        top_k=0,
        max_new_tokens=how.max_new_tokens,
        eos_token_id=sorted(how.ends) or None,
        pad_token_id=0,
    )
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    found = dict.fromkeys(range(len(prompts)), Example([], 0))
    progress = _bar(len(order) * how.max_new_tokens)

    def count(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # it stops none
        progress.update(len(ids))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    for start in range(0, len(order), how.batch):
        chunk = order[start : start + how.batch]
        length = len(prompts[chunk[-1]])
        ids = [[0] * (length - len(prompts[place])) + prompts[place] for place in chunk]
        read = [[0] * (length - len(prompts[place])) + [1] * len(prompts[place]) for place in chunk]
        told = target.generate(
            input_ids=torch.tensor(ids, device=target.device),
            attention_mask=torch.tensor(read, device=target.device),
            generation_config=settings,
            stopping_criteria=StoppingCriteriaList([count]),
        )
        for place, row in zip(chunk, told[:, length:].tolist(), strict=True):
            end = next((count for count, token in enumerate(row, 1) if token in how.ends), len(row))
            found[place] = Example(prompts[place] + row[:end], len(prompts[place]))
    progress.close()
    return list(found.values())


def sample_with_engine(
    folder: Path, prompts: Sequence[list[int]], how: Sampling, *, seed: int, device: str
) -> list[Example]:
    """Sample as `sample_answers` by an SGLang engine.

    Another request begins where one ends. The checkpoint's own EOS ends them, too.
    """
    from sglang import Engine

    longest = max(map(len, prompts)) + how.max_new_tokens
    engine = Engine(
        model_path=str(folder),
        device=device,
        random_seed=seed,
        skip_tokenizer_init=True,
        max_running_requests=how.batch,
        max_total_tokens=how.batch * (longest + 1),
        log_level="error",
    )
    params = {
        "temperature": how.temperature,
        "max_new_tokens": how.max_new_tokens,
        "stop_token_ids": sorted(how.ends),
    }
    found: list[list[int]] = [[] for _ in prompts]
    with engine, _bar(len(prompts) * how.max_new_tokens) as progress:
        for told in engine.generate(input_ids=list(prompts), sampling_params=params, stream=True):
            place = told["index"]
            answer = list(told["output_ids"])  # SGLang appends to its own
            progress.update(len(answer) - len(found[place]))
            found[place] = answer
    return [Example(p + answer, len(p)) for p, answer in zip(prompts, found, strict=True)]


def _bar(most: int) -> tqdm:
    """Return the progress of sampling; answers that end early leave it short of ``most``."""
    return tqdm(total=most, desc="sampling", unit="token", mininterval=2)
