"""Define the options of SMC speculative decoding: names, defaults, ranges.

`patches/server_args.py` turns them into command-line flags and `Engine` keywords,
`server/algorithm.py` resolves them when a server starts, and a request may set its own in
`custom_params={"smc": {...}}`, by the same names. This module does not import SGLang.
"""

import math
import os
from typing import Any, NamedTuple

import msgspec

ALGORITHM = "SMC"
"""Value of `--speculative-algorithm`."""

# For tests: the overlap schedule on a CPU, where results reach the scheduler one round late.
CPU_OVERLAP_ENV = "SGLANG_SMC_CPU_OVERLAP"

MAX_PARTICLES = 1024
MODES = ("smc", "exact", "mixed", "auto")
RESAMPLING_METHODS = ("systematic", "stratified", "multinomial", "residual", "ssp")
RESAMPLE_AT = ("block", "token")
SELECTIONS = ("sample", "argmax")
VOTE = "vote"  # the selection that only requests may set
KERNELS = ("auto", "triton", "torch")
ROUND_GRAPH = ("auto", "on", "off")

EVIDENCE_THRESHOLD = 0.5
"""Default threshold. Chosen by bench/fidelity, as the next."""

AUTO_EVIDENCE_THRESHOLD = 2.0
"""Mode `auto` is `mixed` with this threshold, independent of the server's own."""

# Field of SMCConfig -> attribute of ServerArgs. K is SGLang's own flag.
SERVER_ARGS_FIELDS = {
    "num_steps": "speculative_num_steps",
    "mode": "speculative_smc_mode",
    "num_particles": "speculative_smc_num_particles",
    "ess_threshold": "speculative_smc_ess_threshold",
    "resampling_method": "speculative_smc_resampling_method",
    "resample_at": "speculative_smc_resample_at",
    "selection": "speculative_smc_selection",
    "power": "speculative_smc_power",
    "evidence_threshold": "speculative_smc_evidence_threshold",
    "tilt": "speculative_smc_tilt",
    "draft_temperature": "speculative_smc_draft_temperature",
    "ngram_weight": "speculative_smc_ngram_weight",
    "max_lag": "speculative_smc_max_lag",
    "kernels": "speculative_smc_kernels",
    "round_graph": "speculative_smc_round_graph",
    "adaptive": "speculative_smc_adaptive",
    "potential_timeout": "speculative_smc_potential_timeout",
}

SERVER_FIELDS = ("kernels", "round_graph", "adaptive", "potential_timeout")
"""Options that select code, which a request cannot set."""

LAG = 4
"""Default lag bound. Chosen by measurement: docs/fidelity.md."""

LONG_LAG = 256
"""Default lag bound where later weights correct earlier tokens: for a power of p, and for p under a
mask that weights correct. There a token that is drawn early is drawn from a wrong distribution, for
any number of particles."""


class SMCConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a server, which apply unless a request sets its own."""

    num_steps: int = 8
    """K: draft tokens per round. A round yields at most K + 1 tokens, with the target's bonus."""

    mode: str = "smc"
    """`smc`: weigh and resample, every draft token is kept. `exact`: verify; the output follows p.
    `mixed`: keep a block where its evidence is high, verify elsewhere. `auto`: `mixed`, tuned."""

    num_particles: int = 8
    """N: particles, that is continuations, per request."""

    ess_threshold: float = 0.5
    """smc: resample when the effective sample size falls below this fraction of N."""

    resampling_method: str = "systematic"
    """smc: method of drawing ancestors from the weights."""

    resample_at: str = "block"
    """smc: `block`, after the whole round; `token`, at the first column with a low ESS."""

    selection: str = "sample"
    """smc: `sample` draws the particle of the answer by weight; `argmax` takes the heaviest.
    A request may also set `vote`: draw among the particles of the majority answer."""

    power: float = 1.0
    """smc: alpha; the output follows p^alpha of whole sequences."""

    evidence_threshold: float | None = None
    """smc, mixed: c; columns are kept while their evidence exceeds c times a uniform. 0 keeps all.
    Default: `EVIDENCE_THRESHOLD`, but 0 for a power of p, which has an unknown normaliser."""

    tilt: float | None = None
    """auto: how far answers may lean to the draft; 0 is exact. c is set by it and the server's
    measurements (`options.policy`). A tilt without a mode implies `auto`."""

    draft_temperature: float | None = None
    """Temperature of the draft; default: the request's own."""

    ngram_weight: float = 0.0
    """w: q is (1 - w) times the draft distribution plus w times that of n-gram matches, where there
    are any. 1 is for servers without a draft model."""

    max_lag: int | None = None
    """smc: tokens that a particle may be ahead of the output that all share, before the oldest of
    them are resampled. Default: `LAG`, but `LONG_LAG` for a target that is not normalized."""

    kernels: str = "auto"
    """Implementation of the small operations: `triton` kernels or `torch` functions, which give the
    same tokens. `auto`: kernels on a GPU, torch elsewhere. Kernels on a GPU are checked against
    torch at start: `auto` replaces those that fail, `triton` fails to start."""

    round_graph: str = "auto"
    """Whether rounds are captured as CUDA graphs, one launch each. `auto`: on a GPU, unless
    SGLang's own --disable-cuda-graph is given."""

    adaptive: bool = False
    """Adapt N and K to the load: requests get at most their own, down to N = 1, K = 0."""

    potential_timeout: float = 10.0
    """Seconds that a call of a potential may take; a call scores all sequences of a round."""

    drafts_all: bool = True
    """Not a flag: whether the draft can propose any token. EAGLE-3 heads may not."""

    @property
    def round_sizes(self) -> tuple[int, int, bool]:
        """Return N, K and whether the round only verifies, its inputs if the server adapts."""
        return self.num_particles, self.num_steps, self.is_exact

    @property
    def tokens_of_round(self) -> int:
        """Return the tokens that the target reads for one request in a round: N (K + 1)."""
        return self.num_particles * (self.num_steps + 1)

    @property
    def weighs(self) -> bool:
        """Return whether rounds weigh and resample particles; else they verify drafts."""
        return self.mode == "smc"

    @property
    def is_exact(self) -> bool:
        """Return whether rounds verify every draft token."""
        return self.mode == "exact"

    @property
    def keeps_texts(self) -> bool:
        """Return whether the server keeps texts for n-gram matches."""
        return self.ngram_weight > 0

    @property
    def has_no_draft(self) -> bool:
        """Return whether n-gram matches are the only proposer."""
        return self.ngram_weight == 1

    @property
    def lag(self) -> int:
        """Return the bound on tails before a round; 1 where every token is emitted at once."""
        if not self.weighs or self.num_particles == 1:
            return 1
        if self.max_lag is not None:
            return self.max_lag
        return self._usual_lag

    @property
    def _usual_lag(self) -> int:
        return LAG if self.is_normalized else LONG_LAG

    @property
    def most_lag(self) -> int:
        """Return the longest lag that a request may set: the server's, or the longest default."""
        return LONG_LAG if self.max_lag is None else self.max_lag

    @property
    def is_normalized(self) -> bool:
        """Return whether the target's next-token probabilities sum to 1, as those of p do."""
        return self.power == 1.0

    @classmethod
    def from_server_args(cls, server_args: Any) -> "SMCConfig":
        """Read the flags, fill in the defaults of those not given, and validate."""
        values = {name: getattr(server_args, attr) for name, attr in SERVER_ARGS_FIELDS.items()}
        config = cls(**with_mode({k: v for k, v in values.items() if v is not None}))
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, naming the flag, at the first value outside its range."""
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            is_left_open = value is None and getattr(DEFAULTS, name) is None
            if not (is_left_open or allowed.holds(value)):
                raise _out_of_range(name, value, allowed)
        if self.power != 1.0:
            self._check_power()
        if self.tilt is not None and self.mode != "auto":
            raise ValueError(
                f"{flag_of('tilt')} is {self.tilt!r}, but {flag_of('mode')} is {self.mode!r}; "
                "allowed: mode 'auto', which it implies. Leave one of the two out."
            )
        if self.weighs and self.ngram_weight == 1:
            raise ValueError(
                f"{flag_of('ngram_weight')} is {self.ngram_weight!r}, but {flag_of('mode')} is "
                f"{self.mode!r}; allowed: 'exact', 'mixed' and 'auto', which draw from the target "
                "what no match proposes: weights cannot make up for tokens that are never drafted. "
                f"Pass {flag_of('mode')} exact, or a smaller weight with a draft model."
            )

    def _check_power(self) -> None:
        if not self.weighs:
            raise ValueError(
                f"{flag_of('power')} is {self.power!r}, but {flag_of('mode')} is {self.mode!r}; "
                "allowed: mode 'smc', since verification knows no other target than p. "
                "Leave one of the two out."
            )
        if self.evidence_threshold:
            raise ValueError(
                f"{flag_of('power')} is {self.power!r}, but {flag_of('evidence_threshold')} is "
                f"{self.evidence_threshold!r}; allowed: 0, since evidence is measured against a "
                "normaliser that only p itself has. Leave one of the two out."
            )


class Integer(NamedTuple):
    """Range of integers from ``low`` to ``high``."""

    low: int
    high: int | None = None

    def holds(self, value: Any) -> bool:
        # bool is an int to Python, but `True` particles is a mistake.
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return is_int and self.low <= value and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"an integer >= {self.low}"
        return f"an integer from {self.low} to {self.high}"


class Number(NamedTuple):
    """Range of finite numbers from ``low`` to ``high``; ``low`` itself only if ``closed``."""

    low: float
    high: float = math.inf
    closed: bool = True
    meaning: str = ""

    def holds(self, value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and math.isfinite(value)):
            return False
        return (self.low <= value if self.closed else self.low < value) and value <= self.high

    def __str__(self) -> str:
        if self.meaning:
            return self.meaning
        return f"a finite number {'>=' if self.closed else '>'} {self.low:g}"


class Choice(NamedTuple):
    """Set of allowed words."""

    words: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)


class Switch:
    """Range of a switch: True or False."""

    def holds(self, value: Any) -> bool:
        return isinstance(value, bool)

    def __str__(self) -> str:
        return "True or False"


Range = Integer | Number | Choice | Switch

RANGES: dict[str, Range] = {
    "num_steps": Integer(1),
    "mode": Choice(MODES),
    "num_particles": Integer(1, MAX_PARTICLES),
    "ess_threshold": Number(0, 1, meaning="a number from 0 (never) to 1 (whenever weights differ)"),
    "resampling_method": Choice(RESAMPLING_METHODS),
    "resample_at": Choice(RESAMPLE_AT),
    "selection": Choice(SELECTIONS),
    "power": Number(0, closed=False),
    "evidence_threshold": Number(0),
    "tilt": Number(0),
    # SGLang's own bound, below which sampling is greedy; dividing by less overflows float32.
    "draft_temperature": Number(1e-6),
    "ngram_weight": Number(0, 1, meaning="a number from 0 (none) to 1 (no draft model)"),
    "max_lag": Integer(1),
    "kernels": Choice(KERNELS),
    "round_graph": Choice(ROUND_GRAPH),
    "adaptive": Switch(),
    "potential_timeout": Number(0, closed=False),
}

DEFAULTS = SMCConfig()


def with_mode(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options ``chosen``, with the mode that a tilt implies."""
    implied = {"mode": "auto"} if chosen.get("tilt") is not None else {}
    return {**implied, **chosen}


def flag_of(name: str) -> str:
    """Return the command-line flag of a field: `num_steps` -> `--speculative-num-steps`."""
    return "--" + SERVER_ARGS_FIELDS[name].replace("_", "-")


def _out_of_range(name: str, value: object, allowed: Range) -> ValueError:
    default = getattr(DEFAULTS, name)
    return ValueError(
        f"{flag_of(name)} is {value!r}; allowed: {allowed}. "
        f"Pass a value in that range, or leave the flag out to get {default!r}."
    )


def cpu_overlap_is_forced() -> bool:
    """Return whether the overlap schedule is forced on a CPU."""
    return os.environ.get(CPU_OVERLAP_ENV) == "1"
