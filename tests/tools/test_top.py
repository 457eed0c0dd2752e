"""`grpo-ray top`: the state that a run writes, the frames drawn from it, and the bottleneck."""

import asyncio
import io
import json
import os
import pty
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import Mock

import local_runs
import psutil
import pytest
import yaml
from builders import write_rows
from commands import Capture, printed, refused
from local_runs import Recorder
from rich.console import Console
from run_process import until
from small_run import QUICKSTART

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config.loading import load_config
from grpo_ray.config.schema import leaves
from grpo_ray.core.controller import Controller
from grpo_ray.records.json_lines import read_lines
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.top.bottleneck import (
    Problems,
    bottleneck,
    learner_figures,
    rank_figures,
    rank_hint,
    ranks_line,
    time_shares,
)
from grpo_ray.tools.top.frame import TopOptions, draw_frame, keys, stage_shares, top
from grpo_ray.tools.top.run_view import RunView, is_alive, read_view, silence_of
from grpo_ray.watch import run_state
from grpo_ray.watch.run_state import ActorState, Ending, LiveStatus, RunState, read_state, reported

NOW = 1_700_000_000.0
Found = TypeVar("Found")


def make_state(**changes: Any) -> RunState:
    """Make the state of a driver that is this process, in the middle of step 5."""
    actors = (
        ActorState(name="generator-0", doing="samples group 9", for_s=1.5, num_calls=4),
        ActorState(name="learner", doing="trains version 5", for_s=0.2, num_calls=1),
        ActorState(name="scorer"),
    )
    now = LiveStatus(step=4, published_version=3, num_sampling=7, num_buffered=2, actors=actors)
    return RunState(**{
        "time": NOW, "host": socket.gethostname(), "pid": os.getpid(),
        "process_started": psutil.Process().create_time(), "began": NOW - 65, "num_steps": 8,
        "phase": "training", "now": now, **changes,
    })  # fmt: skip


def make_run(folder: Path, state: RunState | None, steps: list[dict[str, Any]]) -> RunDirectory:
    run = RunDirectory(folder)
    folder.mkdir(exist_ok=True)
    run.config_path.write_text("{}")
    write_rows(run.metrics_path, steps)
    if state is not None:
        run.state_path.write_text(state.model_dump_json())
    return run


def step(
    number: int, waits: float = 1.24, trains: float = 0.7, samples: float = 1.9, scores: float = 0.1,
    **changes: float,
) -> dict[str, Any]:  # fmt: skip
    """Make the metrics of a step of two seconds, given the seconds that actors spend on their main stages."""
    row = {
        "step": number, "timing/step_s": 2.0, "timing/wait_for_batch_s": waits, "timing/train_s": trains,
        "timing/generate_s": samples, "lag/max": 1.0, "reward/mean": 0.25,
        "throughput/sampled_tokens_per_s": 1234.0,
        "time/learner/wait_for_batch_s": waits, "time/learner/train_s": trains,
        "time/learner/snapshot_s": 2 - waits - trains,
        "time/generator-0/generate_s": samples, "time/generator-0/wait_for_prompts_s": 2 - samples,
        "time/scorer/score_s": scores, "time/scorer/wait_for_groups_s": 2 - scores,
    }  # fmt: skip
    return row | {name.replace("__", "/"): value for name, value in changes.items()}


def given(found: Found | None) -> Found:
    assert found is not None
    return found


def drawn(view: RunView, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(draw_frame(view, console))
    return console.export_text()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "EVERY_S", 0.01)


def written(run: RunDirectory, condition: Any) -> RunState:
    until(lambda: bool((state := read_state(run)) and condition(state)))
    return given(read_state(run))


@pytest.mark.usefixtures("quick")
def test_a_run_writes_its_phase_and_its_ending(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with reported(run, 8, Recorder()) as reporter:
        assert written(run, lambda s: s.phase == "starting").ending is None
        reporter.status("starting the actors")
        reporter.warning("generator-0: died")
        reporter.warning("generator-0: died")
        state = written(run, lambda s: s.warnings)
        assert (state.phase, state.warnings) == ("starting the actors", ("generator-0: died",))
        live_status = LiveStatus(step=1, published_version=1, actors=(ActorState(name="learner"),))
        reporter.follow(lambda: live_status)
        reporter.step(1, {"reward/mean": 0.5})
        state = written(run, lambda s: s.phase == "training")
        assert (state.now, state.warnings) == (live_status, ())
        assert (state.pid, state.num_steps) == (os.getpid(), 8)
        reporter.follow(lambda: LiveStatus(is_evaluating=True))
        assert reporter.state().phase == "evaluating the policy"
        reporter.follow(lambda: LiveStatus(is_evaluating=True, is_stopping=True))
        assert reporter.state().phase == "stopping after this step"
        reporter.follow(lambda: live_status)
        assert state.began <= state.time <= time.time()
    assert given(read_state(run)).ending == Ending(kind="finished")
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (AssertionError(), Ending(kind="failed", text="AssertionError")),
        (KeyboardInterrupt("go on with: ..."), Ending(kind="stopped", text="go on with: ...")),
    ],
)
def test_last_words(error: BaseException, ending: Ending, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(type(error)), reported(run, 8, Recorder()):
        raise error
    assert given(read_state(run)).ending == ending


@pytest.mark.usefixtures("quick")
def test_a_full_disk_is_reported_once_and_ends_nothing(tmp_path: Path) -> None:
    run, shown = RunDirectory(tmp_path / "missing"), Recorder()
    with reported(run, 8, shown):
        until(lambda: bool(shown.warnings))
        run.path.mkdir()  # writable again
        written(run, lambda s: True)
    assert len(shown.warnings) == 1
    assert "state.json" in shown.warnings[0]


def test_a_disk_that_hangs_blocks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(run_state, "LAST_WRITE_S", 0.05)
    monkeypatch.setattr(run_state, "replacing", lambda path, fsync: hangs.wait(100) and nullcontext(path))
    began = time.monotonic()
    with reported(RunDirectory(tmp_path), 8, Recorder()):
        pass
    assert time.monotonic() - began < 60
    hangs.set()


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache", "any_reward", "quick")
def test_a_real_run_is_followed_drawn_and_planned_with_its_own_rates(tmp_path: Path, capsys: Capture) -> None:
    config = local_runs.make_config("algorithm.num_steps=6", "weight_sync.max_lag=1")
    run, glances = RunDirectory(tmp_path / "run"), []

    async def watch(actors: LocalActors, controller: Controller) -> None:
        with reported(run, 6, Recorder()) as reporter:
            reporter.follow(controller.live_status)
            while controller.live_status().step < 6:
                glances.append(reporter.state().now)
                await asyncio.sleep(0.002)

    local_runs.train(config, run.path, watch)
    last = given(read_state(run))
    assert last.now.step == 6
    names = {"generator-0", "scorer", "learner", "buffer", "weight_sync"}
    assert {actor.name for actor in last.now.actors} == names
    assert {live_status.is_evaluating for live_status in glances} == {True, False}
    steps = [live_status.step for live_status in glances]
    assert steps == sorted(steps)
    assert all(live_status.published_version <= live_status.step for live_status in glances)
    size = config.algorithm.prompts_per_step
    assert all(live_status.num_sampling + live_status.num_buffered <= 3 * size for live_status in glances)
    done = {actor.doing.split()[0] for live_status in glances for actor in live_status.actors if actor.doing}
    assert {"samples", "trains", "waits", "publishes"} <= done
    buffers = [a for live_status in glances for a in live_status.actors if a.name == "buffer" and a.doing]
    assert all(actor.is_waiting for actor in buffers if actor.doing != "starts")
    text = drawn(read_view(run), 160)  # its columns are of metrics that real runs write: each has a value
    (row,) = [line.split() for line in text.splitlines() if line.strip().startswith("6 ")]
    assert len(row) == 15
    assert row[1] == f"{read_metrics(run.metrics_path)[-1]['reward/mean']:.3f}"
    assert "tokens/s per Generator" in printed(capsys, "plan", QUICKSTART, "--from", run.path)


def test_the_tail_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text("".join(f'{{"n": {n}}}\n' for n in range(1000)) + '{"half": ')
    assert read_lines(path, 3) == [{"n": 997}, {"n": 998}, {"n": 999}]
    assert len(read_lines(path, 5000)) == 1000


def test_a_driver_that_writes_nothing() -> None:
    state = make_state()
    assert silence_of(state, NOW + 9) is None
    assert "has written nothing for 60 s but is alive" in (silence_of(state, NOW + 60) or "")
    assert "and is gone" in (silence_of(make_state(process_started=1.0), NOW + 60) or "")
    assert "3 days, 0:00:09; check on that host" in (silence_of(make_state(host="a"), NOW + 259_209) or "")
    assert silence_of(make_state(ending=Ending(kind="finished")), NOW + 9999) is None


def test_a_process_is_the_driver_by_pid_and_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_alive(make_state())
    child = os.fork()
    if not child:
        os._exit(0)
    while psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    started = psutil.Process(child).create_time()
    assert not is_alive(make_state(pid=child, process_started=started))
    os.waitpid(child, 0)
    assert not is_alive(make_state(pid=child, process_started=started))
    state = make_state(process_started=1.0)
    monkeypatch.setattr(psutil, "Process", Mock(side_effect=psutil.AccessDenied(1)))
    assert is_alive(state)  # it may not be inspected


SYNCS = {f"timing__weight_sync__{phase}_s": 0.5 for phase in ("stage", "load")}
WAITS = "Learner waits 62% of the time"
LOOKS_UP = {"time/teacher-0/look_up_s": 1.8, "time/teacher-0/wait_for_groups_s": 0.2}


@pytest.mark.parametrize(
    ("rows", "sentence", "remedy"),
    [
        ([], "No step has been timed yet.", ""),
        ([{"step": 1, "timing/step_s": None}], "No step has been timed yet.", ""),
        ([step(2, waits=0.2)], "No clear bottleneck", ""),
        ([step(2), step(3)], f"{WAITS}: add", "generator.num_generators; one more saves at most 48% of a step"),
        ([step(2, samples=0.8)], f"{WAITS}, and Generators sample only 40% of it", "buffer.lookahead"),
        ([step(2, scores=1.9)], f"{WAITS} and the Scorer grades 95% of it", "add scorer.num_workers"),
        ([step(2, samples=1.0) | LOOKS_UP], f"{WAITS} and Teachers work 90%", "add distillation.num_teachers"),
        ([step(2, samples=1.2, lag__max=0.0)], f"{WAITS} and trains 35% of it: sampling and training take",
         "weight_sync.max_lag: 1 (and generator.colocated: false)"),
        ([step(2, waits=0.1, trains=1.8, samples=1.0)],
         "Learner trains 90% of the time and Generators sample 50%: the Learner is the bottleneck", ""),
        ([step(2, waits=0.1, trains=1.8)], "Both are busy: the Learner 90%", "the Generators 95%"),
        # 2 + 2 seconds of steps; 1.8 of validation are 45%
        ([step(2, time__driver__train_s=2.0), step(3, time__driver__evaluate_s=1.8, time__driver__train_s=0.2)],
         "Validation takes 45% of the time", ""),
        ([step(2, **SYNCS)], "Weight syncs take 50% of the time", "try a faster"),
        ([step(2, **SYNCS, lag__max=0.0)], "Weight syncs take 50% of the time", "overlap them with training"),
        # time of waiting for groups that are being sampled
        ([step(2, timing__weight_sync__join_s=1.9)], f"{WAITS}: add Generators", ""),
        ([step(2, timing__checkpoint__capture_s=0.8)], "Copying the state for checkpoints takes 40%", ""),
        # work in parallel with a Learner that trains all the time
        ([step(2, waits=0.0, trains=1.9, samples=1.0, timing__weight_sync__stage_s=0.6)], "Learner trains 95%",
         ""),
    ],
)  # fmt: skip
def test_the_bottleneck(rows: list[dict[str, Any]], sentence: str, remedy: str) -> None:
    found = bottleneck(rows)
    assert found.startswith(sentence)
    assert remedy in found


def test_shares_are_of_the_time_of_all_steps_and_of_all_actors_of_a_kind() -> None:
    long = {
        "timing__step_s": 3.0, "time__driver__evaluate_s": 1.0, "time__driver__train_s": 4.0,
        "time__learner__wait_for_batch_s": 0.5, "time__learner__train_s": 1.0,
        "time__learner__optimizer_s": 1.5, "time__learner__snapshot_s": 0.0,
        "time__generator-0__generate_s": 3.0, "time__generator-0__wait_for_prompts_s": 0.0,
        "time__generator-1__generate_s": 0.0, "time__generator-1__wait_for_prompts_s": 3.0,
    }  # fmt: skip
    shares = given(time_shares([step(2, **long), step(3, waits=1.5, trains=0.5, samples=1.0)]))
    assert shares.learner_waits == pytest.approx((0.5 + 1.5) / 5)
    assert shares.learner_trains == pytest.approx((2.5 + 0.5) / 5)
    assert shares.generators_sample == pytest.approx((3.0 + 0.0 + 1.0) / 8)
    assert shares.evaluates == pytest.approx(1 / 5)
    # A Learner of several ranks is their mean.
    shares = given(time_shares([rank_step(2, waits=(0.5, 0.1)), rank_step(3, waits=(0.7, 0.3))]))
    assert shares.learner_waits == pytest.approx((0.5 + 0.1 + 0.7 + 0.3) / 8)
    assert shares.learner_trains == pytest.approx(1 - shares.learner_waits)
    # One more Generator saves its part of the sampling, but no more than the Learner waits.
    two = {"time__generator-1__generate_s": 1.9, "time__generator-1__wait_for_prompts_s": 0.1}
    shares = given(time_shares([step(2, **two)]))
    assert shares.num_generators == 2
    assert shares.saved_by_a_generator == pytest.approx(0.95 / 3)  # three sample in 2/3 of the time of two
    waits_less = given(time_shares([step(2, waits=0.5)]))  # a step takes the other 1.5 of its 2 s anyway
    assert waits_less.saved_by_a_generator == 0.25


def rank_step(
    number: int, waits: tuple[float, ...] = (0.2, 0.2), samples: float = 1.9,
    collectives: tuple[float, ...] = (0.4, 0.1), slowest: int = 1, imbalance: float = 1.0,
) -> dict[str, Any]:  # fmt: skip
    """Make the metrics of a step of two seconds of a Learner of several ranks; each value is a rank's."""
    row = {name: value for name, value in step(number, samples=samples).items() if "/learner/" not in name}
    for rank, (waiting, spent) in enumerate(zip(waits, collectives, strict=True)):
        row |= {
            f"time/learner-{rank}/wait_for_batch_s": waiting, f"time/learner-{rank}/train_s": 2 - waiting,
            f"ranks/learner-{rank}/collectives_s": spent,
        }  # fmt: skip
    return row | {"ranks/slowest": float(slowest), "ranks/imbalance": imbalance}


def test_ranks_by_hand() -> None:
    rows = [
        rank_step(2, (0.2,) * 3, collectives=(0.5, 0.1, 0.3), slowest=1, imbalance=1.1),
        rank_step(3, (0.2,) * 3, collectives=(0.1, 0.3, 0.7), slowest=0, imbalance=1.3),
        rank_step(4, (0.2,) * 3, collectives=(0.6, 0.2, 0.2), slowest=1, imbalance=1.2),
    ]
    figures = given(rank_figures(rows))
    assert figures.collectives == pytest.approx({"learner-0": 0.2, "learner-1": 0.1, "learner-2": 0.2})
    assert ranks_line(figures) == (
        "Ranks: slowest learner-1 (2 of 3 steps), with 10% of the time in collectives, the others 20%; "
        "imbalance 1.20"
    )
    # Only steps with the newest step's ranks count.
    four = rank_step(2, (0.2,) * 4, collectives=(1.0, 1.0, 1.0, 0.0), slowest=3)
    figures = given(rank_figures([four, rank_step(3)]))  # the run was resumed with two
    assert (figures.slowest, figures.num_steps) == ("learner-1", 1)
    assert figures.collectives == pytest.approx({"learner-0": 0.2, "learner-1": 0.05})


@pytest.mark.parametrize(
    "changes",
    [{"ranks/slowest": None}, {"ranks/slowest": 7.0}, {"timing/step_s": None}, {"timing/step_s": 0.0}],
)
def test_lines_without_a_slowest_rank_or_a_time_are_left_out(changes: dict[str, Any]) -> None:
    assert rank_figures([rank_step(2) | changes]) is None
    assert rank_figures([step(2), step(3)]) is None  # of one rank
    assert given(rank_figures([rank_step(2), rank_step(3) | changes])).num_steps == 1


def test_the_cause_of_waits_in_collectives() -> None:
    def hint(**changes: Any) -> str | None:
        return rank_hint(given(rank_figures([rank_step(number, **changes) for number in (2, 3, 4)])))

    assert hint() is None
    spent = "40% of the time of most ranks is in collectives"
    assert f"{spent}, because batches cannot be dealt" in str(hint(collectives=(0.8, 0.1), imbalance=1.5))
    late = hint(collectives=(0.8, 0.1))
    assert late == f"{spent}, waiting for learner-1, which has no more work: its device or node is slower"
    slow = hint(collectives=(0.8, 0.7))  # all ranks spend the time there, so nothing waits: it is the transfer
    assert "raise learner.micro_batch_tokens" in str(slow)


def test_a_frame_shows_each_rank_and_the_slowest(tmp_path: Path) -> None:
    actors = tuple(ActorState(name=f"learner-{rank}", doing="trains", num_calls=1) for rank in (0, 1))
    rows = [rank_step(number, collectives=(0.6, 0.1)) for number in range(1, 5)]
    run = make_run(tmp_path / "run", make_state(now=LiveStatus(step=4, actors=actors)), rows)
    text = drawn(view_of(run))
    first, second = [line for line in text.splitlines() if line.startswith("learner-")]
    assert "train 90%; collectives 30%" in first
    assert "; collectives 5%" in second
    words = " ".join(text.split())
    assert "! 30% of the time of most ranks is in collectives, waiting for learner-1" in words
    assert "Ranks: slowest learner-1 (3 of 3 steps)" in words


TWO_BY_FOUR = {"algorithm": {"prompts_per_step": 2, "samples_per_prompt": 4}}


def test_problems_are_counted_over_all_steps() -> None:
    nothing = Problems({}, [step(2, rollout__truncated_frac=0.1, lag__rejected=0.0)])
    assert (nothing.errors(), nothing.cut_off()) == ([], [])
    first = {"rollout__truncated_frac": 0.5, "lag__rejected": 2.0, "optim__skipped_updates": 1.0}
    second = {"rollout__truncated_frac": 0.3, "reward__ungradable": 5.0}
    found = Problems(TWO_BY_FOUR, [step(1, reward__errors=3.0, **first), step(2, reward__errors=1.0, **second)])
    assert [re.split("[,:]", text)[0] for text in found.errors()] == [
        "4 of 16 responses could not be graded",
        "5 responses were too costly to grade",
        "1 updates were skipped as not finite",
        "2 groups exceeded weight_sync.max_lag",
    ]
    assert [text.partition(" are")[0] for text in found.cut_off()] == ["40% of the responses"]


@pytest.mark.parametrize(
    ("config", "counts", "expected"),
    [
        (TWO_BY_FOUR, [(8, 0), (8, 0)], "None of the 16 responses could"),
        (TWO_BY_FOUR, [(8, 0), (7, 0)], "15 of 16 responses could not"),
        (TWO_BY_FOUR, [(8, 1)], "8 of 12 responses could not"),  # those of a dropped group were graded as well
        ({}, [(8, 0)], "8 responses could not"),
    ],
)
def test_ungraded_runs_say_so(config: dict[str, Any], counts: list[tuple[int, int]], expected: str) -> None:
    rows = [step(1, reward__errors=errors, rollout__dropped_groups=dropped) for errors, dropped in counts]
    (text,) = Problems(config, rows).errors()
    assert text.startswith(f"{expected} be graded")


def test_errors_come_first_then_responses_that_are_cut_off_then_waits(tmp_path: Path) -> None:
    steps = [step(n, reward__errors=1.0, rollout__truncated_frac=1.0) for n in (1, 2)]
    run = make_run(tmp_path / "run", make_state(), steps)
    run.config_path.write_text(yaml.safe_dump(TWO_BY_FOUR))
    text = " ".join(drawn(view_of(run), width=200).split())
    places = [
        text.index("! 2 of 16 responses could not be graded"), text.index("(steps 1 to 2)"),
        text.index("! 100% of the responses are cut off"), text.index("Learner waits 62%"),
    ]  # fmt: skip
    assert places == sorted(places)


def test_every_remedy_is_in_the_tuning_guide_and_in_the_configuration() -> None:
    known = set(leaves(load_config("configs/quickstart.yaml").model_dump()))
    source = Path("grpo_ray/tools/top/bottleneck.py").read_text().partition("def _from_outside")[2]
    named = {word for word in re.findall(r"\b[a-z_]+\.[a-z_]+\b", source) if word in known}
    assert len(named) >= 13
    guide = Path("docs/tuning.md").read_text()
    assert [name for name in sorted(named) if name not in guide] == []


def view_of(run: RunDirectory, at: float = NOW + 1) -> RunView:
    return replace(read_view(run), read_at=at)


def test_steps_of_episodes_have_columns_of_their_own(tmp_path: Path) -> None:
    of_episodes = {"episodes/turns/mean": 3.25, "episodes/status/finished": 0.875, "episodes/seconds/max": 41.7}
    run = make_run(tmp_path / "run", make_state(), [step(1), step(2) | of_episodes])
    narrow, wide = (drawn(view_of(run), width=width) for width in (80, 140))
    for text in (narrow, wide):
        assert re.search(r"turns +finished", text)
        assert re.search(r" 3\.2 +88%", text)
        assert "tokens/s" in text
    assert ("longest" in narrow, "42 s" in narrow) == (False, False)
    assert re.search(r"step +reward +lag +seconds *\n +1 ", drawn(view_of(run), width=30))  # whole numbers
    assert ("longest" in wide, "42 s" in wide, "eval" in wide) == (True, True, True)
    assert "turns " not in drawn(view_of(make_run(tmp_path / "plain", make_state(), [step(1)])), width=140)


def test_a_frame_shows_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_state(), [step(n) for n in range(1, 5)])
    text = drawn(view_of(run))
    assert "training  step 4/8" in text
    assert f"process {os.getpid()} on {socket.gethostname()}, for 0:01:06" in text
    assert "samples group 9 (and 3 more)" in text
    assert "7 groups in sampling or grading, 2 in the buffer; Generators run version 3" in text
    assert "Learner waits 62% of the time: add Generators" in text
    (last,) = [line.split() for line in text.splitlines() if line.strip().startswith("4 ")]
    assert last == ["4", "0.250", "1", "2.00", "1.90", "1.24", "0.70", "1,234"]
    assert not re.search("Ranks|collectives", drawn(view_of(run), 140))  # there is one
    begun = drawn(view_of(make_run(tmp_path / "begun", None, [])))
    assert "no state.json yet" in begun
    assert "No step has been timed yet" in begun


def test_a_frame_is_as_wide_and_as_high_as_its_terminal(tmp_path: Path) -> None:
    clock = {"time__learner__train_s": 1.0, "time__learner__wait_for_batch_s": 1.0, "eval__reward": 0.875}
    run = make_run(tmp_path / "run", make_state(), [step(n, **clock) for n in range(1, 41)])
    for width, height in ((80, 24), (140, 40)):
        console = Console(width=width, height=height, force_terminal=True, file=io.StringIO())
        lines = console.render_lines(draw_frame(view_of(run), console), pad=False)
        assert len(lines) <= height - 1
        assert max(sum(segment.cell_length for segment in line) for line in lines) <= width
    assert "0.875" in drawn(view_of(run), 140)
    assert "0.875" not in drawn(view_of(run), 80)


def test_the_learners_figures_are_one_line_of_those_that_there_are(tmp_path: Path) -> None:
    rows = [
        step(
            number, perf__mfu=mfu, perf__tokens_per_s_per_device=1000.0 * number, perf__prompt_frac=0.25,
            perf__padding_frac=0.02, memory__learner_device_peak_bytes=number * 2.0**30,
        )
        for number, mfu in ((2, 0.4), (3, 0.5))
    ]  # fmt: skip
    assert learner_figures(rows) == (
        "Learner: 45.0% MFU, 2,500 tokens/s per device, up to 3.0 GiB, 25% of the computed tokens are prompts, "
        "2% are padding"
    )
    assert learner_figures([step(2)]) == ""
    on_a_cpu = make_run(tmp_path / "run", make_state(), [step(2, perf__tokens_per_s_per_device=1500.0)])
    assert "Learner: 1,500 tokens/s per device\n" in re.sub(" +\n", "\n", drawn(view_of(on_a_cpu)))


def test_an_actors_recent_time() -> None:
    rows = [
        {"time/learner/train_s": 1.0, "time/learner/wait_for_batch_s": 2.0},
        {"time/learner/train_s": 2.0, "time/learner/snapshot_s": 0.5, "time/learner/wait_for_batch_s": None},
    ]
    assert stage_shares(rows, 2) == {"learner": "train 55%, wait for batch 36%"}


def test_a_run_that_has_ended_or_died_is_over_until_it_is_resumed(tmp_path: Path) -> None:
    ending = Ending(kind="failed", text="the cluster lacks GPUs")
    run = make_run(tmp_path / "run", make_state(ending=ending), [step(1)])
    text = drawn(view_of(run))
    assert "failed 0:01:05 after the last start: the cluster lacks GPUs" in text
    set_back = make_run(tmp_path / "set back", make_state(ending=ending, began=NOW + 7200), [step(1)])
    assert "failed 0:00:00 after the last start" in drawn(view_of(set_back))
    assert "samples group" not in text
    with run.lock():  # which comes long before the first state of its own
        assert not read_view(run).is_over
    (run.path / ".lock").write_text(json.dumps({"pid": 2**30, "host": "h", "machine": "other"}))
    assert read_view(run).is_over
    run.state_path.write_text(make_state(process_started=1.0, is_local=True).model_dump_json())
    text = " ".join(drawn(view_of(run, NOW + 30)).split())
    assert "has written nothing for 30 s and is gone" in text
    assert "resume with: grpo-ray resume" in text
    assert "--local" in text.partition("resume with: grpo-ray resume")[2]


def test_events_and_warnings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", make_state(warnings=("the disk is full", "it died")), [step(1)])
    events = [{"text": "it died", "time": NOW - 90_000}, {"actor": "scorer-1", "text": "works again"}]
    write_rows(run.events_path, [{"time": NOW, "kind": "generator_failed", **event} for event in events])
    text = drawn(view_of(run))
    assert re.search(r"2023-11-1\d \d\d:\d\d it died *\n\d\d:\d\d:\d\d scorer-1: works again", text)
    assert "! the disk is full" in text
    assert text.count("it died") == 1


def test_once_prints_one_frame_and_what_is_no_run_is_refused(tmp_path: Path, capsys: Capture) -> None:
    run = make_run(tmp_path / "run", make_state(), [step(1)])
    for words in (["--once"], []):  # there is no terminal
        assert printed(capsys, "top", run.path, *words).count("No step") == 0
    assert "not a run to watch" in refused(capsys, "top", tmp_path)
    run.events_path.write_text('{"kind": "x"}\n')
    assert "events.jsonl, line 1: it has no time; remove the line" in refused(capsys, "top", run.path)
    run.state_path.write_text("{")
    assert "state.json is not a valid run state" in refused(capsys, "top", run.path)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make a terminal standard input; bytes written to the yielded end count as typed."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr("sys.stdin", os.fdopen(theirs, "r"))
    yield ours
    os.close(ours)


def test_following_ends_with_the_run_or_with_q(tmp_path: Path, terminal: int) -> None:
    run = make_run(tmp_path / "run", make_state(), [step(1)])
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO())
    with keys() as wait:
        assert wait(0) == ""
        os.write(terminal, b"q")
        assert wait(5) == "q"  # without enter
    os.write(terminal, b"q")
    top(TopOptions(str(run.path), False, 0.01), console)  # returns because of the key
    finished = make_state(ending=Ending(kind="finished")).model_dump_json()
    threading.Timer(0.1, run.state_path.write_text, [finished]).start()
    top(TopOptions(str(run.path), False, 0.01), console)
    assert "finished 0:01:05 after the last start" in console.file.getvalue()  # type: ignore[attr-defined]


def test_ctrl_c_ends_only_the_watching_and_leaves_the_last_frame_on_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run, interrupted = make_run(tmp_path / "run", make_state(), [step(1)]), Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr("grpo_ray.tools.top.frame.read_view", interrupted)
        assert "have been ended" not in refused(capsys, "top", run.path, status=0)
    monkeypatch.setattr("grpo_ray.tools.top.frame.keys", lambda: nullcontext(interrupted))
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO())
    top(TopOptions(str(run.path), False, 0.01), console)
    _, _, after = console.file.getvalue().rpartition("\x1b[?1049l")  # type: ignore[attr-defined]
    assert "Learner waits 62% of the time" in after
