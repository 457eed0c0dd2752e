"""Equal runs have equal hashes, whatever the order of arrival; the first difference is named."""

import shutil
from pathlib import Path

import pytest
from builders import trained_so
from local_runs import make_config, train
from report_runs import Rows, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.audit.hashes import first_difference, hashes
from grpo_ray.tools.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("hashed") / "run"
    train(make_config("algorithm.num_steps=2", "weight_sync.max_lag=0"), folder)
    return RunDirectory(folder)


@pytest.fixture
def other(run: RunDirectory, tmp_path: Path) -> RunDirectory:
    shutil.copytree(run.path, tmp_path / "other")
    return RunDirectory(tmp_path / "other")


def test_the_order_of_arrival_and_names_do_not_count(run: RunDirectory, other: RunDirectory) -> None:
    def change(rows: Rows) -> None:
        rows.reverse()
        for row in rows:
            row["generator"] = "generator-9"

    rewrite(other.rollouts_path(2), change)
    assert hashes(other) == hashes(run)
    assert first_difference(run, other) is None


def test_one_token_changes_the_hash_of_rollouts_alone(run: RunDirectory, other: RunDirectory) -> None:
    def change(rows: Rows) -> None:
        rows[-1]["token_ids"][1] += 1

    rewrite(other.rollouts_path(2), change)
    found, expected = hashes(other), hashes(run)
    assert [name for name in expected if found[name] != expected[name]] == ["rollouts"]
    difference = first_difference(run, other)
    assert difference is not None
    assert difference.startswith("step-000002: group ")
    assert ", token_ids from place 1 on: [" in difference


@pytest.mark.parametrize(
    ("files", "name"), [("*.safetensors", "weights"), ("training/*.safetensors", "optimizer")]
)
def test_one_value_changes_the_hash_of_its_tensors(
    run: RunDirectory, other: RunDirectory, files: str, name: str
) -> None:
    (path,) = sorted(other.checkpoints.iterdir())[-1].glob(files)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()  # with which the file keeps its size, which a checkpoint knows
    key = max(tensors, key=lambda key: tensors[key].numel())
    tensors[key].flatten()[0] += 1
    save_file(tensors, path, metadata)
    trained_so(sorted(other.checkpoints.iterdir())[-1])
    found, expected = hashes(other), hashes(run)
    assert [each for each in expected if found[each] != expected[each]] == [name]
    assert first_difference(run, other) == f"the newest checkpoint's {key}"


def test_the_command_prints_hashes_and_the_first_difference(
    run: RunDirectory, other: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "--hash", str(run.path)]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        list(pair) for pair in hashes(run).items()
    ]
    assert main(["audit", str(run.path), str(other.path)]) == 0
    assert "the two runs are the same" in capsys.readouterr().out
    other.rollouts_path(1).unlink()
    assert main(["audit", str(run.path), str(other.path)]) == 1
    assert "step-000001.parquet stands where the other run has step-000002" in capsys.readouterr().out


def test_a_step_more_and_a_run_without_a_checkpoint_are_named(run: RunDirectory, other: RunDirectory) -> None:
    other.rollouts_path(2).unlink()
    assert first_difference(run, other) == "2 steps of rollouts, and 1"
    shutil.rmtree(other.checkpoints)
    with pytest.raises(RunError, match="there is no checkpoint to hash"):
        hashes(other)
