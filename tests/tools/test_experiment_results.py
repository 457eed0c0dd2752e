"""The results of experiments: tables by hand, true sentences, plots of odd data, and sweeps."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from grpo_ray.config.loading import ConfigError
from grpo_ray.tools.drawing.figures import draw_spread, new_figure
from grpo_ray.tools.experiments.curves import plot_metrics, plot_timing, plot_validation_reward, seconds_of
from grpo_ray.tools.experiments.experiment import Experiment, make_sweep, split_values
from grpo_ray.tools.experiments.outcome import ExperimentOutcome, Status
from grpo_ray.tools.experiments.table import by_variant, comparison_table, short, write_csv, write_summary

Evaluations = list[tuple[int, float]]


def outcome(
    variant: str, evaluations: Evaluations, seed: int = 0, status: Status = "finished", num_steps: int = 8,
    **metrics: Any,
) -> ExperimentOutcome:  # fmt: skip
    """Return an outcome with one row per step; a metric is a list or a function of the step. `__` means `/`."""
    rows = [{"step": step} for step in range(1, num_steps + 1)]
    for name, values in metrics.items():
        for row in rows:
            row[name.replace("__", "/")] = values(row["step"]) if callable(values) else values[row["step"] - 1]
    return ExperimentOutcome(
        variant, seed, num_steps, status, "why" if status != "finished" else "", evaluations, rows
    )


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
    write_csv(tmp_path / "table.csv", results, ["x/y", "not/there"])
    with (tmp_path / "table.csv").open() as file:
        a, b = csv.DictReader(file)
    expected = {
        "runs": 2,
        "final_reward_mean": 0.8,
        "final_reward_sd": 0.02**0.5,
        "best_reward_mean": 0.8,
        "half_reward_mean": ((0.2 + 0.3 * 4 / 6) + (0.2 + 0.2 * 4 / 6)) / 2,
        "steps_to_0.5_mean": 7,  # 6 and 8
        "steps_to_0.5_runs": 2,
        "steps_to_0.8_mean": 8,
        "steps_to_0.8_runs": 1,
        "seconds_total_mean": (17 + 24) / 2,
        "seconds_per_step_mean": 2,  # without the first
        "lag_max": 2,
        "x/y_last_quarter_mean": (2 + 4) / 2,  # of steps 7 and 8
        "diverged": 0,
        "failed": 0,
    }
    assert {name: float(a[name]) for name in expected} == pytest.approx(expected)
    assert a["not/there_last_quarter_mean"] == ""
    assert (b["runs"], b["final_reward_mean"], b["final_reward_sd"]) == ("1", "0.3", "")
    assert (b["half_reward_mean"], b["steps_to_0.5_mean"], b["steps_to_0.5_runs"]) == ("0.3", "", "0")
    assert (b["x/y_last_quarter_mean"], b["diverged"], b["failed"], b["lag_max"]) == ("7.0", "1", "1", "")


def test_comparison_table_by_hand() -> None:
    lines = comparison_table(by_variant(["a", "b", "none"], OUTCOMES), ["x/y", "lag/max"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:5]]
    assert cells[0][:4] == ["variant", "final validation reward", "best", "at half the steps"]
    assert cells[0][-4:] == ["lag/max", "warnings", "diverged", "failed"]
    rewards, steps, others = ["0.800 ± 0.141", "0.800", "0.367"], ["7", "8 (1 of 2)"], ["20.5", "2", "3", "2"]
    assert cells[2] == ["a", *rewards, *steps, *others, "none", "0", "0"]
    assert cells[3] == ["b", "0.300", "0.300", "0.300", "never", "never", "48", "6", "7", "–", "none", "1", "1"]
    assert cells[4][1:] == ["–"] * 9 + ["none", "0", "0"]


def test_warnings_of_the_runs_stand_in_the_table() -> None:
    warned = [
        replace(OUTCOMES[0], detected={"wrong_mask": 1}),
        replace(OUTCOMES[1], detected={"wrong_mask": 3, "large_lag": 9}),
    ]
    row = comparison_table(by_variant(["a"], warned), ["lag/max"]).splitlines()[2]
    assert row.split(" | ")[-3] == "large_lag at 9 (1 of 2 runs); wrong_mask at 1, 3"


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


ODD = {
    "results": OUTCOMES,
    "nothing": [],
    "no seconds, negative rewards, a metric that runs away": [
        outcome("a", [(0, -3.0), (8, 2.0)], x__y=[1, 1, 1, 1, 1e9, None, None, 1]),
        outcome("b", [(0, 0.0), (8, 0.5)]),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_plots_are_drawn_of_whatever_there_is(name: str, tmp_path: Path) -> None:
    results = by_variant(["a", "b"], ODD[name])
    plot_validation_reward(results, "title", tmp_path / "reward.png")
    plot_metrics(results, ["x/y", "lag/max", "not/there", "policy/entropy"], "title", tmp_path / "metrics.png")
    plot_timing(results, "title", tmp_path / "timing.png")
    for file in ("reward", "metrics", "timing"):
        assert imread(tmp_path / f"{file}.png").std() > 0.01


def test_bands_are_one_sample_standard_deviation_on_either_side() -> None:
    axis = new_figure(4, 3).subplots()
    draw_spread(axis, 0, "three runs, then one", [(0, [0.1, 0.2, 0.6]), (5, [0.5, 0.7, 0.6]), (9, [0.8])])
    (line,), (band,) = axis.lines, axis.collections
    assert line.get_ydata().tolist() == pytest.approx([0.3, 0.6, 0.8])
    corners = {(x, round(y, 6)) for x, y in band.get_paths()[0].vertices.tolist()}
    deviation = 0.07**0.5  # of 0.1, 0.2 and 0.6: (0.04 + 0.01 + 0.09) / 2
    expected = [(0, 0.3 - deviation), (0, 0.3 + deviation), (5, 0.5), (5, 0.7), (9, 0.8)]
    assert corners == {(x, round(y, 6)) for x, y in expected}


def test_seconds_are_the_mean_without_the_first_step() -> None:
    assert seconds_of("timing/train_s", outcome("a", [], timing__train_s=[9, *[2] * 7])) == 2
    assert seconds_of("timing/train_s", outcome("a", [])) is None


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


def test_sweep_labels_are_safe_and_distinct() -> None:
    bands = make_sweep("x.yaml", ["algorithm.correction_band=[0.5, 2],[0.1, 5]", "generator.slowdown_s=0,1"])
    label, overrides = next(iter(bands.variants.items()))
    assert label == "correction_band=_0.5,_2_,slowdown_s=0"
    assert overrides == ("algorithm.correction_band=[0.5, 2]", "generator.slowdown_s=0")
    alike = make_sweep("x.yaml", ["generator.slowdown_s=0,1", "learner.slowdown_s=0,1"])
    assert list(alike.variants)[1] == "generator.slowdown_s=0,learner.slowdown_s=1"
    paths = make_sweep("x.yaml", ["task.prompt=../a b.txt,short"])
    assert next(iter(paths.variants)) == "prompt=.._a_b.txt"
    single = make_sweep("x.yaml", ["run.save_rollouts=false"])
    assert list(single.variants) == ["save_rollouts=false"]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2", ["1", "2"]),
        ("[1,2],[3, 4]", ["[1,2]", "[3, 4]"]),
        ("{a: [1,2], b: 3},null", ["{a: [1,2], b: 3}", "null"]),
        ("'a,b', \"c,d\"", ["'a,b'", '"c,d"']),
        ("", [""]),
    ],
)
def test_values_are_split_at_outer_commas(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize(
    ("arguments", "name", "message"),
    [
        ([], None, "at least one"),
        (["a.b"], None, "write it as"),
        (["a.b=1,,2"], None, "a value is empty"),
        (["a.b=1,2", "a.b=3"], None, "a.b is given twice"),
        (["a.b=1,1"], None, "have the name 'b=1'"),
        (["a.b=1,2"], "../up", "not a folder name"),
    ],
)
def test_wrong_sweeps(arguments: list[str], name: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_sweep("x.yaml", arguments, name)
