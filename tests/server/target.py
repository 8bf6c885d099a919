"""The target's own law of an answer, by transformers and SGLang's own edits of logits."""

from types import SimpleNamespace
from typing import Any

import torch
from edit_cases import stock_edit
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from transformers import AutoModelForCausalLM

PENALTIES = "frequency_penalty", "presence_penalty", "repetition_penalty"
EDITED_BY = {"logit_bias", "min_new_tokens", *PENALTIES}


class Target:
    """A checkpoint; ``eos`` ends its texts."""

    def __init__(self, path: str, eos: int) -> None:
        found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model: Any = found.eval()
        self._eos = eos

    @torch.inference_mode()
    def logits(self, request: dict[str, Any], output: list[int]) -> torch.Tensor:
        """Logits ``[L, V]`` in the places of an answer's tokens, as the request edits them."""
        prompt = request["input_ids"]
        params = request["sampling_params"]
        raw = self._model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        own = {name: value for name, value in params.items() if name in EDITED_BY}
        stops = frozenset({self._eos, *params.get("stop_token_ids", ())})
        rows = [stock_edit(row, output[:i], own, stops) for i, row in enumerate(raw)]
        if processor := request.get("custom_logit_processor"):
            edit = CustomLogitProcessor.from_str(processor)
            for i, row in enumerate(rows):
                req = SimpleNamespace(origin_input_ids=prompt, output_ids=output[:i])
                rows[i] = edit(row[None], [{**params["custom_params"], "__req__": req}])[0]
        return torch.stack(rows)

    def log_probs(self, request: dict[str, Any], output: list[int]) -> torch.Tensor:
        """Log-probabilities ``[L, V]`` at the request's temperature, as SGLang returns them."""
        temperature = request["sampling_params"]["temperature"] or 1.0
        log_p = (self.logits(request, output) / temperature).log_softmax(-1)
        return log_p.clamp_min(torch.finfo(torch.float32).min)
