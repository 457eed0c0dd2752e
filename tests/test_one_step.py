"""docs/one_step.py, the first page of code for a reader, runs as its page says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "one_step.py"


def test_one_step_of_grpo_raises_the_reward(tmp_path: Path) -> None:
    environment = {"GRPO_RAY_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    before, after = map(float, re.findall(r"mean reward (\d\.\d+)", ran.stdout))
    assert after > before + 0.2, ran.stdout
    agreement = re.search(r"agree to (\S+) nats", ran.stdout)
    assert agreement is not None
    assert float(agreement[1]) < 1e-4


def test_one_step_fits_on_a_page_and_needs_neither_ray_nor_vllm() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 100
    program = f"""
import runpy, sys
runpy.run_path({str(SCRIPT)!r})
sys.exit(bool({{"ray", "vllm"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0
