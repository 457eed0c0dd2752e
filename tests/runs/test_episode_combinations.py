"""Whole runs with episodes in this process, each with another feature of the system, and audited."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_episodes
from builders import write_rows
from commands import Capture, printed, refused
from local_runs import train
from local_serving import serve_locally as serve_locally
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.preparation import check_files
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.cli import main
from grpo_ray.tools.experiments.experiment import EXPERIMENTS
from grpo_ray.tools.experiments.experiment_plan import plan_experiment
from grpo_ray.tools.planning.command import PlanOptions
from grpo_ray.tools.planning.memory_plan import plan_memory
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.types import Completion, Episode, ScoredGroup
from grpo_ray.watch.console import banner

SMALL = "tests/small_episodes.yaml"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("model_cache")]

# Overrides by the feature that they turn on.
FEATURES: dict[str, list[str]] = {
    "lag": ["weight_sync.max_lag=3", "generator.num_generators=2", "weight_sync.in_flight=false",
            "episodes.num_workers=2", "scorer.num_scorers=2", "learner.micro_batch_tokens=40",
            "algorithm.train_batch_size=6", "algorithm.old_log_probs=proximal",
            "algorithm.off_policy_correction=truncate_sequence", "learner.share_prompts=never"],
    "delta": ["weight_sync.delta=true", "model.dtype=bfloat16", "learner.learning_rate=1e-4",
              "buffer.lookahead=2", "algorithm.advantage=gdpo", "algorithm.advantage_scale=whiten_responses"],
    "gspo": ["algorithm.loss=gspo", "weight_sync.recompute_kv=false", "algorithm.advantage=leave_one_out",
             "algorithm.aggregation=constant"],
    "kl": ["algorithm.kl.reference=initial", "algorithm.kl.coefficient=0.1", "algorithm.epochs_per_batch=2",
           "algorithm.train_batch_size=6", "weight_sync.transport=collective",
           "algorithm.dynamic_sampling_tries=2"],
    "kl_in_the_reward": ["algorithm.kl.reference=initial", "algorithm.kl.coefficient=0.1",
                         "algorithm.kl.placement=reward", "algorithm.advantage=mean",
                         "algorithm.advantage_scale=whiten_tokens"],
    "reinforce_plus_plus": ["algorithm.kl.reference=initial", "algorithm.kl.coefficient=0.1",
                            "algorithm.kl.placement=reward_to_go", "algorithm.advantage=raw",
                            "algorithm.advantage_scale=whiten_tokens", "model.adapter.rank=4",
                            "buffer.replay.frac=0.5", "buffer.replay.max_age=4"],
    "ipo": ["algorithm.loss=ipo", "algorithm.loss_options={kl_tau: 0.001}", "learner.moments=8bit",
            "algorithm.advantage=mean", "algorithm.advantage_scale=batch"],
    "pass_at_k": ["algorithm.advantage=pass_at_k", "algorithm.advantage_options={k: 2}",
                  "model.implementation=grpo_ray", "algorithm.dynamic_sampling_tries=2",
                  "algorithm.dynamic_sampling_metric=answer"],
    "curriculum": ["task.curriculum={min_weight: 0.2}", "algorithm.num_steps=7", "weight_sync.max_lag=0",
                   "algorithm.samples_per_prompt=2", "generator.colocated=true"],
}  # fmt: skip


def make(*overrides: str) -> Config:
    return load_config(SMALL, list(overrides))


def run(folder: Path, *overrides: str) -> RunDirectory:
    """Train and audit a run; nothing out of the ordinary happens in it."""
    directory = RunDirectory(folder / "run")
    recorder = train(make(*overrides), directory.path)
    assert audit(directory, run_reward_code=True).problems == []
    assert recorder.warnings == []
    rows = read_metrics(directory.metrics_path)
    assert any(row["optim/grad_norm"] for row in rows)
    assert all("episodes/turns/mean" in row for row in rows)
    return directory


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.kept("kl", "curriculum", "reinforce_plus_plus")
def test_episodes_train_with(feature: str, tmp_path: Path) -> None:
    run(tmp_path, *FEATURES[feature])


def groups_of(directory: RunDirectory) -> list[ScoredGroup]:
    return [group for path in sorted(directory.rollouts.glob("*.parquet")) for group in read_groups(path)]


def test_masked_are_the_episodes_that_reached_a_limit(tmp_path: Path) -> None:
    """Each step trains the tokens of the episodes that ended by themselves and have an advantage."""
    directory = run(tmp_path, "algorithm.mask_truncated=true", "algorithm.num_steps=6")
    episodes = [e for g in groups_of(directory) for e in g.rollout.completions if isinstance(e, Episode)]
    # What the small task is to have in all of these runs:
    assert any(len(e.sequences) > 1 for e in episodes)
    assert any(e.turn_rewards is not None for e in episodes)
    assert any(e.status == "truncated_turns" for e in episodes)
    assert {e.num_turns for e in episodes} >= {1, 3, 4}
    for row in read_metrics(directory.metrics_path):
        trained = [
            int(episode.mask.sum())
            for group in read_groups(directory.rollouts_path(row["step"]))
            for number, episode in enumerate(group.rollout.completions)
            if isinstance(episode, Episode) and not episode.is_truncated
            if np.any(group.turn_advantages[number] if group.turn_advantages else group.advantages[number])
        ]
        assert row["throughput/trained_tokens"] == sum(trained)


def test_examples_of_files_several_samples_to_validate_and_tables_for_trackers(tmp_path: Path) -> None:
    for name, numbers in (("train", range(24)), ("validation", range(24, 28))):
        rows = [{"question": small_episodes.question(n), "truth": str(n)} for n in numbers]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    paths = [f"task.examples={tmp_path / 'train.jsonl'}",
             f"task.validation_examples={tmp_path / 'validation.jsonl'}"]  # fmt: skip
    with pytest.raises(ValueError, match=r"train.jsonl.*answer"):
        check_files(make(*paths))
    directory = run(
        tmp_path, *paths, "task.answer_field=truth", "task.num_validation_prompts=3",
        "evaluation.samples_per_prompt=3", "tracking.trackers=[tensorboard]",
        "tracking.rollouts_every_num_steps=2",
    )  # fmt: skip
    for summary in read_metrics(directory.evaluations_summary_path):
        assert (summary["num_examples"], summary["num_samples"]) == (3, 3)
        assert summary["episodes"]["episodes/turns/mean"] >= 1
    events = EventAccumulator(str(next(directory.path.rglob("events.out.*")).parent), {"tensors": 0})
    events.Reload()
    tables = [e for name in events.Tags()["tensors"] for e in events.Tensors(name)]
    texts = [text.decode() for e in tables for text in e.tensor_proto.string_val]
    assert any("num_turns" in text and "finished" in text for text in texts)


def mixture(episode: str = "small_episodes:talk", reward: object = "small_episodes:reward") -> list[str]:
    """Return the overrides of a mixture of episodes and sorting, with a model of its own."""
    episodes = {"kind": "episodes", "episode": episode, "examples": "small_episodes:examples"}
    sorting = {"kind": "sorting", "num_train_prompts": 24, "num_validation_prompts": 4, "reward": reward}
    parts = {"talking": {"task": episodes}, "sorting": {"task": sorting}}
    task = json.dumps({"kind": "mixture", "parts": parts})
    return ["model.tiny=null", f"model.path={tiny_model_folder(make())}", f"task={task}"]


@pytest.mark.usefixtures("any_reward")
def test_a_mixture_of_episodes_and_a_plain_task(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    # This model's rate is large enough to clip many tokens, which is what the detector is for.
    quiet = "run.silent_detectors=[stale_old_logprobs]"
    recorder = train(make(*mixture(), "algorithm.num_steps=6", quiet), directory.path)
    assert audit(directory, run_reward_code=True).problems == []
    assert recorder.warnings == []
    kinds = {(g.rollout.item.task, type(c)) for g in groups_of(directory) for c in g.rollout.completions}
    assert kinds == {("talking", Episode), ("sorting", Completion)}
    rows = read_metrics(directory.metrics_path)
    assert {name for row in rows for name in row} >= {"reward/mean/talking", "reward/mean/sorting"}
    page = tmp_path / "page.html"
    assert main(["report", str(directory.path), "--output", str(page)]) == 0
    assert "<html" in page.read_text()


@pytest.fixture(scope="module")
def finished(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return run(tmp_path_factory.mktemp("finished"))


def test_the_tools_read_a_run_with_episodes(finished: RunDirectory, tmp_path: Path, capsys: Capture) -> None:
    for command, *options in (
        ["audit", "--run-reward-code"],
        ["report", "--output", tmp_path / "page.html"],
        ["export", "--merged", tmp_path / "model"],
    ):
        printed(capsys, command, finished.path, *options)
    assert "turns" in printed(capsys, "top", finished.path, "--once")
    assert load_tokenizer(str(tmp_path / "model")).chat_template


def test_a_report_has_the_log_ratios_of_episodes(finished: RunDirectory) -> None:
    rows = run_data(finished, "run")["rollouts"]
    last = [row for row in rows if row["step"] == 4 and row["min_version"] == 4]
    for row in rows:
        assert len(row["ratios"]) == len(row["tokens"])
    assert all(abs(ratio) < 1e-3 for row in last for ratio in row["ratios"] if ratio is not None)


def test_a_run_is_evaluated(
    finished: RunDirectory, tmp_path: Path, serve_locally: Any, capsys: Capture
) -> None:
    serve_locally()
    command = ["evaluate", finished.path, "--checkpoint", "all", "--n", 2, "--output", tmp_path / "e"]
    assert "--run-reward-code" in refused(capsys, *command)
    command.append("--run-reward-code")
    assert "4 prompts of episodes x 2, episodes" in " ".join(printed(capsys, *command).split())
    summaries = [json.loads(path.read_text())["summary"] for path in tmp_path.rglob("summary.json")]
    assert summaries
    for summary in summaries:
        assert (summary["num_examples"], summary["num_samples"]) == (4, 2)
        assert summary["episodes"]["episodes/turns/mean"] >= 1
    assert "episodes.max_turns: was 4, is 2" in refused(capsys, *command, "episodes.max_turns=2")
    for field, value in (("prompt", "r1_zero"), ("reward", "exact_match")):
        message = f"task.{field}: unknown key; allowed: kind, episode"
        assert message in refused(capsys, *command, f"--{field}={value}")


def test_check_and_plan(capsys: Capture) -> None:
    assert "24 training and 4 validation prompts" in printed(capsys, "check", SMALL)
    shown = printed(capsys, "plan", SMALL)
    assert "sequence  up to 48 prompt + 48 response tokens" in shown
    assert "episodes are planned as responses that fill episodes.max_tokens" in shown
    with pytest.raises(ValueError, match=r"--prompt-tokens 91.*exceeds episodes.max_tokens \(96\)"):
        plan_memory(PlanOptions(SMALL, prompt_tokens=91))
    plan = plan_memory(PlanOptions(SMALL, prompt_tokens=20))
    assert (plan.work.prompt_tokens, plan.config.sampling.max_tokens, plan.work.response_tokens) == (20, 76, 76)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_bundled_experiment_is_possible_with_episodes(name: str, tmp_path: Path) -> None:
    sizes = [] if name == "group-size" else ["algorithm.prompts_per_step=32"]
    args = EXPERIMENTS[name], "configs/guess-number.yaml", sizes, 1, str(tmp_path)
    if name in ("prompt", "cs336-2026"):  # an episode makes its own prompts and rewards
        with pytest.raises(ConfigError, match=r"task\.(prompt|reward): unknown key; allowed: kind, episode"):
            plan_experiment(*args)
    else:
        assert plan_experiment(*args)


# ---- what is said before a run ----


def shown_banner(*overrides: str, config: str = SMALL) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(banner(load_config(config, list(overrides)), 90, "runs/x"))
    return console.export_text()


def test_the_banner_has_the_limits_of_episodes() -> None:
    shown = shown_banner()
    assert "up to 4 turns of 6 tokens, 96 tokens with their prompt, 60 s" in shown
    assert "response tokens" not in shown
    assert "prompts up to" not in shown
    assert re.search("WeightSync, EnvironmentWorker *\n", shown)
    assert "EnvironmentWorker x3" in shown_banner("episodes.num_workers=3")
    plain = shown_banner(config="configs/quickstart.yaml")
    assert "up to 6,144 response tokens" in plain
    assert "EnvironmentWorker" not in plain
    of_mixture = shown_banner(*mixture())
    assert "mixture, prompts up to 90 tokens" in of_mixture
    assert "up to 4 turns" in of_mixture


WRONG = {
    "task.episode=small_episodes:no_such": "task.episode: .*no_such",
    "episodes.tool_parser=nonsense": "episodes.tool_parser: .*nonsense",
    "episodes.max_tokens=100000": r"episodes.max_tokens is 100000, more than the model's positions \(\d+\)",
    "task.examples=small_episodes:a_list": "task.examples: .*:a_list returned a list; return .*ExampleSets",
    "task.examples=small_episodes:none_at_all": "task.examples: .* returned no examples",
    "task.warmup=null": "task.warmup: a tiny model needs pairs",
    "task.warmup=small_episodes:no_such": "task.warmup: .*no_such",
    "task.warmup=small_episodes:no_pairs": r"task.warmup: .*no_pairs returned \[\]; return",
    "task.warmup=small_episodes:half_pairs": "task.warmup: .*half_pairs returned '1 . 1 ='; return",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_named_before_ray_starts(override: str, capsys: Capture) -> None:
    """By `check`, which starts nothing; `train` makes the same checks first."""
    shown = " ".join(refused(capsys, "check", SMALL, override).split())
    assert re.search(WRONG[override], shown), shown


REFUSED = {
    "task.examples=train.jsonl": "validation_examples: give a file if `examples` is one",
    "task.prompt=chat": "task.prompt",
    "task.reward=exact_match": "task.reward",
    "episodes.max_tokens=6": r"episodes.max_tokens \(6\) covers a turn",
    "episodes.max_seconds=900": r"recovery.stall_timeout_s \(1800\) must exceed twice the 905 s .* above 1810",
    "algorithm.samples_per_prompt=3584": r"twice the 910 s .* If a group's 3584 episodes do not run together",
    "algorithm.overlong_buffer_tokens=2": "algorithm.overlong_buffer_tokens: it penalizes long responses",
    "algorithm.oversample_frac=0.5": "episodes.over_age: `wait` does not fit",
    "episodes.over_age=mask": "episodes.over_age: `mask` does not fit",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_impossible_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[override]):
        make(override)
