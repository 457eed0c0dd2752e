"""Whole runs with a Learner of two ranks: real processes, real Ray."""

from pathlib import Path

import pytest
import torch
from run_process import interrupt, resume, start, untimed, wait_for_step
from safetensors.torch import load_file

from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.audit.audit import audit

pytestmark = [pytest.mark.ray, pytest.mark.campaign, pytest.mark.usefixtures("model_cache", "any_reward")]
EXACT = ("weight_sync.max_lag=0", "algorithm.num_steps=7", "learner.num_ranks=2")


def compared(run: RunDirectory) -> list[dict[str, object]]:
    rows = [untimed(row) for row in read_metrics(run.metrics_path)]
    by_the_clock = ("ranks/slowest", "collectives_s")
    return [{name: v for name, v in row.items() if not name.endswith(by_the_clock)} for row in rows]


def tensors_of(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    """Return every tensor of a checkpoint, with its shards in the order of the ranks."""
    tensors: dict[str, list[torch.Tensor]] = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors.setdefault(name, []).append(tensor)
    return tensors


def test_a_run_of_two_ranks_that_is_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    """To the last bit with as many ranks; then it goes on with one."""
    cut, whole = RunDirectory(tmp_path / "cut"), RunDirectory(tmp_path / "whole")
    uninterrupted = start(whole.path, *EXACT)
    process = start(cut.path, *EXACT, "learner.slowdown_s=0.5")
    wait_for_step(process, cut.path, 3)
    interrupt(process, cut.path)
    assert 3 <= len(read_metrics(cut.metrics_path)) < 7
    assert uninterrupted.wait(timeout=600) == 0, uninterrupted.communicate()[0]
    resumed = resume(cut.path, "learner.slowdown_s=0")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr

    assert compared(whole) == compared(cut)
    assert any(row["optim/grad_norm"] for row in compared(cut))
    saved, expected = (tensors_of(run.checkpoint_path(7)) for run in (cut, whole))
    assert saved.keys() == expected.keys()
    assert any(len(shards) == 2 for shards in saved.values())
    for name, shards in saved.items():
        assert all(map(torch.equal, shards, expected[name])), name
    assert {"logs/learner-0.log", "logs/learner-1.log"} <= {f"logs/{p.name}" for p in cut.logs.iterdir()}

    alone = resume(cut.path, "learner.num_ranks=1", "algorithm.num_steps=9")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert audit(cut).problems == []
    assert len(read_metrics(cut.metrics_path)) == 9
