"""Advantages of the user's own: found by import path, checked before a run, and applied."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import changed, make_completion, make_group, make_item
from episode_batches import make_episode
from local_runs import train
from small_run import QUICKSTART, SMALL

from grpo_ray.config import Config
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.loading import load_config
from grpo_ray.learning.batch_advantages import with_batch_advantages
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.objectives import ADVANTAGES, advantages_of, check_algorithm
from grpo_ray.objectives.returns import verdict_on
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import _check_algorithm
from grpo_ray.tools.audit.audit import audit

ROOT = Path(__file__).parents[2]
MODULE = "my_advantages_4711"
CODE = """
import torch
from grpo_ray.objectives import AdvantageInputs

def median(inputs: AdvantageInputs, *, factor: float = 1.0, eps: float):
    middle = inputs.rewards.quantile(0.5, dim=1, keepdim=True)
    return factor * (inputs.rewards - middle) / (1 + eps)

def parts(inputs: AdvantageInputs):
    return inputs.rewards + 10 * inputs.format_rewards + 100 * inputs.answer_rewards
def opo(inputs: AdvantageInputs):
    weights = inputs.lengths / inputs.lengths.sum(dim=1, keepdim=True)
    return inputs.rewards - (weights * inputs.rewards).sum(dim=1, keepdim=True)
def term(inputs: AdvantageInputs): return inputs.rewards + inputs.weights["short"] * inputs.terms["short"]
def needing(inputs: AdvantageInputs, *, tau: float): return inputs.rewards * tau
def means(inputs: AdvantageInputs): return inputs.rewards.mean(dim=1)
def raising(inputs: AdvantageInputs): raise KeyError("no")
def dividing(inputs: AdvantageInputs): return inputs.rewards / inputs.rewards.std(dim=1, keepdim=True)
def nothing(): ...
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a current folder with a module of the user's own in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{MODULE}.py").write_text(CODE)


def config_of(name: str, **changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=f"{MODULE}{name}" if name.startswith(":") else name, **changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (":median", {}),
        (":median", {"advantage_options": {"factor": 2}, "samples_per_prompt": 1, "prompts_per_step": 4}),
        (":median", {"advantage_scale": "batch"}),
        (":parts", {"dynamic_sampling_tries": 1, "advantage_scale": "whiten_tokens"}),
        ("pass_at_k", {"advantage_options": {"k": 7, "threshold": 0.2}}),
        ("gdpo", {"advantage_options": {"format_weight": 0.1}}),
        *[(name, {}) for name in ADVANTAGES if name != "pass_at_k"],
    ],
    ids=str,
)
def test_what_fits_is_accepted(name: str, changes: dict[str, Any]) -> None:
    check_algorithm(config_of(name, **changes))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_module_4711:f", {}, r"^algorithm\.advantage: there is no module 'no_module_4711' in "),
        (":none", {}, r"algorithm\.advantage: 'my_advantages_4711' has no function 'none'"),
        (":nothing", {}, r"algorithm\.advantage: my_advantages_4711:nothing must take \(inputs\)"),
        (":needing", {}, r"needing needs tau; give algorithm\.advantage_options: \{tau: \.\.\.\}"),
        (":median", {"factr": 2}, r"median has no argument 'factr'; it takes factor"),
        (":median", {"eps": 1.0}, r"eps is a field of its own; set algorithm\.advantage_eps"),
        (":means", {}, r"means fails on a small batch: .* returned shape \(1,\) for rewards of shape \(1, 8\)"),
        (":raising", {}, r"raising fails on a small batch: KeyError: 'no'"),
        (":dividing", {}, r"dividing returned \[nan, .*\] for the rewards \[0\.0, "),
        ("pass_at_k", {}, r"pass_at_k needs k; give algorithm\.advantage_options: \{k: \.\.\.\}"),
        ("pass_at_k", {"k": 0}, r"pass_at_k has k=0: input should be greater than or equal to 1"),
        ("pass_at_k", {"k": 8}, r"k is 8 and a group has 8 responses .*give at most 7"),
        ("mean", {"k": 2}, r"algorithm\.advantage: mean has no argument 'k'; it takes none"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm(config_of(name, advantage_options=options))


def test_rewards_parts_and_options_reach_the_function() -> None:
    """Ungraded responses are left out; the median of 0, 1 and 3 is 1."""
    rewards, is_graded = np.array([0, 7, 1, 3], np.float32), np.array([True, False, True, True])
    config = config_of(":median", advantage_options={"factor": 2.0}, advantage_eps=1.0)
    found = advantages_of(rewards, np.ones(4, int), is_graded, config, max_tokens=8)
    assert found.tolist() == [-1, 0, 0, 2]
    assert (advantages_of(rewards, np.ones(4, int), is_graded.astype(int), config, max_tokens=8) == found).all()
    formats, answers = np.array([1, 1, 0, 1]), np.array([0, 1, 1, 1])
    parts = advantages_of(rewards, np.ones(4, int), is_graded, config_of(":parts"), 8, formats, answers)
    assert parts.tolist() == [10, 0, 101, 113]


@pytest.mark.parametrize(("name", "expected"), [("median", [-1, 0, 1]), ("term", [-1, 10, 1])])
def test_a_kl_in_the_reward_is_compared_by_it(name: str, expected: list[float], tiny_config: Config) -> None:
    """A function has the terms before the run, when it is tried, and in the Learner, as in the Scorer."""
    kl = {"reference": "initial", "coefficient": 1.0, "placement": "reward"}
    algorithm = {"advantage": f"{MODULE}:{name}", "kl": kl, "advantage_eps": 1e-9}
    reward = [{"reward": "brevity", "name": "short", "weight": 10.0}, {"reward": "format"}]
    config = changed(tiny_config, algorithm=algorithm, task={"reward": reward})
    _check_algorithm(config)
    completions = [make_completion([1], [logprob]) for logprob in (-1.0, -2.0, -3.0)]
    group = make_group(make_item(0), completions, [0, 0, 0], [0, 0, 0])
    groups = [replace(group, terms={"short": np.float32([0, 1, 0])})]
    sequences = sequences_of(groups)
    for s in sequences:
        object.__setattr__(s, "reference_logprobs", np.array([-2.0]))
    found, _ = with_batch_advantages(groups, sequences, config)  # KL 1, 0 and -1
    assert [s.advantage for s in found] == pytest.approx(expected)


def test_lengths_reach_an_advantage_of_responses_and_of_episodes() -> None:
    """OPO's baseline of rewards 1, 0, 1 and lengths 1, 2, 5 is 6 / 8; without the ungraded third, 1 / 3."""
    rewards, lengths = np.float32([1, 0, 1]), np.array([1, 2, 5])
    found = advantages_of(rewards, lengths, np.ones(3, bool), config_of(":opo"), max_tokens=8)
    assert found.tolist() == [0.25, -0.75, 0.25]
    found = advantages_of(rewards, lengths, np.array([True, True, False]), config_of(":opo"), max_tokens=8)
    assert found.tolist() == pytest.approx([2 / 3, -1 / 3, 0])
    turns = [([1, 2], [5]), ([1, 2, 5, 6], [7, 8])]
    episodes = [replace(make_episode(turns[:n]), reward=float(n == 1)) for n in (1, 2)]  # of 1 and 3 tokens
    assert verdict_on(episodes, config_of(":opo"), 1.0).advantages.tolist() == [0.75, -0.25]


@pytest.mark.slow
def test_the_audit_runs_it_only_if_told_to(tmp_path: Path, model_cache: None) -> None:
    run = RunDirectory(tmp_path / "run")
    changes = ["algorithm.num_steps=2", f"algorithm.advantage={MODULE}:median"]
    config = load_config(ROOT / QUICKSTART, [*SMALL, *changes, "algorithm.advantage_options={factor: 3}"])
    train(config, run.path)
    trusted = audit(run, run_reward_code=True)
    assert (trusted.problems, trusted.notes) == ([], [])
    report = audit(run)
    assert report.problems == []
    assert report.notes == [
        f"advantages are not checked, because {MODULE}:median is code that the run's configuration names; if "
        "you trust it, audit with --run-reward-code"
    ]
