"""The base installation, without Ray and vLLM: what works in it, and the message of what does not."""

import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from report_runs import make_run
from small_run import QUICKSTART, SMALL

from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError, ray_needed
from grpo_ray.records.run_files import read_metrics
from grpo_ray.run.machine import check_machine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stand in for the hub that processes of this test ask; return the paths that they request."""
    requests: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HOME", str(tmp_path / "evil" / "hub"))
        yield requests
        server.shutdown()


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
def test_a_run_in_one_process_all_that_reads_it_and_the_refusal_of_what_needs_ray(
    tmp_path: Path, hub: list[str]
) -> None:
    """The first command audits an attacker's folder: nothing that it names is downloaded."""
    names = ["train_path: evil/questions", "validation_path: evil/questions", "reward: r1_zero"]
    task = f"task={{kind: file, {', '.join(names)}}}"
    make_run(tmp_path / "evil", load_config(QUICKSTART, ["model={path: evil/model}", task]), num_steps=0)
    run, small = tmp_path / "run", " ".join([*SMALL[1:], "algorithm.num_steps=1"])
    elsewhere = f"generator.engine=torch model.tiny.warmup=null run.output_dir={tmp_path} run.name=other"
    output = commands(
        f"audit {tmp_path / 'evil'}",
        f"check {QUICKSTART}",
        f"train {QUICKSTART} --local {small} run.output_dir={tmp_path} run.name=run",
        f"resume {run} --local algorithm.num_steps=2",
        f"evaluate {run} --local --limit 2 --output {tmp_path / 'evaluation'}",
        f"audit {run}",
        f"report {run}",
        f"top {run} --once",
        f"plan {QUICKSTART}",
        "preflight examples.zoo.known.whole_solution:reward --num-examples 1",
        f"train {QUICKSTART} {elsewhere}",
        f"evaluate {QUICKSTART} {elsewhere} --output {tmp_path / 'other'}",
        f"submit {QUICKSTART} --address http://127.0.0.1:1",
    )
    assert [output.count(f"\nstatus {status}: ") for status in (0, 1, 2)] == [8, 2, 3], output
    needed = "grpo-ray: this needs Ray: pip install 'grpo_ray[cluster]'"
    assert output.count(f"{needed}, or add --local") == 2, output
    assert output.count(needed) == 3, output
    assert "the task's data is missing" in output, output
    assert hub == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evaluation", "evil", "run"]  # and no others
    assert (run / "checkpoints/step-000002/model.safetensors").exists()
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2]
    assert load_config(run / "config.yaml").generator.engine == "torch"  # although the quickstart has vLLM
    assert (tmp_path / "evaluation/summary.json").exists()
    assert (run / "report.html").exists()


def test_only_the_lack_of_ray_is_explained() -> None:
    with pytest.raises(RunError, match="this needs Ray"), ray_needed():
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    with pytest.raises(ModuleNotFoundError, match="psutil"), ray_needed():
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")


def test_a_missing_vllm_is_named_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("grpo_ray.cluster.session.find_spec", lambda name: None)
    with pytest.raises(RunError, match=r"'grpo_ray\[cpu\]'.* set generator.engine=torch$"):
        check_machine(load_config(QUICKSTART), is_local=False)
    check_machine(load_config(QUICKSTART, ["generator.engine=torch"]), is_local=False)
