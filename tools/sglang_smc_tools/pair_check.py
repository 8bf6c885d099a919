"""Check a target and a draft by their configurations and tokenizers, for `sglang-smc doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_smc.command.machine import HERE, Finding, fail, ok, warning
from sglang_smc.drafts import heads, reading, sizes
from sglang_smc.drafts.heads.base import architecture
from sglang_smc.kv.arena import arena
from sglang_smc.kv.rounds import Room as Graphs
from sglang_smc.kv.rounds import round_bytes
from sglang_smc.options.server import LAG, MODES, SMCConfig, flag_of
from sglang_smc_tools import published, start_check
from sglang_smc_tools.plan import memory, shapes
from sglang_smc_tools.plan.devices import Device, measure, named
from sglang_smc_tools.plan.report import si
from sglang_smc_tools.plan.roofline import DEFAULT_PARTICLES, Scenario
from sglang_smc_tools.plan.shapes import EAGLE3, EAGLE3_STATES, MODEL, MTP, NGRAM, ModelShape
from sglang_smc_tools.start_check import SETTINGS

CONTEXT = 4096
OTHER_DRAFT = "Choose a draft of the target's family: SMC scores a draft's tokens by their ids."
LAGS = (256, 128, 64, 32, 16, 8, LAG)
#: Modes with the same number of KV slots per request are reported together.
WEIGHING = "smc"
VERIFYING = "exact"


def check(options: argparse.Namespace) -> None:
    """Raise ValueError unless target and draft are known; without a draft it is the MTP layer."""
    options.draft = options.draft or MTP
    both = [(options.target, shapes.BUILT_IN), (options.draft, {**shapes.DRAFTS, MTP: ()})]
    if _has_rows_alone(options):
        return
    for name, known in both:
        is_known = name.lower() in known
        if name is options.draft:
            is_known |= _is_class(name)
        if not is_known and not Path(name).is_dir():
            raise ValueError(f"{name!r} is no folder, and none of {', '.join(known)}.")


def findings(
    options: argparse.Namespace, device: Device | None = None, most_slots: int | None = None
) -> Iterator[Finding]:
    """Yield all findings.

    Args:
        device: that of the options for None.
        most_slots: bounds SGLang's KV pool regardless of the memory.
    """
    fill_in(options)
    yield from _published(options.target)
    if _has_rows_alone(options):
        return
    if options.draft == MTP and _has_no_layer(options.target):
        yield _recommended(options, device)
        return
    if _is_class(options.draft):
        yield _drafter(options)
        return
    if not _has_name(options):
        if told := _format(options.draft):
            yield ok("draft's format", told)
        if not _is_head(options.draft):
            yield _vocabularies(options)
        yield from start_check.findings(options)
    try:
        target = shapes.from_config(options.target)
        draft = shapes.draft_for(target, options.draft)
    except ValueError as error:
        yield warning("arithmetic", "left out", str(error))
        return
    misfit = _misfit(target, draft, options)
    if misfit is not None:
        yield misfit
        return
    if device is None:
        try:
            device, most_slots = _device(options, shapes.lowest_precision(target, draft))
        except ValueError as error:
            yield fail("device of the pair", options.device, str(error))
            return
    if most_slots is not None:  # a CPU
        target = target.dequantized()
        draft = draft.dequantized()
    options.context = options.context or _context(options.target)
    tail = options.max_lag / 2  # tokens by which a particle runs ahead on average
    scenario = Scenario(target, draft, device.times(options.tp), options.context, tail)
    given = scenario.smc(1, options.num_particles, options.num_steps)
    pair = ModelPair(given, options, most_slots)
    if target.states is not None:
        yield pair.states()
    yield pair.memory()
    if pair.slots > 0:
        yield from (pair.requests(mode) for mode in (WEIGHING, VERIFYING))
        if most_slots is None:
            yield pair.round_graphs()
    yield pair.speed()
    if pair.fitting(pair.settings(VERIFYING)) > 0:
        yield pair.advice()


def fill_in(options: argparse.Namespace) -> None:
    """Set N and K where they are not given, as a server of mode exact does."""
    chosen = _chosen(options.draft, is_mixture=_is_mixture(options.target))
    options.num_particles = options.num_particles or chosen.num_particles
    options.num_steps = options.num_steps or chosen.num_steps
    options.are_chosen = chosen[:2] == (options.num_particles, options.num_steps)


def _chosen(draft: str, *, is_mixture: bool) -> sizes.Chosen:
    server = SMCConfig(mode=VERIFYING)
    known = shapes.DRAFTS.get(draft.lower())
    kind = draft if known is None else known.kind
    config = None
    if known is None and Path(draft).is_dir():
        try:
            config = shapes.contents(draft)
        except ValueError:  # reported by other findings
            config = {}
        kind = heads.kind_of(architecture(config))
    elif _is_class(draft):
        kind = sizes.OWN
    chosen = sizes.choose(
        kind if kind in sizes.ROWS else MODEL, config, server, is_mixture=is_mixture
    )
    most = chosen.num_steps if known is None else known.max_steps or chosen.num_steps
    return chosen._replace(num_steps=min(chosen.num_steps, most))


def _is_mixture(target: str) -> bool:
    known = shapes.BUILT_IN.get(target.lower())
    if known is not None:
        return known.experts is not None
    try:
        return Path(target).is_dir() and sizes.is_mixture(shapes.contents(target))
    except ValueError:  # reported by other findings
        return False


def _has_rows_alone(options: argparse.Namespace) -> bool:
    """Return whether the target is a name of which nothing but published drafts is known."""
    target = options.target
    is_known = target.lower() in shapes.BUILT_IN or Path(target).exists()
    return options.draft == MTP and not is_known and any(published.drafts_of(target))


def _published(target: str) -> Iterator[Finding]:
    """Yield what the table of published drafts has for a target."""
    try:
        name = shapes.architecture(shapes.contents(target)) if Path(target).is_dir() else None
    except ValueError:  # reported by other findings
        return
    for one in published.drafts_of(target, name):
        found = f"for {one.target}: {one.draft}" + (f" ({one.format})" if one.format else "")
        if one.refused:
            yield warning("published draft", found, f"It does not run: {one.refused}.")
            continue
        found += f", {flag_of('mode')} {published.MODE}; its configuration: {one.configuration}; "
        found += published.UNTRIED
        yield ok("published draft", found)


def _is_class(draft: str) -> bool:
    """Return whether the draft is given as a class of one's own, package.module:Class."""
    return ":" in draft and not Path(draft).exists()


def _drafter(options: argparse.Namespace) -> Finding:
    """Import a drafter of one's own, and say what it needs; its sizes are not known here."""
    from sglang_smc.models.head_kinds import drafter_named

    try:
        found = drafter_named(options.draft)
    except ValueError as error:
        return fail("draft", options.draft, str(error))
    needs = "runs a draft model" if found.runs_model else "runs no model: plan for it as ngram"
    return ok("draft", f"{options.draft}, a {found.__mro__[1].__name__} of your own, {needs}")


def _has_no_layer(target: str) -> bool:
    try:
        return shapes.from_config(target).mtp_layers == 0
    except ValueError:  # reported by other findings
        return False


def _recommended(options: argparse.Namespace, device: Device | None) -> Finding:
    """Return a failure that compares what could draft for the target, by the planner's bounds."""
    target = shapes.from_config(options.target)
    known = shapes.BUILT_IN.values()
    layer = shapes.draft_for(replace(target, mtp_layers=1), MTP)
    # A recurrent model drafts for none.
    alike = [one for one in known if one.vocab_size == target.vocab_size and not one.states]
    smallest = min([target, *alike], key=lambda one: one.num_parameters)
    drafts = {
        "an EAGLE-3 head": replace(layer, kind=EAGLE3, num_states=EAGLE3_STATES),
        **{name: one for name, one in shapes.BUILT_IN.items() if one is smallest is not target},
        "n-gram matches alone": shapes.DRAFTS[NGRAM],
    }
    device = (device or _device(options, target.weight_bytes)[0]).times(options.tp)
    sizes = (options.num_particles, options.num_steps)
    plain = 0.0
    times = {}
    for name, draft in drafts.items():
        load = Scenario(target, draft, device, options.context or CONTEXT)
        times[name] = 1e3 * load.smc(1, *sizes).seconds
        plain = 1e3 * load.ar(1).seconds
    told = ", ".join(f"{ms:.2f} ms with {name}" for name, ms in times.items())
    do = f"A round of N = {sizes[0]}, K = {sizes[1]} takes at least {told}; a token of plain "
    do += f"decoding {plain:.2f} ms. Take a head made for this target, or train one (sglang-smc "
    do += "distill --new eagle3); else a small model of its family and vocabulary; n-gram matches "
    do += "where texts repeat. docs/drafts.md has what each yields."
    return fail("draft", "none, and the target has no MTP layer", do, times)


def _device(options: argparse.Namespace, weight_bytes: float) -> tuple[Device, int | None]:
    """Return the device, measured in 16 bits if it is here, and a CPU's limit of KV slots.

    Without --mem-fraction the options get the share that a server takes.
    """
    import torch

    from sglang_smc.cpu.platform import MAX_TOTAL_TOKENS, MEM_FRACTION

    is_here = options.device == HERE
    on_cpu = is_here and not torch.cuda.is_available()
    found = measure("cpu" if on_cpu else "cuda") if is_here else named(options.device, weight_bytes)
    if options.mem_fraction is None:
        kept = memory.reserved_bytes(found.capacity or 0.0)
        options.mem_fraction = MEM_FRACTION if on_cpu else 1 - kept / (found.capacity or kept)
    return found, MAX_TOTAL_TOKENS if on_cpu else None


# --- Whether a server would start


def _has_name(options: argparse.Namespace) -> bool:
    """Return whether either model is given by a built-in name, which has no files to read."""
    return any(map(shapes.is_name, (options.target, options.draft)))


def _is_head(draft: str) -> bool:
    """Return whether the draft is a head, which has no tokenizer: its tokens are the target's."""
    from sglang_smc.drafts.heads import BY_CLASS

    try:
        return draft == MTP or shapes.architecture(shapes.contents(draft)) in BY_CLASS
    except ValueError:  # reported by other findings
        return False


def _format(draft: str) -> str | None:
    """Return what a `speculators` checkpoint says of itself; None for another."""
    try:
        told = shapes.contents(draft)
    except ValueError:  # reported by other findings
        return None
    if reading.SPECULATORS not in told:
        return None
    made_for = reading.target_name(told)
    num_tokens = reading.num_tokens(told)
    told = f"speculators {told[reading.SPECULATORS]}"
    told += f", made for {made_for}" if made_for else ""
    told += f", proposes K = {num_tokens}" if num_tokens else ""
    return f"{told}; for stock SGLang: sglang-smc convert"


def _misfit(target: ModelShape, draft: ModelShape, options: argparse.Namespace) -> Finding | None:
    """Return a failure if the sizes of target and draft do not fit together, else None."""
    try:
        draft.require_fit(target, options.num_steps)
    except ValueError as error:
        return fail("draft", f"{draft.kind} for another target, or fewer steps", str(error))
    sizes = target.vocab_size, draft.vocab_size
    # For folders, `_vocabularies` compares the tokenizers.
    if draft.is_head or not draft.num_layers or not _has_name(options) or len({*sizes}) == 1:
        return None
    return fail("vocabulary", f"vocab_size is {sizes[0]} and {sizes[1]}", OTHER_DRAFT)


def _vocabularies(options: argparse.Namespace) -> Finding:
    """Compare the tokenizers of a target and a draft model."""
    from transformers import AutoConfig, AutoTokenizer

    from sglang_smc.models import vocabulary

    found = []
    how = {"local_files_only": True, "trust_remote_code": options.trust_remote_code}
    try:
        for folder in (options.target, options.draft):
            config = AutoConfig.from_pretrained(folder, **how).get_text_config()
            tokenizer = AutoTokenizer.from_pretrained(folder, **how)
            found.append(vocabulary.Vocabulary.of(tokenizer, config.vocab_size))
    except Exception as error:  # of transformers, whatever a broken file raises
        told = f"a tokenizer cannot be read: {error}"
        return fail("vocabulary", told, "Give two model folders.")
    if problem := vocabulary.problem(*found):
        return fail("vocabulary", problem, OTHER_DRAFT)
    size = len(found[0].tokens or ())
    return ok("vocabulary", f"the same {size} tokens in both", numbers={"tokens": size})


def _context(target: str) -> int:
    """Return the tokens of a request: `CONTEXT`, or fewer if the model's maximum is lower."""
    if shapes.is_name(target):
        return CONTEXT
    return min(CONTEXT, shapes.contents(target).get("max_position_embeddings") or CONTEXT)


# --- Memory and speed


class ModelPair(NamedTuple):
    """A target and a draft on a device with one request, and the options."""

    given: Scenario
    options: argparse.Namespace
    most_slots: int | None

    @property
    def share(self) -> float:
        """Return the bytes for weights, states and KV."""
        given = self.options.mem_fraction * (self.given.device.capacity or 0.0)
        return given - (memory.ASIDE_BYTES if self.most_slots is None else 0.0)

    @property
    def slots(self) -> int:
        """Return the KV slots of the pool; on this machine's CPU nothing is set aside."""
        target = self.given.target
        draft = self.given.draft
        requests = self.options.requests
        if target.states is not None:  # which a server sets aside for all that it may run
            requests = max(1, min(requests, self.most(self.settings())))
        slots = memory.kv_slots(target, draft, self.share, self.settings(), requests)
        return slots if self.most_slots is None else min(slots, self.most_slots)

    def settings(self, mode: str = WEIGHING, **other: Any) -> SMCConfig:
        given = {name: getattr(self.options, name) for name in SETTINGS}
        return SMCConfig(**{"mode": mode, **given, **other})

    def fitting(self, config: SMCConfig) -> int:
        """Return how many requests of full length fit at once, without a shared prefix."""
        if self.given.target.states is not None:
            return self.most(config)
        context = self.options.context
        return self.slots // (context + arena(config, context))

    def most(self, config: SMCConfig) -> int:
        """Return how many requests of full length fit at once, each with its recurrent states."""
        given = self.given
        context = self.options.context
        length = context + arena(config, context)
        return memory.most_requests(given.target, given.draft, self.share, config, length)

    def lag(self) -> int | None:
        """Return the longest lag at which the wanted number of requests fits, or None."""
        fitting = (
            lag
            for lag in LAGS
            if lag <= self.options.max_lag
            and self.fitting(self.settings(max_lag=lag)) >= self.options.requests
        )
        return next(fitting, None)

    def memory(self) -> Finding:
        both = self.given.target, self.given.draft
        weights = sum(one.resident_bytes for one in both)
        slot = sum(one.kv_bytes_per_token for one in both)
        found = f"{si(weights)}B of weights, {si(slot)}B of KV a token in both, on "
        found += self.given.device.name
        if self.slots <= 0:
            do = "Too large: split it (--tp), take a larger device, or leave less of it free "
            do += "(--mem-fraction, --mem-fraction-static of the server)."
            return fail("memory", found, do)
        numbers = {"weight_bytes": weights, "bytes_per_slot": slot, "slots": self.slots}
        return ok("memory", f"{found}: {self.slots:,} KV slots", numbers=numbers)

    def states(self) -> Finding:
        """Report the recurrent states, which a server sets aside for all requests at its start."""
        both = self.given.target, self.given.draft
        each = memory.state_bytes(*both, self.settings())
        most = self.most(self.settings())
        found = f"{si(each)}B a request, which a server sets aside for --max-running-requests"
        found += f" ({memory.MOST_RUNNING} unless set); {most} such requests fit"
        numbers = {"bytes": each, "requests": most}
        if most >= memory.MOST_RUNNING:
            return ok("recurrent states", found, numbers=numbers)
        if most < 1:
            do = "Too large: split it (--tp), take a larger device, or fewer particles."
            return fail("recurrent states", found, do, numbers)
        do = f"Give the server --max-running-requests {min(most, self.options.requests)}."
        return warning("recurrent states", found, do, numbers)

    def requests(self, mode: str) -> Finding:
        config = self.settings(mode)
        context = self.options.context
        own = arena(config, context)
        fitting = self.fitting(config)
        modes = [name for name in MODES if self.settings(name).weighs == config.weighs]
        about = f"mode {', '.join(modes)}"
        found = (
            f"{own:,} slots a request beside its {context:,} tokens; {fitting:,} such requests fit"
        )
        numbers = {"arena": own, "requests": fitting}
        if fitting >= self.options.requests:
            return ok(about, found, numbers=numbers)
        lag = self.lag()
        if lag is not None and lag < self.options.max_lag:
            remedy = f"With --speculative-smc-max-lag {lag} they fit."
        elif self.fitting(self.settings(VERIFYING)) >= self.options.requests:
            remedy = "In mode exact or auto they fit."
        else:
            remedy = "Texts as long as --context are too long for this device, or N is too large."
        do = f"Fewer than --requests {self.options.requests}. {remedy}"
        return (warning if fitting else fail)(about, found, do, numbers)

    def round_graphs(self) -> Finding:
        """Report how many requests' rounds are captured as CUDA graphs in the free memory."""
        options = self.options
        kept = (1 - options.mem_fraction) * (self.given.device.capacity or 0.0) / options.tp
        sizes = options.num_particles, options.num_steps, self.given.target.vocab_size
        weighed, verified = (
            Graphs.beside_recordings(
                int((1 - memory.PREFILL_SHARE) * kept),
                round_bytes(*sizes, verifies=verifies),
                round_bytes(*sizes, mixes=True),
            )
            for verifies in (False, True)
        )
        most = [min(one, memory.MOST_RUNNING) for one in (weighed[1], verified[1], weighed.of_any)]
        found = (
            f"of up to {most[0]} requests in mode smc, {most[1]} in the modes that verify, "
            f"{most[2]} where one asks for what most do not, in {si(kept)}B that are left free; "
            f"rounds that the host looks into play {weighed.launched} requests at a time"
        )
        numbers = {"recorded": most, "launched": weighed.launched}
        if min(most) >= options.requests:
            return ok("round graphs", found, numbers=numbers)
        do = f"Fewer than --requests {options.requests}: larger batches play in slices, which "
        do += "takes longer. A smaller --mem-fraction leaves more free."
        return warning("round graphs", found, do, numbers)

    def speed(self) -> Finding:
        given = self.given
        found = f"N = {given.num_particles}, K = {given.num_steps} at most {given.times_ar:.2f} "
        found += "times plain decoding, one request at a time"
        if given.times_ar <= 1:
            do = "Take a smaller draft, or a larger target: sglang-smc plan has the table."
            return warning("speed", f"{found}: no gain", do, {"times_ar": given.times_ar})
        until = given.plain_wins_from
        ends = "" if until is None else f"; from {until} requests at once plain decoding is as fast"
        numbers = {"times_ar": given.times_ar, "plain_wins_from": until}
        return ok("speed", found + ends, numbers=numbers)

    def advice(self) -> Finding:
        """Recommend mode exact, with the given N and K, or the fastest with fewer particles.

        Those that a server chooses are left out: it follows the load from them.
        """
        best = self.given
        if best.times_ar <= 1:
            most = best.num_particles
            particles = [count for count in DEFAULT_PARTICLES if count <= most] or [most]
            best, _ = best.best(1, particles)
        if best.times_ar <= 1:
            do = "SMC runs there, as a trial. To gain time, plan for a GPU: --device h100."
            found = f"no N and K are faster than plain decoding on {self.given.device.name}"
            return warning("advice", found, do)
        settings = {"num_particles": best.num_particles, "num_steps": best.num_steps}
        flags = [f"{flag_of(name)} {value}" for name, value in settings.items()]
        flags = [] if self.options.are_chosen else flags
        return ok("advice", " ".join([f"{flag_of('mode')} {VERIFYING}", *flags]), numbers=settings)
