"""vLLM samples with other code on GPUs; its kernels run here in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
def test_the_sampler_of_gpus_draws_from_the_learners_distribution(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(tmp_path),
        "triton==3.6.0",
    ]
    subprocess.run(pip, check=True, capture_output=True)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "profiling", tmp_path)))
    done = subprocess.run(
        [sys.executable, "profiling/gpu_page/v2_sampler.py"], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logprob_max"] < 1e-5
    freedom = found["degrees_of_freedom"]
    assert freedom > 50
    assert found["chi_square"] < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations above its mean
