"""What memory a server has and what requests take of it, as one table. Arithmetic alone.

The server logs it as it starts and shows it on /server_info; `sglang_smc.plan` makes it of models
and a device. What a request reserves is `memory.arena`'s to say.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from sglang_smc.memory import arena
from sglang_smc.options.server import LAG, SMCConfig

PROMPT, ANSWER = 1024, 512
"""Tokens of the request that is counted by, where the server takes texts as long."""

FEW = 8
"""Requests at a time below which a pool is called small."""

SHORT_LAG = 32
"""The lag bound that is advised to powers of p where memory is short: `LAG` would spoil them."""

_VERIFIES = "exact, mixed, auto"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a server has, on each tensor-parallel rank."""

    num_slots: int
    """KV slots of the pool."""

    slot_bytes: int
    """Of a KV slot, the target's and the draft's together."""

    target_slot_bytes: int
    """Of a KV slot of the target's alone."""

    draft_weight_bytes: int

    most_running: int
    """--max-running-requests, or what SGLang has made of it."""

    context_length: int

    beside: dict[str, int] = {}
    """Bytes of what stands beside the pool and the models, by name."""


class Mode(msgspec.Struct, frozen=True):
    """What requests of a mode take."""

    slots: int
    """The most KV slots that one reserves beside its text."""

    bytes: int

    fits: int
    """Requests of `Table.prompt` + `Table.answer` tokens at a time, whole answers counted."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """The table."""

    pool_slots: int
    pool_bytes: int
    modes: dict[str, Mode]
    longest: int
    """Tokens of the longest request, prompt and answer."""
    prompt: int
    answer: int
    plain: int
    """Requests at a time that the same memory would hold without SMC and its draft model."""
    beside: dict[str, int]
    is_shortened: bool
    """Whether arenas make the longest request shorter than the pool or the model would."""
    advice: str | None
    """What to change where the pool is small; None where it is not."""

    @classmethod
    def of(cls, config: SMCConfig, sizes: Sizes) -> "Table":
        """The table of a server with these settings."""
        limit = min(sizes.context_length, sizes.num_slots) - 1
        longest = max(arena.longest(config, sizes.num_slots, limit), 0)
        answer = min(ANSWER, longest // 3)
        prompt = min(PROMPT, longest - answer)
        memory = sizes.num_slots * sizes.slot_bytes + sizes.draft_weight_bytes
        plain = memory // (sizes.target_slot_bytes * max(prompt + answer, 1))
        settings = {"smc": replace(config, mode="smc")}
        if config.is_normalized:
            settings[_VERIFIES] = replace(config, mode="exact")
        modes = {
            name: Mode(
                slots := arena.arena(setting, setting.lag),
                slots * sizes.slot_bytes,
                _fits(setting, sizes, prompt, answer),
            )
            for name, setting in settings.items()
        }
        plain = min(plain, sizes.most_running)
        return cls(
            pool_slots=sizes.num_slots,
            pool_bytes=sizes.num_slots * sizes.slot_bytes,
            modes=modes,
            longest=longest,
            is_shortened=longest < limit,
            prompt=prompt,
            answer=answer,
            plain=plain,
            beside=sizes.beside,
            advice=_advice(config, sizes, prompt, answer, plain),
        )

    def as_dict(self) -> dict[str, Any]:
        """The table for JSON."""
        return msgspec.to_builtins(self)

    def lines(self) -> Iterator[str]:
        """The table in words, a line each, without the advice."""
        yield _line("KV pool", f"{self.pool_slots:,} slots", self.pool_bytes)
        for name, mode in self.modes.items():
            what = f"a request beside its text; {mode.fits:,} fit"
            yield _line(f"kept by {name}", f"{mode.slots:,} slots", mode.bytes, what)
        counted = f"{self.prompt:,} + {self.answer:,} tokens"
        yield f"{'requests that fit are of':<26}{counted:>20}; without SMC {self.plain:,} would fit"
        yield _line("longest request", f"{self.longest:,} tokens")
        for name, size in self.beside.items():
            yield _line(name, "", size, "beside the pool")

    def as_text(self) -> str:
        """All `lines` under a heading."""
        return "\n".join(["SMC memory", *(f"  {line}" for line in self.lines())])


def _fits(config: SMCConfig, sizes: Sizes, prompt: int, answer: int) -> int:
    return min(arena.fits(config, sizes.num_slots, prompt, answer), sizes.most_running)


def _advice(config: SMCConfig, sizes: Sizes, prompt: int, answer: int, plain: int) -> str | None:
    """What to change where few requests fit for the arena's sake, computed for this server."""
    now = _fits(config, sizes, prompt, answer)
    if now >= min(FEW, plain):
        return None
    options = {}
    short = LAG if config.is_normalized else SHORT_LAG
    if config.lag > short:
        options[f"--speculative-smc-max-lag {short}"] = replace(config, max_lag=short)
    if config.weighs and config.is_normalized:
        options["--speculative-smc-mode auto"] = replace(config, mode="auto")
    told = [
        f"{flag} makes that {arena.arena(setting, setting.lag):,} slots, and {fits:,} requests"
        for flag, setting in options.items()
        if (fits := _fits(setting, sizes, prompt, answer)) > now
    ]
    if not told:
        return None
    reserved = arena.arena(config, config.lag)
    return (
        f"Of requests of {prompt:,} + {answer:,} tokens the KV pool holds {now:,} at a time, and "
        f"without SMC would hold {plain:,}: each reserves up to {reserved:,} slots for its "
        f"particles. {'; '.join(told)}. Fewer particles and a larger --mem-fraction-static help, "
        "too."
    )


def _line(name: str, count: str, size: int | None = None, what: str = "") -> str:
    """Name, count and megabytes, in columns."""
    megabytes = "" if size is None else f"{size / 1e6:,.1f} MB"
    return f"{name:<26}{count:>20}{megabytes:>14} {what}".rstrip()
