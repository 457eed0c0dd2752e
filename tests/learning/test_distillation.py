"""Distillation in the Learner, the buffer and the files: the teacher's term of each token's advantage."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    changed,
    edit_json,
    make_batch,
    make_completion,
    make_group,
    make_item,
    plain_logprobs,
    same_groups,
    simple_group,
)
from episode_groups import make_episode_group, random_episode
from small_run import QUICKSTART
from transformers import AutoModelForCausalLM

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.teacher import Teacher
from grpo_ray.engines.torch_engine import TorchTeacher
from grpo_ray.learning.model_files import check_local_model, check_teacher, load_tokenizer
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.learning.tiny_tokenizer import train_tokenizer
from grpo_ray.objectives import SELECTIONS
from grpo_ray.objectives.kl import teacher_term
from grpo_ray.records.rollout_log import read_groups, read_rollouts, write_rollouts
from grpo_ray.tools.audit.rollouts import audit_teacher, teacher_kl
from grpo_ray.types import CONTEXT, Episode, RolloutGroup, ScoredGroup, TrainBatch
from grpo_ray.watch.batch_metrics import teacher_metrics


def taught(group: ScoredGroup, seed: int = 0) -> ScoredGroup:
    """Give the group random logprobs of a teacher."""
    rng = np.random.default_rng(seed)
    masks = np.concatenate([c.mask for c in group.rollout.completions])
    return replace(group, teacher_logprobs=np.where(masks, -rng.random(len(masks)), 0).astype(np.float32))


def test_the_term_is_the_bounded_log_ratio_to_the_current_policy() -> None:
    teacher = torch.tensor([-2.0, -3.0, -torch.inf, -40.0, 0.0])
    policy = torch.tensor([-3.0, -1.0, -1.0, -1.0, -40.0], requires_grad=True)
    term = teacher_term(teacher, policy, 10.0)
    assert term.tolist() == [1.0, -2.0, -10.0, -10.0, 10.0]
    assert not term.requires_grad


def test_tokens_that_are_too_old_have_no_term() -> None:
    rng = np.random.default_rng(0)
    group = taught(make_episode_group(0, [random_episode(rng, version=1, max_lag=1) for _ in range(8)]))
    masked = replace(group, rollout=group.rollout.masked_before(1))
    num_sampled = [sum(s.num_sampled for s in sequences_of([g])) for g in (group, masked)]
    assert 0 < num_sampled[1] < num_sampled[0]
    for sequence in sequences_of([masked]):
        assert np.shape(sequence.teacher_logprobs) == (sequence.num_sampled,)


def test_tokens_are_selected_by_the_advantage_with_the_teachers_term(make_learner: MakeLearner) -> None:
    algorithm = {"token_selection": "clip_cov", "selection_options": {"share": 0.2, "low": 0.0, "high": 1e9}}
    distillation = {"teacher": "somewhere", "engine": "torch", "coefficient": 2.0, "use_reward": False}
    learner = make_learner(algorithm=algorithm, distillation=distillation)
    passes = learner._forward_backward
    sequences = passes.with_proximal(learner.model, sequences_of([taught(make_batch(learner)[3])]))
    seen = {}
    with pytest.MonkeyPatch.context() as patch:

        def select(log_probs: Any, entropies: Any, advantages: Any, rng: Any, **_: Any) -> Any:
            seen["advantages"] = advantages
            return np.ones_like(log_probs), np.zeros_like(log_probs)

        patch.setitem(SELECTIONS, "clip_cov", select)
        passes.with_selection(sequences)
    gaps = [s.teacher_logprobs - s.proximal_logprobs for s in sequences]
    np.testing.assert_allclose(seen["advantages"], 2 * np.concatenate(gaps), rtol=1e-5)


def test_a_group_without_an_advantage_is_trained(make_learner: MakeLearner) -> None:
    learner = make_learner(distillation={"teacher": "somewhere", "engine": "torch"})
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
    write_rollouts(tmp_path / "groups.parquet", 1, [simple_group(0)])  # without a teacher there is no column
    assert "teacher_logprobs" not in read_rollouts(tmp_path / "groups.parquet")[0]
    assert read_groups(tmp_path / "groups.parquet")[0].teacher_logprobs is None


def test_kl_is_the_mean_over_sampled_tokens() -> None:
    group = make_group(make_item(0), [make_completion([5, 6], [-1.0, -2.0]), make_completion([7], [np.nan])])
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
    (unexpected,) = audit_teacher(first, has_teacher=False)
    assert unexpected == "has a teacher's logprobs, and there is no teacher"


# ---- what is refused ----


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    path, tokenizer = tiny_model(), load_tokenizer(str(tiny_model()))
    policy = shutil.copytree(path, tmp_path / "policy")
    engine, model = "distillation.engine=torch", ["model.tiny=null", f"model.path={policy}"]
    config = load_config(QUICKSTART, [f"distillation.teacher={path}", engine, *model])
    check_teacher(config, tokenizer, longest_prompt=100)
    short = rf"distillation.teacher: .{path}. has 512 positions, .* up to 514 tokens"
    with pytest.raises(ValueError, match=short):
        check_teacher(config, tokenizer, longest_prompt=490)
    others = train_tokenizer(["other words altogether"] * 9, vocab_size=280)
    differs = rf"the vocabulary of .{path}. differs from that of .{policy}. \(model\): \d+ tokens"
    with pytest.raises(ValueError, match=f"distillation.teacher: {differs}"):
        check_teacher(config, others, longest_prompt=100)
    edit_json(policy / "config.json", vocab_size=448)
    small = r"has embeddings of \d+ tokens, and .*/policy. can sample 448; resize"
    with pytest.raises(ValueError, match=small):
        check_teacher(config, tokenizer, longest_prompt=100)
    (policy / "config.json").rename(policy / "adapter_config.json")
    with pytest.raises(ValueError, match=r"has no config\.json; it holds an adapter alone; merge it"):
        check_local_model(str(policy), "distillation.teacher")


PROMPT = (40, 41, 42)


@pytest.fixture
def make_teacher(tiny_config: Config, tiny_model: TinyModel) -> Callable[..., Teacher]:
    def make(**changes: dict[str, Any]) -> Teacher:
        distillation = {"teacher": str(tiny_model(tied=False)), "engine": "torch", "num_gpus": 0}
        config = changed(tiny_config, distillation=distillation, **changes)
        return Teacher("teacher-0", TorchTeacher(config, ENDS))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("share_prompts", "temperature", "min_tokens"), [("auto", 1.0, 0), ("never", 0.7, 3)])
def test_logprobs_are_those_of_a_plain_forward_pass(
    make_teacher: Callable[..., Teacher], tiny_model: TinyModel, share_prompts: str, temperature: float,
    min_tokens: int,
) -> None:  # fmt: skip
    teacher = make_teacher(
        sampling={"temperature": temperature, "min_tokens": min_tokens},
        learner={"share_prompts": share_prompts, "micro_batch_tokens": 16},  # several micro-batches
    )
    responses = [[50, 51, 52, 53, 0], [60], [61, 62, 63, 64, 65, 66, 67, 17]]
    group = RolloutGroup(make_item(0, PROMPT), tuple(map(make_completion, responses)), "generator-0")
    found, num_tokens = asyncio.run(teacher.look_up(group))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tied=False))
    expected = [plain_logprobs(model, PROMPT, r, temperature, min_tokens, ENDS) for r in responses]
    assert (found.dtype, num_tokens) == (np.float32, 14)
    np.testing.assert_allclose(found, np.concatenate([e.detach().numpy() for e in expected]), atol=1e-4)


def test_episodes_are_judged_by_branch(make_teacher: Callable[..., Teacher], tiny_model: TinyModel) -> None:
    rng = np.random.default_rng(3)
    episodes = [random_episode(rng, branch=0.5) for _ in range(6)]
    assert max(len(episode.sequences) for episode in episodes) > 1
    group = RolloutGroup(make_item(0, PROMPT), tuple(episodes), "environment-0")
    found, num_tokens = asyncio.run(make_teacher(sampling={"min_tokens": 0}).look_up(group))
    model = AutoModelForCausalLM.from_pretrained(tiny_model(tied=False))
    expected = np.concatenate([of_episode(model, episode) for episode in episodes])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert num_tokens == sum(episode.num_tokens for episode in episodes) > 0


def of_episode(model: Any, episode: Episode) -> np.ndarray:
    logprobs = np.zeros(len(episode.token_ids))
    for sequence in episode.sequences:
        own = slice(sequence.start, sequence.end)
        prompt, response = sequence.prompt_token_ids, episode.token_ids[own].tolist()
        logprobs[own] = plain_logprobs(model, prompt, response).detach().numpy()
    return np.where(episode.mask, logprobs, 0.0)


def test_a_logprob_that_is_not_finite_is_an_error() -> None:
    broken = Mock(logprobs=AsyncMock(return_value=[np.array([-1.0, -np.inf], np.float32)]))
    group = RolloutGroup(make_item(7, PROMPT), (make_completion([50, 51]),), "generator-0")
    with pytest.raises(ValueError, match="no finite logprob for a token of group 7"):
        asyncio.run(Teacher("teacher-0", broken).look_up(group))
