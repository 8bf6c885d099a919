"""The knobs of SMC speculative decoding: names, defaults, ranges.

This module is the one place that knows them. `patches/server_args.py` turns them into command-line
flags and `Engine` keywords, `algorithm.py` resolves them when a server starts, and a request may
choose for itself in `custom_params={"smc": {...}}`, by the same names. No SGLang in here.
"""

import math
import os
from typing import Any, NamedTuple

import msgspec

ALGORITHM = "SMC"
"""The name after `--speculative-algorithm`."""

# For tests: results reach the scheduler one round late on a CPU, too, as they do on a GPU.
CPU_OVERLAP_ENV = "SGLANG_SMC_CPU_OVERLAP"

MAX_PARTICLES = 1024
MODES = ("smc", "exact", "mixed", "auto")
RESAMPLING_METHODS = ("systematic", "stratified", "multinomial", "residual", "ssp")
RESAMPLE_AT = ("block", "token")
SELECTIONS = ("sample", "argmax")
VOTE = "vote"  # the selection that only requests may ask for
KERNELS = ("auto", "triton", "torch")
ROUND_GRAPH = ("auto", "on", "off")

EVIDENCE_THRESHOLD = 0.5
"""The threshold where none is given. Chosen by bench/fidelity, as the next."""

AUTO_EVIDENCE_THRESHOLD = 2.0
"""`auto` is a name for `mixed` with this threshold, whatever the server's own is."""

# Field of SMCConfig -> attribute of ServerArgs. K is SGLang's own flag; the others are ours.
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
"""They choose code, so a request has no say in them."""

LAG = 4
"""The lag bound where none is given. Chosen by measurement: docs/notes.md."""

LONG_LAG = 256
"""The same where a tail's weight tells what its beginning is worth: of a power of p, and of p under
a mask that weights make up for. There a token that is settled early is settled by a wrong law,
however many particles there are."""


class SMCConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a server runs SMC with, unless a request asks otherwise."""

    num_steps: int = 8
    """K: tokens the draft proposes per round. A round yields K + 1, with the target's bonus."""

    mode: str = "smc"
    """`smc`: weigh and resample, every draft is kept. `exact`: verify; the output follows p.
    `mixed`: keep a block where its evidence is high, verify elsewhere. `auto`: `mixed`, tuned."""

    num_particles: int = 8
    """N: continuations kept alive per request."""

    ess_threshold: float = 0.5
    """smc: resample when the effective sample size falls below this fraction of N."""

    resampling_method: str = "systematic"
    """smc: how ancestors are drawn from the weights."""

    resample_at: str = "block"
    """smc: `block`, after the whole round; `token`, at the first drafted token whose ESS is low."""

    selection: str = "sample"
    """smc: `sample` draws the particle to answer with by weight; `argmax` takes the heaviest.
    A request may also ask for a `vote`: of those that give the answer which weighs most."""

    power: float = 1.0
    """smc: alpha; the output follows p^alpha, on whole texts."""

    evidence_threshold: float | None = None
    """smc, mixed: c; columns are kept while their evidence exceeds c times a uniform. 0 keeps all.
    Where it is not given: `EVIDENCE_THRESHOLD`, but 0 for a power of p, whose normaliser nobody
    knows."""

    tilt: float | None = None
    """auto: how far answers may lean to the draft; 0 is exact. c follows it, by what the server
    measures (`options.dial`). Whoever names a tilt, and no mode, means `auto`."""

    draft_temperature: float | None = None
    """The draft's temperature, where it is not to be the request's own."""

    ngram_weight: float = 0.0
    """w: q is (1 - w) times the draft's law plus w times that of n-gram matches, where there are
    any. 1 is for servers without a draft model."""

    max_lag: int | None = None
    """smc: tokens a particle may run ahead of the text that all share, before the oldest of them
    are drawn. Where it is not given: `LAG`, but `LONG_LAG` for a target that is not normalized."""

    kernels: str = "auto"
    """What runs a round beside the models: `triton` kernels or `torch` functions, which give the
    same tokens. `auto`: kernels on a GPU, torch elsewhere. A GPU's are checked against torch at
    start: `auto` replaces those that fail, `triton` refuses to start."""

    round_graph: str = "auto"
    """Whether rounds are captured as CUDA graphs, one launch each. `auto`: on a GPU, unless
    SGLang's own --disable-cuda-graph is given."""

    adaptive: bool = False
    """N and K follow the load: under it requests get fewer than they ask for, down to N = 1, K = 0.
    """

    potential_timeout: float = 10.0
    """Seconds that a potential may take for a call, which is of all texts of a round."""

    drafts_all: bool = True
    """Not a flag: whether the draft may come up with any token. EAGLE-3 heads may not."""

    @property
    def round_sizes(self) -> tuple[int, int, bool]:
        """What a round is told where the server adapts: N, K, and whether it verifies alone."""
        return self.num_particles, self.num_steps, self.is_exact

    @property
    def tokens_of_round(self) -> int:
        """Tokens that the target reads for one request in a round: N (K + 1)."""
        return self.num_particles * (self.num_steps + 1)

    @property
    def weighs(self) -> bool:
        """Whether rounds weigh and resample particles; else they verify."""
        return self.mode == "smc"

    @property
    def is_exact(self) -> bool:
        """Whether rounds verify all that is drafted."""
        return self.mode == "exact"

    @property
    def keeps_texts(self) -> bool:
        """Whether the server keeps what was said, for n-gram matches."""
        return self.ngram_weight > 0

    @property
    def has_no_draft(self) -> bool:
        """Whether a server's n-gram matches are all that drafts."""
        return self.ngram_weight == 1

    @property
    def lag(self) -> int:
        """The length that no tail reaches before a round; 1 where all that is drawn is emitted."""
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
        """The longest lag that a request may have: what the server was given, or any default."""
        return LONG_LAG if self.max_lag is None else self.max_lag

    @property
    def is_normalized(self) -> bool:
        """Whether the target's next-token probabilities sum to 1, as those of p do."""
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
    """Integers from ``low`` to ``high``."""

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
    """Finite numbers from ``low`` to ``high``; ``low`` itself only where it is ``closed``."""

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
    """One of several words."""

    words: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)


class Switch:
    """A switch: True or False."""

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
    # As SGLang's own, below which sampling is greedy; division by less leaves float32.
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
    """Settings that somebody chose, with the mode that a tilt implies."""
    implied = {"mode": "auto"} if chosen.get("tilt") is not None else {}
    return {**implied, **chosen}


def flag_of(name: str) -> str:
    """The command-line flag of a field: `num_steps` -> `--speculative-num-steps`."""
    return "--" + SERVER_ARGS_FIELDS[name].replace("_", "-")


def _out_of_range(name: str, value: object, allowed: Range) -> ValueError:
    default = getattr(DEFAULTS, name)
    return ValueError(
        f"{flag_of(name)} is {value!r}; allowed: {allowed}. "
        f"Pass a value in that range, or leave the flag out to get {default!r}."
    )


def cpu_overlap_is_forced() -> bool:
    """Whether the overlap schedule is wanted on a CPU."""
    return os.environ.get(CPU_OVERLAP_ENV) == "1"
