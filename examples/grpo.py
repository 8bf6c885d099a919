"""Train a model by GRPO, with rollouts from `sgl.Engine`: plain, with n-gram drafts, with SMC.

    python examples/grpo.py --out grpo
    python examples/grpo.py --out grpo --methods AR NGRAM exact --problems 8 --samples 8

Trains the target in bench/pair on some word problems, on a CPU in a quarter of an hour. Each method
trains a policy of its own from the same weights and problems; all take turns in every step. In
`exact` the draft model learns, too: one gradient step on each batch of rollouts, after which both
models' weights are sent to the engine. Writes OUT.json and OUT.png with, for each step:

- the reward, and the seconds of the rollouts;
- the tokens of a target pass, and the probability that a draft token is accepted;
- how on-policy the rollouts are, in the trainer's own probabilities p: the mean of log p(x) + H(p)
  over all tokens x, which is 0 if they were drawn from p, and the mean of the importance ratio of
  p and the log-probabilities that the engine returned, which is 1 if they are of these weights.
"""

import argparse
import json
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import sglang as sgl
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_smc_tools.distill.losses import chi2, rejection

PAIR = Path(__file__).resolve().parents[1] / "bench" / "pair"
sys.path.insert(0, str(PAIR))
from task import Problem, check, messages, problem  # noqa: E402

SMC = {
    "speculative_algorithm": "SMC",
    "speculative_draft_model_path": str(PAIR / "draft"),
    "speculative_smc_mode": "exact",
    "speculative_smc_num_particles": 4,
    "speculative_num_steps": 6,
}
METHODS: dict[str, dict[str, Any]] = {
    "AR": {},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "exact": SMC,
    "exact, draft frozen": SMC,
}
FIRST_PROBLEM = 100_000_000  # neither model was trained on those from here on
CLIP = 0.2


class Rollouts(NamedTuple):
    """Answers to the problems of a step, the samples of a problem side by side."""

    ids: torch.Tensor  # [B, L] int64: prompt, answer, padding
    sampled: torch.Tensor  # [B, L - 1] bool: the token behind this position is of the answer
    log_probs: torch.Tensor  # [B, L - 1] float32, as the engine returned them; 0 elsewhere
    rewards: torch.Tensor  # [B] float32
    tokens_a_pass: float
    tilt: dict[str, float]  # of SMC, as the engine measures it, with its standard error


class Training:
    """A policy, its draft if it has one that learns, and the engine that samples from them."""

    def __init__(self, method: str, given: argparse.Namespace) -> None:
        self.method = method
        self.samples = given.samples
        self.tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
        self.policy, self.optimizer = trainable(PAIR / "target", given.learning_rate)
        self.draft, self.draft_optimizer = trainable(PAIR / "draft", given.draft_learning_rate)
        self.engine = sgl.Engine(
            model_path=str(PAIR / "target"),
            dtype="float32",  # as in training
            random_seed=given.seed,
            max_running_requests=given.problems * given.samples,
            sleep_on_idle=True,
            log_level="error",
            **METHODS[method],
        )

    def step(self, problems: list[Problem]) -> dict[str, Any]:
        """Sample answers, take a gradient step, and send the new weights; return measurements."""
        began = time.monotonic()
        rollouts = self.sample(problems)
        seconds = time.monotonic() - began
        log_p = self.learn(rollouts)
        found = {
            "reward": float(rollouts.rewards.mean()),
            "rollout_seconds": seconds,
            "tokens_a_pass": rollouts.tokens_a_pass,
            **rollouts.tilt,
            **on_policy(log_p, rollouts),
        }
        self.push("target", self.policy)
        if self.method.startswith("exact"):
            found["acceptance"] = self.distill(rollouts, log_p)
        if self.method == "exact":
            self.push("draft", self.draft)
        return found

    def sample(self, problems: list[Problem]) -> Rollouts:
        """Sample answers to each problem at temperature 1."""
        prompts = [self.prompt(one) for one in problems]
        answers = self.engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 1.0, "max_new_tokens": 160, "n": self.samples},
            return_logprob=True,
        )
        asked = [i // self.samples for i in range(len(answers))]  # places of their problems
        pairs = zip(answers, asked, strict=True)
        rewards = [check(found["text"], problems[place]) for found, place in pairs]
        told = [found["meta_info"] for found in answers]
        tokens = sum(info["completion_tokens"] for info in told)
        passes = sum(info.get("spec_verify_ct", info["completion_tokens"]) for info in told)
        return Rollouts(
            *padded([prompts[place] for place in asked], answers),
            torch.tensor(rewards).float(),
            tokens / passes,
            tilt_of(told),
        )

    def prompt(self, one: Problem) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages(one), tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def learn(self, rollouts: Rollouts) -> torch.Tensor:
        """Take a step of GRPO; return log p ``[B, L - 1, V]`` of the weights before it."""
        groups = rollouts.rewards.unflatten(0, (-1, self.samples))
        # Not over their deviation, which would weigh the easiest and hardest problems most.
        advantages = (groups - groups.mean(1, keepdim=True)).flatten().unsqueeze(1)
        log_p = self.policy(rollouts.ids[:, :-1]).logits.log_softmax(-1)
        chosen = log_p.gather(2, rollouts.ids[:, 1:, None]).squeeze(2)
        ratios = (chosen - rollouts.log_probs).exp()
        clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
        surrogate = torch.minimum(ratios * advantages, clipped * advantages)
        descend(self.optimizer, -surrogate[rollouts.sampled].mean())
        return log_p.detach()

    def distill(self, rollouts: Rollouts, log_p: torch.Tensor) -> float:
        """Take a step of the draft towards p; return the probability of acceptance before it."""
        log_q = self.draft(rollouts.ids[:, :-1]).logits.log_softmax(-1)
        log_p = log_p[rollouts.sampled]
        log_q = log_q[rollouts.sampled]
        if self.method == "exact":
            descend(self.draft_optimizer, chi2(log_p, log_q).mean())
        return 1 - float(rejection(log_p, log_q.detach()).mean())

    def push(self, selector: str, model: torch.nn.Module) -> None:
        """Send weights to the engine's target or draft."""
        self.engine.begin_weight_update(selector=selector)
        tensors = [(name, weight.detach()) for name, weight in model.named_parameters()]
        is_done, message = self.engine.update_weights_from_tensor(tensors)
        if not is_done:
            raise RuntimeError(message)
        self.engine.end_weight_update()


def padded(prompts: list[list[int]], answers: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the first fields of `Rollouts`."""
    texts = [prompt + found["output_ids"] for prompt, found in zip(prompts, answers, strict=True)]
    longest = max(map(len, texts))
    ids = torch.zeros(len(texts), longest, dtype=torch.int64)
    sampled = torch.zeros(len(texts), longest - 1, dtype=torch.bool)
    log_probs = torch.zeros(len(texts), longest - 1)
    for row, (prompt, text, found) in enumerate(zip(prompts, texts, answers, strict=True)):
        answer = slice(len(prompt) - 1, len(text) - 1)
        ids[row, : len(text)] = torch.tensor(text)
        sampled[row, answer] = True
        values = [value for value, *_ in found["meta_info"]["output_token_logprobs"]]
        log_probs[row, answer] = torch.tensor(values)
    return [ids, sampled, log_probs]


def trainable(folder: Path, learning_rate: float) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model in float32 and its optimizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0)


def descend(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Take one step down the gradient, clipped to norm 1."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def on_policy(log_p: torch.Tensor, rollouts: Rollouts) -> dict[str, float]:
    """Return the mean of log p(x) + H(p), its standard error, and the mean importance ratio."""
    chosen = log_p.gather(2, rollouts.ids[:, 1:, None]).squeeze(2)[rollouts.sampled]
    entropy = -(log_p.exp() * log_p).sum(2)[rollouts.sampled]
    # A token's term has mean 0 whatever came before it, so that the terms are uncorrelated.
    terms = chosen + entropy
    ratios = (chosen - rollouts.log_probs[rollouts.sampled]).exp()
    error = float(terms.std() / len(terms) ** 0.5)
    return {"score": float(terms.mean()), "score_error": error, "ratio": float(ratios.mean())}


def tilt_of(told: list[dict[str, Any]]) -> dict[str, float]:
    """Return the tilt of all answers, each one's weighted by its information, and its error."""
    known = [info for info in told if info.get("spec_smc_tilt") is not None]
    weights = [info["spec_smc_tilt_information"] for info in known]
    whole = sum(weights)
    if not whole:
        return {}
    pulls = [info["spec_smc_tilt"] * weight for info, weight in zip(known, weights, strict=True)]
    return {"tilt": sum(pulls) / whole, "tilt_error": whole**-0.5}


def draw(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    """Plot each measurement against the step."""
    titles = {
        "reward": "reward",
        "rollout_seconds": "seconds of the rollouts",
        "tokens_a_pass": "tokens of a target pass",
        "acceptance": "acceptance of a draft token",
        "score": "mean of log p(x) + H(p), and 95 %: 0 if on-policy",
        "ratio": "mean importance ratio: 1 if on-policy",
    }
    figure, panels = plt.subplots(2, 3, figsize=(13, 7), layout="constrained", dpi=150)
    for axes, (name, title) in zip(panels.flat, titles.items(), strict=True):
        for method, steps in found.items():
            known = [(i, step) for i, step in enumerate(steps) if name in step]
            errors = [1.96 * step["score_error"] for _, step in known] if name == "score" else None
            heights = [step[name] for _, step in known]
            axes.errorbar([i for i, _ in known], heights, errors, label=method, marker=".")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        axes.grid(alpha=0.25)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="without suffix")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["exact"])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--problems", type=int, default=16, help="the same in each step")
    parser.add_argument("--samples", type=int, default=16, help="of each problem")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--draft-learning-rate", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def begin(method: str, given: argparse.Namespace) -> None:
    """Begin a training in this process: SGLang has one engine a process."""
    global training
    training = Training(method, given)


def take_step(problems: list[Problem]) -> dict[str, Any]:
    return training.step(problems)


def end() -> None:
    training.engine.shutdown()


def main() -> None:
    given = arguments()
    spawn = multiprocessing.get_context("spawn")
    pools = {
        method: ProcessPoolExecutor(1, spawn, begin, (method, given)) for method in given.methods
    }
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in pools}
    first = FIRST_PROBLEM + given.seed * given.problems
    problems = [problem(first + index) for index in range(given.problems)]
    for _ in (bar := tqdm(range(given.steps), desc="training", unit="step")):
        for method, pool in pools.items():
            found[method].append(pool.submit(take_step, problems).result())
        bar.set_postfix({method: steps[-1]["reward"] for method, steps in found.items()})
    for pool in pools.values():
        pool.submit(end).result()
        pool.shutdown()
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    told = {"settings": settings, "steps": found}
    given.out.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
    draw(given.out.with_suffix(".png"), found)


if __name__ == "__main__":  # SGLang starts processes, which read this file again
    main()
