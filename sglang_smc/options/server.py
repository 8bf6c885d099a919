"""Declare the settings of SMC speculative decoding, each in one place.

A field of `SMCConfig` that is annotated with a `Setting` is a command-line flag and an `Engine`
keyword (`patches/server_args.py`), a key of a request's `custom_params={"smc": {...}}`
(`options.request`), and the range, modes and words of all errors about it. This module does not
import SGLang.
"""

import math
import sys
from collections.abc import Container, Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

ALGORITHM = "SMC"
"""Value of `--speculative-algorithm`."""

# For tests: the overlap schedule on a CPU, where results reach the scheduler one round late.
CPU_OVERLAP_ENV = "SGLANG_SMC_CPU_OVERLAP"

WHOLE_TEXT = 2**31 - 1
"""What --speculative-draft-window-size 0 becomes, which SGLang refuses before it asks us."""

MAX_PARTICLES = 1024
MAX_FLOAT = sys.float_info.max
MODES = ("smc", "exact", "auto")
RESAMPLING_METHODS = ("systematic", "stratified", "multinomial", "chopthin")
PROPOSALS = ("draft", "verified")
RESAMPLE_AT = ("block", "token")
SELECTIONS = ("sample", "argmax")
KERNELS = ("auto", "triton", "torch")
DRAFT_LAYERS = ("sglang", "fused", "fused-int8", "auto")
ROUND_GRAPH = ("auto", "on", "off")
ADAPTIVE = ("auto", "on", "off")

EVIDENCE_THRESHOLD = 0.5
"""Default threshold. Chosen by bench/fidelity, as the next."""

AUTO_EVIDENCE_THRESHOLD = 2.0
"""Default threshold of mode `auto`, which has neither a threshold nor a tilt."""

LAG = 4
"""Default lag bound. Chosen by measurement: docs/algorithm.md, "The lag"."""

LONG_LAG = 256
"""Default lag bound where later weights correct earlier tokens: for a power of p, and for p under a
mask that weights correct. There a token that is drawn early is drawn from a wrong distribution, for
any number of particles."""


class Range(NamedTuple):
    """The values that a setting allows."""

    kind: type
    words: str  # in errors
    bounds: str = ""  # in a flag's help
    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False  # without ``low`` itself
    choices: tuple[Any, ...] | None = None

    def holds(self, value: Any) -> bool:
        if self.kind is list:
            return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        # bool is an int to Python, but `True` particles is a mistake.
        is_of_kind = isinstance(value, int | float if self.kind is float else self.kind)
        if not is_of_kind or isinstance(value, bool) != (self.kind is bool):
            return False
        if self.choices is not None or isinstance(value, str):
            return self.choices is None or value in self.choices
        return value <= self.high and (self.low < value if self.is_open else self.low <= value)


def integers(low: int, high: int | None = None) -> Range:
    """Return the range of integers from ``low`` to ``high``."""
    if high is None:
        return Range(int, f"an integer >= {low}", f"at least {low}", low)
    return Range(int, f"an integer from {low} to {high}", f"{low} to {high}", low, high)


def numbers(low: float, high: float = MAX_FLOAT, *, above: bool = False, words: str = "") -> Range:
    """Return the range of finite numbers from ``low`` to ``high``; ``above``: without ``low``."""
    words = words or f"a finite number {'>' if above else '>='} {low:g}"
    bounds = f"{'above' if above else 'at least'} {low:g}"
    bounds = bounds if high == MAX_FLOAT else f"{low:g} to {high:g}"
    return Range(float, words, bounds, low, high, above)


def one_of(values: tuple[str, ...]) -> Range:
    """Return the range of some words."""
    listed = ", ".join(values)
    return Range(str, f"one of {listed}", listed, choices=values)


class Setting(NamedTuple):
    """Declaration of a setting."""

    allowed: Range
    help: str  # of its flag, without the sentence's end
    note: str = ""  # the help's end, in parentheses; else it names bounds and default
    modes: tuple[str, ...] = MODES  # those in which a request's value has an effect
    is_key: bool = True  # whether a request may set it
    sglang_field: str = ""  # of SGLang's own flag, where it has one
    bare: str | None = None  # the value of a flag without one; None: it needs one


_SMC = ("smc",)
_CHOSEN = "default: by the kind of draft and of target"


class SMCConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server, which apply unless a request sets its own.

    N and K of a server that is given none are those of `drafts.sizes`.
    """

    # K: a round yields at most K + 1 tokens, with the target's bonus.
    num_steps: Annotated[
        int,
        Setting(
            integers(1),
            "Tokens drafted a round",
            f"at least 1, {_CHOSEN}",
            sglang_field="speculative_num_steps",
        ),
    ] = 8
    mode: Annotated[
        str,
        Setting(
            one_of(MODES),
            "'exact' verifies all drafts together: lossless. 'auto' keeps a round's drafts where "
            "their mean weight is high (evidence threshold, or tilt), and verifies them elsewhere: "
            "nearly the target. 'smc' weighs and resamples particles: approximate, keeps the most "
            "tokens, and alone takes powers and potentials",
        ),
    ] = "smc"
    num_particles: Annotated[  # N
        int,
        Setting(
            integers(1, MAX_PARTICLES),
            "Particles: continuations kept alive per request",
            f"1 to {MAX_PARTICLES}, {_CHOSEN}",
        ),
    ] = 8
    # None: `verified` where p is not all of a request's target, else `draft`.
    proposal: Annotated[
        str | None,
        Setting(
            one_of(PROPOSALS),
            "How particles advance in mode 'smc': 'draft' keeps draft tokens, and weighs them by "
            "target over draft. 'verified' verifies them, so that each particle advances by a "
            "sample of the target, and only masks, powers and potentials are weighed",
            "default: 'verified' beside a power, potentials or structured output, else 'draft'",
            modes=_SMC,
        ),
    ] = None
    ess_threshold: Annotated[
        float,
        Setting(
            numbers(0, 1, words="a number from 0 (never) to 1 (whenever weights differ)"),
            "Resample when the effective sample size falls below this fraction of the particles",
            "0 never, 1 unless all weights are equal, default {default}",
            modes=_SMC,
        ),
    ] = 0.5
    resampling_method: Annotated[
        str,
        Setting(
            one_of(RESAMPLING_METHODS),
            "How ancestors are drawn. 'chopthin' keeps weights that differ by a factor up to 5.8",
            modes=_SMC,
        ),
    ] = "systematic"
    resample_at: Annotated[
        str,
        Setting(
            one_of(RESAMPLE_AT),
            "'block' resamples after a round, 'token' at the first drafted token where the "
            "threshold is crossed",
            modes=_SMC,
        ),
    ] = "block"
    selection: Annotated[
        str,
        Setting(
            one_of(SELECTIONS),
            "The particle to answer with: 'sample' draws it by weight, 'argmax' takes the heaviest",
            modes=_SMC,
        ),
    ] = "sample"
    power: Annotated[  # alpha
        float,
        Setting(
            numbers(0, above=True),
            "Sample whole texts from the target distribution raised to this power, in mode 'smc'",
            modes=_SMC,
        ),
    ] = 1.0
    # c. None: the mode's default, but 0 for a power of p, which has an unknown normaliser.
    evidence_threshold: Annotated[
        float | None,
        Setting(
            numbers(0),
            "In modes 'smc' and 'auto', a round keeps its drafts up to the last position where "
            "their evidence (mean weight) exceeds this times a random number from 0 to 1. 0 keeps "
            "all, as the paper does; large values verify nearly all",
            f"at least 0, default {EVIDENCE_THRESHOLD:g}, {AUTO_EVIDENCE_THRESHOLD:g} in 'auto'",
            modes=("smc", "auto"),
        ),
    ] = None
    # c is set by it and the server's measurements (`options.policy`).
    tilt: Annotated[
        float | None,
        Setting(
            numbers(0),
            "How far answers may lean from the target to the draft, as the server measures it: 0 "
            "is exact, 1 the draft. Implies mode 'auto', and sets its evidence threshold",
            modes=("auto",),
        ),
    ] = None
    draft_temperature: Annotated[
        float | None,
        Setting(
            # SGLang's own bound, below which sampling is greedy; dividing by less overflows
            # float32.
            numbers(1e-6),
            "Temperature of the draft model",
            "from 1e-6, default: the request's own, but in mode exact at least 1.14 (1 - 1 / N) "
            "for a draft model, and 0.8 (1 - 1 / N) for EAGLE heads and MTP layers",
        ),
    ] = None
    ngram_matches: Annotated[
        bool,
        Setting(
            Range(bool, "True or False"),
            "Draft from n-gram matches, without a draft model: what followed the same tokens "
            "before, in prompts and answers. Drafts are verified",
            is_key=False,
        ),
    ] = False
    draft_class: Annotated[
        str | None,
        Setting(
            Range(str, "package.module:Class as a text"),
            "A drafter of your own, as package.module:Class, of sglang_smc.proposers.base."
            "DraftProposer",
            is_key=False,
        ),
    ] = None
    # None: `LAG`, but `LONG_LAG` for a target that is not normalized.
    max_lag: Annotated[
        int | None,
        Setting(
            integers(1),
            "Tokens that particles may differ in before the oldest are drawn by weight; bounds KV "
            "memory and the silence of a stream. Requests may ask for less",
            f"at least 1, default {LAG}, but {LONG_LAG} for powers, structured output, potentials "
            "and return_particles",
            modes=_SMC,
        ),
    ] = None
    # Kernels on a GPU are checked against torch at start: `auto` replaces those that fail, with
    # `triton` the server fails to start.
    kernels: Annotated[
        str,
        Setting(
            one_of(KERNELS),
            "What computes a round beside the models' passes: 'triton' kernels or 'torch' "
            "functions, which give the same tokens, to compare or debug. 'auto' takes kernels on a "
            "GPU and torch elsewhere",
            is_key=False,
        ),
    ] = "auto"
    draft_layers: Annotated[
        str,
        Setting(
            one_of(DRAFT_LAYERS),
            "What runs the layers of a draft: 'sglang', or 'fused' kernels, five launches a layer "
            "for up to 64 rows of a draft in bfloat16 on one GPU, or 'fused-int8', which are over "
            "weights in 8 bits, with its LM head. 'auto' compares and times passes at start, and "
            "fuses those that are faster so. No GPU has run these yet",
            is_key=False,
        ),
    ] = "sglang"
    round_graph: Annotated[
        str,
        Setting(
            one_of(ROUND_GRAPH),
            "Whether whole rounds are captured as CUDA graphs and launched at once. 'auto' "
            "captures them on a GPU unless --disable-cuda-graph is given",
            is_key=False,
        ),
    ] = "auto"
    adaptive: Annotated[
        str,
        Setting(
            one_of(ADAPTIVE),
            "Whether particles and steps adapt to the load, by the measured cost of rounds: where "
            "speculation does not pay, requests get fewer than they ask for, down to one verified "
            "chain, or plain decoding. 'auto' adapts those of requests in modes 'exact' and 'auto' "
            "on a server in one of these, 'on' those of mode 'smc', too. A request with a seed "
            "keeps what it asks for",
            "auto, on, off, default auto; alone: on",
            is_key=False,
            bare="on",
        ),
    ] = "auto"
    # No field, but a flag: `potentials.declared` reads its texts, and `presets` below.
    potential: ClassVar[
        Annotated[
            list[str] | None,
            Setting(
                Range(list, "a list of texts NAME=package.module:factory"),
                "Potentials that requests may name, which multiply the target: "
                "NAME=package.module:factory, where factory is the class of a "
                "sglang_smc.potentials.Potential or a function that returns one. Literal keyword "
                "arguments may follow it, in parentheses. Several values, or the flag several "
                "times",
                modes=_SMC,
                is_key=False,
            ),
        ]
    ] = None
    potential_timeout: Annotated[
        float,
        Setting(
            numbers(0, above=True),
            "Seconds that a potential may take for all texts of a round; where it takes longer, "
            "the requests of these texts end with HTTP 503",
            modes=_SMC,
            is_key=False,
        ),
    ] = 10.0
    presets: ClassVar[
        Annotated[
            str | None,
            Setting(
                Range(str, "JSON as a text, or a file's path"),
                "Settings that requests choose by name, as 'NAME' in the model "
                "'served-model-name:NAME': a JSON object, or the path of a file with one, of names "
                "and objects with the keys of custom_params['smc']",
                is_key=False,
            ),
        ]
    ] = None

    drafts_all: bool = True
    """No setting: whether the draft can propose any token; some know only frequent ones."""
    page_size: int = 1
    """No setting: the KV slots of a page, SGLang's --page-size."""

    @property
    def round_sizes(self) -> tuple[int, int, bool]:
        """Return N, K and whether the round only verifies, its inputs if the server adapts."""
        return self.num_particles, self.num_steps, self.is_exact

    @property
    def adapts(self) -> bool:
        """Return whether N and K adapt to the load."""
        return self.adaptive == "on" or (self.adaptive == "auto" and not self.weighs)

    @property
    def keeps_sizes(self) -> bool:
        """Return whether its N and K stay as they are where the server adapts those of others."""
        return False

    @property
    def weighs(self) -> bool:
        """Return whether rounds weigh and resample particles; else they verify drafts."""
        return self.mode == "smc"

    @property
    def extends(self) -> bool:
        """Return whether each particle of its rounds is extended by a verified chain of its own."""
        if self.proposal is None and self.resample_at == "block":
            return self.weighs and self._has_factors
        return self.weighs and self.proposal == "verified"

    @property
    def _has_factors(self) -> bool:
        """Return whether p is not all of the target in mode smc."""
        return self.power != 1.0

    @property
    def drafted_power(self) -> float:
        """Return the power of q that is drafted from: that of p where this is verified."""
        return self.power if self.extends else 1.0

    @property
    def is_exact(self) -> bool:
        """Return whether rounds verify every draft token."""
        return self.mode == "exact" or (self.mode == "auto" and self.tilt == 0)

    @property
    def lag(self) -> int:
        """Return L: tails have fewer tokens than this before a round; 1: all is emitted at once."""
        if not self.weighs or self.num_particles == 1:
            return 1
        return self._usual_lag if self.max_lag is None else self.max_lag

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
        config = cls(**with_implied({k: v for k, v in values.items() if v is not None}))
        config.validate()
        return config

    def validate(self) -> None:
        """Raise ValueError, naming the flag, at the first value outside its range."""
        for name in SERVER_ARGS_FIELDS:
            value = getattr(self, name)
            default = getattr(DEFAULTS, name)
            if not (SETTINGS[name].allowed.holds(value) or value is default is None):
                left = "the default" if name in CHOSEN else repr(default)
                raise ValueError(
                    f"{out_of_range(name, value)} Pass a value in that range, or leave the flag "
                    f"out to get {left}."
                )
        conflicts = [*self.conflicts(SETTINGS)]
        if self.tilt is not None and self.mode != "auto":
            conflicts.append((("tilt", "mode"), "mode 'auto', which it implies"))
        for names, allowed in conflicts:
            told = " and ".join(f"{flag_of(name)} is {getattr(self, name)!r}" for name in names)
            raise ValueError(f"{told}; allowed: {allowed}. Leave one of them out.")

    def conflicts(self, chosen: Container[str]) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield settings that exclude each other, and what is allowed, with the reason.

        Verified proposals ignore a threshold unless it is ``chosen`` with them.
        """
        if self.power != 1.0 and not self.weighs:
            told = "mode 'smc' or power 1, since verification knows no other target than p"
            yield ("mode", "power"), told
        elif self.power != 1.0 and self.evidence_threshold:
            told = "evidence_threshold 0, since only p itself has a known normaliser"
            yield ("power", "evidence_threshold"), told
        if self.mode == "auto" and None not in (self.tilt, self.evidence_threshold):
            yield ("tilt", "evidence_threshold"), "one of the two, since each sets the other"
        weighs_drafts = bool(self.evidence_threshold) and "evidence_threshold" in chosen
        if self.extends and (weighs_drafts or self.resample_at == "token"):
            told = "no threshold, and resample_at 'block', since verified tokens are not weighed"
            yield ("proposal", "evidence_threshold", "resample_at"), told
        if self.ngram_matches and self.draft_temperature is not None:
            told = "one of the two, since matches have no temperature"
            yield ("draft_temperature", "ngram_matches"), told
        if self.ngram_matches and self.weighs and not self.extends:
            told = (
                "proposal 'verified', or mode 'exact' or 'auto', which draw from the "
                "target what no match proposes"
            )
            yield ("mode", "ngram_matches"), told


DEFAULTS = SMCConfig()

CHOSEN = ("num_particles", "num_steps")
"""Settings that a server chooses where they are not given, by `drafts.sizes`."""


def settings_of(config: type[SMCConfig]) -> dict[str, Setting]:
    """Return the settings that a class declares, by name, in their order."""
    found = {}
    for name, hint in get_type_hints(config, include_extras=True).items():
        (declared,) = get_args(hint) if get_origin(hint) is ClassVar else (hint,)
        *_, last = get_args(declared) or (None,)
        if isinstance(last, Setting):
            found[name] = last
    return found


SETTINGS = settings_of(SMCConfig)

FIELDS = {
    name: setting.sglang_field or f"speculative_smc_{name}" for name, setting in SETTINGS.items()
}
"""Setting -> attribute of ServerArgs."""

SERVER_ARGS_FIELDS = {
    name: field for name, field in FIELDS.items() if name in SMCConfig.__struct_fields__
}
"""The same, of the fields of `SMCConfig`."""

SERVER_FIELDS = tuple(name for name, setting in SETTINGS.items() if not setting.is_key)
"""Settings that a request cannot set."""


def with_implied(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options ``chosen``, with those implied: a tilt or a threshold replaces both."""
    implied: dict[str, Any] = {}
    if chosen.get("tilt") is not None:
        implied = {"mode": "auto", "evidence_threshold": None}
    elif chosen.get("evidence_threshold") is not None:
        implied = {"tilt": None}
    return {**implied, **chosen}


def flag_of(name: str) -> str:
    """Return the command-line flag of a field: `num_steps` -> `--speculative-num-steps`."""
    return "--" + FIELDS[name].replace("_", "-")


def values_of(name: str) -> str:
    """Return the bounds and the default of a flag, in words."""
    setting = SETTINGS[name]
    default = getattr(DEFAULTS, name)
    shown = f"{default:g}" if isinstance(default, float) else default
    note = setting.note or ", ".join(filter(None, (setting.allowed.bounds, "default {default}")))
    return note.format(default="none" if shown is None else shown)


def out_of_range(name: str, value: object) -> str:
    """Return the error for a flag's value outside its range; what to do may follow."""
    return f"{flag_of(name)} is {value!r}; allowed: {SETTINGS[name].allowed.words}."


def is_smc(server_args: Any) -> bool:
    """Return whether these server arguments select SMC."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM
