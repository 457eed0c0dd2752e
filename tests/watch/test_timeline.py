"""timeline.json is readable by a trace viewer, whatever happened to the run."""

import json
import os
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import check_names
from local_runs import make_config, train, until

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.report.series import stage_times
from grpo_ray.watch.stage_clock import Span, StageTimes
from grpo_ray.watch.timeline import Timeline, row_of

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    return json.loads(path.read_text())


def rows(events: list[Event]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def turns(*lengths: float, start: float = 1_800_000_000.0) -> StageTimes:
    """Return turns of `train` and `wait` with these lengths."""
    spans = []
    for place, length in enumerate(lengths):
        spans.append(Span(("train", "wait")[place % 2], start, start + length, f"step {place}"))
        start += length
    return StageTimes(sum(lengths), {}, tuple(spans))


def test_events_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    waiting = Span("wait", 1_800_000_000.0, 1_800_000_001.0)
    training = Span("train", 1_800_000_001.0, 1_800_000_001.5, "step 1")
    sampled = Span("rollout", 1_800_000_000.25, 1_800_000_000.75, "group 7")
    times = StageTimes(1.5, {}, (waiting, training), (sampled,))
    assert Timeline(path, "sums").append({"generator-1": times}) is None
    where = {"pid": 1, "tid": 7}
    rollout = {"cat": "rollout", "name": "rollout (generator-1)", "id": 1, **where}
    assert read(path) == [
        {"ph": "M", "name": "process_name", **where, "args": {"name": "sums"}},
        {"ph": "M", "name": "thread_name", **where, "args": {"name": "generator-1"}},
        {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": 7}},
        {"ph": "X", "cat": "stage", "name": "wait", **where, "ts": 1_800_000_000_000_000, "dur": 1_000_000},
        {"ph": "X", "cat": "stage", "name": "train", **where, "ts": 1_800_000_001_000_000, "dur": 500_000,
         "args": {"what": "step 1"}},
        {"ph": "b", **rollout, "ts": 1_800_000_000_250_000, "args": {"what": "group 7"}},
        {"ph": "e", **rollout, "ts": 1_800_000_000_750_000},
    ]  # fmt: skip


def test_every_actor_has_a_row_of_its_own() -> None:
    names = ["driver", "learner", "buffer", "scorer", "weight_sync", *(f"generator-{i}" for i in range(12))]
    assert [row_of(name) for name in names] == list(range(1, 18))
    assert row_of("generator-99") < row_of("scorer-0") < row_of("scorer-1") < row_of("learner-0")
    others = [f"{kind}-{number}" for kind in ("generator", "teacher", "environment") for number in range(3)]
    assert len({row_of(name) for name in others}) == 9
    assert [row_of(f"learner-{number}") for number in (0, 9, 10, 11)] == [20_000, 20_009, 20_010, 20_011]


def test_ranks_have_rows_of_their_own_at_the_learners_place(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path, "run").append({"generator-0": turns(1)})
    ranks = {"learner-0": turns(1), "learner-1": turns(2), "weight_sync": turns(1)}
    Timeline(path, "run").append(ranks)  # a resumed process with two ranks of the Learner
    events = read(path)
    assert rows(events) == {6: "generator-0", 20_000: "learner-0", 20_001: "learner-1", 5: "weight_sync"}
    places = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert places == {6: 6, 20_000: 2, 20_001: 2, 5: 5}  # below the driver, above all others
    lengths = {event["tid"]: event["dur"] / 1e6 for event in events if event["ph"] == "X"}
    assert lengths == {6: 1, 20_000: 1, 20_001: 2, 5: 1}


def test_the_file_is_whole_after_each_append_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    first, second = Timeline(path, "run"), Timeline(path, "run")  # the second belongs to a resumed process
    assert first.append({}) is None
    assert not path.exists()  # nothing to write
    for number, timeline in enumerate((first, first, second), start=1):
        assert timeline.append({"learner": turns(1, 2)}) is None
        assert timeline.append({"learner": StageTimes(0.0, {})}) is None
        assert sum(event["ph"] == "X" for event in read(path)) == 2 * number


@pytest.mark.parametrize("num_lost", [1, 4, 20, 130, 100_000])
def test_a_truncated_file_is_repaired(tmp_path: Path, num_lost: int) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path, "run").append({"learner": turns(1, 2, 3)})
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - num_lost)])
    before = whole[: max(0, len(whole) - num_lost)].count(b'"ph":"X"')
    Timeline(path, "run").append({"learner": turns(4)})
    lengths = [event["dur"] / 1e6 for event in read(path) if event["ph"] == "X"]
    assert lengths[-1] == 4
    assert lengths[:-1] == [1, 2, 3][: len(lengths) - 1]
    assert len(lengths) - 1 >= before - 1  # at most the truncated event is lost


def test_a_long_run_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path, "run", max_bytes=20_000)
    sizes = []
    for step in range(200):
        assert timeline.append({"learner": turns(step + 1), "scorer": turns(step + 1)}) is None
        sizes.append(path.stat().st_size)
        read(path)  # whole
    assert max(sizes) < 20_500
    events = read(path)
    assert rows(events) == {2: "learner", 4: "scorer"}
    lengths = [round(event["dur"] / 1e6) for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert lengths == list(range(lengths[0], 201))
    assert 40 < len(lengths) < 200


def test_a_full_disk_is_reported_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    timeline, write, room = Timeline(path, "run"), os.pwrite, 1000

    def fill(descriptor: int, data: bytes, offset: int) -> int:
        return write(descriptor, data[: max(0, room - offset)], offset)

    assert timeline.append({"learner": turns(1)}) is None
    monkeypatch.setattr(os, "pwrite", fill)
    error = timeline.append({"learner": turns(*range(1, 10))})
    assert error == f"{path}: the disk is full; a part of the timeline is lost"
    room = 10**9
    assert timeline.append({"learner": turns(11)}) is None
    lengths = [event["dur"] / 1e6 for event in read(path) if event["ph"] == "X"]
    assert (lengths[0], lengths[-1]) == (1, 11)


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_runs_stages_add_up_to_its_time_and_its_timeline_has_them(run: RunDirectory) -> None:
    """Rows have no gaps or overlaps, and the seconds of metrics.jsonl, even if a Generator dies."""
    config = make_config("weight_sync.max_lag=1", "generator.num_generators=2")

    async def end_a_generator(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.version >= 3)
        actors.generators["generator-1"].die()
        await until(lambda: controller.version >= 8)

    train(config, run.path, end_a_generator)
    events = read(run.timeline_path)
    names = rows(events)
    actors = ["driver", "learner", "buffer", "scorer", "weight_sync", "generator-0", "generator-1"]
    assert sorted(names.values()) == sorted(actors)
    drawn: Counter[str] = Counter()
    by_row: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            drawn[f"time/{names[event['tid']]}/{event['name']}_s"] += event["dur"] / 1e6
            by_row[names[event["tid"]]].append(event)
    lines = read_metrics(run.metrics_path)
    for name, seconds in drawn.items():
        assert seconds == pytest.approx(sum(line.get(name, 0.0) for line in lines), abs=1e-3), name
    for name, row in by_row.items():
        gaps = [later["ts"] - (sooner["ts"] + sooner["dur"]) for sooner, later in pairwise(row)]
        assert min(gaps) >= 0, name
        assert name == "generator-1" or max(gaps) <= 1, name  # rounded to a microsecond
    labels = {event.get("args", {}).get("what") for event in by_row["learner"]}
    assert {f"step {step}, 4 groups" for step in range(1, 9)} <= labels
    begun, ended = ([e["id"] for e in events if e["ph"] == phase] for phase in "be")
    assert begun == ended
    assert len(set(begun)) == len(begun) >= 32
    check_stages(lines, max(event["dur"] for row in by_row.values() for event in row) / 1e6)


def check_stages(lines: list[dict[str, Any]], longest_s: float) -> None:
    assert check_names({name for line in lines for name in line} - {"step"}) == []
    whole = sum(line["timing/step_s"] for line in lines)
    actors = stage_times({name: [line.get(name) for line in lines] for line in lines for name in line})
    del actors["generator-1"]  # which died
    for name, stages in actors.items():
        # Here all actors share one thread: one that is asked while others work answers late, by up to a turn.
        assert sum(map(sum, stages.values())) == pytest.approx(whole, abs=0.02 * whole + longest_s), name
        assert all(seconds >= 0 for each in stages.values() for seconds in each), name
    for stage in ("train", "optimizer", "snapshot", "capture", "wait_for_batch"):
        assert sum(actors["learner"][stage]) > 0, stage
    for name in (
        "buffer/make_batch", "buffer/write_rollouts", "scorer/score", "weight_sync/stage", "driver/train",
        "driver/evaluate", "driver/checkpoint", "generator-0/generate", "generator-0/load_weights",
    ):  # fmt: skip
        actor, _, stage = name.partition("/")
        assert sum(actors[actor][stage]) > 0, (actor, stage)
    # The step's durations come from the same clock, so they agree except at the edges of the windows.
    trained = sum(line["timing/train_s"] for line in lines)
    in_turns = sum(sum(actors["learner"][stage]) for stage in ("train", "optimizer", "logprobs"))
    assert in_turns == pytest.approx(trained, rel=0.02, abs=0.01)
