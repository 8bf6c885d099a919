"""Report a server's memory, and the requests' shares of it, as one table.

The server logs it when it starts, and returns it on /server_info; `sglang_smc_tools.plan` computes
it for models and a device. `kv.arena` defines how much a request reserves.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from sglang_smc.kv import arena
from sglang_smc.options.server import LAG, SMCConfig

PROMPT = 1024
ANSWER = 512
"""Tokens of the reference request, where the server admits such lengths."""

FEW = 8
"""Requests at a time below which a pool counts as small."""

SHORT_LAG = 32
"""Recommended lag bound for powers of p where memory is short: `LAG` would bias them."""

_VERIFIES = "exact, auto"


class MemorySizes(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and limits of a server, on each tensor-parallel rank."""

    num_slots: int  # of the KV pool
    slot_bytes: int  # of a KV slot, of target and draft together
    target_slot_bytes: int  # of the target alone
    draft_weight_bytes: int
    most_running: int  # --max-running-requests, as resolved by SGLang
    context_length: int
    beside: dict[str, int] = {}  # bytes beside the pool and the models, by name


class Mode(msgspec.Struct, frozen=True):
    """Memory of a request in one mode."""

    slots: int  # the most KV slots that a request reserves beside its sequence
    bytes: int
    fits: int  # requests of `Table.prompt` + `Table.answer` tokens at a time, with whole answers


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Memory table of a server."""

    pool_slots: int
    pool_bytes: int
    modes: dict[str, Mode]
    longest: int  # tokens of the longest request, prompt and answer
    prompt: int
    answer: int
    plain: int  # requests at a time that this memory would hold without SMC and its draft model
    beside: dict[str, int]
    is_shortened: bool  # arenas make the longest request shorter than the pool or the model would
    advice: str | None  # recommended changes if the pool is small, else None

    @classmethod
    def of(cls, config: SMCConfig, sizes: MemorySizes) -> "Table":
        """Return the table of a server with these options."""
        limit = min(sizes.context_length, sizes.num_slots) - 1
        longest = max(arena.longest(config, sizes.num_slots, limit), 0)
        answer = min(ANSWER, longest // 3)
        prompt = min(PROMPT, longest - answer)
        memory = sizes.num_slots * sizes.slot_bytes + sizes.draft_weight_bytes
        plain = memory // (sizes.target_slot_bytes * max(prompt + answer, 1))
        plain = min(plain, sizes.most_running)
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
        return msgspec.to_builtins(self)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, without the advice."""
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
        """Return all `lines` under a heading."""
        return "\n".join(["SMC memory", *(f"  {line}" for line in self.lines())])


def _fits(config: SMCConfig, sizes: MemorySizes, prompt: int, answer: int) -> int:
    return min(arena.fits(config, sizes.num_slots, prompt, answer), sizes.most_running)


def _advice(
    config: SMCConfig, sizes: MemorySizes, prompt: int, answer: int, plain: int
) -> str | None:
    """Return recommended changes if arenas let few requests fit, else None."""
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
    megabytes = "" if size is None else f"{size / 1e6:,.1f} MB"
    return f"{name:<26}{count:>20}{megabytes:>14} {what}".rstrip()
