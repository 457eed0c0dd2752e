"""profiling/gpu.py: the page runs tiny on a CPU, without Ray, vLLM and pyarrow; no failing case ends it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from run_process import output_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = ["--device", "cpu", "--models", "tiny", "--response-tokens", "16", "--prompt-tokens", "24"]
TINY += ["--groups", "2", "--samples-per-prompt", "4", "--micro-batch-tokens", "256", "--rounds", "1"]
TINY += ["--peak-tflops", "0.1"]
SCRIPT = """
import sys
sys.path.insert(0, "profiling")
import gpu
code = gpu.main(sys.argv[1:])
heavy = {"ray", "vllm", "pyarrow"} & sys.modules.keys()
sys.exit(code or (f"imported {heavy}" if heavy else 0))
"""


@pytest.fixture(scope="module")
def gpu(profiling_script: Callable[[str], ModuleType]) -> ModuleType:
    return profiling_script("gpu")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The page's results and Markdown, made in a process that must not import what may be missing."""
    out = tmp_path_factory.mktemp("page") / "gpu.json"
    parts = ["--parts", "exactness", "weights", "throughput"]
    output_of(sys.executable, "-c", SCRIPT, *TINY, *parts, "--out", out, cwd=ROOT)
    return json.loads(out.read_text()), out.with_suffix(".md").read_text()


def test_the_learner_is_exact_in_float32_and_near_in_bfloat16(page: tuple[dict[str, Any], str]) -> None:
    rows = page[0]["exactness"]
    assert not any(row["error"] for row in rows)
    assert {row["way"] for row in rows} == {
        "plain transformers",
        "Learner, repeated prompts, sdpa",
        "Learner, shared prompts, sdpa",
        "Learner, repeated prompts, auto",
        "Learner, shared prompts, auto",
    }
    for row in rows:
        bound = 1e-5 if row["dtype"] == "float32" else 0.1
        assert row["logprob_max"] < bound, row
        assert row["gradient"] < bound, row
    assert all(row["gradient"] > 1e-4 for row in rows if row["dtype"] == "bfloat16")  # it is really bfloat16


def test_the_parts_of_a_weight_sync_are_measured(page: tuple[dict[str, Any], str]) -> None:
    (row,) = page[0]["weights"]
    assert (row["model"], row["skipped"]) == ("tiny", "the rest needs a GPU")
    assert list(row["seconds"]) == ["snapshot: cast into a buffer", "copy of the bytes on the device"]
    assert all(seconds > 0 for seconds in row["seconds"].values())
    assert 2 * 64 * 512 < row["num_bytes"] < 1e6  # bfloat16: the embeddings alone, and all of the model


def test_every_way_is_measured_on_the_same_batch(page: tuple[dict[str, Any], str]) -> None:
    rows = {row["case"]["way"]: row for row in page[0]["throughput"]}
    assert list(rows) == ["plain", "repeated", "shared"]
    for row in rows.values():
        assert row["forward_backward_s"] > 0
        assert row["update_s"] > 0
        seconds = row["forward_backward_s"] + row["update_s"]
        assert row["tokens_per_s"] == pytest.approx(2 * (24 + 4 * 16) / seconds)
        assert row["mfu"] == pytest.approx(row["model_tflops_per_s"] / 0.1)
    assert rows["repeated"]["computed_tokens"] == 2 * 4 * (24 + 16)
    assert rows["shared"]["computed_tokens"] == 2 * (24 + 4 * 16)
    assert (rows["shared"]["kernel"], rows["shared"]["notes"]) == ("sdpa", {})
    lines = page[1].splitlines()
    assert sum(line.startswith("| tiny | 24 + 16 |") for line in lines) == 3
    assert sum(line.startswith("| Learner, ") for line in lines) == 4


def test_running_out_of_memory_is_a_result_and_any_other_error_is_an_error(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_page import page
    from gpu_page.throughput import Case, LearnerStep, run_case

    def failing(error: Exception) -> Callable[[LearnerStep], None]:
        def update(self: LearnerStep) -> None:
            raise error

        return update

    case = Case("tiny", "shared", 4, prompt_tokens=4, samples_per_prompt=2, rounds=1)
    monkeypatch.setattr(LearnerStep, "update", failing(torch.cuda.OutOfMemoryError("CUDA out of memory")))
    found = run_case(case, torch.device("cpu"), None, [])
    assert found["out_of_memory"]
    assert found["phase"] == "update"
    assert found["without_optimizer"]["forward_backward_s"] > 0
    table = page.throughput_table([found])
    assert "out of memory (update)" in table
    assert "Learner, a prompt per group, no update" in table
    monkeypatch.setattr(LearnerStep, "update", failing(RuntimeError("broken")))
    with pytest.raises(RuntimeError, match="broken"):
        run_case(case, torch.device("cpu"), None, [])


def test_what_cannot_fit_is_not_tried(gpu: ModuleType) -> None:
    from gpu_page import page
    from gpu_page.throughput import Case, run_case

    def never(seconds: float) -> dict[str, Any]:
        case = Case("7B", "shared", 4, rounds=1)
        return run_case(case, torch.device("cpu"), None, ["false"], memory_bytes=seconds)

    found = never(70 * 2**30)
    assert found["out_of_memory"]
    assert found["without_optimizer"]["phase"] == "not tried: its state alone is larger"
    assert page.throughput_table([found]).count("not tried") == 2


def test_a_page_goes_on_where_its_time_ended(gpu: ModuleType, tmp_path: Path) -> None:
    """No case begins after the time is up; the rest is named, and done by the next call."""
    measured: list[str] = []

    def parts(options: Any, device: torch.device) -> list[Any]:
        def measure(name: str) -> list[dict[str, Any]]:
            measured.append(name)
            return [{"model": name, "error": "none"}]

        return [gpu.Part(name, lambda name=name: measure(name)) for name in ("a", "b")]

    out = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--parts", "weights", "--out", str(out), "--resume"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu.RUN, "weights", parts)
        assert gpu.main([*arguments, "--seconds", "-1"]) == 0
        assert json.loads(out.read_text())["left_out"] == ["weights: a", "weights: b"]
        assert gpu.main(arguments) == gpu.main(arguments) == 0
    found = json.loads(out.read_text())
    assert measured == ["a", "b"]
    assert [row["model"] for row in found["weights"]] == ["a", "b"]
    assert found["left_out"] == []


@pytest.mark.campaign
@pytest.mark.vllm
def test_every_stage_of_vllm_runs_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    asked = ["--parts", "engine", "--running", "8", "--engine-tokens", "16"]
    command = [sys.executable, "profiling/gpu.py", *TINY, *asked, "--out", str(tmp_path / "gpu.json")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=900)
    rows = {row["stage"]: row for row in json.loads((tmp_path / "gpu.json").read_text())["engine"]}
    assert list(rows) == ["start", "sample", "mismatch", "sync", "in_flight", "sleep"]
    assert not any("error" in row for row in rows.values())
    assert rows["mismatch"]["kl"] < 1e-4
    found = rows["sync"]["transports"]["pages"]
    assert found["logprobs_changed_by"] > 0.01
    assert found["logprobs_came_back_within"] == 0
    assert found["tokens_came_back"]
    assert found["checksums_came_back"]
    assert rows["in_flight"]["of_two_versions"] > 0
    assert rows["in_flight"]["all_finite"]


def test_a_stage_of_an_engine_and_a_case_that_fail_on_a_gpu_end_alone(gpu: ModuleType) -> None:
    from gpu_page.engine import EngineCase, run_engine
    from gpu_page.page import throughput_table
    from gpu_page.throughput import Case, run_case

    line, error = '{"stage": "start", "seconds": 1.0}', "no kernel image is available"
    command = [sys.executable, "-c", f"import sys; print('log'); print({line!r}); sys.exit({error!r})"]
    started, ended = run_engine(EngineCase("tiny"), command)
    assert started == {"stage": "start", "seconds": 1.0}
    assert ended["stage"] == "process"
    assert error in ended["error"]
    found = run_case(Case("tiny", "plain", 4), torch.device("cuda"), None, command)
    assert found["error"] == error
    assert error in throughput_table([found])
