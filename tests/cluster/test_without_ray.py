"""The base installation, without Ray and vLLM: what works in it, and the message of what does not."""

import subprocess
import sys
from pathlib import Path

import pytest
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster import session
from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError, ray_needed

ROOT = Path(__file__).parents[2]


def commands(*lines: str) -> str:
    """Run the commands in one process without Ray and vLLM; return its output."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests/without_ray_cli.py"],
        cwd=ROOT, input="\n".join(lines), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("status ") == len(lines)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_a_run_in_one_process_and_all_that_reads_it(tmp_path: Path) -> None:
    run, small = tmp_path / "run", " ".join([*SMALL[1:], "algorithm.num_steps=1"])
    output = commands(
        f"check {QUICKSTART}",
        f"train {QUICKSTART} --local {small} run.output_dir={tmp_path} run.name=run",
        f"resume {run} --local algorithm.num_steps=2",
        f"evaluate {run} --local --limit 2 --output {tmp_path / 'evaluation'}",
        f"audit {run}",
        f"report {run}",
        f"top {run} --once",
        f"plan {QUICKSTART}",
    )
    assert output.count("status 0") == 8, output
    assert (run / "checkpoints/step-000002/model.safetensors").exists()
    assert (tmp_path / "evaluation/summary.json").exists()
    assert (run / "report.html").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("model_cache")
def test_what_needs_ray_says_so(tmp_path: Path) -> None:
    small = f"generator.engine=torch model.tiny.warmup=null run.output_dir={tmp_path}"
    output = commands(
        f"train {QUICKSTART} {small}",
        f"evaluate {QUICKSTART} {small} --output {tmp_path / 'evaluation'}",
        f"submit {QUICKSTART} --address http://127.0.0.1:1",
    )
    assert output.count("status 2") == 3, output
    needed = "grpo-ray: this needs Ray: pip install 'grpo_ray[cluster]'"
    assert output.count(f"{needed}, or add --local") == 2, output
    assert output.count(needed) == 3, output
    assert list(tmp_path.iterdir()) == []


def test_only_the_lack_of_ray_is_explained() -> None:
    with pytest.raises(RunError, match="this needs Ray"), ray_needed():
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    with pytest.raises(ModuleNotFoundError, match="psutil"), ray_needed():
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")


def test_a_missing_vllm_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(session, "find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"'grpo_ray\[cpu\]'.* set generator.engine=torch$"):
        session.check_machine(load_config(QUICKSTART))
    session.check_machine(load_config(QUICKSTART, ["generator.engine=torch"]))
