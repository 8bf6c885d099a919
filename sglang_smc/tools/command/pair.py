"""Check a target and a draft by their configurations and tokenizers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc.kv.arena import arena
from sglang_smc.kv.rounds import Room as Graphs
from sglang_smc.kv.rounds import round_bytes
from sglang_smc.options.server import LAG, MODES, SMCConfig, flag_of
from sglang_smc.tools.command.findings import Finding, fail, ok, warning
from sglang_smc.tools.plan import proposals
from sglang_smc.tools.plan.devices import Device
from sglang_smc.tools.plan.heads import ARCHITECTURES, Head
from sglang_smc.tools.plan.memory import (
    ASIDE_BYTES,
    MOST_RUNNING,
    PREFILL_SHARE,
    hidden_bytes,
    kv_slots,
)
from sglang_smc.tools.plan.proposals import Ngram, Proposal
from sglang_smc.tools.plan.report import si
from sglang_smc.tools.plan.roofline import DEFAULT_PARTICLES, Scenario, best_settings
from sglang_smc.tools.plan.shapes import ModelShape, architecture, from_config

if TYPE_CHECKING:
    from sglang_smc.models.vocabulary import Vocabulary

CONTEXT = 4096
OTHER_DRAFT = "Choose a draft of the target's family: SMC scores a draft's tokens by their ids."
LAGS = (256, 128, 64, 32, 16, 8, LAG)
#: Modes with the same number of KV slots per request are reported together.
WEIGHING, VERIFYING = "smc", "exact"


class Room(NamedTuple):
    """KV slots of a device, and the length of the requests that share them."""

    slots: int  # of the pool, in tokens
    context: int  # tokens of a request, output included

    def requests(self, config: SMCConfig) -> int:
        """Return how many requests of full length fit at once, without a shared prefix."""
        return self.slots // (self.context + arena(config, self.context))


def findings(
    options: argparse.Namespace, device: Device, most_slots: int | None
) -> Iterator[Finding]:
    """Yield all findings; ``most_slots`` bounds SGLang's KV pool regardless of the memory."""
    if not _has_name(options):
        if not _is_head(options.draft):
            yield _vocabularies(options.target, options.draft)
        yield _accepted(options)
    try:
        shapes = from_config(options.target), proposals.from_config(options.draft)
    except ValueError as error:
        yield warning("arithmetic", "left out", str(error))
        return
    misfit = _misfit(*shapes, options)
    if misfit is not None:
        yield misfit
        return
    options.context = options.context or _context(options.target)
    room = _room(*shapes, device, options, most_slots)
    yield _fits(shapes, device, room)
    if room.slots > 0:
        yield from (_requests(mode, room, options) for mode in (WEIGHING, VERIFYING))
    if room.slots > 0 and most_slots is None:
        yield _recorded(shapes[0], device, options)
    yield _roofline(*shapes, device, options)
    yield _advice(*shapes, device, room, options)


def _has_name(options: argparse.Namespace) -> bool:
    """Return whether either model is given by a built-in name, which has no files to read."""
    return any(map(proposals.is_name, (options.target, options.draft)))


def _is_head(draft: str) -> bool:
    """Return whether the draft is a head, which has no tokenizer: its tokens are the target's."""
    try:
        return architecture(_config(draft)) in ARCHITECTURES
    except (OSError, ValueError):  # reported by other findings
        return False


def _misfit(target: ModelShape, draft: Proposal, options: argparse.Namespace) -> Finding | None:
    """Return a failure if the sizes of target and draft do not fit together, else None."""
    if isinstance(draft, Head):
        try:
            draft.require_fit(target, options.num_steps)
        except ValueError as error:
            return fail("draft", f"{draft.kind} for another target, or fewer steps", str(error))
        return None
    model = draft.model if isinstance(draft, Ngram) else draft
    if model is None or not _has_name(options) or model.vocab_size == target.vocab_size:
        return None  # for folders, `_vocabularies` compares the tokenizers
    found = f"vocab_size is {target.vocab_size} and {model.vocab_size}"
    return fail("vocabulary", found, OTHER_DRAFT)


# --- Whether a server would start


def _vocabularies(target: str, draft: str) -> Finding:
    from sglang_smc.models import vocabulary

    about = "vocabulary"
    try:
        theirs = [_vocabulary(name) for name in (target, draft)]
    except (OSError, ValueError) as error:
        return fail(about, f"a tokenizer cannot be read: {error}", "Give two model folders.")
    found = vocabulary.problem(*theirs)
    if found is not None:
        return fail(about, found, OTHER_DRAFT)
    size = len(theirs[0].tokens or ())
    return ok(about, f"the same {size} tokens in both", tokens=size)


def _vocabulary(name: str) -> Vocabulary:
    from transformers import AutoConfig, AutoTokenizer

    from sglang_smc.models.vocabulary import Vocabulary

    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True)
    config = AutoConfig.from_pretrained(name, local_files_only=True)
    return Vocabulary.of(tokenizer, config.get_text_config().vocab_size)


def _config(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text())


def _accepted(options: argparse.Namespace) -> Finding:
    """Check these server arguments with SGLang's and SMC's validation; no weights are loaded."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_smc import upstream

    given = ["--model-path", options.target, "--speculative-draft-model-path", options.draft]
    given += ["--speculative-algorithm", "SMC", "--log-level", "error"]
    given += ["--speculative-smc-num-particles", str(options.num_particles)]
    given += ["--speculative-num-steps", str(options.num_steps)]
    given += ["--speculative-smc-max-lag", str(options.max_lag)]
    try:
        upstream.resolve_now(prepare_server_args(given))
    except (OSError, ValueError) as error:
        return fail("server arguments", "refused", str(error))
    return ok("server arguments", "accepted, and both models' families (by configuration)")


# --- Memory


def _context(target: str) -> int:
    """Return the tokens of a request: `CONTEXT`, or fewer if the model's maximum is lower."""
    if proposals.is_name(target):
        return CONTEXT
    return min(CONTEXT, _config(target).get("max_position_embeddings") or CONTEXT)


def _room(
    target: ModelShape,
    draft: Proposal,
    device: Device,
    options: argparse.Namespace,
    most_slots: int | None,
) -> Room:
    assert device.capacity is not None, "all that can be named or measured have one"
    share = options.mem_fraction * device.capacity * options.tp
    aside = ASIDE_BYTES if most_slots is None else 0.0  # on this machine's CPU nothing is set aside
    aside += options.requests * hidden_bytes(draft, options.num_particles, options.num_steps)
    slots = kv_slots(target, draft, share - aside)
    return Room(slots if most_slots is None else min(slots, most_slots), options.context)


def _fits(shapes: tuple[ModelShape, Proposal], device: Device, room: Room) -> Finding:
    weights = sum(shape.resident_bytes for shape in shapes)
    slot = sum(shape.kv_bytes_per_token for shape in shapes)
    found = f"{si(weights)}B of weights, {si(slot)}B of KV a token in both, on {device.name}"
    if room.slots <= 0:
        do = "Too large: split it (--tp), take a larger device, or leave less of it free "
        do += "(--mem-fraction, --mem-fraction-static of the server)."
        return fail("memory", found, do)
    return ok(
        "memory",
        f"{found}: {room.slots:,} KV slots",
        weight_bytes=weights,
        bytes_per_slot=slot,
        slots=room.slots,
    )


def _requests(mode: str, room: Room, options: argparse.Namespace) -> Finding:
    config = _settings(options, mode)
    own, fitting = arena(config, room.context), room.requests(config)
    modes = [name for name in MODES if _settings(options, name).weighs == config.weighs]
    about = f"mode {', '.join(modes)}"
    found = (
        f"{own:,} slots a request beside its {room.context:,} tokens; {fitting:,} such requests fit"
    )
    numbers = {"arena": own, "requests": fitting}
    if fitting >= options.requests:
        return ok(about, found, **numbers)
    do = f"Fewer than --requests {options.requests}. {_mend(room, options)}"
    return (warning if fitting else fail)(about, found, do, **numbers)


def _recorded(target: ModelShape, device: Device, options: argparse.Namespace) -> Finding:
    """Report how many requests' rounds are captured as CUDA graphs in the free memory."""
    assert device.capacity is not None
    kept = (1 - options.mem_fraction) * device.capacity
    sizes = options.num_particles, options.num_steps, target.vocab_size
    weighed, verified = (
        Graphs.beside_recordings(
            int((1 - PREFILL_SHARE) * kept),
            round_bytes(*sizes, verifies=verifies),
            round_bytes(*sizes, mixes=True),
        )
        for verifies in (False, True)
    )
    most = [min(one, MOST_RUNNING) for one in (weighed[1], verified[1], weighed.of_any)]
    found = (
        f"of up to {most[0]} requests in mode smc, {most[1]} in the modes that verify, {most[2]} "
        f"where one asks for what most do not, in {si(kept)}B that are left free; rounds that the "
        f"host looks into play {weighed.launched} requests at a time"
    )
    numbers = {"recorded": most, "launched": weighed.launched}
    if min(most) >= options.requests:
        return ok("round graphs", found, **numbers)
    do = f"Fewer than --requests {options.requests}: larger batches play in slices, which takes "
    do += "longer. A smaller --mem-fraction leaves more free."
    return warning("round graphs", found, do, **numbers)


def _settings(options: argparse.Namespace, mode: str = WEIGHING, **other: Any) -> SMCConfig:
    given = {name: getattr(options, name) for name in ("num_particles", "num_steps", "max_lag")}
    return SMCConfig(**{"mode": mode, **given, **other})


def _lag(room: Room, options: argparse.Namespace) -> int | None:
    """Return the longest lag at which the wanted number of requests fits, or None."""
    shorter = [lag for lag in LAGS if lag <= options.max_lag]
    enough = (
        lag for lag in shorter if room.requests(_settings(options, max_lag=lag)) >= options.requests
    )
    return next(enough, None)


def _mend(room: Room, options: argparse.Namespace) -> str:
    lag = _lag(room, options)
    if lag is not None and lag < options.max_lag:
        return f"With --speculative-smc-max-lag {lag} they fit."
    if room.requests(_settings(options, VERIFYING)) >= options.requests:
        return "In mode auto or exact they fit."
    return "Texts as long as --context are too long for this device, or N is too large."


# --- Speed


def _scenario(
    target: ModelShape, draft: Proposal, device: Device, options: argparse.Namespace
) -> Scenario:
    tail = options.max_lag / 2  # the average number of tokens by which a particle runs ahead
    return Scenario(target, draft, device.times(options.tp), options.context, tail)


def _roofline(
    target: ModelShape, draft: Proposal, device: Device, options: argparse.Namespace
) -> Finding:
    scenario = _scenario(target, draft, device, options)
    n, k = options.num_particles, options.num_steps
    times = _times_ar(scenario, n, k)
    until = scenario.plain_wins_from(lambda batch: scenario.smc(batch, n, k))
    found = f"N = {n}, K = {k} at most {times:.2f} times plain decoding, one request at a time"
    if times <= 1:
        do = "Take a smaller draft, or a larger target: sglang-smc plan has the table."
        return warning("speed", f"{found}: no gain", do, times_ar=times)
    ends = "" if until is None else f"; from {until} requests at once plain decoding is as fast"
    return ok("speed", found + ends, times_ar=times, plain_wins_from=until)


def _times_ar(scenario: Scenario, num_particles: int, num_steps: int) -> float:
    smc = scenario.smc(1, num_particles, num_steps)
    return smc.tokens_per_second / scenario.ar(1).tokens_per_second


def _advice(
    target: ModelShape,
    draft: Proposal,
    device: Device,
    room: Room,
    options: argparse.Namespace,
) -> Finding:
    """Recommend the given settings if they gain time, else the fastest with fewer particles."""
    scenario = _scenario(target, draft, device, options)
    n, k = options.num_particles, options.num_steps
    if _times_ar(scenario, n, k) <= 1:
        particles = [count for count in DEFAULT_PARTICLES if count <= n] or [n]
        best = best_settings(*scenario[:3], 1, scenario.context, particles, tail=scenario.tail).best
        n, k = best.num_particles, best.num_steps
    if _times_ar(scenario, n, k) <= 1:
        do = "SMC runs there, as a trial. To gain time, plan for a GPU: --device h100."
        return warning("advice", f"no N and K are faster than plain decoding on {device.name}", do)
    lag = _lag(room, options)
    settings = {"num_particles": n, "num_steps": k, **({"max_lag": lag} if lag else {})}
    flags = [f"{flag_of(name)} {value}" for name, value in settings.items()]
    flags += [] if lag else [f"{flag_of('mode')} auto"]
    return ok("advice", " ".join(flags), **settings)
