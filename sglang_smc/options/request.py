"""Resolve and validate the options of one request, and apply the server's budget to them.

A request sets options in `custom_params={"smc": {...}}`, by the names of `SMCConfig`. The server's
values apply to all others. A key without effect in the request's mode is rejected, as is an unknown
one.

A *budget* bounds N and K for the requests of a batch where the server adapts to its load; a
request's own N and K bound them, too. With the lowest budget, N = 1 and K = 0, no tokens are
drafted, and the target decodes alone. A request with a seed keeps its N and K, so that its text
does not depend on the load.
"""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from sglang_smc.options.server import (
    AUTO_EVIDENCE_THRESHOLD,
    DEFAULTS,
    EVIDENCE_THRESHOLD,
    LONG_LAG,
    SERVER_FIELDS,
    Range,
    Setting,
    SMCConfig,
    flag_of,
    integers,
    settings_of,
    with_implied,
)
from sglang_smc.potentials.spec import PotentialSpec, parse_specs
from sglang_smc.printable import in_all, shown

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_Config = TypeVar("_Config", bound=SMCConfig)

PARTICLES_KEY = "return_particles"
POTENTIALS_KEY = "potentials"
TRACE_KEY = "trace"
CUSTOM_PARAMS = "custom_params['smc']"

_SWITCH = Range(bool, "true or false")


class RequestConfig(SMCConfig, frozen=True, kw_only=True):
    """`SMCConfig` of one request."""

    return_particles: Annotated[
        bool, Setting(_SWITCH, "All particles and their weights in `meta_info`", modes=("smc",))
    ] = False
    trace: Annotated[
        bool, Setting(_SWITCH, "A trace of the particles, round by round, in `meta_info`")
    ] = False
    # `parse_specs` says what is allowed.
    potentials: Annotated[
        tuple[PotentialSpec, ...],
        Setting(Range(list, "a list"), "Potentials that multiply the target", modes=("smc",)),
    ] = ()

    # The rest are no keys.
    constrained: bool = False  # whether the request has a grammar
    greedy: bool = False  # whether the request takes the likeliest token, as at temperature 0
    seeded: bool = False  # whether it has a seed of its own, which its text depends on
    threshold_in_force: float | None = None  # of evidence, for its tilt; set when it starts

    @property
    def keeps_sizes(self) -> bool:
        """Return whether no budget bounds it: with a seed, or where N is its fidelity."""
        return self.seeded or (self.adaptive == "auto" and self.weighs)

    @property
    def extras(self) -> frozenset[str]:
        """Return the keys that ask a round to return more than tokens; see `round.extras`."""
        asked = {"return_particles": self.return_particles, "trace": self.trace}
        return frozenset(name for name, is_asked in asked.items() if is_asked)

    @property
    def is_normalized(self) -> bool:
        """Return whether its target's next-token probabilities sum to 1, as those of p do.

        Those of a power of p and of p under a grammar do not. Verification renormalises the
        latter at each token.
        """
        return self.power == 1.0 and not (self._has_factors and self.weighs)

    @property
    def _has_factors(self) -> bool:
        """Return whether p is not all of the target in mode smc: a power, grammar or potentials."""
        return self.constrained or bool(self.potentials) or super()._has_factors

    @property
    def _usual_lag(self) -> int:
        # Returned particles must differ.
        return LONG_LAG if self.return_particles else super()._usual_lag

    @property
    def uses_matches(self) -> bool:
        """Return whether its draft tokens are n-gram matches."""
        return self.num_steps > 0 and self.ngram_matches

    @property
    def branches(self) -> bool:
        """Return whether its chains are a tree of likely tokens: greedy, and more than one."""
        return self.greedy and self.num_particles > 1 and self.num_steps > 0

    @property
    def effective_evidence_threshold(self) -> float:
        """Return the evidence threshold in force; infinite where all is verified, 0 for trees."""
        if self.branches:
            return 0.0
        if self.is_exact or self.extends:
            return float("inf")
        if self.threshold_in_force is not None:
            return self.threshold_in_force
        if not self.is_normalized:
            return 0.0
        if self.evidence_threshold is None:
            return EVIDENCE_THRESHOLD if self.weighs else AUTO_EVIDENCE_THRESHOLD
        return self.evidence_threshold


KEYS = {name: key for name, key in settings_of(RequestConfig).items() if name not in SERVER_FIELDS}
"""The settings of a request, by key."""

UP_TO_SERVER = {"num_particles": 1, "num_steps": 0, "max_lag": 1}
"""Keys that allow integers up to the server's own value, and the least that they allow."""


def request_config(
    server: SMCConfig, given: Any, *, constrained: bool = False, where: str = CUSTOM_PARAMS
) -> RequestConfig:
    """Return the validated options of a request with the `custom_params` ``given``.

    Args:
        given: `custom_params` of the request.
        where: name of these options in error messages.

    Raises ValueError naming every key that is unknown, out of range or without effect.
    """
    chosen = chosen_keys(given, where)
    found = (_problem(server, name, value) for name, value in chosen.items())
    _raise_if([f"has {problem}" for problem in found if problem], where)
    config = _configured(server, chosen, constrained)
    _raise_if(_conflicts(config, chosen), where)
    return config


def _configured(server: SMCConfig, chosen: dict[str, Any], constrained: bool) -> RequestConfig:
    own = {**asdict(server), **with_implied(chosen)}
    if POTENTIALS_KEY in chosen:
        own[POTENTIALS_KEY] = parse_specs(chosen[POTENTIALS_KEY])
    config = RequestConfig(**own, constrained=constrained)
    return config if config.num_steps else without_drafts(config)


def chosen_keys(given: Any, where: str = CUSTOM_PARAMS) -> dict[str, Any]:
    """Return the SMC options in the `custom_params` ``given``, not yet validated.

    Raises ValueError if they are no object.
    """
    if not isinstance(given, dict) or given.get("smc") is None:
        return {}
    if not isinstance(given["smc"], dict):
        raise ValueError(
            f"{where} is {shown(given['smc'])}; allowed: an object with keys of {', '.join(KEYS)}."
        )
    return given["smc"]


def config_of(server: SMCConfig, req: "Req") -> RequestConfig:
    """Return the options of a request in the scheduler, which have been validated on arrival."""
    found = req.__dict__.get("smc_config")
    if found is None:
        # Conflicts are not looked for again: SGLang takes the grammar from a request that it
        # aborts, and gives one to requests without under --enable-strict-thinking.
        params = req.sampling_params
        constrained = req.grammar is not None
        found = _configured(server, chosen_keys(params.custom_params), constrained)
        if params.top_k == 1:  # SGLang's form of temperature 0
            found = at_temperature_0(found)
        elif params.sampling_seed is not None:
            found = replace(found, seeded=True)
        req.smc_config = found  # pyright: ignore[reportAttributeAccessIssue] -- ours
    return found


def at_temperature_0(asked: RequestConfig) -> RequestConfig:
    """Return the options for greedy decoding: a verified tree, in every mode and for any power.

    Particles that are returned or weighed by potentials would all be equal: they are one.
    """
    if asked.return_particles or asked.potentials:
        return replace(asked, greedy=True, num_particles=1, power=1.0)
    return replace(verified_as_tree(asked), greedy=True)


def verified_as_tree(asked: _Config) -> _Config:
    """Return the options with the mode and the power of trees, whatever was chosen."""
    return replace(asked, mode="exact", power=1.0)


def without_drafts(asked: _Config) -> _Config:
    """Return the options for plain decoding: one particle, which the target alone extends."""
    return replace(asked, mode="exact", num_particles=1, num_steps=0)


def _raise_if(problems: list[str], where: str) -> None:
    if problems:
        raise ValueError(f"{where} {in_all(problems)}")


def _problem(server: SMCConfig, name: str, value: Any) -> str | None:
    """Return what is wrong with a key or its value, or None."""
    if name not in KEYS:
        return f"the unknown key {shown(name)}; allowed: {', '.join(KEYS)}."
    try:
        if name == POTENTIALS_KEY:
            parse_specs(value)
        elif not (allowed := _range_of(name, server)).holds(value):
            return f"{name}={shown(value)}; allowed: {allowed.words}."
    except ValueError as error:
        return str(error)
    return None


def _range_of(name: str, server: SMCConfig) -> Range:
    """Return the allowed values of a request's option.

    Tables and graphs are allocated for the server's N, K and lag, so these are maxima.
    """
    if name not in UP_TO_SERVER:
        return KEYS[name].allowed
    most = server.most_lag if name == "max_lag" else getattr(server, name)
    return integers(UP_TO_SERVER[name], most)


def check_support(config: RequestConfig) -> str | None:
    """Return why weights cannot cover the target's support, or None; it continues a sentence."""
    if (
        config.drafts_all
        or not config.weighs
        or config.extends
        or config.effective_evidence_threshold
    ):
        return None
    others = "potentials" if config.potentials else f"power {config.power:g}"
    reason = "a grammar" if config.constrained else others
    why = "evidence_threshold 0" if config.is_normalized else f"{reason}, which keeps whole blocks"
    return (
        f"mode 'smc' with {why}, beside a draft that knows a part of the vocabulary alone: no "
        "number of particles would ever reach the other tokens where they are drafted; allowed: "
        "proposal 'verified', an evidence_threshold above 0, or modes 'exact' and 'auto'."
    )


def _conflicts(config: RequestConfig, chosen: dict[str, Any]) -> list[str]:
    if config.num_steps == 0:
        return _conflicts_without_drafts(config, chosen)
    lacking = check_support(config)
    found = [f"has {lacking}"] if lacking else []
    found += [
        f"has {name}={shown(value)}, which has no effect in mode {config.mode!r}; allowed: mode "
        f"{' or '.join(map(repr, KEYS[name].modes))}. Leave one of the two out."
        for name, value in chosen.items()
        if config.mode not in KEYS[name].modes and not _is_neutral(name, value)
    ]
    beside = "a grammar" if config.constrained else "potentials" if config.potentials else ""
    if beside and config.weighs and chosen.get("evidence_threshold"):
        found.append(
            f"has evidence_threshold={config.evidence_threshold!r} beside {beside}; allowed: "
            "evidence_threshold 0, since only p itself has a known normaliser. Leave it out"
            + (", or add mode='auto'." if config.constrained else ".")
        )
    for names, allowed in config.conflicts(chosen):
        if names != ("mode", "power") or "power" not in chosen:  # else it is told above
            told = " beside ".join(_told(name, config, chosen) for name in names)
            found.append(f"has {told}; allowed: {allowed}. Leave one of them out.")
    return found


def _conflicts_without_drafts(config: RequestConfig, chosen: dict[str, Any]) -> list[str]:
    every = {"power": config.power, **chosen}  # the power may be the server's
    idle = {name: value for name, value in every.items() if not _is_neutral(name, value)}
    names = sorted(idle.keys() - {"num_steps", "mode", TRACE_KEY})
    if idle.get("num_particles") == 1:
        names.remove("num_particles")
    told = " and ".join(_told(name, config, chosen) for name in names)
    allowed = "num_particles 1, power 1, any mode and trace, since the target decodes alone"
    problem = f"has num_steps=0 beside {told}; allowed: {allowed}. Leave one of the two out."
    return [problem] if names else []


def _told(name: str, config: RequestConfig, chosen: dict[str, Any]) -> str:
    """Return a setting with its value, and where it is the server's, with its flag."""
    value = chosen.get(name, getattr(config, name))
    whose = "" if name in chosen else f" (this server's {flag_of(name)})"
    return f"{name}={shown(value)}{whose}"


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a value has no effect in any mode, so that it is allowed in all."""
    return (name == "power" and value == 1.0) or (
        # Lists of potentials are packed as JSON.
        name in (PARTICLES_KEY, POTENTIALS_KEY) and (not value or value == "[]")
    )


class Budget(NamedTuple):
    """Upper bounds of a request's particles and draft tokens in a round."""

    num_particles: int
    num_steps: int

    def within(self, bound: "Budget") -> "Budget":
        """Return the minimum of this and ``bound``, in N and in K."""
        num_particles = min(self.num_particles, bound.num_particles)
        return Budget(num_particles, min(self.num_steps, bound.num_steps))


OFF = Budget(1, 0)


def budgets(top: Budget) -> tuple[Budget, ...]:
    """Return the budgets from ``top`` down: N and K halved in all combinations, and `OFF`."""
    steps = _halved(top.num_steps)
    return *(Budget(n, k) for n in _halved(top.num_particles) for k in steps), OFF


def unmeasured(top: Budget) -> Budget:
    """Return the budget of a server that adapts, but does not know what rounds cost.

    It is the first within the N and K of servers that do not adapt.
    """
    usual = Budget(DEFAULTS.num_particles, DEFAULTS.num_steps)
    return next(of for of in budgets(top) if of.within(usual) == of)


def apply_budget(asked: _Config, budget: Budget | None) -> _Config:
    """Return a request's options on a budget; None leaves them as they are.

    Rounds get the return value only. The weight of a single particle has no effect, and its
    sequence would follow the draft: a request that is reduced to one particle is verified.
    Verification supports only the target p, or p renormalised at each token, so requests for a
    power of p and, in mode smc, for p under a mask keep their particles.
    """
    if budget is None or asked.keeps_sizes:
        return asked
    num_particles = asked.num_particles
    if asked.is_normalized:
        num_particles = min(num_particles, budget.num_particles)
    return replace(
        asked,
        num_particles=num_particles,
        num_steps=min(asked.num_steps, budget.num_steps),
        mode="exact" if num_particles == 1 < asked.num_particles else asked.mode,
    )


def union(before: RequestConfig, now: RequestConfig) -> RequestConfig:
    """Return options that need enough memory for both: larger N, larger K and longer tails."""
    if before is now:  # as in most rounds
        return now
    return replace(
        now,
        num_particles=max(before.num_particles, now.num_particles),
        num_steps=max(before.num_steps, now.num_steps),
        mode=before.mode if before.weighs else now.mode,
    )


def _halved(size: int) -> list[int]:
    return [size >> shift for shift in range(size.bit_length())]
