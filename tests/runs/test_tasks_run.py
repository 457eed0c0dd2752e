"""Whole runs in this process with a mixture, a curriculum and a chat prompt, and their audits."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import CHAT_ML, TinyModel, check_names
from local_runs import make_config, train, until
from report_runs import rewrite, set_in_group
from safetensors.torch import load_file
from transformers import AutoTokenizer

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.records.rollout_log import read_groups, read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files
from grpo_ray.tools.audit.audit import audit

pytestmark = pytest.mark.usefixtures("model_cache", "any_reward")

SUMS = "{kind: arithmetic, num_digits: 1, num_train_prompts: 6, num_validation_prompts: 3}"
SORTS = "{kind: sorting, num_train_prompts: 5, num_validation_prompts: 2, prompt: question_only}"
MIXTURE = f"task={{kind: mixture, parts: {{sums: {{weight: 3, task: {SUMS}}}, sorts: {{task: {SORTS}}}}}}}"


def rows_of(run: RunDirectory) -> list[dict[str, Any]]:
    """Return one row per group, in the order of the groups."""
    rows = [row for path in sorted(run.rollouts.glob("*.parquet")) for row in read_rollouts(path)]
    return sorted((row for row in rows if row["sample"] == 0), key=lambda row: row["group_id"])


async def stop_after_three(actors: LocalActors, controller: Controller) -> None:
    await until(lambda: controller.version >= 3)
    controller.stop()


def check_found(run: RunDirectory, change: Callable[[list[dict[str, Any]]], None], expected: str) -> None:
    """Check that the audit finds a change to the rollouts of step 1, which is undone."""
    path = run.rollouts_path(1)
    kept = path.read_bytes()
    rewrite(path, change)
    problems = audit(run).problems
    path.write_bytes(kept)
    assert any(expected in problem for problem in problems), problems


@pytest.mark.slow
def test_a_mixture_trains_and_its_audit_is_clean_until_its_order_is_changed(
    tiny_model: TinyModel, run: RunDirectory
) -> None:
    model = f"model={{path: {tiny_model()}, dtype: float32}}"
    train(make_config(model, MIXTURE, "weight_sync.max_lag=0", "algorithm.num_steps=5"), run.path)
    report = audit(run)
    assert (report.problems, report.notes) == ([], [])
    rows = rows_of(run)
    assert Counter(row["task"] for row in rows)["sums"] > len(rows) / 2
    for row in rows:
        assert row["prompt"].startswith({"sums": "User: What is", "sorts": "Sort "}[row["task"]])
    metrics = read_metrics(run.metrics_path)
    assert not any(check_names(line.keys() - {"step", "time"}) for line in metrics)
    for step, line in enumerate(metrics, start=1):
        groups = read_groups(run.rollouts_path(step))
        for part in ("sums", "sorts"):
            means = [group.rewards.mean() for group in groups if group.rollout.item.task == part]
            assert (f"reward/mean/{part}" in line) == bool(means)
            assert line.get(f"reward/mean/{part}", 0) == pytest.approx(sum(means) / max(1, len(means)))
    evaluated = read_metrics(run.evaluations_summary_path)[0]
    by_part = evaluated["reward_by_task"]
    assert (3 * by_part["sums"] + 2 * by_part["sorts"]) / 5 == pytest.approx(evaluated["reward"])
    later = read_metrics(run.evaluations_summary_path)[1]
    assert metrics[3]["eval/reward/sums"] == later["reward_by_task"]["sums"]

    other_part = {"sums": "sorts", "sorts": "sums"}[rows[0]["task"]]
    for change, expected in (
        (set_in_group(0, task=other_part), f"{rows[0]['task']}, epoch 0: samples"),
        (set_in_group(0, prompt="?"), f"{rows[0]['task']}, epoch 0: samples '?' 1 times"),
        (lambda changed: changed[0].update(task=other_part), "group 0: has more than one task"),
    ):
        check_found(run, change, expected)


@pytest.mark.slow
def test_a_mixture_that_replaces_groups_at_lag_1_and_is_interrupted_is_clean(
    tiny_model: TinyModel, run: RunDirectory
) -> None:
    model = f"model={{path: {tiny_model()}, dtype: float32}}"
    curriculum = MIXTURE.replace("num_digits: 1", "num_digits: 1, curriculum: {min_weight: 0.2}")
    changes = ["weight_sync.max_lag=1", "algorithm.dynamic_sampling_tries=2", "algorithm.num_steps=5"]
    config = make_config(model, curriculum, *changes)
    train(config, run.path, stop_after_three)
    assert len(read_metrics(run.metrics_path)) < 5
    train(config, run.path)
    assert audit(run).problems == []


# Also what a checkpoint has of an adapter and of a reference that follows it.
ADAPTER = ("model.adapter.rank=4", "algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1")
CURRICULUM = ("task.num_train_prompts=8", "task.curriculum.min_weight=0.1", "algorithm.num_steps=7")


@pytest.mark.slow
def test_a_curriculum_and_an_adapter_resume_as_the_same_run(tmp_path: Path) -> None:
    config = make_config(*CURRICULUM, *ADAPTER, "weight_sync.max_lag=0")
    whole, other = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "other")
    train(config, whole.path)
    assert audit(whole).problems == []
    metrics = read_metrics(whole.metrics_path)
    assert not any(check_names(line.keys() - {"step", "time"}) for line in metrics)
    assert metrics[0]["curriculum/seen_frac"] == 0.5
    assert metrics[-1]["curriculum/seen_frac"] == 1.0
    assert metrics[-1]["curriculum/skipped"] > 0
    train(config, other.path, stop_after_three)
    train(config, other.path)
    assert [row["prompt"] for row in rows_of(other)] == [row["prompt"] for row in rows_of(whole)]
    figures = [{n: v for n, v in line.items() if n.startswith("curriculum/")} for line in metrics]
    resumed = read_metrics(other.metrics_path)
    assert [{n: v for n, v in line.items() if n.startswith("curriculum/")} for line in resumed] == figures
    for file in ("adapter_model.safetensors", "training/optimizer.safetensors"):
        tensors, expected = (load_file(each.checkpoint_path(7) / file) for each in (other, whole))
        torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_curriculum_two_versions_behind_is_clean_and_its_audit_finds_another_order(run: RunDirectory) -> None:
    train(make_config(f"task={SUMS}", *CURRICULUM, "weight_sync.max_lag=2"), run.path)
    assert audit(run).problems == []
    check_found(run, set_in_group(2, prompt="?"), "index 2: samples '?', which is not a training prompt")
    second = rows_of(run)[1]
    twice = set_in_group(2, prompt=second["prompt"], ground_truth=second["ground_truth"])
    check_found(run, twice, "epoch 0: samples")  # a curriculum leaves nothing out before it was seen


@pytest.fixture
def chat_model(tiny_model: TinyModel, tmp_path: Path) -> Path:
    folder = tmp_path / "chat"
    shutil.copytree(tiny_model(), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT_ML
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_models_own_chat_template(chat_model: Path, run: RunDirectory) -> None:
    task = ["task.prompt=chat", "task.system_prompt=Be brief.", "algorithm.num_steps=3"]
    train(make_config(f"model={{path: {chat_model}, dtype: float32}}", *task), run.path)
    report = audit(run)
    assert (report.problems, report.notes) == ([], [])
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    for row in [*rows_of(run), *read_rollouts(run.evaluations / "step-000000.parquet")]:
        assert row["prompt"].startswith("<|im_start|>system\nBe brief.<|endoftext|>\n<|im_start|>user\nSort ")
        assert row["prompt"].endswith("<|endoftext|>\n<|im_start|>assistant\n")
        assert row["prompt_token_ids"].count(tokenizer.eos_token_id) == 2  # special tokens stay special tokens
        assert tokenizer.decode(row["prompt_token_ids"]) == row["prompt"]


def test_no_chat_template_or_one_without_a_system_prompt_is_refused(chat_model: Path) -> None:
    template = chat_model / "chat_template.jinja"
    template.write_text("{{ raise_exception('System role not supported') }}")
    task = [f"model={{path: {chat_model}, dtype: float32}}", "task.prompt=chat"]
    message = r"refuses the question \(System role not supported\); some templates allow"
    with pytest.raises(ValueError, match=message):
        check_files(make_config(*task, "task.system_prompt=x"))
    template.unlink()
    message = r"task.prompt: `chat` needs the model's chat template, but its tokenizer"
    with pytest.raises(ValueError, match=message):
        check_files(make_config(*task))
