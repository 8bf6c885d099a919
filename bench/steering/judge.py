"""Evaluate the shipped reward model as a potential in the server's own process.

`sglang_smc.potentials.library` calls the same model on a server of its own.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from pair.reward_texts import TEMPLATE, WHOLE_TEMPLATE
from study import PAIR

from sglang_smc.potentials import Potential, Text

_AT_ONCE = 64  # batch size of the model


class Judge(Potential):
    """log phi = log sigmoid(score), the model's log-probability that all steps so far are right."""

    when: ClassVar[dict[str, Any]] = {"delimiter": "\n"}

    def open(self) -> None:
        """Load the model."""
        import torch
        from transformers import AutoTokenizer, LlamaForSequenceClassification

        folder = PAIR / "reward"
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = LlamaForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def complete(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.complete`."""
        return self._values([_filled(WHOLE_TEMPLATE, text) for text in texts])

    def prefix(self, texts: Sequence[Text]) -> list[float]:
        """See `Potential.prefix`."""
        return self._values([_filled(TEMPLATE, text) for text in texts])

    def _values(self, texts: list[str]) -> list[float]:
        """Return the values of texts, padded on the right, which causal attention ignores."""
        import torch

        values: list[float] = []
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            rows = self._tokenizer(some, padding=True, padding_side="right", return_tensors="pt")
            with torch.inference_mode():
                scores = self._model(**rows).logits.squeeze(-1)  # of the last token of each
            values += torch.nn.functional.logsigmoid(scores).tolist()
        return values


def _filled(template: str, text: Text) -> str:
    return template.format(prompt=text.prompt, output=text.output)
