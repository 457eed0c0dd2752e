"""A power cut loses what was not flushed: the run resumes from its checkpoint, and its records are whole."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import pytest
from local_runs import Killed, make_config, train, until

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.errors import RunError
from grpo_ray.records import durable
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.run_files import RunDirectory, last_logged_step
from grpo_ray.tools.audit.audit import audit
from grpo_ray.watch.background import BackgroundThread

pytestmark = pytest.mark.usefixtures("model_cache", "any_reward")

Synced = dict[int, int]  # bytes that are on disk, by inode


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> Synced:
    """The sizes that files had when they were last flushed to disk."""
    sizes: Synced = {}
    original = durable.sync

    def sync(path: Path) -> int:
        size = original(path)
        sizes[path.stat().st_ino] = size
        return size

    for module in ("durable", "checkpoint", "run_files"):
        monkeypatch.setattr(f"grpo_ray.records.{module}.sync", sync)
    monkeypatch.setattr("grpo_ray.learning.training_state.sync", sync)
    return sizes


def first_line_zeroed(data: bytes, num_synced: int) -> bytes:
    """Fill the first line that was not flushed with zeros; those after it are there."""
    head, line, rest = data[:num_synced], *data[num_synced:].partition(b"\n")[::2]
    return head + b"\0" * len(line) + (b"\n" + rest if line else b"")


def cut_power(run: RunDirectory, synced: Synced) -> list[str]:
    """Damage every file that was not flushed as it is; return their names. A Parquet file is then empty."""
    damaged = []
    for path in filter(Path.is_file, run.path.rglob("*")):
        num_synced = synced.get(path.stat().st_ino, 0)
        if num_synced < path.stat().st_size and path.name != "config.yaml":
            damaged.append(path.name)
            is_log = path.suffix == ".jsonl"
            path.write_bytes(first_line_zeroed(path.read_bytes(), num_synced) if is_log else b"")
    return damaged


@pytest.mark.slow
def test_all_before_a_checkpoint_is_on_disk_and_a_run_resumes_after_a_power_cut(
    run: RunDirectory, synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, commit = [], CheckpointStore.commit

    def checked_commit(self: CheckpointStore, step: int, *rest: object) -> object:
        for log in (run.metrics_path, run.evaluations_summary_path):
            *_, last = log.read_bytes()[: synced[log.stat().st_ino]].splitlines()
            assert json.loads(last)["step"] >= (step - 1 if log == run.metrics_path else 0)
        for path in (*map(run.rollouts_path, range(1, step)), *run.evaluations.glob("*.parquet")):
            assert synced.get(path.stat().st_ino) == path.stat().st_size, path.name
        for folder in (run.path, run.rollouts, run.evaluations):
            assert folder.stat().st_ino in synced
        seen.append(step)
        return commit(self, step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "commit", checked_commit)
    steps = "algorithm.num_steps=12", "checkpoint.every_num_steps=4", "evaluation.every_num_steps=3"
    config = make_config("weight_sync.max_lag=0", *steps)

    async def kill(actors: LocalActors, controller: Controller) -> None:
        await until((run.checkpoints / "step-000004").exists)
        await until(lambda: run.metrics_path.stat().st_size > synced[run.metrics_path.stat().st_ino])
        raise Killed

    with pytest.raises(Killed):
        train(config, run.path, kill)
    newest = CheckpointStore(run, config.checkpoint).latest()
    assert cut_power(run, synced) != []
    assert last_logged_step(run.metrics_path) >= newest.state.step - 1  # those before it are on disk
    train(config, run.path)
    assert sorted({*seen}) == [4, 8, 12]
    assert audit(run).problems == []


LINES = "".join(f'{{"step": {step}}}\n' for step in range(1, 7))
THREE = LINES[: LINES.index("4") - 9]


@pytest.mark.parametrize(
    ("text", "step", "message"),
    [
        (LINES.replace('{"step": 2}', "\0" * 11), 4, "line 2: not valid JSON, or without a step; remove"),
        (LINES.replace('{"step": 2}', '{"step": null}'), 4, "line 2: not valid JSON, or without a step"),
        (THREE + "\0" * 40, 5, "line 4: the lines of steps 4 to 4 are missing or damaged"),
        ("", 5, "line 1: the lines of steps 1 to 4 are missing or damaged"),
    ],
)
def test_damage_before_the_checkpoint_is_an_error_and_changes_nothing(
    run: RunDirectory, text: str, step: int, message: str
) -> None:
    run.create_subfolders()
    run.metrics_path.write_text(text)
    for attempt in (run.check_records, run.rewind):
        with pytest.raises(RunError, match=message) as caught:
            attempt(step)
        assert str(caught.value).startswith(str(run.metrics_path))
        assert run.metrics_path.read_text() == text


@pytest.mark.parametrize(
    "tail", ['{"step": 4, "x', "\0" * 9 + "\n", '{"step": 4}\n\0\0\n{"step": 6}\n', '[]\n{"step": "4"}\n']
)
def test_damage_behind_the_checkpoint_is_as_good_as_absent(run: RunDirectory, tail: str) -> None:
    run.create_subfolders()
    run.metrics_path.write_text(THREE + tail)
    run.rewind(3)
    assert run.metrics_path.read_text() == THREE
    assert os.listdir(run.rollouts) == []


async def test_jobs_run_in_order_and_their_errors_are_not_lost() -> None:
    thread, done = BackgroundThread("test"), []
    for number in range(5):
        thread.submit("a job", lambda number=number: done.append(number))
    thread.call("waiting", str).result(5)
    assert done == [0, 1, 2, 3, 4]
    assert await thread.run("a job", lambda: 7) == 7
    with pytest.raises(OSError, match="No space left"):
        await thread.run("a job", lambda: Path("/dev/full").write_text("x"))
    assert thread.problem() is None
    thread.submit("a bug", lambda: done[99])
    thread.submit("a job", lambda: done.append(5))
    thread.call("waiting", str).result(60)
    assert thread.problem() == "a bug has failed: IndexError: list index out of range"
    assert done[-1] == 5  # one mistake stops no other record


@pytest.mark.slow
def test_a_job_that_hangs_is_reported_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, may_end, done = BackgroundThread("test"), threading.Event(), []
    assert thread.problem() is None
    monkeypatch.setattr("grpo_ray.watch.background.SLOW_S", 0.05)
    thread.submit("the line of step 3", lambda: may_end.wait(30))
    thread.submit("the line of step 4", lambda: done.append(4))
    time.sleep(0.1)
    problem = thread.problem() or ""
    assert "the line of step 3 has not been written for" in problem
    assert "1 more records wait in memory" in problem
    with pytest.raises(TimeoutError):
        thread.call("waiting", str).result(0.05)
    assert not thread.close(0.05)
    may_end.set()
    thread._thread.join(5)
    assert done == []  # the run may have been restored since


async def test_a_job_whose_caller_was_cancelled_does_not_run() -> None:
    thread, may_end, done = BackgroundThread("test"), threading.Event(), []
    thread.submit("hangs", lambda: may_end.wait(30))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.run("a checkpoint", lambda: done.append(1))
    may_end.set()
    thread.call("waiting", str).result(5)
    assert done == []
