"""The law of texts whose drafts are an MTP layer's, through SGLang's layers, against enumeration.

Texts of five tokens over three: the prompt's pass draws the first, each round two of q and one of
p. So the second round drafts from states that the target's pass over the first one left.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from head_laws import MTPDraft, add_mtp_layer
from model_families import make_family
from tiny_models import smc_arguments, tiny_tokenizer
from toy_laws import EOS, LENGTH, VOCAB, Text, assert_properly_weighted, law_by, p_value

PROMPT, NUM_STEPS, NUM_RUNS = [1, 0, 1], 2, 600
ASKED = {
    "one particle": {"num_particles": 1, "evidence_threshold": 0.0},
    "weighed": {"num_particles": 3, "evidence_threshold": 0.0, "ess_threshold": 0.9},
    "exact": {"num_particles": 3, "mode": "exact"},
}


class Enumerated:
    """p and q behind each output, in float64."""

    def __init__(self, target: str) -> None:
        texts = torch.cartesian_prod(*[torch.arange(VOCAB)] * LENGTH)  # [R, LENGTH]
        whole = torch.cat([torch.tensor(PROMPT).expand(len(texts), -1), texts], 1)
        layer, start = MTPDraft(target, NUM_STEPS), len(PROMPT)
        with torch.no_grad():
            self.p = layer.model(whole).logits[:, start - 1 : -1].softmax(-1)  # [R, LENGTH, V]
        self.q = self.p.clone()
        padded = torch.nn.functional.pad(whole, (0, NUM_STEPS))
        for first in range(0, LENGTH - 1, NUM_STEPS + 1):
            laws = layer.laws(padded, torch.full((len(texts),), start + first))
            drafted = self.q[:, first + 1 : first + 1 + NUM_STEPS]
            drafted.copy_(laws[:, : drafted.shape[1]])
        self.row = {text: row for row, text in enumerate(map(tuple, texts.tolist()))}

    def law(self, probs: torch.Tensor) -> dict[Text, float]:
        """Of whole texts."""
        return law_by(lambda text: probs[self.row[self._filled(text)], len(text)])

    def log_evidence(self, text: list[int]) -> float:
        """Of one particle that keeps what it drafts."""
        row, columns = self.row[self._filled(text)], range(len(text))
        return float((self.p / self.q).log()[row, columns, text].sum())

    def _filled(self, text: Any) -> Text:
        return (*text, *[0] * LENGTH)[:LENGTH]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])  # latents, full attention
def test_texts_and_weights_have_the_layers_law(
    start: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    """Error probability 1e-4 each. Red for a state or key of another pair: it makes another q."""
    sizes = {"vocab_size": VOCAB, "eos_token_id": EOS, "initializer_range": 0.2}
    target = make_family(tmp_path, family, seed=3, **sizes)
    tiny_tokenizer(VOCAB, EOS).save_pretrained(target)
    add_mtp_layer(target)
    laws, found = Enumerated(target), {}
    more = {"num_particles": 3, "max_running_requests": 256, "max_total_tokens": 16384}
    server = start(**smc_arguments(target, None, num_steps=NUM_STEPS, **more))
    for name, smc in ASKED.items():
        own = {"temperature": 1.0, "max_new_tokens": LENGTH, "custom_params": {"smc": smc}}
        asked = [{**own, "sampling_seed": seed} for seed in range(NUM_RUNS)]
        sent = [{"input_ids": PROMPT, "sampling_params": params} for params in asked]
        replies = server.play(sent, every=0)
        texts = [reply.output_ids for reply in replies]
        evidence = [reply.meta["spec_smc_log_evidence"] for reply in replies]
        if name == "one particle":
            assert evidence == pytest.approx(list(map(laws.log_evidence, texts)), abs=1e-4)
        outputs = torch.tensor([(text + [EOS] * LENGTH)[:LENGTH] for text in texts])
        log_evidence = torch.tensor(evidence, dtype=torch.float64)
        outcome: Any = SimpleNamespace(outputs=outputs, log_evidence=log_evidence)
        found[name] = outcome
    p, q = laws.law(laws.p), laws.law(laws.q)
    assert p_value(found["one particle"], q) > 1e-4
    assert p_value(found["one particle"], p) < 1e-9, "the test could not tell them apart"
    assert p_value(found["exact"], p) > 1e-4
    assert_properly_weighted(found["weighed"], p)
