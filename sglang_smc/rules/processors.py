"""Run SGLang's custom logit processors, each row with the sequence that it follows.

A processor is the client's Python code and reads host objects: rounds with one wait for the round
before (`patches/batch_result.py`), and for the device. Its `custom_params["__req__"]` is the
request with one particle's output.
"""

from array import array
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_smc.rules.base import BatchTexts, LogitsRule
from sglang_smc.smc.population import Population
from sglang_smc.state.failures import end_request
from sglang_smc.state.request import state_of
from sglang_smc.state.texts import shared_ids, tails_of

_NO_TOKEN = (
    "The custom logit processor {name} leaves no token to draw: of a row of logits that it "
    "returned behind the {num_tokens} output tokens so far, all are -inf, or one is NaN or inf. "
    "Let it leave a finite one, of a token that min_new_tokens does not forbid."
)


class Loaded(msgspec.Struct):
    """The processor of a request."""

    processor: Callable[..., torch.Tensor]
    leaves_none: bool = False  # in the last round it has left a row without a token


class ParticleView:
    """A request with a particle's output; all other attributes are the request's."""

    def __init__(self, req: Req, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = array("q", output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class Processors(LogitsRule):
    """The custom logit processors of a batch."""

    def __init__(self, texts: BatchTexts) -> None:
        # By group: its request, and the output of each particle that has not ended.
        self._texts = {
            group: (req, _outputs(req, texts.population, group))
            for group, req in enumerate(texts.reqs)
            if self.applies(req)
        }
        for req, _ in self._texts.values():
            _loaded(req).leaves_none = False

    @classmethod
    def applies(cls, req: Req) -> bool:
        return bool(req.custom_logit_processor)

    @classmethod
    def begin(cls, req: Req) -> None:
        """Load the processor, once."""
        if cls not in state_of(req).kept:
            assert req.custom_logit_processor is not None, "only for requests that it applies to"
            processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
            state_of(req).kept[cls] = Loaded(processor)

    @classmethod
    def end_without_token(cls, req: Req) -> bool:
        """End a request whose processor has left no token; return whether it has."""
        if not (cls.applies(req) and _loaded(req).leaves_none):
            return False
        name = type(_loaded(req).processor).__name__
        message = _NO_TOKEN.format(name=name, num_tokens=len(shared_ids(req)))
        end_request(req, message, HTTPStatus.BAD_REQUEST)
        return True

    def edit(self, logits: torch.Tensor, chains: torch.Tensor, first: int) -> torch.Tensor:
        for group, (req, outputs) in self._texts.items():
            if req.to_finish or not outputs:
                continue
            drafted = chains[group].tolist()
            params = [
                _params(req, output + drafted[particle][: first + column])
                for particle, output in outputs.items()
                for column in range(logits.shape[2])
            ]
            rows = logits[group, list(outputs)]  # [n, C, V]
            could_draw = _can_draw(rows)
            try:
                edited = _loaded(req).processor(rows.flatten(0, 1), params)
                logits[group, list(outputs)] = edited.view_as(rows)
            except Exception as error:  # the client's code
                _abort(req, error)
                continue
            # Rows behind an end may be empty: whether a token is missed, the round finds out.
            _loaded(req).leaves_none |= could_draw and not _can_draw(edited)
        return logits


def _loaded(req: Req) -> Loaded:
    return state_of(req).kept[Processors]


def _can_draw(rows: torch.Tensor) -> bool:
    """Return whether each row of logits ``[..., V]`` gives a distribution."""
    return bool(rows.amax(-1).isfinite().all())


def _outputs(req: Req, population: Population | None, group: int) -> dict[int, list[int]]:
    """Return the output of each particle that has not ended, before this round."""
    shared = shared_ids(req)
    if population is None:
        return {0: shared}
    ended = population.ended[group].tolist()
    return {
        particle: shared + tail
        for particle, tail in enumerate(tails_of(req, population, group))
        if not ended[particle]
    }


def _params(req: Req, output_ids: list[int]) -> dict[str, Any] | None:
    """Return the processor's parameters for one row; None where the request gives none."""
    given = req.sampling_params.custom_params
    return given if given is None else {**given, "__req__": ParticleView(req, output_ids)}


def _abort(req: Req, error: Exception) -> None:
    """End the request with its processor's error; other requests go on."""
    message = f"The custom logit processor raised {type(error).__name__}: {error}"
    end_request(req, message, HTTPStatus.BAD_REQUEST)
