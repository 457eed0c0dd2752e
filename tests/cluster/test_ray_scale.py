"""A run on real Ray with logical engines, of which a process and a node are killed (ray_scale.py)."""

import json
import os
import sys
from pathlib import Path

import pytest
from run_process import output_of

SCRIPT = Path(__file__).parents[2] / "profiling" / "scale" / "ray_scale.py"
FAST = [
    "sampling.max_tokens=100", "algorithm.samples_per_prompt=2", "algorithm.prompts_per_step=16",
    "recovery.restart_backoff_s=0.1",
]  # fmt: skip


@pytest.mark.ray
@pytest.mark.campaign
def test_no_prompt_is_lost_when_a_process_and_a_node_with_several_engines_die(tmp_path: Path) -> None:
    command = [
        sys.executable, str(SCRIPT), "--engines", "16", "--processes", "4", "--nodes", "2", "--minutes", "0.75",
        "--forced", "1", "--length-mean", "40", "--out", str(tmp_path), *FAST,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    assert "0 groups too old, 0 prompts lost, 0 repeated" in output_of(*command, env=environment)
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert measured["num_steps"] >= 3
    assert measured["num_groups"] == 16 * measured["num_steps"]
    assert measured["num_restarts"] >= 4  # of the process; on a slow machine the run may end before the node's
    assert len(measured["process_bytes"]) == 4
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert len({event["actor"] for event in events if event["kind"] == "generator_back"}) >= 4
