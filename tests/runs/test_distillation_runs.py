"""Whole runs with a teacher: killed and resumed, with a death, or replay; and in vLLM on Ray."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import check_names, perturb, plain_logprobs
from local_runs import kill_after, make_config, train, train_twice, until
from small_run import QUICKSTART, SMALL
from test_run import run_actors
from transformers import AutoModelForCausalLM

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.controller import Controller
from grpo_ray.errors import RunError
from grpo_ray.records.rollout_log import read_groups, read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.run.training import resume
from grpo_ray.tools.audit.audit import audit

pytestmark = pytest.mark.usefixtures("model_cache")


def teacher_of(config: Config) -> Path:
    """Return the folder of a model with the configuration's vocabulary and weights far from its own."""
    own = tiny_model_folder(config)
    folder = own.with_name(f"{own.name}-teacher")
    if not folder.exists():
        shutil.copytree(own, folder)
        model = AutoModelForCausalLM.from_pretrained(own)
        perturb(model, seed=5, scale=0.1)
        with torch.no_grad():
            model.model.norm.weight.mul_(4)  # so that it has clear preferences
        model.save_pretrained(folder)
    return folder


def with_teacher(*overrides: str, number: int = 1, student: Config | None = None) -> list[str]:
    """Return the overrides for a teacher of `student`, by default of `make_config`."""
    path = teacher_of(student or make_config("model.tiny.num_layers=2"))
    return [
        f"distillation.teacher={path}", "distillation.engine=torch", "distillation.num_gpus=0",
        f"distillation.num_teachers={number}", *overrides,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_policy_comes_closer_to_its_teacher_without_a_reward_and_keeps_it(run: RunDirectory) -> None:
    overrides = with_teacher("distillation.use_reward=false", "weight_sync.max_lag=0", "learner.warmup_steps=0")
    train(make_config(*overrides, "algorithm.num_steps=18", "algorithm.samples_per_prompt=8"), run.path)
    assert audit(run).problems == []
    rows = read_metrics(run.metrics_path)
    divergences = [row["distillation/kl"] for row in rows]
    assert sum(divergences[-6:]) < 0.87 * sum(divergences[:6])
    for row in rows:
        rewards = [set(group.rewards.tolist()) for group in read_groups(run.rollouts_path(row["step"]))]
        assert row["rollout/zero_variance_groups"] == sum(len(values) == 1 for values in rewards)
    assert all(row["throughput/teacher_tokens_per_s"] > 0 for row in rows)
    assert all(row["time/teacher-0/look_up_s"] > 0 for row in rows)
    assert read_rollouts(run.rollouts_path(1))[0]["teacher_logprobs"]
    (validation, *_) = sorted(run.evaluations.glob("step-*.parquet"))
    assert "teacher_logprobs" not in read_rollouts(validation)[0]  # validations ask no teacher
    message = r"distillation.teacher: this run has .* and cannot be resumed with None"
    with pytest.raises(RunError, match=message):
        resume(str(run.path), ["distillation.teacher=null", "algorithm.num_steps=20"])


@pytest.mark.slow
def test_a_teacher_that_dies_is_replaced_and_looks_up_again(run: RunDirectory) -> None:
    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 2)
        actors.teachers["teacher-0"].die()
        await until(lambda: controller.version >= 4)

    train(make_config(*with_teacher(number=2)), run.path, meddle)
    assert audit(run).problems == []
    events = [row for row in read_metrics(run.events_path) if str(row["kind"]).startswith("teacher")]
    assert [row["kind"] for row in events] == ["teacher_failed", "teacher_back"]
    assert read_metrics(run.metrics_path)[-1]["recovery/restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["buffer.replay.frac=0.5", "buffer.replay.max_age=4", "algorithm.loss=no_baseline"],
        [
            "algorithm.epochs_per_batch=2", "algorithm.train_batch_size=4", "weight_sync.max_lag=2",
            "algorithm.loss=dppo_tv", "algorithm.advantage_scale=whiten_tokens",
        ],
        ["algorithm.oversample_frac=0.5", "learner.share_prompts=never", "sampling.temperature=0.8"],
    ],
)  # fmt: skip
@pytest.mark.kept("overrides1")
def test_combinations(run: RunDirectory, overrides: list[str]) -> None:
    train_twice(make_config(*with_teacher(*overrides), "algorithm.num_steps=5"), run.path, kill_after(3, 0.01))
    assert len(read_metrics(run.metrics_path)) == 5
    assert audit(run).problems == []


@pytest.mark.parametrize("path", ["/no/such/folder", "tests"])
def test_a_teacher_that_is_no_model_is_refused_by_name(path: str) -> None:
    with pytest.raises(ValueError, match=r"distillation\.teacher: "):
        check_files(make_config(*with_teacher(f"distillation.teacher={path}")))


# ---- on Ray, with the teacher in vLLM; the policy samples in torch ----


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray", "model_cache")
def test_the_logprobs_of_a_teacher_in_vllm_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    own = [*SMALL, "model.tiny.hidden_size=128", "sampling.min_tokens=0", "algorithm.num_steps=3"]
    teacher = teacher_of(load_config(QUICKSTART, own))
    overrides = [f"distillation.teacher={teacher}", "distillation.num_gpus=0", "distillation.num_cpus=0"]
    run = run_actors(load_config(QUICKSTART, [*own, *overrides]), tmp_path / "run")
    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == 3
    assert check_names(set().union(*metrics) - {"step", "time"}) == []
    assert audit(run).problems == []
    model = AutoModelForCausalLM.from_pretrained(teacher)
    rows = [row for step in (1, 2, 3) for row in read_rollouts(run.rollouts_path(step))]
    for row in rows:
        expected = plain_logprobs(model, row["prompt_token_ids"], row["token_ids"]).detach().numpy()
        np.testing.assert_allclose(row["teacher_logprobs"], expected, atol=1e-4)
    assert len(rows) == 24
