"""Represent the particles of one answer for notebooks, with genlm-control's names."""

import html
import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_smc.state.trace import Trace
from sglang_smc_tools.view.finding import checked, values_in
from sglang_smc_tools.view.genealogy import Genealogy, genealogy

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

KEY = "spec_smc_particles"
SHOWN = 12  # particles that a notebook shows

_NONE = (
    'The answer has no particles: ask for them with custom_params={"smc": {"return_particles": '
    "true}} in mode smc, and hand over the whole answer."
)
_SEVERAL = "There are {count} answers with particles here: hand over one of them."
_NO_TRACE = (
    'The answer has no trace, which is what a plot shows: ask for it with custom_params={"smc": '
    '{"trace": true}}.'
)


class Particle(NamedTuple):
    """One particle of an answer."""

    output_ids: list[int]
    text: str  # as an answer's; token ids if the server has no tokenizer
    weight: float  # normalised, 0 to 1
    log_weight: float  # -inf for weight 0


class Particles(NamedTuple):
    """All particles of one answer, before one was drawn."""

    particles: list[Particle]
    log_ml: float | None  # log Z-hat, of the target's normalising constant; None without one
    trace: Trace | None = None

    @classmethod
    def of(cls, answer: Any) -> "Particles":
        """Return the particles of an answer.

        Raises ValueError without particles, for those of several answers, and for an invalid trace.
        """
        plain = answer.model_dump() if hasattr(answer, "model_dump") else answer
        found = list(values_in(plain, lambda info: info if info.get(KEY) is not None else None))
        if len(found) != 1:
            raise ValueError(_SEVERAL.format(count=len(found)) if found else _NONE)
        info = found[0]
        trace = info.get("spec_smc_trace")
        return cls(
            [_particle(one) for one in info[KEY]],
            info.get("spec_smc_log_evidence"),
            None if trace is None else checked(trace),
        )

    @property
    def texts(self) -> list[str]:
        return [one.text for one in self.particles]

    @property
    def weights(self) -> list[float]:
        """Return the normalised weights, which sum to 1."""
        return [one.weight for one in self.particles]

    @property
    def log_weights(self) -> list[float]:
        return [one.log_weight for one in self.particles]

    @property
    def ess(self) -> float:
        """Return the effective sample size, 1 to N."""
        return 1.0 / sum(weight * weight for weight in self.weights)

    def posterior(self) -> dict[str, float]:
        """Return the weight of each distinct text, the heaviest first."""
        totals: dict[str, float] = {}
        for one in self.particles:
            totals[one.text] = totals.get(one.text, 0.0) + one.weight
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def frame(self) -> "pandas.DataFrame":
        """Return a data frame with a row for each particle, the heaviest first."""
        pandas = _imported("pandas")
        rows = [one._asdict() for one in self.particles]
        return pandas.DataFrame(rows).sort_values("weight", ascending=False, ignore_index=True)

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draw the particles' genealogy over output tokens, the answer's lineage in bold.

        Raises ValueError if the answer has no trace.
        """
        trace = self._required_trace()
        if axes is None:
            axes = _imported("matplotlib.pyplot").subplots(figsize=(10, 3), layout="tight")[1]
        assert axes is not None
        _draw(axes, genealogy(trace))
        return axes

    def page(self) -> str:
        """Return the HTML page of `python -m sglang_smc_tools.view`.

        Raises ValueError if the answer has no trace.
        """
        from sglang_smc_tools.view.page import page_of

        return page_of(self._required_trace())

    def _required_trace(self) -> Trace:
        if self.trace is None:
            raise ValueError(_NO_TRACE)
        return self.trace

    def __repr__(self) -> str:
        known = "unknown" if self.log_ml is None else f"{self.log_ml:.3f}"
        return f"Particles({len(self.particles)}, ess={self.ess:.2f}, log_ml={known})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{share:.3f}</td><td style='text-align:left'><code>{html.escape(text)}</code>"
            "</td></tr>"
            for text, share in list(self.posterior().items())[:SHOWN]
        )
        return (
            f"<p>{html.escape(repr(self))}</p>"
            f"<table><tr><th>share</th><th>text</th></tr>{rows}</table>"
        )


def _particle(given: Mapping[str, Any]) -> Particle:
    ids = list(given["output_ids"])
    log_weight = given["log_weight"]
    text = given.get("text", " ".join(map(str, ids)))
    return Particle(ids, text, given["weight"], -math.inf if log_weight is None else log_weight)


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        needed = name.partition(".")[0]
        raise ImportError(f"This needs {needed}: pip install {needed}") from error


def _draw(axes: "Axes", tree: Genealogy) -> None:
    for here in tree.segments:
        at = None if here.parent is None else tree.segments[here.parent]
        if at is not None and at.lane != here.lane:
            axes.plot([here.start, here.start], [at.lane, here.lane], color="0.8", lw=0.8)
        width = 0.4 + 4.0 * math.sqrt(here.after)
        axes.plot([here.start, here.end], [here.lane] * 2, color="0.75", lw=width)
    for here in tree.segments:
        if here.surviving:
            end = here.start + here.surviving
            axes.plot([here.start, end], [here.lane] * 2, color="tab:blue", lw=2.5)
    for step in tree.steps:
        if step.resampled:
            axes.axvline(step.kept_to, color="tab:red", lw=0.5, ls=":")
    axes.set(xlabel="output token", ylabel="particle", xlim=(0, tree.length))
    axes.invert_yaxis()
