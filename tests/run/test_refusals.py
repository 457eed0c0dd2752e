"""Mistakes that `train` and `check` refuse before a run has started, without touching anything."""

import re
import time
from pathlib import Path

import pytest
from small_run import QUICKSTART

from grpo_ray.config.loading import load_config
from grpo_ray.run.preparation import check_files
from grpo_ray.tools.cli import main

MISTAKES = {
    "a group needs at least 2 completions": "algorithm.samples_per_prompt=1",
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
def test_the_last_check_refuses_within_seconds_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = time.process_time()  # CPU seconds, as other work may keep the machine busy
    assert main(["train", QUICKSTART, f"run.output_dir={tmp_path}", "generator.num_gpus=1"]) == 2
    assert "this machine lacks resources: GPU: 1 needed" in capsys.readouterr().err
    assert time.process_time() - before < 15
    assert list(tmp_path.iterdir()) == []


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no examples"),
        (['{"question": "1+1", "answer": "2"}', '{"question": "2+2"}'], "answer"),
        (['{"question": "1+1", "answer": '], "line 1"),
    ],
)
def test_a_bad_prompt_file_is_refused_with_its_name(
    lines: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_lines(tmp_path / "train.jsonl", lines)
    validation = write_lines(tmp_path / "validation.jsonl", ['{"question": "1+1", "answer": "2"}'])
    config = write_lines(
        tmp_path / "config.yaml",
        [
            f"task: {{kind: file, train_path: {train}, validation_path: {validation}}}",
            "model: {path: some/model}",
        ],
    )
    assert main(["check", str(config)]) == 2
    refusal = capsys.readouterr().err
    assert str(train) in refusal
    assert message in refusal


def test_a_run_never_writes_into_another_runs_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "metrics.jsonl").write_text("{}\n")
    assert main(["train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=taken"]) == 2
    assert "folder; give another run.name, or move the folder away" in capsys.readouterr().err
    (tmp_path / "taken" / "config.yaml").touch()
    assert main(["train", QUICKSTART, f"run.output_dir={tmp_path}", "run.name=taken"]) == 2
    assert f"resume it with `grpo-ray resume {tmp_path / 'taken'}`" in capsys.readouterr().err
    assert (tmp_path / "taken" / "metrics.jsonl").read_text() == "{}\n"


def test_heads_that_vllm_has_no_attention_for_are_refused() -> None:
    small = ["model.tiny={hidden_size: 64, num_heads: 4, num_kv_heads: 2}", "generator.num_gpus=0"]
    with pytest.raises(
        ValueError, match=r"model\.tiny: hidden_size / num_heads is 16, .* num_heads: 2, or generator"
    ):
        check_files(load_config(QUICKSTART, small))
    check_files(load_config(QUICKSTART, [*small, "generator.engine=torch"]))
