"""docs/one_step.py and docs/own_loop.py, the first code that a reader sees, run as their pages say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "one_step.py"


LOOP = ROOT / "docs" / "own_loop.py"


def run_without_ray_and_vllm(script: Path, cache: Path) -> str:
    """Run the script in a process of its own; return its output."""
    program = f"""
import runpy, sys
runpy.run_path({str(script)!r}, run_name="__main__")
sys.exit(bool({{"ray", "vllm"}} & set(sys.modules)))
"""
    environment = {"GRPO_RAY_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.campaign
def test_one_step_of_grpo_raises_the_reward_without_ray_and_vllm(tmp_path: Path) -> None:
    shown = run_without_ray_and_vllm(SCRIPT, tmp_path)
    before, after = map(float, re.findall(r"mean reward (\d\.\d+)", shown))
    assert after > before + 0.1, shown
    agreement = re.search(r"agree to (\S+) nats", shown)
    assert agreement is not None
    assert float(agreement[1]) < 1e-4


def test_one_step_fits_on_a_page() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 100


@pytest.mark.slow
def test_a_loop_of_ones_own_learns_without_ray_and_vllm(tmp_path: Path) -> None:
    shown = run_without_ray_and_vllm(LOOP, tmp_path)
    rewards = [float(reward) for reward in re.findall(r"reward (\d\.\d+)", shown)]
    assert rewards[0] < 0.6, shown
    assert rewards[-1] > 0.9, shown


def test_a_loop_of_ones_own_has_forty_lines() -> None:
    lines = LOOP.read_text().split('"""', 2)[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 40
