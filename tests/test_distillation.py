"""Distillation in the Learner, the buffer and the files: the teacher's term of each token's advantage."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    changed,
    gradient,
    make_batch,
    make_completion,
    make_group,
    make_item,
    own_logprobs,
    relative_difference,
    same_groups,
    simple_group,
)
from episode_groups import make_episode_group, random_episode
from small_run import QUICKSTART

from grpo_ray.actors.learner import Learner
from grpo_ray.config import Config
from grpo_ray.config.distillation import DistillationConfig
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.models.loading import load_tokenizer
from grpo_ray.models.sequences import TrainSequence, sequences_of, with_teacher
from grpo_ray.models.teacher import check_teacher
from grpo_ray.models.tiny import train_tokenizer
from grpo_ray.telemetry.batch_metrics import teacher_metrics
from grpo_ray.telemetry.rollout_log import read_groups, read_rollouts, write_rollouts
from grpo_ray.tools.audit.teacher import audit_teacher, teacher_kl
from grpo_ray.types import CONTEXT, ScoredGroup, TrainBatch


def taught(group: ScoredGroup, seed: int = 0) -> ScoredGroup:
    """Give the group random logprobs of a teacher."""
    rng = np.random.default_rng(seed)
    masks = np.concatenate([c.mask for c in group.rollout.completions])
    return replace(group, teacher_logprobs=np.where(masks, -rng.random(len(masks)), 0).astype(np.float32))


def config_of(**values: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teacher": "somewhere", **values})


# ---- advantages ----


@pytest.mark.parametrize(
    ("use_reward", "advantage", "expected"),
    [(True, 0.5, [0.5 + 2.0, 0.5 - 4.0, 0.5]), (False, 0.5, [2.0, -4.0, 0.0])],
)
def test_the_term_is_the_coefficient_times_the_log_ratio(
    use_reward: bool, advantage: float, expected: list[float]
) -> None:
    """A token that the sampler gave no logprob has no term."""
    behaviour, teacher = np.float32([-3.0, -1.0, np.nan]), np.float32([-2.0, -3.0, -1.0])
    sequence = TrainSequence((1,), np.array([5, 6, 7]), behaviour, advantage, teacher_logprobs=teacher)
    (found,) = with_teacher([sequence], config_of(coefficient=2.0, use_reward=use_reward))
    assert isinstance(found.advantage, np.ndarray)
    assert found.advantage.tolist() == expected


def test_without_a_teacher_nothing_changes() -> None:
    sequences = sequences_of([simple_group(0)])
    assert with_teacher(sequences, DistillationConfig()) is sequences


def test_an_episode_has_the_term_of_each_sampled_token_beside_the_advantage_of_its_turn() -> None:
    rng = np.random.default_rng(2)
    episodes = [random_episode(rng, branch=0.5, with_turn_rewards=True) for _ in range(5)]
    group = taught(make_episode_group(0, episodes))
    assert group.teacher_logprobs is not None
    plain, both = sequences_of([group]), with_teacher(sequences_of([group]), config_of())
    rows = iter(group.teacher_rows)
    expected = []
    for episode, row in zip(episodes, rows, strict=True):
        for part in episode.sequences:
            own = slice(part.start, part.end)
            mask = episode.mask[own]
            if mask.any():
                assert row is not None
                expected.append((row[own] - episode.logprobs[own])[mask])
    assert len(expected) == len(plain) > len(episodes) - 2
    for before, after, term in zip(plain, both, expected, strict=True):
        np.testing.assert_allclose(after.advantage - before.advantage, term, atol=1e-6)


def test_tokens_that_are_too_old_have_no_term() -> None:
    rng = np.random.default_rng(0)
    episodes = [random_episode(rng, version=1, max_lag=1) for _ in range(8)]
    group = taught(make_episode_group(0, episodes))
    masked = replace(group, rollout=group.rollout.masked_before(1))
    num_sampled = [
        sum(s.num_sampled for s in with_teacher(sequences_of([g]), config_of())) for g in (group, masked)
    ]
    assert 0 < num_sampled[1] < num_sampled[0]
    for sequence in with_teacher(sequences_of([masked]), config_of()):
        assert np.shape(sequence.advantage) == (sequence.num_sampled,)


@pytest.mark.parametrize("loss", ["reinforce_with_baseline", "no_baseline", "grpo_clip", "cispo", "unclipped"])
@pytest.mark.parametrize("use_reward", [True, False])
def test_the_gradient_is_that_of_the_plain_policy_gradient(
    tiny_config: Config, tiny_model: Callable[..., Path], loss: str, use_reward: bool
) -> None:
    """On-policy, whatever the loss: - mean over tokens of advantage * log pi."""
    algorithm = {"prompts_per_step": 4, "samples_per_prompt": 3, "loss": loss, "aggregation": "token_mean"}
    distillation = {"teacher": "somewhere", "engine": "torch", "coefficient": 0.5, "use_reward": use_reward}
    config = changed(tiny_config, algorithm=algorithm, distillation=distillation)
    learner = Learner(str(tiny_model()), config, ENDS)
    groups = [taught(group, seed) for seed, group in enumerate(make_batch(learner, noise=0.0))]
    learner.accumulate_gradient(with_teacher(sequences_of(groups), config.distillation))
    found = gradient(learner)

    total, num_tokens = torch.zeros(()), 0
    plain = Learner(str(tiny_model()), config, ENDS)
    for group in groups:
        rows = zip(group.rollout.completions, group.advantages, group.teacher_rows, strict=True)
        for completion, advantage, row in rows:
            logprobs = own_logprobs(plain, group.rollout.item.prompt_token_ids, completion.token_ids.tolist())
            for place in range(len(completion.token_ids)):
                assert row is not None
                gap = float(row[place] - completion.logprobs[place])
                total = total - ((advantage if use_reward else 0.0) + 0.5 * gap) * logprobs[place]
                num_tokens += 1
    (total / num_tokens).backward()
    assert relative_difference(found, gradient(plain)) < 1e-4


def test_a_group_without_an_advantage_is_trained(tiny_config: Config, tiny_model: Callable[..., Path]) -> None:
    config = changed(tiny_config, distillation={"teacher": "somewhere", "engine": "torch"})
    learner = Learner(str(tiny_model()), config, ENDS)
    group = taught(make_batch(learner)[3])
    assert not group.advantages.any()
    assert group.has_signal
    metrics = learner.train_step(TrainBatch((group,))).metrics
    assert metrics["optim/grad_norm"] > 0
    assert metrics["throughput/trained_tokens"] == sum(c.num_tokens for c in group.rollout.completions)


# ---- files and metrics ----


def test_files_of_groups_keep_the_logprobs_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    groups = [taught(simple_group(0)), taught(make_episode_group(1, [random_episode(rng) for _ in range(3)]))]
    write_rollouts(tmp_path / "groups.parquet", None, groups)
    assert same_groups(read_groups(tmp_path / "groups.parquet"), groups)
    assert groups[0].num_bytes == simple_group(0).num_bytes + 6 * 4


def test_a_file_without_a_teacher_lacks_the_column(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "groups.parquet", 1, [simple_group(0)])
    assert "teacher_logprobs" not in read_rollouts(tmp_path / "groups.parquet")[0]
    assert read_groups(tmp_path / "groups.parquet")[0].teacher_logprobs is None


def test_kl_is_the_mean_over_sampled_tokens() -> None:
    completions = [make_completion([5, 6], [-1.0, -2.0]), make_completion([7], [np.nan])]
    group = make_group(make_item(0), completions)
    group = replace(group, teacher_logprobs=np.float32([-1.5, -4.0, -1.0]))
    assert teacher_metrics([group]) == {"distillation/kl": (0.5 + 2.0) / 2}
    assert teacher_metrics([simple_group(0)]) == {}


def test_the_audit_finds_what_is_missing_or_not_finite(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    episodes = [random_episode(rng, max_turns=3) for _ in range(3)]
    groups = [taught(simple_group(0)), taught(make_episode_group(1, episodes))]
    write_rollouts(tmp_path / "step.parquet", 1, groups)
    rows = read_rollouts(tmp_path / "step.parquet")
    assert [problem for row in rows for problem in audit_teacher(row, has_teacher=True)] == []
    assert teacher_kl(rows) == pytest.approx(teacher_metrics(groups)["distillation/kl"], rel=1e-5)
    first, episode = rows[0], next(row for row in rows if any(s["turn"] == CONTEXT for s in row["turns"] or ()))
    context = next(span["start"] for span in episode["turns"] if span["turn"] == CONTEXT)
    spoiled = [*episode["teacher_logprobs"]]
    spoiled[context] = -1.0
    wrong = {
        "do not cover": first | {"teacher_logprobs": first["teacher_logprobs"][:-1]},
        "do not cover its": first | {"teacher_logprobs": None},
        "logprob nan": first | {"teacher_logprobs": [-1.0, float("nan"), -1.0]},
        "logprob 0.5": first | {"teacher_logprobs": [-1.0, 0.5, -1.0]},
        "is context": episode | {"teacher_logprobs": spoiled},
    }
    for text, row in wrong.items():
        (problem,) = audit_teacher(row, has_teacher=True)
        assert text in problem
    assert list(audit_teacher(first, has_teacher=False)) == [
        "has a teacher's logprobs, and there is no teacher"
    ]


# ---- what is refused ----


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss=gmpo"], "algorithm.loss: `gmpo` gives all tokens"),
        (["algorithm.loss=gspo"], "algorithm.loss: `gspo` gives all tokens of a response the same weight"),
        (["algorithm.dynamic_sampling_tries=2"], "algorithm.dynamic_sampling_tries: .* set it to 0"),
        (["task.curriculum={}"], "task.curriculum: .* remove it"),
        (["distillation.engine=vllm", "sampling.temperature=0.7"], "sampling.temperature is 0.7, and vLLM"),
        (["distillation.engine=vllm"], "sampling.min_tokens is 4: .* set it to 0"),
        (["distillation.coefficient=0"], "distillation.coefficient: 0 is not valid"),
        (
            ["distillation.engine=vllm", "distillation.engine_args.tensor_parallel_size=2"],
            "distillation.engine_args: tensor_parallel_size is decided by the run; set distillation.num_gpus",
        ),
    ],
)
def test_combinations_without_a_meaning_are_refused(overrides: list[str], message: str) -> None:
    teacher = ["distillation.teacher=/some/where", "distillation.engine=torch"]
    load_config(QUICKSTART, teacher)
    with pytest.raises(ConfigError, match=message):
        load_config(QUICKSTART, [*teacher, *overrides])


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_model: Callable[..., Path]) -> None:
    path, tokenizer = tiny_model(), load_tokenizer(str(tiny_model()))
    config = load_config(
        QUICKSTART,
        [f"distillation.teacher={path}", "distillation.engine=torch", "model.tiny=null", "model.path=/a"],
    )
    check_teacher(config, tokenizer, longest_prompt=100)
    with pytest.raises(
        ValueError, match=rf"distillation.teacher: .{path}. has 512 positions, .* up to 514 tokens"
    ):
        check_teacher(config, tokenizer, longest_prompt=490)
    others = train_tokenizer(["other words altogether"] * 9, vocab_size=280)
    text = rf"distillation.teacher: the vocabulary of .{path}. is not that of ./a. \(model\): \d+ tokens differ"
    with pytest.raises(ValueError, match=text):
        check_teacher(config, others, longest_prompt=100)
