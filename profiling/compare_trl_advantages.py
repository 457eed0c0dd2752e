"""Advantages of every kind that TRL has too, and the loss and gradient they lead to; see docs/lab/profiling.md.

    python profiling/compare_trl_advantages.py --trl-python ~/trl/bin/python

TRL needs a Python of its own: the head of compare_trl.py has the commands. TRL's side builds its own trainer
for each case and calls its code from rewards to loss on given completions, rewards and log-probabilities. This
side goes the way of a group in a run: the comparison of the Scorer, the batch's part of the Learner, the loss.

The six groups of four: any rewards; equal ones, of which the mean is rounded; all wrong; one right; two of 1
and two of 0.5; any. In the cases of `failed` rewards some are None: two responses of a group, all but one of
another, and a whole group.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from benchmarks.tiny_learner import QUICKSTART
from compare_trl_losses import MAX_TOKENS, TOLERANCE, make_tensors, options_of, run_side
from torch import Tensor

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.learning.batch_advantages import needs_batch, with_batch_advantages
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import Objective, advantages_of, loss_denominator, policy_gradient_step
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup

GROUPS, SIZE = 6, 4
WEIGHTS = (0.7, 2.0)  # of two rewards
OVERLONG = (MAX_TOKENS - 4, 6)  # maximum and buffer, tokens
Rewards = list[list[float | None]]  # of each reward, of each response


@dataclass(frozen=True)
class Case:
    """One kind of advantage for both sides; the loss is REINFORCE's for RLOO, else GRPO-Clip."""

    ours: Mapping[str, Any]  # fields of `algorithm`
    trl: Mapping[str, Any] = field(default_factory=dict)  # fields of the trainer's configuration
    trainer: str = "GRPOTrainer"
    num_rewards: int = 1
    has_failures: bool = False
    has_partial_failures: bool = False  # of the first reward alone: the second has an opinion on all
    overlong: bool = False
    reason: str | None = None  # of a difference that is meant


def _rloo(ours: Mapping[str, Any], trl: Mapping[str, Any], **options: Any) -> Case:
    loss = {"advantage": "leave_one_out", "loss": "reinforce_with_baseline", "aggregation": "sequence_sum"}
    return Case({**loss, **ours}, {"beta": 0.0, **trl}, "RLOOTrainer", **options)


GDPO = {"advantage": "gdpo", "advantage_scale": "whiten_responses"}
TRL_GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
KL = {"kl": {"reference": "initial", "coefficient": 0.05, "placement": "reward"}}
BATCH = {"advantage": "mean", "advantage_scale": "batch"}
WHITENED = {"advantage_scale": "whiten_responses"}
CASES = {
    "group": Case({}, {"scale_rewards": "group"}),
    "none": Case({"advantage": "mean"}, {"scale_rewards": "none"}),
    "batch": Case(BATCH, {"scale_rewards": "batch"}),
    "two rewards, sum then normalize": Case({}, num_rewards=2),
    "two rewards, normalize then sum": Case(GDPO, TRL_GDPO, num_rewards=2),
    "overlong punishment": Case(
        {"overlong_buffer_tokens": OVERLONG[1], "overlong_penalty": 1.0}, overlong=True
    ),
    "group, failed": Case({}, {"scale_rewards": "group"}, has_failures=True),
    "none, failed": Case({"advantage": "mean"}, {"scale_rewards": "none"}, has_failures=True),
    "batch, failed": Case(BATCH, {"scale_rewards": "batch"}, has_failures=True),
    "two rewards, sum then normalize, failed": Case({}, num_rewards=2, has_failures=True),
    "two rewards, normalize then sum, failed": Case(GDPO, TRL_GDPO, num_rewards=2, has_failures=True),
    "two rewards, sum then normalize, one without an opinion": Case(
        {}, num_rewards=2, has_partial_failures=True
    ),
    "two rewards, normalize then sum, one without an opinion": Case(
        GDPO, TRL_GDPO, num_rewards=2, has_partial_failures=True
    ),
    "RLOO": _rloo({}, {}),
    "RLOO, normalized": _rloo(WHITENED, {"normalize_advantages": True}),
    "RLOO, KL in the reward": _rloo(KL, {"beta": 0.05}),
    "RLOO, KL in the reward, normalized": _rloo(
        {**KL, **WHITENED}, {"beta": 0.05, "normalize_advantages": True}
    ),
    "RLOO, two rewards": _rloo({}, {}, num_rewards=2),
    "RLOO, failed": _rloo({}, {}, has_failures=True),
    "RLOO, normalized, failed": _rloo(
        WHITENED,
        {"normalize_advantages": True},
        has_failures=True,
        reason="TRL leaves out of mean and std a response that is its group's only scored one; here it is 0",
    ),
}


def make_rewards(seed: int, has_failures: bool, has_partial_failures: bool = False) -> Rewards:
    """Make two rewards of each response; see the module. The second is 0 or 1; partial failures spare it."""
    rng = np.random.default_rng(seed)
    groups = [
        rng.normal(size=4).tolist(),
        [0.1] * 4,
        [0.0] * 4,
        [0, 0, 1, 0],
        [1, 0.5, 1, 0.5],
        rng.random(4).tolist(),
    ]
    first: list[float | None] = [float(reward) for group in groups for reward in group]
    second: list[float | None] = rng.integers(0, 2, len(first)).astype(float).tolist()
    failed = {0, 3, 13, 14, 15, 20, 21, 22, 23} if has_failures or has_partial_failures else set()
    first = [None if n in failed else reward for n, reward in enumerate(first)]
    return [first, [None if n in failed else r for n, r in enumerate(second)] if has_failures else second]


def config_of(case: Case) -> Config:
    """Return the quickstart's configuration with the case's algorithm; TRL adds 1e-4 to what it divides by."""
    config = load_config(QUICKSTART, [])
    algorithm = {"advantage_eps": 1e-4, "samples_per_prompt": SIZE, **case.ours}
    data = config.model_dump()
    data["algorithm"] |= algorithm
    data["sampling"] |= {"max_tokens": OVERLONG[0]}
    return Config.model_validate(data)


def scored_groups(
    case: Case, config: Config, rewards: Rewards, tensors: Mapping[str, Tensor]
) -> list[ScoredGroup]:
    """Return the groups as the Scorer leaves them."""
    names = ("first", "second")[: case.num_rewards]
    weights = dict(zip(names, WEIGHTS if case.num_rewards > 1 else (1.0,), strict=True))
    groups = []
    for place in range(GROUPS):
        rows = range(SIZE * place, SIZE * (place + 1))
        completions = []
        for row in rows:
            logprobs = tensors["old"][row][tensors["mask"][row]].numpy()
            ids, versions = np.full(len(logprobs), 5, np.int32), np.zeros(len(logprobs), np.int32)
            completions.append(Completion("", ids, logprobs, versions, "stop"))
        terms = {
            name: np.array([np.nan if own[row] is None else own[row] for row in rows], np.float64)
            for name, own in zip(names, rewards, strict=False)
        }
        is_graded = np.array([any(own[row] is not None for own in rewards[: case.num_rewards]) for row in rows])
        weighed = np.nansum([weights[name] * term for name, term in terms.items()], axis=0)
        format_rewards = np.ones(SIZE)
        lengths = np.array([len(c.token_ids) for c in completions])
        advantages = advantages_of(
            weighed, lengths, is_graded, config.algorithm, config.sampling.max_tokens, format_rewards,
            format_rewards, terms if case.num_rewards > 1 else {}, weights,
        )  # fmt: skip
        rollout = RolloutGroup(PromptItem(place, "", (5,), ""), tuple(completions), "generator-0")
        errors = {number: "failed" for number in range(SIZE) if not is_graded[number]}
        groups.append(ScoredGroup(weighed, format_rewards, format_rewards, advantages, errors, rollout=rollout))
    return groups


def ours(case: Case, rewards: Rewards, tensors: Mapping[str, Tensor]) -> tuple[Tensor, float, Tensor]:
    """Return advantages `[batch]`, the loss, and its gradient with respect to the log-probabilities."""
    config, mask = config_of(case), tensors["mask"]
    groups = scored_groups(case, config, rewards, tensors)
    sequences = sequences_of(groups)
    if needs_batch(config.algorithm):
        looked_up = [
            replace(s, reference_logprobs=tensors["reference"][row][mask[row]].numpy())
            for row, s in enumerate(sequences)
        ]
        sequences, _ = with_batch_advantages(groups, looked_up, config)
    advantages = torch.tensor([s.advantage for s in sequences], dtype=torch.float64)
    objective = Objective.from_config(config.algorithm)
    policy = tensors["policy" if objective.needs_old_log_probs else "old"].clone().requires_grad_()
    denominator = loss_denominator(objective.aggregation, len(mask), int(mask.sum()), MAX_TOKENS)
    loss, _ = policy_gradient_step(
        policy, mask, objective=objective, denominator=denominator, advantages=advantages[:, None],
        old_log_probs=tensors["old"],
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, policy)
    return advantages, loss.item(), gradient


def job_of(case: Case, rewards: Rewards) -> dict[str, Any]:
    """Return the case for TRL's side."""
    options = dict(case.trl)
    if case.trainer == "GRPOTrainer":
        options["loss_type"] = "grpo"
    if case.num_rewards > 1:
        options["reward_weights"] = list(WEIGHTS)
    return {
        "trainer": case.trainer,
        "options": options,
        "rewards": rewards[: case.num_rewards],
        "overlong": OVERLONG if case.overlong else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(__doc__, "compare_trl_advantages.py", arguments)
    if options is None:
        return 2
    chosen = {name: case for name, case in CASES.items() if options.case in name}
    rewards = {
        name: make_rewards(options.seed, case.has_failures, case.has_partial_failures)
        for name, case in chosen.items()
    }
    tensors = make_tensors(options.seed, GROUPS * SIZE)
    jobs = {name: job_of(case, rewards[name]) for name, case in chosen.items()}
    theirs = run_side(options.trl_python, tensors, jobs)
    num_different = 0
    for name, case in chosen.items():
        advantages, loss, gradient = ours(case, rewards[name], tensors)
        found = theirs[name]
        apart = (advantages - torch.tensor(found["advantages"])).abs().max().item()
        expected = torch.tensor(found["gradient"], dtype=torch.float64)
        gradient_apart = ((gradient - expected).norm() / expected.norm()).item()
        # TRL's loss of RLOO is that of a ratio, of which only the gradient is REINFORCE's.
        loss_apart = 0.0 if case.trainer == "RLOOTrainer" else abs(loss - found["loss"])
        is_same = max(apart, gradient_apart, loss_apart) < TOLERANCE
        num_different += is_same == bool(case.reason)
        verdict = "the same" if is_same else case.reason or "DIFFERENT"
        print(f"{name:<40} advantages {apart:.1e}  loss {loss_apart:.1e}  "
              f"gradient {gradient_apart:.1e}  {verdict}")  # fmt: skip
    print(f"{len(chosen)} cases, {num_different} not as expected")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
