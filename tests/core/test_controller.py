"""Whole runs in this process: real engine, Learner, Scorer and buffer, which die at chosen moments."""

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from any_reward_cli import ParityGrader
from local_runs import Recorder, Watcher, make_config, train, until
from run_process import untimed
from safetensors.torch import load_file

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError
from grpo_ray.core import controller, scorer
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.controller import Controller
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import Learner
from grpo_ray.core.validation import Validation
from grpo_ray.errors import ActorDied, RunError
from grpo_ray.records import json_lines
from grpo_ray.records.checkpoint import CheckpointStore
from grpo_ray.records.json_lines import JsonLines
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics, step_name
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.run.restores import train_through_restores
from grpo_ray.run.signals import Interrupted, run_until_signal
from grpo_ray.tools.audit.audit import audit as audit_files

pytestmark = pytest.mark.usefixtures("model_cache", "any_reward")
# All actors share one event loop here, so a limit must be longer than a step's and a batch's own work in it,
# also on a busy machine; what hangs, hangs for good.
LIMIT_S = 2.0


def audit(run: RunDirectory, config: Config, set_aside: tuple[int, ...] = ()) -> None:
    """Check in the run's own files: every prompt trained exactly once, no token too old, one line per step."""
    report = audit_files(run)
    assert report.problems == []
    assert (report.num_steps, report.set_aside) == (config.algorithm.num_steps, set_aside)


RESTORES = {"recovery/restores": "any number"}


def assert_same_run(one: RunDirectory, other: RunDirectory) -> None:
    """Check that the metrics but timings, evaluations, rollouts, weights and optimizer are the same."""
    for row, other_row in zip(read_metrics(one.metrics_path), read_metrics(other.metrics_path), strict=True):
        assert untimed(row) | RESTORES == untimed(other_row) | RESTORES
    assert read_metrics(one.evaluations_summary_path) == read_metrics(other.evaluations_summary_path)
    for path in sorted(one.rollouts.glob("*.parquet")):
        rollouts = [
            [{**row, "generator": None} for row in read_rollouts(folder / path.name)]
            for folder in (one.rollouts, other.rollouts)
        ]
        assert rollouts[0] == rollouts[1]
    newest = max(one.checkpoints.glob("step-*")).name
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        tensors, other_tensors = (load_file(run.checkpoints / newest / file) for run in (one, other))
        assert tensors.keys() == other_tensors.keys()
        assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors), file


@pytest.fixture(scope="module")
def whole(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A synchronous run of one Generator that is left alone."""
    run = RunDirectory(tmp_path_factory.mktemp("whole") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scorer, "Grader", ParityGrader)
        train(make_config("weight_sync.max_lag=0"), run.path)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interruption", "num_generators", "after"),
    [("stop", 2, 4), ("kill", 1, 5)],  # at a checkpoint with a validation, and after it
)
def test_a_synchronous_run_that_is_interrupted_is_the_same_run(
    run: RunDirectory, whole: RunDirectory, interruption: str, num_generators: int, after: int
) -> None:
    config = make_config("weight_sync.max_lag=0", f"generator.num_generators={num_generators}")
    audit(whole, config)
    assert not whole.profile.exists()  # without `learner.profile_steps`
    assert any(row["optim/grad_norm"] > 0 for row in read_metrics(whole.metrics_path))
    for row in read_metrics(whole.metrics_path)[1:3]:  # in which nothing is validated
        num_tokens = sum(each["num_tokens"] for each in read_rollouts(whole.rollouts_path(row["step"])))
        assert row["throughput/sampled_tokens_per_s"] * row["timing/step_s"] == pytest.approx(num_tokens)

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= after)
        if interruption == "stop":
            controller.stop()
            assert not controller._is_preempted  # its validation has time
        else:
            actors.learner.die()

    if interruption == "stop":
        train(config, run.path, meddle)
        assert read_metrics(run.metrics_path)[-1]["step"] < config.algorithm.num_steps
        train(config, run.path)
    else:
        recorder = train(config, run.path, once(meddle))
        assert any("the run continues from step" in text for text in recorder.warnings)
        assert len(events(run, "restored")) == 1
    assert_same_run(whole, run)
    audit(run, config)


def once(meddle: Watcher) -> Watcher:
    calls: list[int] = []

    async def first_time_only(actors: LocalActors, controller: Controller) -> None:
        calls.append(1)
        if len(calls) == 1:
            await meddle(actors, controller)

    return first_time_only


def events(run: RunDirectory, *kinds: str) -> list[dict[str, Any]]:
    rows = read_metrics(run.events_path) if run.events_path.exists() else []
    return [event for event in rows if event["kind"] in kinds]


@pytest.mark.slow
def test_a_generator_that_dies_is_replaced_and_synced_before_it_serves(run: RunDirectory) -> None:
    config = make_config("generator.num_generators=2", "algorithm.num_steps=12")

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        for version in (3, 6):
            await until(lambda version=version: controller.version >= version)
            actors.generators["generator-1"].die()
            await until(lambda: len(controller._pool.serving) == 1)
            await until(lambda: len(controller._pool.serving) == 2)
            versions = await actors.weight_sync.versions()
            assert versions["generator-1"] == versions["generator-0"] >= version - 1
            assert actors.generators["generator-1"].actor._version >= versions["generator-1"]

    train(config, run.path, meddle)
    audit(run, config)
    assert [event["actor"] for event in events(run, "generator_failed")] == ["generator-1", "generator-1"]
    assert read_metrics(run.metrics_path)[-1]["recovery/restarts"] == 2
    rollouts = [row for path in run.rollouts.glob("*.parquet") for row in read_rollouts(path)]
    assert {row["generator"] for row in rollouts} == {"generator-0", "generator-1"}


@pytest.mark.slow
def test_a_replacement_that_fails_a_sync_before_it_serves_is_replaced_as_well(run: RunDirectory) -> None:
    """The answer to `admit` travels while the next sync, which the fresh Generator fails, is under way."""
    config = make_config("generator.num_generators=2", "algorithm.num_steps=12")

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 2)
        sync = actors.weight_sync.actor
        admit, publish, published = sync.admit, sync.publish, asyncio.Event()

        async def does_not_switch(*_: Any) -> None:
            raise RuntimeError("it does not switch")

        async def slow_admit(generator: Any) -> int:
            version = await admit(generator)
            actors.generators["generator-1"].actor.switch = does_not_switch
            published.clear()
            await published.wait()
            sync.admit = admit
            return version

        async def watched_publish(*args: Any) -> Any:
            report = await publish(*args)
            published.set()
            return report

        sync.admit, sync.publish = slow_admit, watched_publish
        actors.generators["generator-1"].die()
        await until(lambda: len(controller._pool.serving) == 1)
        await until(lambda: len(controller._pool.serving) == 2)
        assert (await sync.versions()).keys() == {"generator-0", "generator-1"}

    train(config, run.path, once(meddle))
    assert len(events(run, "generator_failed")) == 2
    assert all(row["lag/rejected"] == 0 for row in read_metrics(run.metrics_path))
    audit(run, config)


def test_an_unloadable_adapter_ends_its_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Generator, "stage_weights", Mock(side_effect=ValueError("no such layer")))
    with pytest.raises(RunError, match=r"no Generator can load the adapted weights: .*: no such layer"):
        train(make_config("model.adapter.rank=4", "generator.num_generators=2"), run.path)
    assert events(run, "generator_back") == []


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "version"), [("buffer", 0), ("buffer", 5), ("weight_sync", 5)])
def test_a_run_restores_itself_when_an_actor_dies_and_waits_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, version: int
) -> None:
    """No actor can replace it; the death of the Learner is above, with room on the disk."""
    config, run = make_config(), RunDirectory(tmp_path / "run")
    original, rewound = RunDirectory.rewind, list[int]()

    def rewind(self: RunDirectory, step: int) -> None:
        rewound.append(step)
        if len(rewound) == 2:
            disk_is_full()
        original(self, step)

    monkeypatch.setattr(RunDirectory, "rewind", rewind)
    monkeypatch.setattr("grpo_ray.run.restores.RETRY_S", 0.01)

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.has_begun and controller.version >= version)
        if version:
            await until((run.checkpoints / "step-000004").exists)
        getattr(actors, victim).die()
        await asyncio.sleep(60)

    recorder = train(config, run.path, once(meddle))
    audit(run, config)
    assert any("No space left" in text for text in recorder.warnings)
    (event,) = events(run, "restored")
    # A later checkpoint may have been complete by then.
    assert event["step"] in ((4, 6) if version else (0,))
    assert event["text"] == f"the run continues from step {event['step']}"
    assert rewound == [0, event["step"], event["step"]]


@pytest.mark.slow
def test_a_restore_without_a_whole_checkpoint_keeps_the_records(run: RunDirectory) -> None:
    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 4 and (run.checkpoints / "step-000003").exists())
        (run.checkpoints / "step-000003/training/state.json").write_text("{")
        actors.learner.die()
        await asyncio.sleep(60)

    with pytest.raises(RunError, match=r"(?s)has no whole checkpoint, so the run would begin.*learner died"):
        train(make_config("checkpoint.every_num_steps=3"), run.path, once(meddle))
    assert [row["step"] for row in read_metrics(run.metrics_path)][:3] == [1, 2, 3]


@pytest.mark.slow
def test_restarts_are_bounded_and_the_run_ends_with_a_checkpoint(run: RunDirectory) -> None:
    config = make_config("recovery.max_restarts=2", "algorithm.num_steps=500", "checkpoint.every_num_steps=400")

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 3)
        while True:
            actors.generators["generator-0"].die()
            await until(lambda: not controller._pool.serving)
            await until(lambda: bool(controller._pool.serving))

    used_up = r"recovery.max_restarts: 2 restarts within .* used up. The first error was: .*generator-0"
    with pytest.raises(RunError, match=used_up):
        train(config, run.path, meddle)
    assert CheckpointStore(run, config.checkpoint).latest() is not None


@pytest.mark.slow
def test_a_group_that_never_finishes_is_retried_and_then_set_aside(run: RunDirectory) -> None:
    config = make_config(f"recovery.group_timeout_s={LIMIT_S}", "recovery.max_group_retries=1")
    stuck = []

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        generator = actors.generators["generator-0"].actor
        original = generator.generate

        async def generate(item: Any, settings: Any) -> Any:
            if item.group_id == 9 and settings.num_samples == 2:
                stuck.append(item.group_id)
                await asyncio.sleep(60)
            return await original(item, settings)

        generator.generate = generate
        await asyncio.sleep(60)

    train(config, run.path, meddle)
    assert stuck == [9, 9]
    audit(run, config, set_aside=(9,))
    assert [event["group_id"] for event in events(run, "set_aside")] == [9]
    assert read_metrics(run.metrics_path)[-1]["rollout/set_aside_groups"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["generator-0", "scorer", "learner"])
@pytest.mark.kept("scorer", "learner")
def test_a_stall_is_explained_and_ended(run: RunDirectory, victim: str) -> None:
    config = make_config(f"recovery.stall_timeout_s={LIMIT_S}")
    method = {"generator-0": "generate", "scorer": "score", "learner": "train_step"}[victim]
    closed: list[str] = []

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 3)

        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        vars(actors.by_name()[victim].actor).update({method: never, "close": lambda: closed.append(victim)})
        await until((run.logs / "threads.log").exists)

    train(config, run.path, once(meddle))
    audit(run, config)
    assert any(f"{victim}: " in event["text"] for event in events(run, "waits"))
    assert len(events(run, "restored")) == (victim == "learner")
    assert closed == ["scorer"] * (victim == "scorer")  # with its processes


@pytest.mark.slow
def test_a_failed_checkpoint_is_retried_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, run, shown = Learner.write_captured, RunDirectory(tmp_path / "run"), list[str]()

    def full_until_shown(self: Learner, folder: Path) -> float:
        if self._captured is not None and self._captured.training["counters/version"] >= 8 and len(shown) < 3:
            raise OSError(28, "No space left on device")
        return original(self, folder)

    monkeypatch.setattr(Learner, "write_captured", full_until_shown)
    monkeypatch.setattr(Recorder, "warning", lambda _, text: "not be written" in text and shown.append(text))
    config = make_config("algorithm.num_steps=40", "checkpoint.every_num_steps=4", "checkpoint.keep=9")
    train(config, run.path)
    audit(run, config)
    assert len(shown) >= 3
    assert all("No space left on device" in text for text in shown)
    assert sorted(path.name for path in run.checkpoints.iterdir())[8:] == ["step-000040"]


@pytest.mark.slow
def test_updates_that_are_not_finite_are_skipped_and_several_in_a_row_end_the_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Learner.accumulate_gradient
    poisoned: set[int] = {2, 5}

    def accumulate(self: Learner, groups: Any) -> dict[str, float]:
        sums = original(self, groups)
        if self.version in poisoned:
            next(self.model.parameters()).grad[0] = float("nan")  # type: ignore[index]
        return sums

    monkeypatch.setattr(Learner, "accumulate_gradient", accumulate)
    train(make_config(), run.path)
    assert [row["step"] for row in read_metrics(run.metrics_path) if row["optim/skipped_updates"]] == [3, 6]
    assert sorted(path.name for path in run.skipped.iterdir()) == ["step-000003.parquet", "step-000006.parquet"]

    poisoned |= {3, 4}
    other = RunDirectory(tmp_path / "other")
    config = make_config("recovery.max_skipped_updates=3", "checkpoint.every_num_steps=4")
    begin, write, capture = CheckpointStore.begin, Learner.write_captured, Learner.capture
    begun, at_capture = list[int](), list[list[int]]()

    def begin_slowly(self: CheckpointStore, step: int) -> Path:
        begun.append(step)
        time.sleep(1.5)  # longer than a step
        return begin(self, step)

    def write_and_note(self: Learner, folder: Path) -> Any:
        files = write(self, folder)
        begun.clear()
        return files

    monkeypatch.setattr(CheckpointStore, "begin", begin_slowly)
    monkeypatch.setattr(Learner, "write_captured", write_and_note)
    monkeypatch.setattr(Learner, "capture", lambda self: (at_capture.append(list(begun)), capture(self))[1])
    with pytest.raises(RunError, match="3 steps in a row had no finite update"):
        train(config, other.path)
    assert audit_files(other).problems == []
    assert at_capture  # for the checkpoint that was due at step 4, and for that of the ending
    assert not any(at_capture)  # none replaces what is being written
    checkpoint = CheckpointStore(other, config.checkpoint).latest()
    assert checkpoint.state.step == 5
    weights = load_file(checkpoint.path / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())


@pytest.mark.slow
def test_a_run_resumes_after_an_error_in_validation(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step of that version has a line, as the checkpoint of a later one needs."""
    config = make_config("weight_sync.max_lag=2", "evaluation.every_num_steps=2")
    evaluate, train_step = Validation.evaluate, Learner.train_step

    async def hang(self: Validation, step: int) -> Any:
        return await (asyncio.Event().wait() if step == 2 else evaluate(self, step))

    def fail(self: Learner, batch: Any) -> Any:
        report = train_step(self, batch)
        if self.version == 3:
            raise ValueError("broken")
        return report

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "evaluate", hang)
        patch.setattr(Learner, "train_step", fail)
        with pytest.raises(ValueError, match="broken"):
            train(config, run.path)
    assert [row["step"] for row in read_metrics(run.metrics_path)] == [1, 2]  # the third is in the checkpoint
    train(config, run.path)
    audit(run, config)


@pytest.mark.slow
def test_a_stop_is_not_forgotten_when_the_learner_dies_with_it(tmp_path: Path) -> None:
    config, run = make_config(), RunDirectory(tmp_path / "run", is_local=True)
    prepared = prepare(config, check_files(config))
    run.create(config)

    @contextlib.contextmanager
    def host(*args: Any) -> Iterator[LocalActors]:
        actors = LocalActors(*args)
        original = actors.learner.actor.train_step

        async def train_step(batch: Any) -> Any:
            if actors.learner.actor.version == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
                raise ActorDied("learner", "the test ended it")
            return original(batch)

        actors.learner.actor.train_step = train_step
        yield actors

    def drive(controller: Controller) -> None:
        run_until_signal(controller, 30.0, run)

    with pytest.raises(Interrupted, match=r"learner died.*resume with: grpo-ray resume .*run --local$"):
        train_through_restores(config, prepared, run, Recorder(), host, drive)
    assert events(run, "restored") == []
    train(config, run.path)
    audit(run, config)


@pytest.mark.slow
def test_a_checkpoint_waits_for_earlier_metrics(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run resumed from the checkpoint would never write them; after the last step, no later one would."""
    config = make_config("algorithm.num_steps=12", "checkpoint.every_num_steps=2")
    fill_the_disk(monkeypatch, {3, 4, 5, 11, 12})

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        learner = actors.learner.actor
        original = learner.train_step

        async def die_in_step_6(batch: Any) -> Any:
            if learner.version == 2:  # before the disk is full
                await until((run.checkpoints / "step-000002").exists)
            if learner.version == 5:
                actors.learner.die()
                await asyncio.sleep(0)  # which is cancelled
            return original(batch)

        learner.train_step = die_in_step_6
        await asyncio.sleep(600)

    train(config, run.path, once(meddle))
    audit(run, config)
    assert [event["text"] for event in events(run, "restored")] == ["the run continues from step 2"]
    assert (run.checkpoints / step_name(12)).exists()


@pytest.mark.slow
def test_a_checkpoint_waits_for_its_rollouts_and_a_full_disk_after_the_last_loses_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, save, problems = TrajectoryBuffer.flush, Controller._save, ["the disk is full"]

    async def full_at_first(self: TrajectoryBuffer) -> str | None:
        return problems.pop() if problems else await flush(self)

    async def save_again(self: Controller, **patience: float) -> None:
        await save(self, **patience)
        self._checkpointing.problem = "a checkpoint waits for the records before it"
        await save(self, patience_s=0)

    monkeypatch.setattr(TrajectoryBuffer, "flush", full_at_first)
    monkeypatch.setattr(Controller, "_save", save_again)
    train(make_config("algorithm.num_steps=4", "checkpoint.keep=9"), run.path)
    written = {path.name for path in run.checkpoints.glob("step-*")}
    assert written - {step_name(3)} == {step_name(4)}  # that of step 3 may be too late for the second attempt


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """Refuse every write to metrics.jsonl and events.jsonl while the last logged step is one of `steps`.

    After the last step the disk has room again, a moment after it has refused that step's metrics.
    """
    is_full = False
    append, write, save = JsonLines.append, json_lines._write_whole, Controller._save

    def append_at(self: JsonLines, row: Any) -> str | None:
        nonlocal is_full
        if self._path.name == "metrics.jsonl":
            is_full = row["step"] in steps
        return append(self, row)

    def write_if_there_is_room(descriptor: int, line: bytes) -> None:
        if is_full:
            disk_is_full()
        write(descriptor, line)

    async def make_room_and_save(self: Controller, **patience: float) -> None:
        self._log.writer.call("waiting", str).result(30)  # for the writes that the disk refuses
        asyncio.get_running_loop().call_later(0.3, make_room)
        await save(self, **patience)

    def make_room() -> None:
        nonlocal is_full
        is_full = False

    monkeypatch.setattr(controller, "RETRY_S", 0.05)
    monkeypatch.setattr(JsonLines, "append", append_at)
    monkeypatch.setattr(json_lines, "_write_whole", write_if_there_is_room)
    monkeypatch.setattr(Controller, "_save", make_room_and_save)


def disk_is_full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.parametrize("is_colocated", [False, True])
def test_a_preemption_skips_the_validation_that_its_checkpoint_would_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_colocated: bool
) -> None:
    """A validation of step 4 never ends. The Learner trains step 5, or waits for its turn on the device."""
    colocated = ("generator.colocated=true", "weight_sync.max_lag=0") if is_colocated else ()
    config = make_config("run.on_preemption_s=1e-6", *colocated)
    run, last = RunDirectory(tmp_path / "run"), 4 if is_colocated else 5
    evaluate, is_slow, has_begun = Validation.evaluate, True, False

    async def slow_evaluate(self: Validation, step: int) -> dict[str, float]:
        nonlocal has_begun
        if step == 4 and is_slow:
            has_begun = True
            await asyncio.sleep(1000)
        return await evaluate(self, step)

    monkeypatch.setattr(Validation, "evaluate", slow_evaluate)

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= last and has_begun)
        controller.stop(is_preempted=True)
        controller.stop()  # by `on_step`
        assert controller._is_preempted
        await asyncio.sleep(60)

    train(config, run.path, meddle)
    assert [path.name for path in sorted(run.checkpoints.iterdir())][-1] == step_name(last)
    assert [event["validation_step"] for event in events(run, "not_evaluated")] == [4][is_colocated:]
    (notice,) = events(run, "slow_checkpoint")
    assert "longer than run.on_preemption_s (1e-06 s)" in notice["text"]
    lines = [row["step"] for row in read_metrics(run.metrics_path)]
    assert lines == [*range(1, last)]  # the last is in its checkpoint
    is_slow = False
    train(config, run.path)
    assert audit_files(run).problems == []


@pytest.mark.slow
def test_a_run_leaves_a_trace_of_each_profiled_step_with_its_parts_one_after_another(tmp_path: Path) -> None:
    profiled = ("learner.profile_steps=[2,3]", "learner.micro_batch_tokens=24")
    train(make_config("algorithm.num_steps=4", *profiled), tmp_path / "run")
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step-000002.json.gz", "step-000003.json.gz"]
    for step, trace in zip((2, 3), traces, strict=True):
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        spans: dict[str, list[tuple[float, float]]] = {}
        for event in events:
            if event.get("cat") == "user_annotation":
                spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
        assert not {f"step {other}" for other in range(1, 5) if other != step} & spans.keys()
        ((begin, end),) = spans[f"step {step}"]
        assert len(spans["forward"]) == len(spans["backward"]) > 1  # micro-batches
        assert len(spans["optimizer"]) == 1
        parts = sorted(spans["forward"] + spans["backward"] + spans["optimizer"])
        assert begin <= parts[0][0]
        assert parts[-1][1] <= end
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(parts))
        assert any(event["name"] == "aten::mm" for event in events if event.get("cat") == "cpu_op")


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_a_warning_and_training_continues(run: RunDirectory) -> None:
    config = make_config("learner.profile_steps=[1,1]", "algorithm.num_steps=2")
    run.create(config)
    run.profile.write_text("a file where the folder should be")
    recorder = train(config, run.path)
    assert recorder.steps == [1, 2]
    (event,) = [e for e in read_metrics(run.events_path) if e["kind"] == "profile_failed"]
    assert "the profile of step 1 could not be written" in event["text"]
    assert any("the profile of step 1" in warning for warning in recorder.warnings)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("[3,2]", "steps 3 to 2 cannot be profiled"),
        ("[0,2]", "learner.profile_steps"),
        ("[1,21]", "at most 20"),
        ("[2]", "learner.profile_steps"),
        ("[9,9]", "begins with step 9, but the run ends with step 8"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(steps: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("[", r"\[")):
        make_config(f"learner.profile_steps={steps}")


def test_a_failure_to_copy_the_weights_is_raised_before_the_state_is_copied(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks of several would wait for the one that failed, for as long again."""
    snapshot, captured = Learner.snapshot, list[int]()

    def failing(self: Learner) -> Any:
        if self.version == 4:
            raise ValueError("the copy failed")
        return snapshot(self)

    monkeypatch.setattr(Learner, "snapshot", failing)
    monkeypatch.setattr(Learner, "capture", lambda self: captured.append(self.version))
    with pytest.raises(ValueError, match="the copy failed"):
        train(make_config("checkpoint.every_num_steps=4"), run.path)
    assert captured == [4, 4]  # both by the ending: to settle the step, and to save
