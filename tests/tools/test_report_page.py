"""The run's web page and its command: one run's data, safe JSON, refusals."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import ALL, HOSTILE, group, make_run, metrics_of, write_lines

from grpo_ray.config import Config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.cli import main
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.tools.report.run_header import about
from grpo_ray.tools.report.write_report import embedded_json, make_page, names_of
from grpo_ray.tools.top.bottleneck import bottleneck
from grpo_ray.watch.run_state import Ending, LiveStatus, RunState

# ---- one run's data ----


def test_data_of_a_run(tmp_path: Path, tiny_config: Config) -> None:
    steps = [[group(step), group(step, ["a", "b", "c", "d"], group_id=100 + step)] for step in range(6)]
    run = make_run(tmp_path / "run", tiny_config, steps=steps)
    data = run_data(run, "a run", ALL, "none")
    training, validation = data["series"]
    assert training["columns"]["reward/mean"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert training["standard_errors"]["reward/mean"] == [0.125] * 6  # groups of means 1/2 and 1/4
    assert validation["steps"] == [0, 2, 4, 6]
    assert validation["columns"]["eval/reward"] == [0.0, 0.2, 0.4, 0.6]
    assert validation["standard_errors"]["eval/reward"] == [0.05] * 4
    assert "mismatch/kl" not in training["columns"]  # null in every line
    assert data["facts"] == {
        "steps": "6", "validation reward": "0.000 → 0.600", "best": "0.600 at step 6",
        "training reward": "0.100 → 0.600", "rollouts": "36", "time in steps": "12 s",
        "trained": "100 tokens/s", "largest lag": "1",
    }  # fmt: skip
    assert data["config"]["algorithm.loss"] == "grpo_clip"
    assert data["config"]["model.tiny.tie_embeddings"] in ("true", "false")
    assert data["config"]["algorithm.cliprange"] == "null"
    assert {"generator.engine", "sampling.max_tokens"} <= set(data["changed"]) <= data["config"].keys()
    assert "algorithm.loss" not in data["changed"]


def test_a_runs_settings_and_ending(tmp_path: Path, tiny_config: Config) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create(tiny_config)
    assert about(run, None) == {"state": "unknown (there is no state.json)"}
    data = run_data(run, "run", ALL, None)  # of a run that has only begun
    assert data["facts"] == {"steps": "none yet", "rollouts": "not saved"}
    assert (data["rollouts"], data["stages"], data["ranks"]) == ([], {}, [])
    state = RunState(
        time=1_700_000_060.0, began=1_700_000_000.0, host="node-1", pid=1, process_started=0.0, num_steps=1000,
        phase="training", now=LiveStatus(step=12),
    )  # fmt: skip
    run.state_path.write_text(state.model_dump_json())
    shown = about(run, tiny_config)
    assert shown["state"] == "not finished: training, step 12 of 1,000, 2023-11-14 22:14 UTC"
    assert shown["last start"] == "2023-11-14 22:13 UTC, on node-1"
    assert shown["task"] == "sorting"
    assert shown["run"].endswith(f"grpo_clip, learning rate {tiny_config.learner.learning_rate:g}")
    failed = state.model_copy(update={"ending": Ending(kind="failed", text="no GPU")})
    run.state_path.write_text(failed.model_dump_json())
    data = run_data(run, "run", ALL, None)
    assert data["errors"] == ["failed at step 12 of 1,000, 2023-11-14 22:14 UTC: no GPU"]
    assert next(iter(data["about"])) == "last start"


def test_problems_and_the_bottleneck_are_those_of_top(tmp_path: Path, tiny_config: Config) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=2)
    rows = [metrics_of(step) | {"reward/errors": 1.0, "rollout/truncated_frac": 0.5} for step in range(1, 31)]
    write_lines(run.metrics_path, rows)
    summary = {"step": 6, "reward": 0.5, "num_errors": 3, "num_examples": 4, "num_samples": 2}
    write_lines(run.evaluations_summary_path, [summary])
    data = run_data(run, "run", ALL, "none")
    whole = 30 * tiny_config.rollouts_per_step  # of all steps, not of the last ones alone
    assert data["errors"][0].startswith(f"30 of {whole:,} responses could not be graded")
    assert data["errors"][1] == "3 of 8 responses of the validation at step 6 could not be graded"
    assert data["hints"][0].startswith("50% of the responses are cut off")
    assert data["hints"][1] == bottleneck(rows)


def test_facts_are_of_all_steps(tmp_path: Path, tiny_config: Config) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=2)
    seconds = {1: 1.0, 2: 9.0}  # 200 tokens in each: the mean of the steps' rates is 111
    ages = {1: 3.0, 2: None}  # a value is missing after a checkpoint of an earlier release
    rows = [
        metrics_of(step) | {"timing/step_s": seconds[step], "lag/updates/max": ages[step]} for step in (1, 2)
    ]
    write_lines(run.metrics_path, rows)
    facts = run_data(run, "run", ALL, "none")["facts"]
    assert (facts["trained"], facts["time in steps"]) == ("40 tokens/s", "10 s")
    assert facts["largest lag"] == "1 (3 updates)"


# ---- the page ----


def script_data(page: str) -> Any:
    """Return the page's JSON as a browser finds it: up to the first `</script`."""
    inside = page.partition('<script type="application/json" id="data">')[2]
    return json.loads(re.split("</script", inside, maxsplit=1, flags=re.I)[0])


def test_no_text_of_a_run_escapes_from_the_data() -> None:
    embedded = embedded_json({text: [text, math.nan] for text in HOSTILE})
    assert not re.search("[<>&\u2028\u2029]", embedded)
    assert json.loads(embedded) == {text: [text, None] for text in HOSTILE}


def test_hostile_texts_arrive_intact_and_add_no_script(tmp_path: Path, tiny_config: Config) -> None:
    run = make_run(tmp_path / "run", tiny_config, num_steps=1, steps=[[group(0, HOSTILE)]])
    page = make_page([run_data(run, HOSTILE[0], ALL, None)])
    assert [row["response"] for row in script_data(page)["runs"][0]["rollouts"]] == HOSTILE
    assert len(re.findall("<script", page)) == 2
    assert "<title>&lt;/script&gt;" in page
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//", page)


def test_links_planted_in_a_runs_folder_are_not_followed(tmp_path: Path, tiny_config: Config) -> None:
    run, mine = make_run(tmp_path / "run", tiny_config, num_steps=1), tmp_path / ".bashrc"
    mine.write_text("mine")
    for name in ("report.html", ".report.html.partial"):
        (run.path / name).symlink_to(mine)
    assert main(["report", str(run.path), "--log-ratio", "none"]) == 0
    assert mine.read_text() == "mine"
    assert "<html" in (run.path / "report.html").read_text()


# ---- the command ----


@pytest.mark.slow
def test_the_command_writes_a_page_into_the_run(
    tmp_path: Path, tiny_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, tiny_config).path for name in ("first", "second")]
    assert main(["report", str(runs[0])]) == 0
    page = (runs[0] / "report.html").read_text(encoding="utf-8")
    assert [run["name"] for run in script_data(page)["runs"]] == ["first"]
    assert f"{runs[0] / 'report.html'}  (" in capsys.readouterr().out
    assert main(["report", *map(str, runs), "--rollouts", "4", "--seed", "-1"]) == 0
    data = script_data((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [len(run["rollouts"]) for run in data["runs"]] == [2, 2]
    assert main(["report", str(runs[1]), "--output", str(tmp_path / "other.html")]) == 0
    assert (tmp_path / "other.html").exists()
    assert not (runs[1] / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}", "{folder}"], "{folder}: not a run to report on (it has no config.yaml)"),
        (["{run}", "{run}/."], "{run}: given 2 times; give each run once"),
        (["{run}", "--output", "{folder}"], "--output: {folder} is a folder; give a file such as report.html"),
        (["{run}", "--output", "{folder}/no/x.html"], "there is no folder {folder}/no; give a file"),
        (["{run}", "--log-ratio", "last"], "{run} has no checkpoint yet"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, tiny_config: Config, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run = make_run(tmp_path / "run", tiny_config).path
    given = [argument.format(run=run, folder=tmp_path) for argument in arguments]
    assert main(["report", *given]) == 2
    assert message.format(run=run, folder=tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.html"))


def test_a_damaged_file_is_named(
    tmp_path: Path, tiny_config: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", tiny_config)
    run.rollouts_path(3).write_bytes(b"no parquet")
    assert main(["report", str(run.path)]) == 2
    assert f"{run.rollouts_path(3)}: not a Parquet file" in capsys.readouterr().err
    run.rollouts_path(3).unlink()
    run.metrics_path.write_text('{"step": 1}\nno json\n{"step": 2}\n')
    assert main(["report", str(run.path)]) == 2
    assert f"{run.metrics_path}, line 2: not valid JSON" in capsys.readouterr().err


def test_runs_of_the_same_name_are_distinguished(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/run", "b/run", "b/other")]
    assert names_of(paths) == ["a/run", "b/run", "other"]
