"""Experiments from end to end, with fake runs in processes of their own, and their results by hand."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pyarrow as pa
import pytest
from builders import check_names
from commands import Capture, printed, refused
from matplotlib.image import imread
from run_process import until, wait_until
from small_run import QUICKSTART, SMALL

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config, make_config
from grpo_ray.errors import RunError
from grpo_ray.records.durable import write_csv
from grpo_ray.records.run_files import read_metrics
from grpo_ray.run.machine import GpuPool, cores_of, default_jobs, gpus_of
from grpo_ray.run.signals import signals_handled
from grpo_ray.tools.cli import main
from grpo_ray.tools.drawing.figures import draw_spread, legend_beside, new_figure
from grpo_ray.tools.experiments import curves
from grpo_ray.tools.experiments.curves import plot_metrics, plot_timing, plot_validation_reward
from grpo_ray.tools.experiments.experiment import EXPERIMENTS, Experiment, make_sweep, split_values
from grpo_ray.tools.experiments.experiment_plan import plan_experiment
from grpo_ray.tools.experiments.outcome import ExperimentOutcome, Status
from grpo_ray.tools.experiments.run_experiment import run_experiment
from grpo_ray.tools.experiments.table import by_variant, comparison_table, csv_row, short, write_summary

FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_run_cli.py"))
pytestmark = pytest.mark.slow  # each starts processes that stand in for runs
RATES = {"low": ("learner.learning_rate=1e-4",), "high": ("learner.learning_rate=1e-3",)}
STEPS = ("algorithm.num_steps=8", "evaluation.every_num_steps=4")
LOW_HIGH = Experiment("rates", "Low or high?", RATES, ("optim/grad_norm",), STEPS)


class FakeRuns:
    """A runner of experiments with fake runs, which records the launches."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"

    def script(self, **runs: dict[str, Any]) -> None:
        """Set the script of each run: `low_seed0={...}`."""
        by_name = {name.replace("_", "-"): course for name, course in runs.items()}
        (self.folder / "script.json").write_text(json.dumps(by_name))

    def run(self, seeds: int = 1, experiment: Experiment = LOW_HIGH, jobs: int = 4, **options: Any) -> bool:
        options = {"base": QUICKSTART, "overrides": (), "command": "grpo-ray experiment rates", **options}
        options |= {"output": str(self.out), "program": FAKE}
        return run_experiment(experiment, num_seeds=seeds, jobs=jobs, **options)

    def launched(self) -> list[str]:
        launches = self.folder / "launches.txt"
        names = [line.split()[0] for line in launches.read_text().splitlines()] if launches.exists() else []
        launches.unlink(missing_ok=True)
        return sorted(names)

    def text(self, name: str) -> str:
        return (self.out / "rates" / name).read_text()


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    monkeypatch.setenv("FAKE_RUNS", str(tmp_path))
    for plot in ("plot_validation_reward", "plot_metrics", "plot_timing"):  # other tests here draw them
        monkeypatch.setattr(curves, plot, lambda *arguments: arguments[-1].touch())
    runs = FakeRuns(tmp_path)
    runs.script()
    return runs


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_variant_of_every_experiment_is_a_valid_configuration(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    assert check_names(experiment.metrics) == []
    plan = plan_experiment(experiment, QUICKSTART, [], num_seeds=2, output=str(tmp_path))
    assert len(plan.runs) == 2 * len(experiment.variants) >= 4
    for run in plan.runs:
        assert run.config.run.seed == run.seed
        assert run.config.run.name == f"{run.variant}-seed{run.seed}" == run.name
        assert run.config.run.if_exists == "resume"
        assert Path(run.config.run.output_dir) == run.directory.path.parent
    assert not tmp_path.joinpath(name).exists()


def test_variants_have_the_samples_and_updates_that_they_are_named_for() -> None:
    def configs(name: str, base: str = QUICKSTART) -> dict[str, Config]:
        plan = plan_experiment(EXPERIMENTS[name], base, [], 1, "experiments")
        return {run.variant: run.config for run in plan.runs}

    assert [config.rollouts_per_step for config in configs("group-size").values()] == [256] * 5
    assert [config.num_updates for config in configs("colocate").values()][:2] == [1, 4]
    for base in (QUICKSTART, "configs/cs336-2026.yaml"):
        for variant, config in configs("cs336-2026", base).items():
            assert config.num_updates == (32 if variant.endswith("-32") else 1)
            assert (config.algorithm.epochs_per_batch, config.weight_sync.max_lag) == (1, 0)


def test_all_problems_are_reported_before_anything_starts(fakes: FakeRuns) -> None:
    variants = {"a": ("algorithm.los=x",), "b": ("learner.learning_rate=-1",), "c": (), "d": ()}
    wrong = Experiment("rates", "?", variants, ())
    with pytest.raises(ConfigError) as caught:
        fakes.run(2, wrong, overrides=["algorithm.num_steps=zero", "run.seed=3"])
    message = str(caught.value)
    assert "run.seed is set for each run" in message
    assert message.count("algorithm.los: unknown key") == 1
    assert message.count("learner.learning_rate: -1 is not valid") == 1
    assert "variant c, d: " in message
    assert message.count("algorithm.num_steps: 'zero' is not valid") == 3  # a's, b's, and c's and d's
    with pytest.raises(ConfigError, match="--seeds 0: give at least 1"):
        fakes.run(0)
    with pytest.raises(ConfigError, match=r"learner\.learning_rate is what rates varies"):
        fakes.run(overrides=["learner={}"])
    with pytest.raises(ConfigError, match="variant d: the same configuration as variant c"):
        fakes.run(1, Experiment("rates", "?", {"c": (), "d": ()}, ()))
    assert fakes.launched() == []
    assert not fakes.out.exists()


def test_finished_runs_are_not_repeated_and_seeds_can_be_added(fakes: FakeRuns) -> None:
    assert fakes.run(seeds=1)
    assert fakes.launched() == ["high-seed0", "low-seed0"]
    assert {path.stem for path in fakes.out.glob("rates/*.png")} == {"validation_reward", "metrics", "timing"}
    (fakes.out / "rates/table.csv").unlink()
    assert fakes.run(seeds=3)
    assert fakes.launched() == ["high-seed1", "high-seed2", "low-seed1", "low-seed2"]
    assert json.loads(fakes.text("experiment.json"))["seeds"] == 3
    assert "low,3," in fakes.text("table.csv")
    # Runs without their last line or checkpoint are resumed.
    runs = fakes.out / "rates/runs"
    metrics = runs / "low-seed0/metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    (runs / "high-seed0/checkpoints/step-000008/training/state.json").unlink()
    fakes.run(seeds=3)
    assert fakes.launched() == ["high-seed0", "low-seed0"]


def test_the_runs_read_a_copy_of_the_base_and_another_definition_is_refused_by_name(fakes: FakeRuns) -> None:
    questions, base = fakes.folder / "pairs.jsonl", fakes.folder / "mine.yaml"
    questions.write_text('{"prompt": "a", "answer": "b", "keywords": ["b"]}\n')
    paths = f"train_path: {questions}, validation_path: {questions}"
    base.write_text(f"model: {{tiny: {{}}}}\ntask: {{kind: keywords, {paths}}}\n")
    assert fakes.run(2, base=str(base), overrides=["learner.warmup_steps=3"])
    launches = (fakes.folder / "launches.txt").read_text().splitlines()
    assert {line.split()[1] for line in launches} == {str(fakes.out / "rates/base.yaml")}
    assert fakes.text("base.yaml") == base.read_text()
    fakes.launched()
    asked = questions.read_text()
    questions.write_text(asked.replace('"a"', '"c"'))
    with pytest.raises(RunError, match=r"variant low: task\.train_path \(.*pairs\.jsonl\): was"):
        fakes.run(2, base=str(base), overrides=["learner.warmup_steps=3"])
    questions.write_text(asked)
    base.write_text(base.read_text().replace("kind: keywords", "kind: keywords, num_validation_prompts: 5"))
    other = Experiment("rates", "?", {"low": (), "new": ("weight_sync.max_lag=0",)}, (), STEPS)
    with pytest.raises(RunError) as caught:
        fakes.run(1, other, base=str(base), overrides=["learner.warmup_steps=4"])
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "give another --output or --name" in lines[0]
    assert lines[1:] == [
        "base configuration: task.num_validation_prompts: was 64, is 5",
        "overrides: was learner.warmup_steps=3, is learner.warmup_steps=4",
        "variant low: was learner.learning_rate=1e-4, is none",
        "variant high: was learner.learning_rate=1e-3, is not there",
        "variant new: was not there, is weight_sync.max_lag=0",
        "seeds: was 2, is 1; seeds can be added, not removed",
    ]
    assert fakes.launched() == []


def test_failure_and_divergence_are_named_and_failures_retried(fakes: FakeRuns, capsys: Capture) -> None:
    fakes.script(
        low_seed0={"rewards": [0.2, 0.3, 0.09]},
        low_seed1={"rewards": [0.2, 0.3, 0.1]},  # exactly half is not below half
        high_seed0={"ending": "fails"},
        high_seed1={"ending": "not finite", "rewards": [0.2, 0.7, 0.8]},
    )
    assert not fakes.run(seeds=2)
    output = capsys.readouterr().out
    assert "high-seed0: failed (the cluster lacks GPUs) after" in output
    assert "low-seed0: diverged (validation reward fell from 0.200 to 0.090)" in output
    assert "low-seed1: finished after" in output
    rows = {line.split(",")[0]: line.split(",") for line in fakes.text("table.csv").splitlines()}
    assert (rows["low"][1], rows["low"][-2:]) == ("2", ["1", "0"])
    assert (rows["high"][1], rows["high"][-2:]) == ("1", ["1", "1"])
    assert float(rows["high"][2]) == 0.7  # the last validation before it went wrong
    summary = fakes.text("summary.md")
    assert "- high, seed 0: failed: the cluster lacks GPUs" in summary
    assert "- high, seed 1: diverged: 3 steps in a row had no finite update" in summary
    assert "- low, seed 0: diverged: validation reward fell" in summary
    assert "low, seed 1" not in summary
    fakes.launched()
    fakes.script(high_seed0={"rewards": [-1.0, -1.1, -1.2]})  # half of what was never above 0 says nothing
    assert fakes.run(seeds=2)
    assert fakes.launched() == ["high-seed0"]
    assert "failed: " not in fakes.text("summary.md")


def test_exactly_as_many_parallel_runs_as_jobs(fakes: FakeRuns) -> None:
    meet = {"meets": 2}  # a run ends once two runs are active
    fakes.script(low_seed0=meet, high_seed0=meet, low_seed1=meet, high_seed1=meet)
    assert fakes.run(seeds=2, jobs=2, experiment=replace(LOW_HIGH, metrics=()))
    assert not (fakes.out / "rates/metrics.png").exists()
    counts = (fakes.folder / "met.txt").read_text().split()
    assert (len(counts), max(map(int, counts))) == (4, 2)


PROGRAM = f"""
import sys
from grpo_ray.tools import cli
from grpo_ray.tools.experiments import experiment, run_experiment
from grpo_ray.tools.experiments.experiment import Experiment
experiment.EXPERIMENTS["rates"] = Experiment("rates", "?", {RATES}, (), {STEPS})
run_experiment.run_experiment.__defaults__ = ({FAKE},)
sys.exit(cli.main(sys.argv[1:]))
"""
FIRST = ("low-seed0", "high-seed0")
WAITS = {"low_seed0": {"ending": "waits"}, "high_seed0": {"ending": "waits"}}


def both_wait(fakes: FakeRuns) -> bool:
    return all((fakes.out / "rates/runs" / name / "waiting").exists() for name in FIRST)


def start_waiting(fakes: FakeRuns) -> subprocess.Popen[str]:
    """Start an experiment by the command line, with two runs that wait for a signal and two queued."""
    fakes.script(**WAITS)
    words = ["experiment", "rates", f"--output={fakes.out}", "--seeds=2", "--jobs=2"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], start_new_session=True, **pipes)
    wait_until(process, lambda: both_wait(fakes))
    return process


def check_stopped(fakes: FakeRuns) -> None:
    """Check that the first two runs received one signal each, and that the others follow when resumed."""
    assert fakes.launched() == sorted(FIRST)  # and no other
    for name in FIRST:
        run = fakes.out / "rates/runs" / name
        assert (run / "signals").read_text() == "1"
        assert (run / "checkpoints/step-000004").exists()
    fakes.script()
    assert fakes.run(seeds=2)
    assert len(fakes.launched()) == 4


def test_ctrl_c_stops_the_runs_once_and_waits_for_them(fakes: FakeRuns) -> None:
    process = start_waiting(fakes)
    with pytest.raises(RunError, match=f"another process .pid {process.pid} "):
        fakes.run(seeds=2)  # two starts of one experiment do not mix
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output
    assert f"resume with: grpo-ray experiment rates --output={fakes.out} --seeds=2 --jobs=2" in output
    assert output.count(": stopped after") == 2
    check_stopped(fakes)


def test_sigterm_stops_them_too(fakes: FakeRuns) -> None:
    def stop() -> None:
        until(lambda: both_wait(fakes))
        os.kill(os.getpid(), signal.SIGTERM)

    fakes.script(**WAITS)
    threading.Thread(target=stop, daemon=True).start()
    stopped = pytest.raises(KeyboardInterrupt, match="resume with: grpo-ray experiment rates")
    with signals_handled((signal.SIGTERM,), lambda *_: None), stopped:  # by default it would end the tests
        fakes.run(seeds=2, jobs=2)
    check_stopped(fakes)


def test_a_killed_experiment_leaves_no_run(fakes: FakeRuns) -> None:
    process = start_waiting(fakes)
    children = psutil.Process(process.pid).children()
    assert len(children) == 2
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(children, timeout=600)
    assert (len(gone), alive) == (2, [])
    assert [(fakes.out / "rates/runs" / name / "signals").read_text() for name in FIRST] == ["0", "0"]


def test_jobs_by_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = ["generator.num_threads=3", "learner.num_threads=2"]
    two = load_config(QUICKSTART, ["generator.num_generators=2", *threads])
    assert (cores_of(two), gpus_of(two)) == (8, 0)
    ranks = load_config(QUICKSTART, ["learner.num_ranks=3", "learner.num_threads=2"])
    assert cores_of(ranks) == load_config(QUICKSTART).generator.num_threads + 3 * 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(17)))
    assert default_jobs([two, load_config(QUICKSTART)]) == 2
    assert default_jobs([load_config(QUICKSTART, ["learner.cpu_cores=[0]"])]) == 1
    monkeypatch.setattr("grpo_ray.run.machine._num_gpus", lambda: 0)  # so each actor takes one core
    assert default_jobs([make_config({"model": {"tiny": {}}, "task": {"kind": "sorting"}}, (), "")]) == 8
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert default_jobs([two]) == 1


def test_each_run_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")  # as if it were unset
    monkeypatch.setattr("grpo_ray.run.machine.visible_gpus", lambda: ["4", "5", "6", "7"])
    gpus = ["generator.num_gpus=1", "learner.num_gpus=1"]
    apart = load_config(QUICKSTART, gpus)
    together = load_config(QUICKSTART, [*gpus, "generator.colocated=true", "weight_sync.max_lag=0"])
    assert (gpus_of(apart), gpus_of(together), default_jobs([apart]), default_jobs([together])) == (2, 1, 2, 4)
    pool = GpuPool([apart, together])
    assert [pool.take(run) for run in (apart, together, apart)] == [["4", "5"], ["6"], None]
    pool.give_back(["4", "5"])
    assert pool.take(apart) == ["7", "4"]
    assert GpuPool([load_config(QUICKSTART)]).take(load_config(QUICKSTART)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment", "kl-drif"], "'kl-drif' is not an experiment; did you mean kl-drift?"),
        (["experiment"], "give the name of an experiment: learning-rate, "),
        (["experiment", "builtins:dict"], "builtins:dict returned a dict; it must return an Experiment"),
        (["experiment", "async", "--config", "nowhere.yaml"], "nowhere.yaml: 1 problem"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refused(capsys, *arguments)


def test_the_list_and_overrides_around_options(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert len(printed(capsys, "experiment", "--list").splitlines()) == len(EXPERIMENTS)
    started = Mock(return_value=True)
    monkeypatch.setattr("grpo_ray.tools.experiments.run_experiment.run_experiment", started)
    assert main(["experiment", "async", "a.b=1", "--seeds", "2", "c.d=2", "--jobs", "3"]) == 0
    assert main(["sweep", QUICKSTART, "a.b=1,2", "--name", "mine", "c.d=3,4"]) == 0
    first, second = (call.args for call in started.call_args_list)
    assert (first[0].name, first[2:6]) == ("async", (("a.b=1", "c.d=2"), 2, "experiments", 3))
    assert first[6] == "grpo-ray experiment async a.b=1 --seeds 2 c.d=2 --jobs 3"
    assert (second[0].name, second[3]) == ("mine", 1)
    assert list(second[0].variants) == ["b=1,d=3", "b=1,d=4", "b=2,d=3", "b=2,d=4"]
    with pytest.raises(SystemExit):
        main(["experiment", "async", "--jobs", "0"])


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("model_cache", "shared_ray")
def test_a_real_run(tmp_path: Path) -> None:
    sizes = ["algorithm.num_steps=2", "evaluation.every_num_steps=1", "run.save_rollouts=false"]
    metrics = ("optim/grad_norm", "policy/entropy")
    experiment = Experiment("rates", "How high?", {"high": RATES["high"]}, metrics, tuple(SMALL))
    arguments = (experiment, QUICKSTART, sizes, 1, str(tmp_path), 1, "grpo-ray experiment rates")
    assert run_experiment(*arguments), (tmp_path / "rates/logs/high-seed0.log").read_text()
    folder = tmp_path / "rates"
    assert [row["step"] for row in read_metrics(folder / "runs/high-seed0/metrics.jsonl")] == [1, 2]
    assert load_config(folder / "runs" / "high-seed0" / "config.yaml").learner.learning_rate == 1e-3
    (cells,) = csv.DictReader((folder / "table.csv").read_text().splitlines())
    assert cells["runs"] == "1"
    assert float(cells["seconds_per_step_mean"]) > 0
    assert cells["policy/entropy_last_quarter_mean"]
    for name in ("validation_reward", "metrics", "timing"):
        assert imread(folder / f"{name}.png").std() > 0.01
    assert run_experiment(*arguments, ("no-such-program",))  # nothing is left to start


def outcome(
    variant: str, evaluations: list[tuple[int, float]], seed: int = 0, status: Status = "finished",
    num_steps: int = 8, **metrics: Any,
) -> ExperimentOutcome:  # fmt: skip
    """Return an outcome with one row per step; a metric is a list or a function of the step. `__` means `/`."""
    steps, why = range(1, num_steps + 1), "why" if status != "finished" else ""
    columns = {n.replace("__", "/"): [v(s) for s in steps] if callable(v) else v for n, v in metrics.items()}
    table = pa.table({"step": list(steps), **columns})
    return ExperimentOutcome(variant, seed, num_steps, status, why, evaluations, table)


# Two seeds of `a`; one result and one failure of `b`.
OUTCOMES = [
    outcome(
        "a", [(0, 0.2), (6, 0.5), (8, 0.9)], 0,
        timing__step_s=lambda step: 10.0 if step == 1 else 1.0, x__y=[9, 9, 9, 9, 9, 9, 1, 3], lag__max=[1] * 8,
    ),
    outcome(
        "a", [(0, 0.2), (6, 0.4), (8, 0.7)], 1,
        timing__step_s=lambda step: 3.0, x__y=[9, 9, 9, 9, 9, 9, 4, None], lag__max=[1, 2, 1, 1, 1, 1, 1, 1],
    ),
    outcome("b", [(0, 0.1), (4, 0.3)], 0, "diverged", num_steps=8, x__y=[7] * 8, timing__step_s=lambda _: 6.0),
    outcome("b", [(0, 0.5), (8, 1.0)], 1, "failed", x__y=[1000] * 8),
]  # fmt: skip


def test_table_by_hand(tmp_path: Path) -> None:
    results = by_variant(["a", "b"], OUTCOMES)
    write_csv(tmp_path / "table.csv", [csv_row(result, ["x/y", "not/there"]) for result in results])
    a, b = csv.DictReader((tmp_path / "table.csv").read_text().splitlines())
    expected = {
        "runs": 2, "final_reward_mean": 0.8, "final_reward_sd": 0.02**0.5, "best_reward_mean": 0.8,
        "half_reward_mean": ((0.2 + 0.3 * 4 / 6) + (0.2 + 0.2 * 4 / 6)) / 2, "steps_to_0.8_mean": 8,
        "steps_to_0.8_runs": 1, "steps_to_0.5_runs": 2, "steps_to_0.5_mean": 7,  # 6 and 8
        "seconds_total_mean": (17 + 24) / 2, "seconds_per_step_mean": 2,  # without the first
        "lag_max": 2, "diverged": 0, "failed": 0, "x/y_last_quarter_mean": (2 + 4) / 2,  # of steps 7 and 8
    }  # fmt: skip
    assert {name: float(a[name]) for name in expected} == pytest.approx(expected)
    assert a["not/there_last_quarter_mean"] == ""
    assert (b["runs"], b["final_reward_mean"], b["final_reward_sd"]) == ("1", "0.3", "")
    assert (b["half_reward_mean"], b["steps_to_0.5_mean"], b["steps_to_0.5_runs"]) == ("0.3", "", "0")
    assert (b["x/y_last_quarter_mean"], b["diverged"], b["failed"], b["lag_max"]) == ("7.0", "1", "1", "")


def test_comparison_table_by_hand() -> None:
    detected = ({"wrong_mask": 1}, {"wrong_mask": 3, "large_lag": 9}, {}, {})
    outcomes = [replace(each, detected=steps) for each, steps in zip(OUTCOMES, detected, strict=True)]
    lines = comparison_table(by_variant(["a", "b", "none"], outcomes), ["x/y", "lag/max"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[0][:4] == ["variant", "final validation reward", "best", "at half the steps"]
    assert cells[0][-4:] == ["lag/max", "warnings", "diverged", "failed"]
    rewards, steps, others = ["0.800 ± 0.141", "0.800", "0.367"], ["7", "8 (1 of 2)"], ["20.5", "2", "3", "2"]
    warnings = "large_lag at 9 (1 of 2 runs); wrong_mask at 1, 3"
    assert cells[2] == ["a", *rewards, *steps, *others, warnings, "0", "0"]
    assert cells[3] == ["b", "0.300", "0.300", "0.300", "never", "never", "48", "6", "7", "–", "none", "1", "1"]
    assert cells[4][1:] == ["–"] * 9 + ["none", "0", "0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (0.0, "0"), (12.0, "12"), (1.234, "1.23"), (0.01234, "0.0123"),
     (1234.5, "1234"), (1.234e-5, "1.23e-05"), (12.345, "12.3"), (-0.5, "-0.500"), (1.23e9, "1.23e+09")],
)  # fmt: skip
def test_short_numbers(value: float | None, text: str) -> None:
    assert short(value) == text


def summary_of(**finals: list[float]) -> str:
    outcomes = [
        outcome(name, [(0, 0.1), (8, reward)], seed, timing__step_s=lambda _, name=name: 1.0 + (name != "a"))
        for name, rewards in finals.items()
        for seed, reward in enumerate(rewards)
    ]
    experiment = Experiment("e", "Which?", dict.fromkeys(finals, ()), ("x/y",), problem=12)
    return write_summary(experiment, by_variant(finals, outcomes), "grpo-ray experiment e", "a machine", jobs=2)


def line_of(summary: str, start: str, nth: int = 0) -> str:
    return [line for line in summary.splitlines() if line.startswith(f"- **{start}**")][nth]


def test_summary_says_within_the_spread_only_where_it_is() -> None:
    summary = summary_of(a=[0.5, 0.7], b=[0.6, 0.9], c=[0.9, 0.92], d=[0.9], e=[0.75, 0.95])
    # sd: a 0.141, b 0.212, c 0.014; the differences of the means are 0.15 and 0.31
    assert line_of(summary, "a") == "- **a**: final validation reward 0.600 ± 0.141 (2 runs)"
    assert line_of(summary, "b").endswith("; +0.150, within the spread (0.255), against a")
    assert line_of(summary, "c").endswith("; +0.310, more than the spread (0.142), against a")
    assert line_of(summary, "d").endswith("; +0.300 (one run: the spread is unknown) against a")
    assert line_of(summary, "e").endswith("; +0.250, more than the spread (0.200), against a")  # not 2 x 0.141
    assert "within the spread" not in line_of(summary, "c") + line_of(summary, "d")
    assert line_of(summary, "b", 1) == "- **b**: 2 s per step, 2 times a's"
    assert "- 2 parallel runs shared the machine" in summary
    assert "- in no run's metrics: x/y" in summary
    assert summary.startswith("# e\n\nWhich? (handout, problem 12)\n")
    assert summary.endswith("## Generated by\n\n    grpo-ray experiment e\n\non a machine\n")


def test_summary_of_a_first_variant_without_a_result() -> None:
    outcomes = [outcome("a", [], 0, "failed"), outcome("b", [(0, 0.2), (8, 0.4)])]
    experiment = Experiment("e", "?", {"a": (), "b": ()}, ())
    summary = write_summary(experiment, by_variant(["a", "b"], outcomes), "command", "machine", 1)
    assert "- **a**: no result" in summary
    assert line_of(summary, "b") == "- **b**: final validation reward 0.400 (1 run)"
    assert "- a, seed 0: failed: why" in summary
    assert "within" not in summary.lower().replace("within the spread: the means", "")


ODD = [  # no seconds, negative rewards, a metric that runs away
    outcome("a", [(0, -3.0), (8, 2.0)], x__y=[1, 1, 1, 1, 1e9, None, None, 1]),
    outcome("b", [(0, 0.0), (8, 0.5)], timing__step_s=lambda _: 2.0),
]


@pytest.mark.parametrize("outcomes", [[], ODD], ids=["nothing", "odd"])
def test_plots_are_drawn_of_whatever_there_is(outcomes: list[ExperimentOutcome], tmp_path: Path) -> None:
    results = by_variant(["a", "b"], outcomes)
    plot_validation_reward(results, "title", tmp_path / "reward.png")
    plot_metrics(results, ["x/y", "lag/max", "not/there", "policy/entropy"], "title", tmp_path / "metrics.png")
    plot_timing(results, "title", tmp_path / "timing.png")
    for file in ("reward", "metrics", "timing"):
        assert imread(tmp_path / f"{file}.png").std() > 0.01


def test_a_legend_has_the_labels_of_all_axes_once() -> None:
    figure = new_figure(8, 3)
    for axis, labels in zip(figure.subplots(1, 3), ("", "ab", "bc"), strict=True):
        for label in labels:
            axis.plot([1, 2], label=label)
    legend_beside(figure, "title")
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]


def test_bands_are_one_sample_standard_deviation_on_either_side() -> None:
    axis = new_figure(4, 3).subplots()
    draw_spread(axis, 0, "three runs, then one", [(0, [0.1, 0.2, 0.6]), (5, [0.5, 0.7, 0.6]), (9, [0.8])])
    (line,), (band,) = axis.lines, axis.collections
    assert line.get_ydata().tolist() == pytest.approx([0.3, 0.6, 0.8])
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices.tolist()}
    deviation = 0.07**0.5  # of 0.1, 0.2 and 0.6: (0.04 + 0.01 + 0.09) / 2
    expected = [(0, 0.3 - deviation), (0, 0.3 + deviation), (5, 0.5), (5, 0.7), (9, 0.8)]
    assert corners == {(x, round(y, 6)) for x, y in expected}


def test_sweep_is_the_product_with_readable_labels() -> None:
    arguments = ["learner.learning_rate=0.0001,1e-3", "algorithm.loss=gspo,cispo", "algorithm.num_steps=4"]
    sweep = make_sweep("configs/quickstart.yaml", arguments)
    assert dict(sweep.variants) == {
        f"learning_rate={rate},loss={loss}": (f"learner.learning_rate={rate}", f"algorithm.loss={loss}")
        for rate in ("0.0001", "1e-3")
        for loss in ("gspo", "cispo")
    }
    assert sweep.common == ("algorithm.num_steps=4",)
    assert sweep.name == "sweep-quickstart-learning_rate-loss"
    assert make_sweep("x.yaml", arguments, "mine").name == "mine"
    # Labels are safe and distinct.
    bands = make_sweep("x.yaml", ["algorithm.correction_band=[0.5, 2],[0.1, 5]", "generator.slowdown_s=0,1"])
    label, overrides = next(iter(bands.variants.items()))
    assert label == "correction_band=_0.5,_2_,slowdown_s=0"
    assert overrides == ("algorithm.correction_band=[0.5, 2]", "generator.slowdown_s=0")
    alike = make_sweep("x.yaml", ["generator.slowdown_s=0,1", "learner.slowdown_s=0,1"])
    assert list(alike.variants)[1] == "generator.slowdown_s=0,learner.slowdown_s=1"
    assert next(iter(make_sweep("x.yaml", ["task.prompt=../a b.txt,short"]).variants)) == "prompt=.._a_b.txt"
    assert list(make_sweep("x.yaml", ["run.save_rollouts=false"]).variants) == ["save_rollouts=false"]


@pytest.mark.parametrize(
    ("text", "values"),
    [("1,2", ["1", "2"]), ("[1,2],[3, 4]", ["[1,2]", "[3, 4]"]), ("", [""]),
     ("{a: [1,2], b: 3},null", ["{a: [1,2], b: 3}", "null"]), ("'a,b', \"c,d\"", ["'a,b'", '"c,d"'])],
)  # fmt: skip
def test_values_are_split_at_outer_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [([], None, "at least one"), (["a.b"], None, "write it as"), (["a.b=1,,2"], None, "a value is empty"),
     (["a.b=1,2", "a.b=3"], None, "a.b is given twice"), (["a.b=1,1"], None, "have the name 'b=1'"),
     (["a.b=1,2"], "../up", "not a folder name")],
)  # fmt: skip
def test_wrong_sweeps(arguments: list[str], name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sweep("x.yaml", arguments, name)
