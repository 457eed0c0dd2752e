"""Calibration: fitting recovers the speeds of a simulated run."""

import json
from pathlib import Path

import pytest
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.cli import main
from grpo_ray.tools.simulation.calibration import calibrate
from grpo_ray.tools.simulation.records import read_run
from grpo_ray.tools.simulation.simulate import simulate
from grpo_ray.tools.simulation.speeds import LognormalLengths, Speeds

KNOWN = Speeds(
    decode_s=0.02, decode_sequence_s=2e-4, request_s=0.03, prefill_token_s=0.0, prompt_tokens=16,
    dispatch_s=0.004, gather_s=0.15, stage_s=0.5, load_s=0.2, score_s=0.03, train_s=1.0, train_token_s=2e-4,
    snapshot_s=0.1, start_s=1.0,
)  # fmt: skip
CHANGES = [
    "evaluation.every_num_steps=1000",
    "algorithm.num_steps=9",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4",
    "sampling.max_tokens=300",
    "scorer.num_workers=1",
    "run.save_rollouts=true",
    "weight_sync.in_flight=false",
]


def record(folder: Path, *changes: str, speeds: Speeds = KNOWN) -> str:
    config = load_config(QUICKSTART, [*CHANGES, *changes])
    simulate(config, RunDirectory(folder), speeds, LognormalLengths(50, 1.0))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("num_generators", "max_lag"), [(3, 0), (2, 1)])
def test_a_fit_recovers_the_speeds_of_a_simulated_run(
    tmp_path: Path, num_generators: int, max_lag: int
) -> None:
    schedule = [f"generator.num_generators={num_generators}", f"weight_sync.max_lag={max_lag}"]
    paths = [record(tmp_path / str(n), f"algorithm.prompts_per_step={n}", *schedule) for n in (8, 2)]
    found = calibrate([read_run(path) for path in paths])
    assert len(found.warnings) == 1  # prompts of one length
    assert (found.sampling_error, found.training_error) == pytest.approx((0, 0), abs=1e-6)
    names = set(found.speeds)
    assert names >= {"decode_s", "request_s", "train_token_s", "stage_s", "dispatch_s"}
    assert found.speeds == pytest.approx({name: getattr(KNOWN, name) for name in names}, rel=0.01)
    assert ("gather_s" in names) == (max_lag == 0)


@pytest.mark.slow
def test_what_one_run_cannot_tell_apart_is_said(tmp_path: Path) -> None:
    path = record(tmp_path / "run", "sampling.max_tokens=5", "sampling.min_tokens=5")
    warnings = " ".join(calibrate([read_run(path)]).warnings)
    assert "decode_s, decode_sequence_s, request_s: these runs do not tell them apart" in warnings
    assert "train_s, train_token_s" in warnings


@pytest.mark.slow
def test_a_wrong_run_is_refused_with_the_file_and_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing/config.yaml is missing; give the directory of a run"):
        read_run(str(tmp_path / "nothing"))
    path = record(tmp_path / "run", "weight_sync.max_lag=1", "weight_sync.in_flight=true")
    with pytest.raises(ValueError, match=r"syncs interrupted requests.*; give a run with"):
        calibrate([read_run(path)])
    (tmp_path / "run/timeline.json").write_text("[{")
    with pytest.raises(ValueError, match=r"timeline.json: .*; give a run that is not being written"):
        read_run(path)
    (tmp_path / "run/timeline.json").unlink()
    with pytest.raises(ValueError, match=r"timeline.json is missing; give a run that has finished"):
        read_run(path)
    short = record(tmp_path / "short", "algorithm.num_steps=4")
    with pytest.raises(ValueError, match=r"has 4 steps; .* needs 6 or more"):
        read_run(short)


@pytest.mark.slow
def test_the_command_saves_speeds_that_it_reads_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, file = record(tmp_path / "run", "weight_sync.max_lag=0"), str(tmp_path / "speeds.json")
    given = ["--calibrate", run, "--save-speeds", file, "--recorded", run]
    assert main(["simulate", QUICKSTART, *CHANGES, *given]) == 0
    assert "fit             median error" in capsys.readouterr().out
    assert json.loads(Path(file).read_text())["decode_s"] > 0
    assert main(["simulate", QUICKSTART, *CHANGES, "--speeds", file]) == 0
