"""A configuration on a machine without GPUs: adapted and said, or refused."""

import re
import time
from pathlib import Path

import pytest
from commands import Capture, printed, refused
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config, make_config
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run import machine
from grpo_ray.run.machine import on_this_machine, with_dtype_of
from grpo_ray.run.preparation import check_files
from grpo_ray.tools.cli import main

ON_GPUS = ("weight_sync.transport=nccl", "model.attention=varlen")
SMALL = {"model": {"tiny": {}}, "task": {"kind": "sorting"}, "sampling": {"max_tokens": 24}}


@pytest.fixture(autouse=True)
def cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No GPU, and a CPU that computes in bfloat16; return the file that says so."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(machine, "CPU_INFO", tmp_path / "cpuinfo")
    machine.CPU_INFO.write_text("flags\t\t: fpu avx2 avx512f avx512_bf16 md_clear\n")
    return machine.CPU_INFO


def test_what_was_not_given_becomes_a_cpus_and_what_was_given_stays() -> None:
    config, notice = on_this_machine(make_config(SMALL, [], "a file"))
    assert config.model.dtype == "float32"
    generator = config.generator
    assert (generator.num_gpus, generator.num_cpus, generator.max_num_seqs) == (0, 0.5, 256)
    assert (config.learner.num_gpus, config.learner.num_cpus) == (0, 0.5)
    assert notice == (
        "no GPU here: model.dtype=float32 generator.num_gpus=0 generator.num_cpus=0.5 learner.num_gpus=0 "
        "learner.num_cpus=0.5"
    )
    given = ["model.dtype=bfloat16", "learner.num_cpus=2", "sampling.max_tokens=9"]
    config, notice = on_this_machine(make_config(SMALL, given, "a file"))
    assert (config.model.dtype, config.learner.num_cpus, config.sampling.max_tokens) == ("bfloat16", 2, 9)
    assert notice == "no GPU here: generator.num_gpus=0 generator.num_cpus=0.5 learner.num_gpus=0"
    # A file that names GPUs, or what needs them, never falls back.
    for name in ("generator.num_gpus=1", "learner.num_gpus=1", "learner.num_gpus=0", *ON_GPUS):
        config = make_config(SMALL, [name], "a file")
        assert on_this_machine(config) == (config, None)


@pytest.mark.parametrize("flags", ["flags\t\t: fpu avx2 avx512f\n", None])
def test_a_cpu_that_emulates_bfloat16_computes_in_float32(flags: str | None, cpu_info: Path) -> None:
    cpu_info.unlink()
    if flags is not None:
        cpu_info.write_text(flags)
    on_cpu = ["learner.num_gpus=0", "generator.num_gpus=0"]
    config, notice = on_this_machine(make_config(SMALL, on_cpu, "a file"))
    assert config.model.dtype == "float32"
    assert notice == "this CPU has no instructions for bfloat16: model.dtype=float32"
    assert on_this_machine(config) == (config, None)
    asked = make_config(SMALL, [*on_cpu, "model.dtype=bfloat16"], "a file")
    warning = "model.dtype: this CPU has no instructions for bfloat16; float32 is many times faster"
    assert on_this_machine(asked) == (asked, warning)
    on_gpus = make_config(SMALL, ["learner.num_gpus=1"], "a file")
    assert on_this_machine(on_gpus) == (on_gpus, None)


def test_a_cluster_may_have_gpus_on_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(SMALL, [], "a file")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert on_this_machine(config) == (config, None)
    adapted, notice = on_this_machine(config, is_local=True)  # joins no cluster
    assert adapted.learner.num_gpus == 0
    assert (notice or "").startswith("on the CPU of this process: ")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert on_this_machine(config)[1] is not None


def test_a_gpu_is_used_and_a_resume_keeps_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {name: RunDirectory(tmp_path / name) for name in ("cpu", "gpu")}
    runs["cpu"].create(on_this_machine(make_config(SMALL, [], "a file"))[0])
    monkeypatch.setattr(machine, "GPU_DEVICES", ["/dev/null"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = make_config(SMALL, [], "a file")
    assert on_this_machine(config) == (config, None)
    runs["gpu"].create(config)
    for run, dtype in zip(runs.values(), ("float32", "bfloat16"), strict=True):
        for count in (0, 1):
            monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
            saved = load_config(run.config_path)
            assert on_this_machine(saved) == (saved, None)
            assert saved.model.dtype == dtype
        for given, expected in (([], dtype), (["model.dtype=bfloat16"], "bfloat16")):
            job = make_config(SMALL, ["run.if_exists=resume", *given], "a file")
            assert with_dtype_of(run, job).model.dtype == expected


@pytest.mark.slow
def test_check_says_what_would_happen_here(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "small.yaml"
    file.write_text("model: {tiny: {}}\ntask: {kind: sorting}\nsampling: {max_tokens: 24}\n")
    assert "no GPU here: model.dtype=float32" in printed(capsys, "check", file)
    printed(capsys, "check", file, "learner.num_gpus=1", "--here", status=1)
    assert "! this machine lacks GPU: 2 needed" in printed(capsys, "check", file, "learner.num_gpus=1")
    with pytest.raises(SystemExit):  # one is about this machine, the other about a cluster
        main(["check", str(file), "--nodes", "2x1", "--here"])
    assert "no GPU here" not in printed(capsys, "check", file, "--nodes", "2x1")


MISTAKES = {
    "model.path: no folder './no/such/model'": "model={path: ./no/such/model}",
    "do not fit the model's positions (512); set it to 497 or less": "sampling.max_tokens=600",
    "do not fit generator.max_model_len (20)": "generator.max_model_len=20",
    "generator.max_model_len is 9999, but the model has 512 positions": "generator.max_model_len=9999",
    "vLLM cannot divide the model's 4 attention heads by it": "generator.num_gpus=3",
}


@pytest.mark.slow
@pytest.mark.parametrize(("message", "override"), MISTAKES.items(), ids=MISTAKES.values())
def test_a_mistake_is_refused(message: str, override: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_files(load_config(QUICKSTART, [override]))


@pytest.mark.slow
def test_the_last_check_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = time.process_time()  # CPU seconds, as other work may keep the machine busy
    message = refused(capsys, "train", QUICKSTART, f"run.output_dir={tmp_path}/runs", "generator.num_gpus=1")
    assert "this machine lacks resources: GPU: 1 needed" in message
    assert time.process_time() - before < 15
    assert not (tmp_path / "runs").exists()


def test_a_run_never_writes_into_another_runs_directory(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}\n")
    words = ("train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=taken")
    assert "folder; give another run.name, or move the folder away" in refused(capsys, *words)
    (tmp_path / "taken" / "config.yaml").touch()
    assert f"resume it with `grpo-ray resume {tmp_path / 'taken'}`" in refused(capsys, *words)
    assert (tmp_path / "taken" / "metrics.jsonl").read_text() == "{}\n"


def test_heads_without_attention_in_vllm_and_experts_without_a_gpu_are_refused(tiny_moe: Path) -> None:
    small = ["model.tiny={hidden_size: 64, num_heads: 4, num_kv_heads: 2}", "generator.num_gpus=0"]
    refused = r"model\.tiny: hidden_size / num_heads is 16, .* num_heads: 2, or generator"
    with pytest.raises(ValueError, match=refused):
        check_files(load_config(QUICKSTART, small))
    check_files(load_config(QUICKSTART, [*small, "generator.engine=torch"]))
    # The layers of an adapter of experts need Triton.
    overrides = [f"model={{path: {tiny_moe}, adapter: {{}}}}", "sampling.stop=[]", "generator.num_gpus=0"]
    check_files(load_config(QUICKSTART, overrides))
    with pytest.raises(ValueError, match=r"weight_sync\.send: .* experts need a GPU"):
        check_files(load_config(QUICKSTART, [*overrides, "weight_sync.send=adapter"]))
