"""Samples, training, numbers, and the command from end to end."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from sglang_smc_tools.distill.checkpoints import new_head
from sglang_smc_tools.distill.cli import main
from sglang_smc_tools.distill.drafts import DraftBlocks, begin_as_target, load_draft
from sglang_smc_tools.distill.teacher import (
    Example,
    Lesson,
    Lessons,
    Sampling,
    Teacher,
    TextBatch,
    collate,
    read_prompts,
    sample_answers,
    sample_with_engine,
    write_texts,
)
from sglang_smc_tools.distill.train import (
    Course,
    Float32Muon,
    accepted,
    draw_anchors,
    train,
    validate,
)

PAIR = Path(__file__).parents[3] / "bench" / "pair"
CPU = torch.device("cpu")
KINDS = ("eagle3", "mtp", "dflash", "dspark")


# --- Samples


PROMPTS = [[5], [7, 7, 7, 9], [3, 20], [11] * 9, [6, 2]]


def wanted(teacher: Teacher) -> tuple[Sampling, list[Example]]:
    """Nearly at temperature 0 answers are the likeliest tokens; some end early, others never."""
    plain = [best(teacher, prompt, 12) for prompt in PROMPTS]
    ends = frozenset([1, plain[0][2], plain[4][5]])  # 1 is the checkpoint's own
    cut = [until(answer, ends) for answer in plain]
    assert len({len(answer) for answer in cut}) > 2
    texts = [Example(p + a, len(p)) for p, a in zip(PROMPTS, cut, strict=True)]
    return Sampling(1e-4, max_new_tokens=12, batch=2, ends=ends), texts


def test_answers_are_what_the_target_says(teacher: Teacher) -> None:
    """Red where padding is seen or kept, positions are off, or rows are mixed up."""
    how, texts = wanted(teacher)
    assert sample_answers(teacher.model, PROMPTS, how) == texts


@pytest.mark.engine
def test_an_engine_says_what_the_target_says(
    teacher: Teacher, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where ends are missed, or answers mixed up."""
    bars: list[tqdm] = []
    monkeypatch.setattr(
        "sglang_smc_tools.distill.teacher._bar",
        lambda most: bars.append(tqdm(total=most)) or bars[0],
    )
    how, texts = wanted(teacher)
    assert sample_with_engine(target, PROMPTS, how, seed=0, device="cpu") == texts
    assert bars[0].n == sum(len(text.ids) - text.prompt for text in texts)


@torch.no_grad()
def best(teacher: Teacher, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(teacher.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def until(answer: list[int], ends: frozenset[int]) -> list[int]:
    place = next((i for i, token in enumerate(answer) if token in ends), len(answer))
    return answer[: place + 1]


def test_anchors_lie_before_answers() -> None:
    """All that do, and no other; the first token of a text is none."""
    batch = collate([Example([5] * 9, 4), Example([5] * 6, 1)], CPU)
    found = draw_anchors(batch, 400, torch.Generator().manual_seed(0))
    assert [sorted(set(row)) for row in found.tolist()] == [[3, 4, 5, 6, 7], [1, 2, 3, 4]]


# --- Training

COURSE = Course(
    loss="forward-kl",
    steps=60,
    batch=12,
    anchors=6,
    depth=3,
    decay=0.9,
    learning_rate=0.01,
    seed=0,
)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["model", *KINDS])
def test_a_draft_learns(
    kind: str, target: Path, draft: Path, teacher: Teacher, texts: list[Example], tmp_path: Path
) -> None:
    """Red where the loss is not between laws of the same token."""
    folder = new_head(kind, target, tmp_path, dtype=torch.float32) if kind in KINDS else draft
    learner = load_draft(folder, target, CPU)
    how = {"depth": 3, "anchors": 6, "batch": 12, "particles": 4}
    before = validate(learner, teacher, texts, **how)
    depth = 3 if kind in KINDS else 1
    course = msgspec.structs.replace(COURSE, depth=depth)
    found = train(learner, teacher, texts, course).losses
    after = validate(learner, teacher, texts, **how)
    assert sum(found[-10:]) < 0.7 * sum(found[:10])
    assert sum(after.forward_kl) < 0.7 * sum(before.forward_kl)
    assert after.accepted > before.accepted


def test_interrupted_training_goes_on(
    target: Path, teacher: Teacher, texts: list[Example], tmp_path: Path, monkeypatch: Any
) -> None:
    """Red where weights, momenta, draws or the order of texts begin anew."""
    monkeypatch.setattr("sglang_smc_tools.distill.train.SAVED", 2)
    path = tmp_path / "training.pt"
    course = msgspec.structs.replace(COURSE, steps=5)
    folder = new_head("eagle3", target, tmp_path / "head", dtype=torch.float32)
    begun, again, whole = (load_draft(folder, target, CPU) for _ in range(3))

    class Interrupted(Teacher):
        def embed(self, ids: torch.Tensor) -> torch.Tensor:
            if path.exists():
                raise KeyboardInterrupt
            return super().embed(ids)

    with pytest.raises(KeyboardInterrupt):
        train(begun, Interrupted(teacher.model, 1.0), texts, course, path)
    found = train(again, teacher, texts, course, path)
    expected = train(whole, teacher, texts, course)
    assert found.losses == expected.losses
    for name, weight in again.module.state_dict().items():
        assert torch.equal(weight, whole.module.state_dict()[name]), name
    with pytest.raises(ValueError, match="delete it"):
        train(again, teacher, texts, msgspec.structs.replace(course, steps=6), path)


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_lessons_are_those_of_each_text(room: int, teacher: Teacher, texts: list[Example]) -> None:
    """Whatever stands beside it; and computed once, where there is room."""
    taught = []

    class Counting(Teacher):
        def teach(self, batch: TextBatch, *asked: Any) -> Lesson:
            taught.append(len(batch.ids))
            return super().teach(batch, *asked)

    lessons = Lessons(Counting(teacher.model, 1.0), (0, 2), CPU, room)
    for some in (texts[:3], texts[1:4]):
        found = lessons.of(some)
        for row, text in enumerate(some):
            alone = teacher.teach(collate([text], CPU), (0, 2))
            length = len(text.ids)
            torch.testing.assert_close(found.states[row, :length], alone.states[0])
            torch.testing.assert_close(found.features[row, :length], alone.features[0])
    assert taught == ([3, 1] if room else [3, 3])


def test_probabilities_are_the_targets_and_of_hot_tokens_alone(teacher: Teacher) -> None:
    ids = torch.tensor([[3, 5, 7, 9]])
    hot = torch.tensor([2, 5, 7])
    whole = teacher.model(input_ids=ids).logits.log_softmax(-1)
    states = teacher.teach(TextBatch(ids, ids[:, 0], ids[:, 0]), ()).states
    torch.testing.assert_close(teacher.log_p(states), whole)
    torch.testing.assert_close(teacher.log_p(states, hot), whole[..., hot].log_softmax(-1))
    teacher.model.config.logit_scale = 2.0
    with pytest.raises(ValueError, match="has logit_scale"):
        Teacher(teacher.model, 1.0)
    del teacher.model.config.logit_scale


def test_a_new_head_begins_as_the_target(target: Path, teacher: Teacher, tmp_path: Path) -> None:
    """Its own rows of the LM head, the last norm, and a state that passes through."""
    new_head("eagle3", target, tmp_path, hot_tokens=[4, 9, 16], dtype=torch.float32)
    head = load_draft(tmp_path, target, CPU)
    begin_as_target(head, teacher)
    last = teacher.model.lm_head.weight[[4, 9, 16]]
    assert torch.equal(head.module.lm_head.weight, last)
    assert torch.equal(head.module.norm.weight, teacher.model.model.norm.weight)
    new_head("mtp", target, tmp_path / "mtp", dtype=torch.float32)
    layer = load_draft(tmp_path / "mtp", target, CPU)
    begin_as_target(layer, teacher)
    of_states = layer.module.layer.input_proj.weight[:, :32]  # before those of the token
    for own in (head.module.fc.weight[:, -32:], of_states):
        assert ((own - torch.eye(32)).abs() < 0.1).all()


def test_the_target_is_accepted(target: Path, teacher: Teacher, texts: list[Example]) -> None:
    """Red where p and q are not of the same column."""
    learner = load_draft(target, target, CPU)
    worth = validate(learner, teacher, texts, depth=4, anchors=8, batch=20, particles=3)
    assert worth.accepted == pytest.approx(4, abs=1e-3)
    assert max(map(abs, worth.forward_kl + worth.chi2 + worth.rejection)) < 1e-4


def test_accepted_tokens_by_enumeration() -> None:
    """The mean over the target's tokens is the sum over drafted prefixes of prod min(p, q)."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 3, generator=rng, dtype=torch.float64)
    p, q = logits.softmax(-1)  # of a first token, and behind each; two rows serve there
    first = torch.minimum(p[0], q[0])
    wanted = float(first.sum())
    found = 0.0
    for a, b in itertools.product(range(3), repeat=2):
        behind = 1 + a % 2
        wanted += float(first[a] * torch.minimum(p[behind, b], q[behind, b]))
        rows = [torch.stack([of[0], of[behind]])[None, None].log() for of in (p, q)]
        drafted = torch.tensor([[[a, b]]])
        live = torch.ones(1, 1, 2, dtype=torch.bool)
        found += float(p[0, a] * p[behind, b] * accepted(DraftBlocks(*rows, drafted, live)))
    assert found == pytest.approx(wanted)


# --- The command


def words(of: Path, folder: Path, **options: object) -> list[str]:
    """Of a target; ``options`` go before what every test has."""
    prompts = folder / "prompts.jsonl"
    asked = (f'{{"prompt": "t{2 + i % 20} t{3 + i % 7}"}}\n' for i in range(40))
    prompts.write_text("".join(asked))
    given = {
        "target": of,
        "out": folder / "out",
        "prompts": prompts,
        "steps": 3,
        "batch": 8,
        "anchors": 4,
        "depth": 3,
        "held-out": 10,
        "max-new-tokens": 12,
        "sampler": "transformers",
    }
    every = {**given, **options}
    return [word for name, value in every.items() for word in (f"--{name}", str(value))]


class Products(TorchDispatchMode):
    """Notes the number formats that matrices are multiplied in."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES or "attention" in name:
            self.types |= {one.dtype for one in args if isinstance(one, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("has_units", [False, True])
def test_products_are_in_what_the_processor_multiplies(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    """Of the target, whose checkpoint is in bfloat16, of training and of its optimizer."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_units)
    stored = tmp_path / "target"
    texts = tmp_path / "texts.jsonl"
    AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(stored)
    write_texts(texts, [Example([2, 3, 4, 5, 6], 2)] * 4, 1.0)
    few = {"held-out": 1, "steps": 2, "batch": 2, "depth": 2}
    with Products() as seen:
        assert main(words(stored, tmp_path, new="eagle3", texts=texts, **few)) == 0
    wanted = {torch.bfloat16, torch.float32} if has_units else {torch.float32}
    assert seen.types == wanted
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert report["products"] == ("bfloat16" if has_units else "float32")


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_muon_in_float32_is_torchs_but_for_rounding(shape: tuple[int, int]) -> None:
    rng = torch.Generator().manual_seed(0)
    begun = torch.randn(shape, generator=rng)
    slopes = [torch.randn(shape, generator=rng) for _ in range(3)]
    found = []
    for kind in (torch.optim.Muon, Float32Muon):
        weight = torch.nn.Parameter(begun.clone())
        muon = kind([weight], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        for slope in slopes:
            weight.grad = slope.clone()
            muon.step()
        found.append(weight.detach() - begun)
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


@pytest.mark.parametrize(
    "begin",
    [
        "draft",
        "eagle3",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("mtp", "dflash", "dspark")),
    ],
)
def test_from_prompts_to_a_checkpoint(
    begin: str, target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And on from there, on the texts that were kept."""
    start: dict[str, Any] = {"draft": draft} if begin == "draft" else {"new": begin}
    if begin == "eagle3":
        start["hot-tokens"] = 9
    texts = {"texts": tmp_path / "texts.jsonl"}
    assert main(words(target, tmp_path, **start, **texts)) == 0
    assert "accepted of a block, N = 1" in capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "distill.json").read_text())
    assert report["texts"] == 30 and len(report["after"]["forward_kl"]) == 3
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    if begin == "draft":  # loads as it was written
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
        files = {path.name for path in (tmp_path / "out").iterdir()}
        assert model.dtype == torch.bfloat16 and {path.name for path in draft.iterdir()} <= files
    if begin == "eagle3":  # the tokens that learned answers have most often
        told = [json.loads(line) for line in texts["texts"].read_text().splitlines()[1:31]]
        times = Counter(token for one in told for token in one["ids"][one["prompt"] :])
        ranked = sorted(range(24), key=lambda token: (-times[token], token))
        hot = load_file(tmp_path / "out" / "model.safetensors")["t2d"].nonzero()[:, 0].tolist()
        assert hot == sorted(ranked[:9])
    again = words(target, tmp_path, draft=tmp_path / "out", out=tmp_path / "more", **texts)
    assert main([*again, "--loss", "acceptance"]) == 0
    more = json.loads((tmp_path / "more" / "distill.json").read_text())
    assert more["before"]["forward_kl"] == pytest.approx(report["after"]["forward_kl"], rel=0.02)
    assert main(words(target, tmp_path, draft=draft, **texts, temperature=0.7)) == 2
    told = capsys.readouterr().err
    assert "was sampled at temperature 1.0, and --temperature is 0.7" in told


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    """As in the shipped draft: its file is no larger than its parameters."""
    learner = load_draft(PAIR / "draft", PAIR / "target", CPU)
    learner.save(tmp_path, torch.bfloat16)
    written, shipped = (load_file(f / "model.safetensors") for f in (tmp_path, PAIR / "draft"))
    assert written.keys() == shipped.keys()
    assert all(torch.equal(written[name], shipped[name]) for name in shipped)


def test_refusals(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each names what was given, what is allowed, or what to do."""
    other = make_tiny_model(tmp_path / "other", vocab_size=30)
    cases = {
        "has another vocabulary than the target: vocab_size 30 and 24": {"draft": other},
        "neither a config.json, nor a folder with one.": {"draft": tmp_path / "nowhere"},
        "holds no model": {"target": tmp_path / "nowhere", "new": "eagle3"},
        "layer ids are [7]; allowed: 0 to 2": {"new": "eagle3", "layer-ids": "7"},
        "--depth is 9; allowed: 1 to 8": {"new": "dflash", "depth": 9},
        "--held-out is 40, of 40 texts": {"draft": draft, "held-out": 40},
        "no held-out answer has 13 tokens": {"draft": draft, "depth": 13},
        "--block-size does not go with --new eagle3": {"new": "eagle3", "block-size": 4},
        "--layer-ids does not go with --new mtp": {"new": "mtp", "layer-ids": "1"},
        "--hot-tokens is 25; allowed: 1 to 24": {"new": "eagle3", "hot-tokens": 25},
        "--num-heads does not go with --draft": {"draft": draft, "num-heads": 4},
        "No such file": {"draft": draft, "prompts": tmp_path / "none.txt"},
    }
    for message, options in cases.items():
        assert main(words(target, tmp_path, **options)) == 2
        told = capsys.readouterr().err
        assert message in told and ("sampling" in told) == ("held" in message), message


class Tokenizer:
    """Ids are the lengths of words."""

    chat_template = "given"

    def __call__(self, text: str, **_: bool) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: bool) -> str:
        return " ".join(["user", *(message["content"] for message in messages), "answer"])


def test_prompts_of_all_kinds(tmp_path: Path) -> None:
    plain = tmp_path / "p.txt"
    lines = tmp_path / "p.jsonl"
    plain.write_text("a bb\n\nccc\n")
    lines.write_text('{"prompt": "a bb"}\n{"messages": [{"role": "user", "content": "ccc"}]}\n')
    assert read_prompts(plain, Tokenizer()) == [[1, 2], [3]]
    assert read_prompts(lines, Tokenizer()) == [[1, 2], [4, 3, 6]]
    lines.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match='line 2 has neither "prompt"'):
        read_prompts(lines, Tokenizer())
    lines.write_text("{\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_prompts(lines, Tokenizer())
