"""Trackers: the contents of each library's own files, and that no tracker delays a run."""

import asyncio
import csv
import json
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from builders import make_completion, make_group, make_item
from local_runs import Recorder, make_config, train
from run_process import until

from grpo_ray.cluster import session
from grpo_ray.cluster.local import LocalActors
from grpo_ray.config.run import TrackerName
from grpo_ray.core.controller import Controller
from grpo_ray.errors import RunError
from grpo_ray.records.evaluation_summary import summarise_groups
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run import training
from grpo_ray.watch.run_log import RunLog
from grpo_ray.watch.timeline import row_of
from grpo_ray.watch.trackers import Trackers, check_trackers, tracking
from grpo_ray.watch.trackers import delivery as delivery_module
from grpo_ray.watch.trackers import tracker as choice
from grpo_ray.watch.trackers import trackers as module
from grpo_ray.watch.trackers.delivery import Delivery
from grpo_ray.watch.trackers.tensorboard_tracker import escaped_markdown_table
from grpo_ray.watch.trackers.tracker import End, Row, TrackedRun, Tracker
from grpo_ray.watch.trackers.trackers import TRACKERS

LONG_S = 30.0  # no test waits this long


class Remembering:
    """A tracker that records its calls, and hangs or raises where a test asks for it."""

    def __init__(self, hang_at: str = "", break_at: str = "", error: BaseException | None = None) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.released = threading.Event()
        self._hang_at, self._break_at, self._error = hang_at, break_at, error or OSError("no route to host")

    def _tell(self, *what: Any) -> None:
        self.threads.add(threading.current_thread().name)
        if what[0] == self._hang_at:
            assert self.released.wait(LONG_S)
        if what[0] == self._break_at:
            raise self._error
        self.told.append(what)

    def start(self, run: TrackedRun) -> str:
        self.folder = run.folder
        self._tell("start", run.name)
        return "at https://me:secret@host"

    def resume_from(self, step: int) -> None:
        self._tell("resume_from", step)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("metrics", step, dict(metrics))

    def table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        self._tell("table", name, step, list(rows))

    def close(self, end: End) -> None:
        self._tell("close", end)


def tracked(tmp_path: Path, *overrides: str) -> TrackedRun:
    return TrackedRun(make_config(*overrides), "my-run", tmp_path / "trackers" / "a")


def deliver(tmp_path: Path, tracker: Tracker, max_waiting: int = 100) -> Delivery:
    delivery = Delivery("a", tracker, tracked(tmp_path), lambda text: None, max_waiting)
    until(lambda: delivery._thread.num_waiting == 0)  # the start is no message
    return delivery


def close(delivery: Delivery, end: End = "finished") -> str | None:
    delivery.begin_to_close(end)
    return delivery.close(time.monotonic() + LONG_S)


def test_a_copy_of_a_runs_folder_is_another_run_in_the_tracker(tmp_path: Path) -> None:
    class Named(Remembering):
        def start(self, run: TrackedRun) -> str:
            run.keep_id(run.id or "new")
            return "there"

    original, announced = tracked(tmp_path / "run"), list[str]()
    original.folder.mkdir(parents=True)
    assert original.id is None
    original.keep_id("abc")
    assert (original.id, original.original) == ("abc", None)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    copy = tracked(tmp_path / "copy")
    assert (copy.id, copy.original) == (None, tmp_path / "run")
    for folder in ("run", "link", "copy", "copy"):
        close(Delivery("a", Named(), tracked(tmp_path / folder), announced.append, 100))
    new = f"a: there (a new run there, as this folder is a copy of {tmp_path / 'run'})"
    assert announced == ["a: there", "a: there", new, "a: there"]
    assert (copy.id, copy.original, original.id) == ("new", None, "abc")
    (tmp_path / "run").rename(tmp_path / "moved")
    assert tracked(tmp_path / "moved").id == "abc"
    shutil.copytree(tmp_path / "moved", tmp_path / "run")  # before the moved one was resumed
    assert tracked(tmp_path / "run").id == "abc"
    (tmp_path / "moved" / "trackers" / "a" / "folder").unlink()  # of a run of an earlier release
    assert tracked(tmp_path / "moved").id == "abc"


def test_messages_arrive_in_order_in_the_trackers_own_thread(tmp_path: Path) -> None:
    tracker, announced = Remembering(), []
    delivery = Delivery("a", tracker, tracked(tmp_path), announced.append)
    for step in range(5):
        delivery.send(lambda t, step=step: t.metrics(step, {"x": step / 2}))  # type: ignore[misc]
    assert close(delivery, "interrupted") is None
    points = [("metrics", step, {"x": step / 2}) for step in range(5)]
    assert tracker.told == [("start", "my-run"), *points, ("close", "interrupted")]
    assert tracker.threads == {"tracker-a"}
    assert announced == ["a: at https://host"]


def test_a_hanging_tracker_delays_nothing_and_its_dropped_messages_are_counted(tmp_path: Path) -> None:
    tracker = Remembering(hang_at="start")
    delivery = deliver(tmp_path, tracker, max_waiting=3)
    assert delivery.problem() is None
    for step in range(8):
        delivery.send(lambda t, step=step: t.resume_from(step))  # type: ignore[misc]
    assert delivery.num_dropped == 5
    assert delivery.problem() == "a does not keep up: 5 messages were dropped"
    tracker.released.set()
    until(lambda: len(tracker.told) == 4)
    assert delivery.problem() is None  # it keeps up again
    delivery.send(lambda t: t.resume_from(9))
    assert close(delivery) == "a: 5 messages were dropped"
    assert [what[1] for what in tracker.told if what[0] == "resume_from"] == [0, 1, 2, 9]
    assert tracker.told[-1] == ("close", "finished")


def test_a_silent_tracker_is_named_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Remembering(hang_at="resume_from")
    delivery = deliver(tmp_path, tracker, max_waiting=2)
    delivery.send(lambda t: t.resume_from(0))
    until(lambda: delivery._thread.num_waiting == 0)
    for _ in range(2):
        delivery.send(lambda t: t.resume_from(0))
    assert delivery.problem() is None
    monkeypatch.setattr(delivery_module, "SLOW_S", 0.0)
    assert re.fullmatch("a has not answered for [0-9]+ s; 2 messages are queued", delivery.problem() or "")
    delivery.begin_to_close("failed")  # there is no room for another message
    assert delivery.close(0.0) == "a: not everything could be sent in tracking.close_timeout_s"
    tracker.released.set()
    until(lambda: delivery.problem() is None)


@pytest.mark.parametrize(
    ("place", "error", "reason"),
    [
        ("start", SystemExit("no route to host"), "SystemExit: no route to host"),
        ("metrics", OSError("https://me:secret@host/api\n gave 503"), "OSError: https://host/api gave 503"),
        ("close", OSError("no route to host"), "OSError: no route to host"),
    ],
)
def test_an_error_turns_a_tracker_off_and_is_reported_once_without_a_password(
    tmp_path: Path, place: str, error: BaseException, reason: str
) -> None:
    tracker = Remembering(break_at=place, error=error)
    delivery = deliver(tmp_path, tracker, max_waiting=2)
    delivery.send(lambda t: t.metrics(1, {}))
    if place == "close":
        told = close(delivery)
    else:
        until(lambda: delivery._failure is not None)
        told = delivery.take_failure()
        for step in range(5):  # they are ignored and not counted as dropped
            delivery.send(lambda t, step=step: t.metrics(step, {}))  # type: ignore[misc]
        assert delivery.num_dropped == 0
        assert close(delivery) is None
    assert told == f"a: {reason}; the run continues without it"
    assert delivery.take_failure() is None
    assert delivery.problem() is None
    assert not any(what[0] == place for what in tracker.told)


# ---- messages of a run ----


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    run.create_subfolders()
    return run


def make_trackers(run: RunDirectory, *trackers: Remembering, **settings: int) -> Trackers:
    config = make_config(*(f"tracking.{name}={value}" for name, value in settings.items()))
    return Trackers(config.tracking, run, [deliver(run.path, tracker) for tracker in trackers])


def told(tracker: Remembering, what: str) -> list[tuple[Any, ...]]:
    return [facts[1:] for facts in tracker.told if facts[0] == what]


def groups_of(step: int, more: str = "") -> list[Any]:
    """Return two groups of three samples with rewards 0, 1, 2 and so on, and responses that end in `more`."""
    return [
        make_group(
            make_item(10 * step + index),
            [make_completion([5, 6], text=f"<{index}{sample}>{more}") for sample in range(3)],
            [3 * index, 3 * index + 1, 3 * index + 2],
        )
        for index in range(2)
    ]


def test_rollouts_are_sent_once_their_file_exists(run: RunDirectory) -> None:
    tracker, other = Remembering(), Remembering()
    trackers = make_trackers(run, tracker, other, rollouts_every_num_steps=2, rollouts_per_table=4)
    trackers.resume_from(0)
    for step in range(1, 5):
        trackers.step(step, {"reward/mean": step, "eval/reward": 0.5})
    write_rollouts(run.rollouts_path(2), 2, groups_of(2))  # late, during step 5
    trackers.step(5, {"reward/mean": 5})
    write_rollouts(run.rollouts_path(4), 4, groups_of(4))
    assert trackers.close("finished") == []
    assert told(tracker, "metrics") == [(step, {"reward/mean": float(step)}) for step in range(1, 6)]
    tables = told(tracker, "table")
    assert [(name, step) for name, step, _ in tables] == [("rollouts", 2), ("rollouts", 4)]
    written = read_rollouts(run.rollouts_path(4))
    rows = tables[1][2]
    assert len(rows) == 4
    for row in rows:
        assert any(row.items() <= whole.items() for whole in written)
    assert len({row["response"] for row in rows}) == 4
    assert {"prompt", "response", "ground_truth", "reward", "advantage"} <= rows[0].keys()
    assert told(other, "table") == tables


@pytest.mark.parametrize(("every", "sent"), [(1, [1, 2]), (0, [])])
def test_a_restored_run_drops_rollouts_it_waited_for(run: RunDirectory, every: int, sent: list[int]) -> None:
    tracker = Remembering(hang_at="start")
    trackers = make_trackers(run, tracker, rollouts_every_num_steps=every)
    for step in (1, 2, 3):
        trackers.step(step, {})
    trackers.resume_from(2)
    for step in (1, 2, 3):  # 3: from the first time, as its metrics are not logged yet
        write_rollouts(run.rollouts_path(step), step, groups_of(step))
    write_rollouts(run.rollouts_path(4), 4, groups_of(4))
    trackers.step(4, {})
    run.rollouts_path(4).unlink()  # a file that is gone when its turn comes is skipped
    tracker.released.set()
    assert trackers.close("finished") == []
    assert [step for _, step, _ in told(tracker, "table")] == sent


def test_a_validation_sends_metrics_and_a_table_of_responses_which_are_cut(run: RunDirectory) -> None:
    tracker = Remembering()
    trackers = make_trackers(run, tracker, rollouts_per_table=2)
    groups = groups_of(4, "ab" * 3000)
    trackers.evaluation(summarise_groups(4, groups), groups)
    trackers.close("finished")
    ((step, metrics),) = told(tracker, "metrics")
    assert (step, metrics["eval/reward"]) == (4, 2.5)
    ((name, step, rows),) = told(tracker, "table")
    assert (name, step) == ("validation", 4)
    shown = "ab" * 1998 + "… (2,004 more characters)"
    assert [(r["response"], r["reward"]) for r in rows] == [(f"<00>{shown}", 0.0), (f"<10>{shown}", 3.0)]


def test_a_broken_tracker_is_shown_once_and_a_slow_one_until_it_keeps_up(run: RunDirectory) -> None:
    broken, good, slow = Remembering(break_at="metrics"), Remembering(), Remembering(hang_at="start")
    deliveries = [deliver(run.path, tracker, limit) for tracker, limit in ((broken, 9), (good, 9), (slow, 1))]
    trackers, display = Trackers(make_config().tracking, run, deliveries), Recorder()
    log = RunLog(run, display, trackers)
    log.line(1, {"reward/mean": 0.5})
    until(lambda: deliveries[0]._failure is not None)
    for step in (2, 3):
        log.show_warnings()
        log.line(step, {"reward/mean": 0.5})
        log.writer.call("waiting", str).result(60)
    log.show_warnings()
    off = "a: OSError: no route to host; the run continues without it"
    assert display.take() == [off, *(f"a does not keep up: {n} messages were dropped" for n in (1, 2))]
    slow.released.set()
    until(lambda: len(slow.told) == 2)
    log.show_warnings()
    assert display.take() == []
    log.writer.call("waiting", str).result(60)
    assert [(event["kind"], event["text"]) for event in read_metrics(run.events_path)] == [("tracker_off", off)]
    assert trackers.close("finished") == ["a: 2 messages were dropped"]
    assert [step for step, _ in told(good, "metrics")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "end"), [(None, "finished"), (KeyboardInterrupt(), "interrupted"), (RunError("x"), "failed")]
)
def test_trackers_of_a_run_given_as_a_dot_have_its_name_and_are_closed_at_every_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, end: str
) -> None:
    good, broken = Remembering(), Remembering(break_at="close")
    monkeypatch.setattr(module, "TRACKERS", {"wandb": lambda: good, "mlflow": lambda: broken})
    announced, warnings = list[str](), list[str]()
    config, run = make_config("tracking.trackers=[wandb,mlflow]"), RunDirectory(".")
    (tmp_path / "run-7").mkdir()
    monkeypatch.chdir(tmp_path / "run-7")
    raised = None
    try:
        with tracking(config, run, announced.append, warnings.append) as trackers:
            trackers.resume_from(3)
            if error is not None:
                raise error
    except (KeyboardInterrupt, RunError) as caught:
        raised = caught
    assert raised is error
    assert good.told == [("start", "run-7"), ("resume_from", 3), ("close", end)]
    assert good.folder == tmp_path / "run-7" / "trackers" / "wandb"
    assert sorted(announced) == ["mlflow: at https://host", "wandb: at https://host"]
    assert warnings == ["mlflow: OSError: no route to host; the run continues without it"]


def test_a_library_that_is_missing_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("tracking.trackers=[tensorboard,mlflow]")
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name == "mlflow" else pytest.__spec__)
    with pytest.raises(ValueError, match=r"mlflow is not installed; run pip install mlflow-skinny"):
        check_trackers(config)
    check_trackers(make_config("tracking.trackers=[tensorboard]"))
    check_trackers(make_config())
    monkeypatch.setattr(choice, "_is_installed", lambda name: name == "mlflow")
    with pytest.raises(ValueError, match=r"tracking.mlflow_uri: sqlite requires MLflow's server libraries"):
        check_trackers(make_config("tracking.trackers=[mlflow]", "tracking.mlflow_uri=sqlite:///runs.db"))
    check_trackers(make_config("tracking.trackers=[mlflow]", "tracking.mlflow_uri=http://127.0.0.1:5000"))


def test_trackers_are_checked_before_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "connected", Mock(side_effect=AssertionError("Ray was to be started")))
    monkeypatch.setattr(choice, "_is_installed", lambda name: False)
    config = make_config(f"run.output_dir={tmp_path}", "run.name=one", "tracking.trackers=[wandb]")
    with pytest.raises(RunError, match="wandb is not installed"):
        training.train(config, "configs/quickstart.yaml")
    RunDirectory(tmp_path / "one").create(config)
    with pytest.raises(RunError, match="wandb is not installed"):
        training.resume(str(tmp_path / "one"), [])
    with pytest.raises(AssertionError, match="Ray was to be started"):
        training.resume(str(tmp_path / "one"), ["tracking.trackers=[]"])


def test_a_folder_with_a_librarys_name_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not choice._is_installed("no_such_library")
    assert choice._is_installed("json")


# ---- the libraries themselves ----

NASTY = 'a|b\n<script>alert(1)</script> ![x](http://host/x.png) **bold** `code` "quoted", _under_\\|'
ROWS: list[Row] = [
    {"prompt": "2 + 2 =", "response": NASTY, "reward": 0.5, "num_turns": None},
    {"prompt": "?", "response": "", "reward": 1, "num_turns": 3},
]


OWN = {"episodes/metrics/pass@1": 0.5, "eval/episodes/metrics/acc/easy": 1.0, "episodes/metrics/..": 2.0}


def use(name: TrackerName, run: TrackedRun, end: End = "finished") -> str:
    """Log a run of two steps, the second of which is repeated after a restore to step 1."""
    tracker = TRACKERS[name]()
    run.folder.mkdir(parents=True, exist_ok=True)
    place = tracker.start(run)
    tracker.resume_from(0)
    # As a mixture has them:
    tracker.metrics(1, {"reward/mean": 0.25, "reward/mean/a-b": 0.125, "loss/policy": float("nan"), **OWN})
    tracker.table("rollouts", 1, ROWS)
    tracker.metrics(2, {"reward/mean": 0.5})
    tracker.resume_from(1)
    tracker.metrics(2, {"reward/mean": 0.75})
    tracker.close(end)
    return place


def go_on(name: TrackerName, run: TrackedRun) -> None:
    """Log the next process of the same run."""
    tracker = TRACKERS[name]()
    tracker.start(run)
    tracker.resume_from(2)
    tracker.metrics(3, {"reward/mean": 1.0})
    tracker.close("finished")


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(tmp_path / "runs" / "my-run")
    assert use("tensorboard", run) == f"tensorboard --logdir {tmp_path / 'runs'}"
    go_on("tensorboard", run)
    seen = EventAccumulator(str(run.folder))
    seen.Reload()
    points = [(event.step, event.value) for event in seen.Scalars("reward/mean")]
    assert points == [(1, 0.25), (2, 0.75), (3, 1.0)]  # 0.5 was logged before the restore
    (event,) = seen.Tensors("rollouts/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (1, escaped_markdown_table(ROWS))
    assert b"    num_steps: 8\n" in seen.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_tensorboard_shows_a_response_literally() -> None:
    pytest.importorskip("tensorboard")
    from html import unescape

    from tensorboard.plugin_util import markdowns_to_safe_html

    html = markdowns_to_safe_html([escaped_markdown_table(ROWS)], lambda parts: parts[0])
    assert not re.search(r"<(script|img|a|strong|em|code)\b", html)
    cells = [unescape(re.sub(r"<br\s*/?>", "\n", cell)) for cell in re.findall(r"<td>(.*?)</td>", html, re.S)]
    assert cells == ["2 + 2 =", NASTY, "0.5", "", "?", "", "1", "3"]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate W&B and MLflow from the network and from this machine's settings."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")  # so that the tracker's own setting is undone
    names = "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    logged, ended = list[dict[str, Any]](), list[tuple[Any, ...]]()
    log, finish = wandb.Run.log, wandb.Run.finish

    def log_too(run: Any, row: dict[str, Any]) -> None:
        logged.append(row)
        log(run, row)

    def finish_too(run: Any, exit_code: int | None = None) -> None:
        ended.append((run.id, run.project, run.name, run.config["algorithm"]["num_steps"], exit_code))
        finish(run, exit_code)

    monkeypatch.setattr(wandb.Run, "log", log_too)
    monkeypatch.setattr(wandb.Run, "finish", finish_too)
    run = tracked(tmp_path, "tracking.project=sums")
    check_trackers(make_config("tracking.trackers=[wandb]"))  # offline mode needs no key
    assert use("wandb", run, "failed").startswith("offline; upload with: wandb sync")
    points = [(row["step"], row.get("reward/mean")) for row in logged]
    assert points == [(1, 0.25), (1, None), (2, 0.5), (2, 0.75)]
    table = logged[1]["rollouts"]
    assert table.columns == ["prompt", "response", "reward", "num_turns"]
    assert table.data == [["2 + 2 =", NASTY, 0.5, None], ["?", "", 1, 3]]
    go_on("wandb", run)
    assert logged[-1] == {"step": 3, "reward/mean": 1.0}
    assert ended == [(run.id, "sums", "my-run", 8, 1), (run.id, "sums", "my-run", 8, 0)]
    files = list(run.folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{run.id}.wandb"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_a_key_or_project_that_wandb_refuses_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    with pytest.raises(ValueError, match="wandb: Invalid project name 'a/b'"):
        check_trackers(make_config("tracking.trackers=[wandb]", "tracking.project=a/b"))

    online = SimpleNamespace(settings=SimpleNamespace(mode="online"))
    monkeypatch.setattr(wandb, "setup", lambda settings: online)
    monkeypatch.setattr(wandb, "login", login := Mock(return_value=None))
    with pytest.raises(ValueError, match=r"no API key; run wandb login, or set WANDB_API_KEY, or WANDB_MODE"):
        check_trackers(make_config("tracking.trackers=[wandb]"))
    login.assert_called_once_with(prompt=False, verify=False)
    login.side_effect = wandb.errors.AuthenticationError("API key must have 40+ characters, has 6.")
    with pytest.raises(ValueError, match=r"wandb: API key must have 40\+ characters, has 6"):
        check_trackers(make_config("tracking.trackers=[wandb]"))


@pytest.mark.usefixtures("offline")
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    run = tracked(tmp_path / "runs" / "my-run", "tracking.project=sums")
    assert use("mlflow", run, "interrupted") == f"{tmp_path / 'runs' / 'mlruns'}, run {run.id}"
    client = MlflowClient(tracking_uri=str(tmp_path / "runs" / "mlruns"))
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (run.id, "my-run", "KILLED")
    assert found.data.params["algorithm.num_steps"] == "8"
    assert found.data.params["learner.betas"] == "[0.9, 0.95]"
    history = client.get_metric_history(run.id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (2, 0.75)]
    path = Path(client.download_artifacts(run.id, "rollouts/step-000001.csv", str(tmp_path)))
    with path.open(newline="") as file:
        texts = [{name: "" if value is None else str(value) for name, value in row.items()} for row in ROWS]
        assert list(csv.DictReader(file)) == texts
    assert client.get_metric_history(run.id, "reward/mean.a-b")[0].value == 0.125
    assert client.get_metric_history(run.id, "episodes/metrics/pass_1")[0].value == 0.5
    go_on("mlflow", tracked(tmp_path / "runs" / "my-run", "algorithm.num_steps=9"))
    found = client.get_run(run.id)
    assert found.info.status == "FINISHED"
    assert found.data.metrics["reward/mean"] == 1.0
    assert found.data.params["algorithm.num_steps"] == "8"  # MLflow's parameters cannot change
    now = Path(client.download_artifacts(run.id, "config.yaml", str(tmp_path)))
    assert yaml.safe_load(now.read_text())["algorithm"]["num_steps"] == 9


@pytest.mark.usefixtures("offline")
def test_mlflow_uses_an_experiment_that_another_run_creates_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    run = tracked(tmp_path / "run")
    run.folder.mkdir(parents=True)
    look, looked = MlflowClient.get_experiment_by_name, []

    def look_too_early(client: MlflowClient, name: str) -> Any:
        looked.append(name)
        if len(looked) > 1:
            return look(client, name)
        assert look(client, name) is None
        client.create_experiment(name)  # by the other run
        return None

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", look_too_early)
    TRACKERS["mlflow"]().start(run)
    assert looked == ["grpo_ray", "grpo_ray"]


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_resumed_and_restored_run_is_one_in_a_tracker_and_all_of_it_is_drawn(tmp_path: Path) -> None:
    """The timeline has the time before a restore, although metrics.jsonl has each step only once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "my-run"
    overrides = ["tracking.trackers=[tensorboard]", "tracking.rollouts_every_num_steps=4"]
    overrides += ["checkpoint.every_num_steps=4"]
    first = train(make_config("algorithm.num_steps=4", *overrides), folder)
    assert first.warnings == []
    assert [text.partition(":")[0] for text in first.announced] == ["tensorboard"]

    async def kill_learner(actors: LocalActors, controller: Controller) -> None:
        if not (folder / "events.jsonl").exists():  # the first time
            while controller.version < 7:
                await asyncio.sleep(0.001)
            actors.learner.die()
        await asyncio.sleep(LONG_S)

    train(make_config(*overrides), folder, kill_learner)
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [event["kind"] for event in read_metrics(folder / "events.jsonl")] == ["run_failed", "restored"]
    seen = EventAccumulator(str(folder / "trackers" / "tensorboard"))
    seen.Reload()
    seconds = [(event.step, event.value) for event in seen.Scalars("timing/step_s")]
    assert seconds == [(row["step"], pytest.approx(row["timing/step_s"])) for row in rows]
    evaluated = read_metrics(folder / "evaluations" / "summary.jsonl")
    rewards = [(event.step, event.value) for event in seen.Scalars("eval/reward")]
    assert rewards == [(row["step"], pytest.approx(row["reward"])) for row in evaluated]
    assert [event.step for event in seen.Tensors("rollouts/text_summary")] == [4, 8]
    assert [event.step for event in seen.Tensors("validation/text_summary")] == [0, 4, 8]
    drawn = [event for event in json.loads((folder / "timeline.json").read_text()) if event["ph"] == "X"]
    rows = {row: [event for event in drawn if event["tid"] == row] for row in {event["tid"] for event in drawn}}
    for row in rows.values():
        assert min(later["ts"] - (sooner["ts"] + sooner["dur"]) for sooner, later in pairwise(row)) >= 0
    trained = (event["args"]["what"] for event in rows[row_of("learner")] if event["name"] == "train")
    steps = [int(what.split()[1].rstrip(",")) for what, _ in groupby(trained)]
    assert steps in [[*range(1, last + 1), *range(5, 9)] for last in (6, 7, 8)]  # drawn before the death
