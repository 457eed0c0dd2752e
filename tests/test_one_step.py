"""docs/one_step.py, the first page of code for a reader, runs as its page says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "one_step.py"


PROGRAM = f"""
import runpy, sys
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
sys.exit(bool({{"ray", "vllm"}} & set(sys.modules)))
"""


@pytest.mark.slow
def test_one_step_of_grpo_raises_the_reward_without_ray_and_vllm(tmp_path: Path) -> None:
    environment = {"GRPO_RAY_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    before, after = map(float, re.findall(r"mean reward (\d\.\d+)", ran.stdout))
    assert after > before + 0.2, ran.stdout
    agreement = re.search(r"agree to (\S+) nats", ran.stdout)
    assert agreement is not None
    assert float(agreement[1]) < 1e-4


def test_one_step_fits_on_a_page() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 100
