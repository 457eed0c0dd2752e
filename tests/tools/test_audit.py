"""The audit finds no problem in a clean run, and names each way its files can be broken."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import change_weights, edit_json, trained_so, write_rows
from commands import Capture, printed
from local_runs import train
from report_runs import Rows, rewrite, set_in_group
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_run import QUICKSTART, SMALL

from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError
from grpo_ray.records.checkpoint import read_checkpoint
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.rewards import REWARDS
from grpo_ray.rewards.base import verdict
from grpo_ray.run import training
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.audit.checkpoint import UNFINISHED, first_difference, hashes

pytestmark = pytest.mark.slow
Finished = Callable[..., RunDirectory]


def even_reward(response: str, ground_truth: str) -> dict[str, float]:
    """Return a reward that a random model earns half of the time."""
    return verdict(has_format=True, is_right=sum(response.encode()) % 2 == 1)


@pytest.fixture(scope="module")
def finished_run(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    """Return `finished_run("field=value", ...)`, which trains each run of 8 steps only once."""
    runs: dict[tuple[str, ...], RunDirectory] = {}

    def finished(*changes: str) -> RunDirectory:
        if changes not in runs:
            runs[changes] = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
            config = load_config(QUICKSTART, [*SMALL, "checkpoint.every_num_steps=3", *changes])
            train(config, runs[changes].path)
        return runs[changes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(REWARDS, "exact_match", even_reward)  # for both the run and the audit
        yield finished


@pytest.fixture
def clean(finished_run: Finished) -> RunDirectory:
    """Return a finished run with the default schedule; tests must not change it."""
    return finished_run()


@pytest.fixture
def run(clean: RunDirectory, tmp_path: Path) -> RunDirectory:
    return RunDirectory(shutil.copytree(clean.path, tmp_path / "run"))


MIXED = ("buffer.replay.frac=0.25", "buffer.replay.max_age=3", "algorithm.dynamic_sampling_tries=2")


@pytest.fixture
def mixed(finished_run: Finished, tmp_path: Path) -> RunDirectory:
    """Return a run with three fresh groups and a replayed one per batch; groups without signal are dropped."""
    return RunDirectory(shutil.copytree(finished_run(*MIXED).path, tmp_path / "run"))


ADVANTAGES = [  # tests/core/test_schedules.py audits the other schedules
    (),
    MIXED,
    ("buffer.lookahead=3", "algorithm.loss=no_baseline", "algorithm.epochs_per_batch=2"),
    ("algorithm.overlong_buffer_tokens=3", "algorithm.advantage=leave_one_out"),
    (*MIXED, "algorithm.kl={reference: ema, coefficient: 0.1, placement: reward}", "algorithm.advantage=mean"),
    (*MIXED, "algorithm.advantage=gdpo", "algorithm.advantage_scale=whiten_responses"),
    ("algorithm.advantage=max_rl", "algorithm.samples_per_prompt=3", "algorithm.advantage_scale=whiten_tokens"),
    ("task.reward=[{reward: exact_match, weight: 0.1}, {reward: exact_match, weight: 7000}]",),  # not float32
]


@pytest.mark.parametrize("changes", ADVANTAGES, ids=str)
@pytest.mark.kept(
    "()",
    "('buffer.replay.frac=0.25', 'buffer.replay.max_age=3', 'algorithm.dynamic_sampling_tries=2')",
    "('algorithm.overlong_buffer_tokens=3', 'algorithm.advantage=leave_one_out')",
)
def test_a_clean_run_with_any_advantage_is_clean(finished_run: Finished, changes: tuple[str, ...]) -> None:
    run = finished_run(*changes)
    report, rows = audit(run), all_rows(run)
    assert (report.problems, report.notes) == ([], [])
    own = [row for row in rows if row["use"] < 2]
    assert (report.num_steps, report.num_evaluations) == (8, 3)
    assert (report.num_groups, report.num_completions) == (len({row["group_id"] for row in own}), len(own))
    assert len({row["reward"] for row in rows}) > 1  # a wrong one can be told from a right one
    uses = {row["use"] for row in rows}
    assert (0 in uses) == any("dynamic_sampling" in change for change in changes)
    assert (2 in uses) == any("replay" in change for change in changes)


def test_steps_are_judged_by_their_own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume may change how many samples, advantages and lags are due; groups in the buffer keep theirs."""
    monkeypatch.setitem(REWARDS, "exact_match", even_reward)
    changed = [
        "algorithm.advantage=mean", "weight_sync.max_lag=0", "algorithm.num_steps=8",
        "evaluation.samples_per_prompt=2", "evaluation.every_num_steps=2",
    ]  # fmt: skip
    short = ["algorithm.num_steps=5", "checkpoint.keep=9", "checkpoint.every_num_steps=2"]
    config = load_config(QUICKSTART, [*SMALL, *short, f"run.output_dir={tmp_path}"])
    run = training.train(config, "", is_local=True)
    run = training.resume(str(run.path), changed, is_local=True)
    assert audit(run).problems == []
    events = run.events_path.read_text()
    run.events_path.unlink()  # then the last one is all that is known
    problems, due = "\n".join(audit(run).problems), "no evaluation at step 2"
    for text in ("versions old; weight_sync.max_lag is 0", "recorded, its rewards give", "instead of 2", due):
        assert text in problems
    run.events_path.write_text(events)
    for overrides in ([], ["algorithm.advantage=mean_std", "algorithm.advantage_eps=0.5"]):
        early, *later = sorted(run.checkpoints.glob("step-*"))
        assert early.name == "step-000002"
        for path in later:  # back to a step before the change
            shutil.rmtree(path)
        run = training.resume(str(run.path), overrides, is_local=True)
        assert audit(run).problems == []


def rewrite_lines(path: Path, change: Callable[[Rows], Rows | None]) -> None:
    rows = read_metrics(path)
    write_rows(path, change(rows) or rows)


def rewrite_config(run: RunDirectory, old: str, new: str) -> None:
    """Change the configuration, without the line that says how it was."""
    run.config_path.write_text(run.config_path.read_text().partition("\n")[2].replace(old, new))


def rewrite_state(run: RunDirectory, step: int = 8, **values: Any) -> None:
    edit_json(run.checkpoint_path(step) / "training" / "state.json", seal=None, **values)


def ledger_of(run: RunDirectory, step: int = 8) -> dict[str, Any]:
    return read_checkpoint(run.checkpoint_path(step)).state.ledger


def set_first(**values: Any) -> Callable[[Rows], None]:
    return lambda rows: rows[0].update(values)


def all_rows(run: RunDirectory) -> Rows:
    return [row for step in range(1, 9) for row in read_rollouts(run.rollouts_path(step))]


def first_with(run: RunDirectory, found: Callable[[dict[str, Any]], bool]) -> tuple[int, int]:
    """Return the step and group of the first row with this property."""
    row = next(row for row in all_rows(run) if found(row))
    return row["step"], row["group_id"]


Change = Callable[[Rows], Rows | None]
ROLLOUTS: dict[str, tuple[Change, str]] = {
    "a logprob above 0": (lambda rows: rows[2]["logprobs"].__setitem__(0, 5.0), "token 0 has logprob 5.0"),
    "another use": (lambda rows: rows[2].update(use=0), "has more than one use"),
    "a group is gone": (lambda rows: rows[2:], "has 3 groups of its own instead of 4"),
    "a group is trained twice": (set_in_group(4, group_id=0), "group 0 was trained 2 times"),
    "another ground truth": (set_in_group(4, ground_truth="?"), "with another ground truth"),
    "a short span": (lambda rows: rows[0]["versions"][-1].update(end=0), "its version spans do not cover its"),
    "a logprob is lost": (lambda rows: rows[0]["logprobs"].pop() and None, "tokens and logprobs differ"),
    "an advantage": (set_first(advantage=0.25), "advantages"),
    "a reward unearned": (lambda rows: next(r for r in rows if not r["reward"]).update(reward=1), "it earns"),
    "another step's row": (set_first(step=7), "a row is of step 7"),
    "another task": (lambda rows: [{**row, "task": "other"} for row in rows], "is of task 'other'"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ROLLOUTS.values(), ids=ROLLOUTS)
def test_rollouts_that_were_changed_are_found(run: RunDirectory, change: Change, message: str) -> None:
    rewrite(run.rollouts_path(2), change)
    problems = audit(run).problems
    of_file = [text for text in problems if "step-000002" in text or text.startswith(("epoch", "group"))]
    assert any(message in problem for problem in of_file), problems


def test_a_silent_zero_is_found_and_a_counted_one_is_not_a_problem(run: RunDirectory) -> None:
    step, group = first_with(run, lambda row: row["advantage"] > 0)  # its other response has reward 0
    path = run.rollouts_path(step)
    place = next(n for n, row in enumerate(read_rollouts(path)) if row["group_id"] == group and row["reward"])
    nothing = dict.fromkeys(("reward", "answer_reward", "format_reward"), 0.0)
    rewrite(path, lambda rows: rows[place].update(nothing))
    change_group(run, step, group, advantage=0.0)  # there is nothing to compare with
    means = {
        f"reward/{metric}": sum(row[column] for row in read_rollouts(path)) / 8
        for metric, column in (("mean", "reward"), ("answer", "answer_reward"), ("format", "format_reward"))
    }
    rewrite_lines(run.metrics_path, lambda rows: rows[step - 1].update(means))
    (problem,) = audit(run).problems
    assert "reward 0, it earns" in problem

    rewrite(path, lambda rows: rows[place].update(error="SIGKILL"))
    assert "reward/errors is recorded as 0.0, its responses give 1" in audit(run).problems[0]
    rewrite_lines(run.metrics_path, lambda rows: rows[step - 1].update({"reward/errors": 1.0}))
    report = audit(run)
    assert (report.problems, report.num_errors) == ([], 1)


def test_what_cannot_be_graded_now_is_a_note(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.rollouts_path(first_with(run, lambda row: row["reward"] > 0)[0])
    row = next(row for row in read_rollouts(path) if row["reward"])

    def slow_reward(response: str, ground_truth: str) -> dict[str, float]:
        if response == row["response"]:
            raise TimeoutError("longer than 2 s")
        return even_reward(response, ground_truth)

    monkeypatch.setitem(REWARDS, "exact_match", slow_reward)
    name = f"group {row['group_id']}: completion {row['sample']}"
    note = f"{path.name}: 1 responses could not be graded now; first {name}: TimeoutError: longer than 2 s"
    report = audit(run)
    assert report.problems == []
    assert any(text.startswith(note) for text in report.notes)
    rewrite(path, lambda rows: next(r for r in rows if not r["reward"]).update(reward=1.0))
    assert any("it earns" in problem for problem in audit(run).problems)  # the others are still graded


def in_lines(change: Change) -> Callable[[RunDirectory], None]:
    return lambda run: rewrite_lines(run.metrics_path, change)


def in_ledger(**values: Any) -> Callable[[RunDirectory], None]:
    return lambda run: rewrite_state(run, ledger=ledger_of(run) | values)


RECORDS: dict[str, tuple[Callable[[RunDirectory], None], str]] = {
    "a line is lost": (in_lines(lambda rows: rows[:3] + rows[4:]), "metrics.jsonl: step 4 has no line"),
    "a line twice": (in_lines(lambda rows: rows[:4] + rows[3:]), "metrics.jsonl: step 4 has 2 lines"),
    "lines out of order": (in_lines(lambda rows: [rows[1], rows[0], *rows[2:]]), "not in the order of"),
    "a metric is lost": (in_lines(lambda rows: [*rows[:3], {"step": 4}, *rows[4:]]), "lacks optim/grad_norm"),
    "a gradient of nan": (in_lines(lambda rows: rows[3].update({"optim/grad_norm": None})), "and was used"),
    "a group in two places": (
        in_ledger(waiting=[32], in_flight=[32], next_group_id=33), "several states, or an impossible one",
    ),
    "a group that was never taken": (in_ledger(waiting=[40]), "or an impossible one, for groups [40]"),
    "a trained group that is waiting": (in_ledger(waiting=[3], num_trained=31), "[3] are done, but unfinished"),
    "dropped groups that were not": (in_ledger(num_dropped=2), "32 trained groups and 2 dropped, together not"),
    "a key is lost": (
        lambda run: rewrite_state(run, ledger={k: v for k, v in ledger_of(run).items() if k != "num_dropped"}),
        "its ledger has no num_dropped",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), RECORDS.values(), ids=RECORDS)
def test_changed_lines_and_ledgers_are_found(run: RunDirectory, change: Any, message: str) -> None:
    change(run)
    assert any(message in problem for problem in audit(run).problems)


def test_changed_metrics_summaries_validations_and_configurations_are_found(run: RunDirectory) -> None:
    metrics = (
        "lag/max", "lag/mean", "reward/mean", "reward/answer", "rollout/response_tokens/mean",
        "rollout/response_tokens/max", "rollout/truncated_frac", "rollout/dropped_groups", "policy/entropy",
    )  # fmt: skip
    rewrite_lines(run.metrics_path, lambda rows: rows[3].update(dict.fromkeys(metrics, 0.77)))
    summary = {
        "accuracy": 0.987, "answer_reward": 0.9, "format_reward": 0.8, "num_correct": "x", "num_errors": 1,
        "pass_at_k": {"1": 2}, "accuracy_interval": [2, 2],
    }  # fmt: skip
    rewrite_lines(run.evaluations_summary_path, lambda rows: rows[1].update(summary))
    rewrite(run.evaluations / "step-000008.parquet", set_first(ground_truth="12345", reward=0.0))
    run.config_path.write_text(run.config_path.read_text().replace("max_lag: ", "max_lag: 1"))
    problems = audit(run).problems
    assert "evaluations/step-000008.parquet: has other prompts than the first validation" in problems
    assert f"{run.config_path} was edited, or is damaged" in problems
    text = "\n".join(problems)
    assert [name for name in metrics if f"{name} is recorded as 0.77" not in text] == []
    for name in summary:
        place = {"pass_at_k": ".1", "accuracy_interval": "[0]"}.get(name, "")
        assert f"{name}{place} is recorded as" in text


def test_a_prompt_sampled_twice_in_an_epoch_is_found(run: RunDirectory) -> None:
    first = read_rollouts(run.rollouts_path(1))[0]
    change_group(run, 2, 4, **{name: first[name] for name in ("prompt", "prompt_token_ids", "ground_truth")})
    problems = audit(run).problems
    assert any(f"epoch 0: samples {first['prompt']!r} 1 times too often" in problem for problem in problems)
    assert "epoch 0: 1 training prompts were not sampled" in problems


def test_another_group_replaces_one_set_aside(run: RunDirectory) -> None:
    change_group(run, 8, 31, group_id=32)
    ledger = ledger_of(run) | {"next_group_id": 33, "num_trained": 32, "num_dropped": 1}
    rewrite_state(run, ledger=ledger)
    assert any("groups [31] are lost" in problem for problem in audit(run).problems)
    rewrite_state(run, ledger=ledger | {"set_aside": [31], "num_dropped": 0})
    report = audit(run)
    assert (report.problems, report.set_aside) == ([], (31,))


def change_group(run: RunDirectory, step: int, group: int, **values: Any) -> None:
    rewrite(run.rollouts_path(step), set_in_group(group, **values))


def aged(run: RunDirectory, step: int, group: int, lag: int) -> list[str]:
    """Return the audit's problems after all tokens of a group were given this lag."""
    version = step - 1 - lag

    def change(rows: Rows) -> None:
        for row in rows:
            if row["group_id"] == group:
                spans = [{"version": version, "start": 0, "end": row["num_tokens"]}]
                row.update(versions=spans, min_version=version, max_version=version)

    rewrite(run.rollouts_path(step), change)
    rewrite_lines(run.metrics_path, lambda rows: rows[step - 1].update({"lag/max": lag}))
    return [problem for problem in audit(run).problems if "lag/mean is recorded" not in problem]


@pytest.mark.parametrize(
    ("use", "allowed", "field"), [(1, 1, "weight_sync.max_lag"), (2, 3, "buffer.replay.max_age")]
)
def test_fresh_and_replayed_groups_have_bounds(mixed: RunDirectory, use: int, allowed: int, field: str) -> None:
    step, group = first_with(mixed, lambda row: row["use"] == use)
    too_old = f"step-{step:06d}.parquet: a token is {allowed + 1} versions old; {field} is {allowed}"
    assert too_old not in aged(mixed, step, group, allowed)
    assert too_old in aged(mixed, step, group, allowed + 1)


def test_a_group_that_is_replayed_too_often_and_a_gap_in_its_uses_are_found(mixed: RunDirectory) -> None:
    step, group_id = first_with(mixed, lambda row: row["use"] == 2)
    later, other = first_with(mixed, lambda row: row["use"] == 2 and row["step"] > step)
    change_group(mixed, later, other, group_id=group_id, use=3)
    assert not any("is replayed with use" in problem for problem in audit(mixed).problems)
    change_group(mixed, step, group_id, use=5)
    name, problems = mixed.rollouts_path(step).name, audit(mixed).problems
    assert f"{name}: group {group_id} is used 5 times, 4 are allowed" in problems
    assert f"{name}: group {group_id} is replayed with use 5 after use 1" in problems


def test_groups_that_are_replayed_or_dropped_wrongly_are_found(mixed: RunDirectory) -> None:
    step, _ = first_with(mixed, lambda row: row["use"] == 2)
    _, fresh = first_with(mixed, lambda row: row["use"] == 1 and row["step"] == step)
    change_group(mixed, step, fresh, use=2)
    place, dropped = first_with(mixed, lambda row: row["use"] == 0)
    _, trained = first_with(mixed, lambda row: row["use"] == 1 and row["step"] != place)
    change_group(mixed, place, dropped, group_id=trained)
    with_signal = [r for r in all_rows(mixed) if r["use"] == 1 and r["advantage"] and r["step"] != step]
    other, left_out = next((r["step"], r["group_id"]) for r in with_signal if r["group_id"] != trained)
    change_group(mixed, other, left_out, use=0)
    rewrite_config(mixed, "dynamic_sampling_tries: 2", "dynamic_sampling_tries: 0")
    name, problems = mixed.rollouts_path(other).name, audit(mixed).problems
    assert f"{name}: group {left_out} was left out, but has a signal" in problems
    assert any(text.startswith(f"{name}: left out") and "groups, more than 0" in text for text in problems)
    name = mixed.rollouts_path(step).name
    assert f"{name}: replays 2 groups, more than 1" in problems
    assert f"{name}: has 2 groups of its own instead of 3" in problems
    assert f"group {trained} was both trained and left out" in problems
    assert any(f"groups {sorted([fresh, dropped])} are lost" in problem for problem in problems)


def test_an_unfinished_group_in_the_checkpoint_is_not_lost(mixed: RunDirectory) -> None:
    ledger = ledger_of(mixed)
    number = ledger["next_group_id"]
    ledger["next_group_id"] += 1
    rewrite_state(mixed, ledger=ledger)
    assert any(f"groups [{number}] are lost" in problem for problem in audit(mixed).problems)
    for place in UNFINISHED:
        rewrite_state(mixed, ledger={**ledger, place: [*ledger[place], number]})
        assert audit(mixed).problems == []


def test_the_checkpoint_that_a_resume_would_take_is_audited(run: RunDirectory) -> None:
    folder = run.checkpoint_path(8)
    change_weights(folder, lambda tensors: next(iter(tensors.values())).view(-1)[0].fill_(float("nan")))
    trained_so(folder)
    assert any("is not finite" in problem for problem in audit(run).problems)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    first, *others = audit(run).problems
    assert "checkpoints/step-000008: model.safetensors has" in first
    assert others == ["checkpoints/step-000006: it is not of the last step, 8"]
    rewrite_state(run, step=6, ledger=ledger_of(run, step=6) | {"num_trained": 1})
    assert any("step-000006: its ledger counts 1 trained groups" in problem for problem in audit(run).problems)
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    assert "there is no checkpoint" in audit(run).problems


def test_missing_changed_and_left_over_files_are_found(run: RunDirectory) -> None:
    run.rollouts_path(5).unlink()
    (run.checkpoints / "unfinished-step-000009").mkdir()
    run.skipped.mkdir()
    (run.skipped / "step-000007.parquet").touch()
    (run.skipped / "step-000007 (copy).parquet").touch()
    (run.rollouts / ".step-000009.parquet.partial").touch()
    (run.rollouts / "step-000001 of mine.parquet").touch()
    pq.write_table(pq.read_table(run.rollouts_path(4)).drop_columns("prompt_token_ids"), run.rollouts_path(4))
    rewrite(run.evaluations / "step-000004.parquet", set_first(max_version=3, min_version=3))
    rewrite_lines(run.evaluations_summary_path, lambda rows: rows[:2])
    (run.evaluations / "step-000000.parquet").unlink()
    problems = audit(run).problems
    assert {
        "step-000005.parquet: step 5 was trained and has no rollouts",
        "no evaluation at step 8",
        "skipped/step-000007.parquet: no update of that step was skipped",
        "evaluations/step-000000.parquet is missing",
        "checkpoints/unfinished-step-000009 is left over",
        "rollouts/.step-000009.parquet.partial is left over",
    } <= set(problems)
    assert any("sampled by versions [3, 4], not only by 4" in problem for problem in problems)
    assert any(text.startswith("step-000004") and "no column prompt_token_ids" in text for text in problems)
    (run.evaluations / "step-000004.parquet").write_bytes(b"PAR1")
    shutil.rmtree(run.checkpoints)
    assert any("not readable as Parquet" in problem for problem in audit(run).problems)
    run.events_path.write_text('{"kind": "x"}\n')
    with pytest.raises(RunError, match=r"events.jsonl, line 1: it has no step; remove the line"):
        audit(run)


def test_an_unfinished_run_is_audited_up_to_its_current_step(run: RunDirectory) -> None:
    rewrite_config(run, "num_steps: 8\n", "num_steps: 12\n")
    run.rollouts_path(8).unlink()
    shutil.rmtree(run.checkpoint_path(8))
    (run.evaluations / "step-000004.parquet").unlink()
    write_rows(run.events_path, [{"kind": "responses_lost", "step": 4, "validation_step": 4}])
    report = audit(run)
    assert report.problems == []
    missing = "evaluations/step-000004.parquet is missing: the disk had no room"
    assert set(report.notes) == {"the run is at step 8 of 12", missing}


@pytest.mark.parametrize(("step", "then"), [(5, "its rows are lost"), (8, "a resume removes it")])
def test_a_damaged_file_of_rollouts_is_named(run: RunDirectory, step: int, then: str) -> None:
    """A power cut leaves files of length 0; those behind the checkpoint do no harm."""
    run.rollouts_path(step).write_bytes(b"")
    if step == 8:
        shutil.rmtree(run.checkpoints / "step-000008")
    report = audit(run)
    (problem,) = [text for text in report.problems if f"step-{step:06d}.parquet is damaged" in text]
    assert f"damaged, and {then}" in problem
    uncounted = "what was trained at steps 5 is lost, so groups and epochs are not counted"
    assert (uncounted in report.notes) == (step == 5)


def test_a_checkpoint_may_be_a_step_ahead_of_an_interrupted_runs_lines_and_no_more(run: RunDirectory) -> None:
    rewrite_config(run, "num_steps: 8\n", "num_steps: 12\n")
    rewrite_state(run, metrics=read_metrics(run.metrics_path)[-1])
    for path in (run.metrics_path, run.evaluations_summary_path):
        rewrite_lines(path, lambda rows: rows[:-1])
    report = audit(run)
    assert report.problems == []
    assert report.notes == ["the run is at step 7 of 12 (a resume writes the line of step 8)"]
    rewrite_lines(run.metrics_path, lambda rows: rows[:5])
    assert audit(run).problems == [f"metrics.jsonl: step {step} has no line" for step in (6, 7)]
    run.metrics_path.unlink()
    assert not [text for text in audit(run).problems if "lost" in text or "not sampled" in text]


# ---- hashes and the first difference of two runs ----


def test_one_token_changes_one_hash_and_order_of_arrival_none(clean: RunDirectory, run: RunDirectory) -> None:
    def rearrange(rows: Rows) -> None:
        rows.reverse()
        for row in rows:
            row["generator"] = "generator-9"

    def change(rows: Rows) -> None:
        rows[-1]["token_ids"][1] += 1

    expected = hashes(clean)
    rewrite(run.rollouts_path(2), rearrange)
    assert hashes(run) == expected
    assert first_difference(clean, run) is None
    rewrite(run.rollouts_path(2), change)
    found = hashes(run)
    assert [name for name in expected if found[name] != expected[name]] == ["rollouts"]
    difference = first_difference(clean, run)
    assert difference is not None
    assert difference.startswith("step-000002: group ")
    assert ", token_ids from place 1 on: [" in difference


@pytest.mark.parametrize(("folder", "name"), [(".", "weights"), ("training", "optimizer")])
def test_one_value_changes_one_hash(clean: RunDirectory, run: RunDirectory, folder: str, name: str) -> None:
    (path,) = (run.checkpoint_path(8) / folder).glob("*.safetensors")
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()  # with which the file keeps its size, which a checkpoint knows
    key = max(tensors, key=lambda key: tensors[key].numel())
    tensors[key].flatten()[0] += 1
    save_file(tensors, path, metadata)
    trained_so(run.checkpoint_path(8))
    found, expected = hashes(run), hashes(clean)
    assert [each for each in expected if found[each] != expected[each]] == [name]
    assert first_difference(clean, run) == f"the newest checkpoint's {key}"


def test_the_command_compares_two_runs(clean: RunDirectory, run: RunDirectory, capsys: Capture) -> None:
    lines = printed(capsys, "audit", "--hash", clean.path).splitlines()
    assert [line.split()[:2] for line in lines] == [list(pair) for pair in hashes(clean).items()]
    assert "the two runs are the same" in printed(capsys, "audit", clean.path, "--hash", run.path)
    run.rollouts_path(8).unlink()
    assert first_difference(clean, run) == "8 steps of rollouts, and 7"
    run.rollouts_path(1).unlink()
    difference = "step-000001.parquet stands where the other run has step-000002"
    assert difference in printed(capsys, "audit", clean.path, run.path, status=1)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(RunError, match="there is no checkpoint to hash"):
        hashes(run)
