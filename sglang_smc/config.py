"""The knobs of SMC speculative decoding: names, defaults, ranges.

This module is the one place that knows them. `patches/server_args.py` turns them into command-line
flags and `Engine` keywords, `algorithm.py` resolves them when a server starts. No SGLang in here.
"""

from typing import Any

import msgspec

ALGORITHM = "SMC"
"""The name after `--speculative-algorithm`."""

MAX_PARTICLES = 1024
MODES = ("smc", "exact")
RESAMPLING_METHODS = ("systematic", "stratified", "multinomial", "residual", "ssp")
RESAMPLE_AT = ("block", "token")
SELECTIONS = ("sample", "argmax")

# Field of SMCConfig -> attribute of ServerArgs. K is SGLang's own flag; the others are ours.
SERVER_ARGS_FIELDS = {
    "num_steps": "speculative_num_steps",
    "mode": "speculative_smc_mode",
    "num_particles": "speculative_smc_num_particles",
    "ess_threshold": "speculative_smc_ess_threshold",
    "resampling_method": "speculative_smc_resampling_method",
    "resample_at": "speculative_smc_resample_at",
    "selection": "speculative_smc_selection",
    "max_lag": "speculative_smc_max_lag",
}


class SMCConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server runs SMC with, unless a request asks otherwise."""

    num_steps: int = 8
    """K: tokens the draft proposes per round. A round yields K + 1, with the target's bonus."""

    mode: str = "smc"
    """`smc`: weigh and resample, every draft is kept. `exact`: verify; the output follows p."""

    num_particles: int = 8
    """N: continuations kept alive per request."""

    ess_threshold: float = 0.5
    """Resample when the effective sample size falls below this fraction of N."""

    resampling_method: str = "systematic"
    """How ancestors are drawn from the weights."""

    resample_at: str = "block"
    """`block`: after the whole round. `token`: at the first drafted token whose ESS is too low."""

    selection: str = "sample"
    """`sample` draws the particle to answer with by weight; `argmax` takes the heaviest."""

    max_lag: int = 256
    """Tokens a particle may run ahead of the text all particles share, before they collapse."""

    @classmethod
    def from_server_args(cls, server_args: Any) -> "SMCConfig":
        """Read the flags, fill in the defaults of those not given, and validate."""
        values = {name: getattr(server_args, attr) for name, attr in SERVER_ARGS_FIELDS.items()}
        config = cls(**{name: value for name, value in values.items() if value is not None})
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, naming the flag, at the first value outside its range."""
        _check_int("num_steps", self.num_steps, low=1)
        _check_choice("mode", self.mode, MODES)
        _check_int("num_particles", self.num_particles, low=1, high=MAX_PARTICLES)
        _check_fraction("ess_threshold", self.ess_threshold)
        _check_choice("resampling_method", self.resampling_method, RESAMPLING_METHODS)
        _check_choice("resample_at", self.resample_at, RESAMPLE_AT)
        _check_choice("selection", self.selection, SELECTIONS)
        _check_int("max_lag", self.max_lag, low=1)
        if self.mode == "exact":
            _check_unused(self)


DEFAULTS = SMCConfig()


def flag_of(name: str) -> str:
    """The command-line flag of a field: `num_steps` -> `--speculative-num-steps`."""
    return "--" + SERVER_ARGS_FIELDS[name].replace("_", "-")


def _out_of_range(name: str, value: object, allowed: str) -> ValueError:
    default = getattr(DEFAULTS, name)
    return ValueError(
        f"{flag_of(name)} is {value!r}; allowed: {allowed}. "
        f"Pass a value in that range, or leave the flag out to get {default!r}."
    )


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    # bool is an int to Python, but `True` particles is a mistake.
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and low <= value and (high is None or value <= high):
        return
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    raise _out_of_range(name, value, allowed)


def _check_fraction(name: str, value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1:
        return  # NaN fails the comparison
    raise _out_of_range(name, value, "a number from 0 (never) to 1 (whenever weights differ)")


def _check_unused(config: SMCConfig) -> None:
    """Exact rounds have no weights and no lag: what steers those would be ignored."""
    for name in ("ess_threshold", "resampling_method", "resample_at", "selection", "max_lag"):
        value = getattr(config, name)
        if value != getattr(DEFAULTS, name):
            raise ValueError(
                f"{flag_of(name)} is {value!r}, but {flag_of('mode')} is 'exact', where it has no "
                f"effect. Leave one of the two out."
            )


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise _out_of_range(name, value, "one of " + ", ".join(choices))
