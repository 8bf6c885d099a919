"""Kernels that lie, raise, or find no room: what a server then runs, and what it says."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import sglang_smc
from sglang_smc.command import doctor
from sglang_smc.models.softmax import Heads
from sglang_smc.ops import TORCH, check
from sglang_smc.ops.check_cases import CHECKS, Check, CheckSizes, Inputs, Passes
from sglang_smc.options.server import SMCConfig
from sglang_smc.round import parts
from sglang_smc.smc.distribution import TokenDistribution
from sglang_smc.smc.ledger import Ledger
from sglang_smc.smc.ops import Ops
from sglang_smc.smc.population import Population

HEADS = Heads(4, 2, 16, torch.float32)
SIZES = CheckSizes(3, 2, (Passes(HEADS, (1, 3)), Passes(HEADS, (2, 3), True)), gated_delta=True)
#: What is of a CPU alone has no kernel.
KERNELS = {*Ops._fields} - {"kind", "sharing"}
OPERATIONS = sorted(KERNELS - {"ledger", "population", "distribution"})
METHODS = {"sample_and_score": "_sample", "score_tokens": "_score"}  # of `TokenDistribution`
METHODS |= {name: name for name in ("filtered", "log_probs", "log_sums")}
IN_PLACE = {"edit_logits": 0, "count_tokens": 0}  # which argument they write to
MODELS = ("particle_attention", "latent_attention", "gated_delta")
ALONE: Any = Mock(all_gather_object=lambda one: [one])


def lie(value: Any) -> Any:
    """Change a result by little more than what is allowed, wherever it is a number."""
    if not isinstance(value, torch.Tensor):
        lies = [lie(part) for part in value]
        return type(value)(*lies) if hasattr(value, "_fields") else tuple(lies)
    little = 3 * check.TOLERANCES.get(value.dtype, 1e-4)
    return ~value if value.dtype == torch.bool else value + (value + 1).abs().clamp_max(1) * little


def lying(name: str) -> Callable[..., Any]:
    true = getattr(TORCH, name)

    def operation(*args: Any, **kwargs: Any) -> Any:
        result = true(*args, **kwargs)
        if name in IN_PLACE:
            written = args[IN_PLACE[name]]
            getattr(written, "counts", written).add_(1)
        return None if result is None else lie(result)

    return operation


def failing(ops: Ops, *names: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "CHECKS", {name: CHECKS[name] for name in names or CHECKS})
        return [found.name for found in check.findings(ops, "cpu", SIZES) if found.problem]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all checks those that these tests are about."""
    names = ("log_probs", "population", "keep", "tally", "watch")
    monkeypatch.setattr(check, "CHECKS", {name: CHECKS[name] for name in names})


def test_every_operation_has_one_check() -> None:
    """And every kernel of models: red where one is added without."""
    fields = [one.field for name, one in CHECKS.items() if name not in MODELS]
    assert sorted(set(fields)) == sorted(KERNELS)
    assert fields.count("distribution") == len(METHODS)
    folder = Path(sglang_smc.__file__).parent / "kernels" / "attention"
    files = {path.stem for path in folder.glob("*.py")} - {"spans", "work"}
    assert files == {"particle_attention", "latent", "gated_delta"}
    assert all(CHECKS[name].field == "kind" for name in MODELS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_reference_agrees_with_itself_and_a_check_blames_nobody_else(name: str) -> None:
    own = {"kind", CHECKS[name].field}
    others = set() if name in MODELS else KERNELS - own - {"distribution"}
    broken: Any = dict.fromkeys(others, Mock(side_effect=AssertionError(name)))
    assert failing(TORCH._replace(**broken), name) == []


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_lie_is_found(name: str) -> None:
    assert failing(TORCH._replace(**{name: lying(name)}), name) == [name]


@pytest.mark.parametrize("is_wrong", [lambda rows: rows > 32, lambda rows: rows in (33, 63)])
def test_a_product_that_lies_for_most_rows_is_found(is_wrong: Callable[[int], bool]) -> None:
    """Of a tile that N particles alone do not reach: whole, and cut off."""

    def skinny(x: torch.Tensor, *given: Any) -> torch.Tensor:
        found = TORCH.skinny(x, *given)
        return lie(found) if is_wrong(len(x)) else found

    assert failing(TORCH._replace(skinny=skinny), "skinny") == ["skinny"]


@pytest.mark.parametrize("name", METHODS)
def test_a_distribution_that_lies_is_found(name: str) -> None:
    method = METHODS[name]
    true = getattr(TokenDistribution, METHODS[name])
    lies: Any = lambda *args: lie(true(*args))  # noqa: E731
    lying = type("Lying", (TokenDistribution,), {method: lies})
    assert failing(TORCH._replace(distribution=lying), name) == [name]


@pytest.mark.parametrize("method", ["reserve", "descend", "commit"])
def test_a_ledger_that_does_nothing_is_found(method: str) -> None:
    def nothing(self: Ledger, wanted: Any, *_: Any, **__: Any) -> Any:
        none = torch.zeros(4, *wanted.lengths.shape).long()
        return (none, none, none[0]) if method == "reserve" else None

    idle = type("Idle", (Ledger,), {method: nothing})
    assert failing(TORCH._replace(ledger=idle), "ledger") == ["ledger"]


@pytest.mark.parametrize("method", ["gather", "store", "extend", "append_bonus", "narrow"])
def test_a_population_that_lies_is_found(method: str) -> None:
    true: Any = getattr(Population, method)

    def lying(self: Population, *given: Any) -> Any:
        found = true(self, *given)
        if isinstance(found, Population):
            return found._replace(fidelity=found.fidelity + 1, lengths=found.lengths + 1)
        return lie(found) if isinstance(found, torch.Tensor) else (*found[:-1], found[-1] + 1)

    if method == "narrow":
        lying = lambda self, *given: true(self, *given)._replace(num_roots=given[1])  # noqa: E731
    kind = type("Lying", (Population,), {method: lying})
    assert failing(TORCH._replace(population=kind), "population") == ["population"]


def test_attention_that_lies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    by_torch = CHECKS["particle_attention"].play

    def play(ops: Ops, of: Inputs) -> Any:
        found = by_torch(TORCH, of)
        return lie(found) if ops.kind == "triton" else found

    monkeypatch.setattr(check, "CHECKS", {"particle_attention": Check("kind", play)})
    found = check.settle(TORCH._replace(kind="triton"), "auto", "cpu", SIZES, ALONE)
    assert found == TORCH


def test_operations_that_raise_or_deviate_fall_back_alone(caplog: pytest.LogCaptureFixture) -> None:
    off = {"log_probs": lambda law: TokenDistribution.log_probs(law) + 0.5}
    kernels = TORCH._replace(
        population=Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")),
        distribution=type("Off", (TokenDistribution,), off),
        keep=lambda *a: TORCH.keep(*a),
    )
    with caplog.at_level(logging.ERROR):
        found = check.settle(kernels, "auto", "cpu", SIZES, ALONE)
    assert found == TORCH._replace(keep=kernels.keep)
    by_values, by_error = [record.getMessage() for record in caplog.records]
    assert "log_probs: values (torch.float32) differ by 0.5" in by_values
    assert "population: it raises OutOfMemoryError: CUDA out of memory." in by_error
    assert "--speculative-smc-kernels torch" in by_error


def test_kernels_that_are_asked_for_are_not_replaced() -> None:
    """No rank refuses before it has told the others."""
    group = Mock(all_gather_object=Mock(side_effect=lambda mine: [mine]))
    kernels = TORCH._replace(tally=Mock(side_effect=OSError()))
    with pytest.raises(ValueError, match=r"^--speculative-smc-kernels is 'triton'.* tally: it r"):
        check.settle(kernels, "triton", "cpu", SIZES, group)
    (told,) = group.all_gather_object.call_args.args
    assert [one.name for one in told] == ["tally"]


def test_a_device_that_answers_no_more_is_not_served_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_answers", lambda _: False)
    kernels = TORCH._replace(tally=Mock(side_effect=RuntimeError("an illegal memory access")))
    with pytest.raises(ValueError, match=r"stopped the device.*--speculative-smc-kernels torch"):
        check.settle(kernels, "auto", "cpu", SIZES, ALONE)


def test_all_ranks_replace_what_fails_on_one() -> None:
    other = [check.Found("watch", 1.0, "values differ by 1")]
    group = Mock(all_gather_object=lambda mine: [mine, other])
    kernels = TORCH._replace(watch=lambda *a: TORCH.watch(*a))
    assert check.settle(kernels, "auto", "cpu", SIZES, group).watch is TORCH.watch


def of_a_server(monkeypatch: pytest.MonkeyPatch, device: str = "cuda", **config: Any) -> Ops:
    """The operations of a server whose kernel of attention fails the check."""
    kernels = TORCH._replace(kind="triton")
    monkeypatch.setattr(parts, "ops_of", lambda kind, _: kernels if kind == "triton" else TORCH)
    monkeypatch.setattr(parts, "heads_of", lambda _: HEADS)
    monkeypatch.setattr(parts, "may_rotate", lambda _: False)
    monkeypatch.setattr(parts, "is_gated_delta", lambda _: False)
    monkeypatch.setattr(check, "settle", lambda ops, *_: ops._replace(kind="torch"))
    return parts.operations(SMCConfig(**config), Mock(), Mock(), device, ALONE)


def test_a_server_checks_its_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_a_server(monkeypatch).kind == "torch"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert of_a_server(monkeypatch, "cpu", kernels="triton").kind == "triton"


def test_without_its_attention_no_round_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^--speculative-smc-round-graph is 'on'"):
        of_a_server(monkeypatch, round_graph="on")


def test_a_doctor_without_a_gpu_says_what_it_would_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.main(["--kernels"]) == 0
    told = capsys.readouterr().out
    assert "no GPU" in told and all(name in told for name in check.CHECKS)


def test_a_doctor_prints_each_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [check.Found("watch", 2e-6), check.Found("population", 0.5, "values differ by 0.5")]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(check, "findings", lambda *_: iter(found))
    monkeypatch.setattr("sglang_smc.ops.ops_of", lambda *_: TORCH)
    assert doctor.main(["--kernels"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["ok", "watch:", "agrees", "with", "torch,", "within", "2e-06"]
    assert lines[1].startswith("fail") and "population: values differ by 0.5" in lines[1]
    assert "--speculative-smc-kernels" in lines[2] + lines[3]
    assert doctor.main(["--kernels", "--target", "a", "--draft", "b"]) == 2
