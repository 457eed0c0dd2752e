"""`grpo-ray evaluate` with its real actors on Ray: a random model, files of questions."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from builders import TinyModel

from grpo_ray.rewards import get_reward_fn
from grpo_ray.tools.cli import main


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray")
def test_two_generators_and_the_scorer_evaluate_a_model_on_a_mixture(
    tmp_path: Path, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    gsm8k = [{"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(8)]
    math = [{"problem": f"Halve {i}.", "solution": rf"\boxed{{\frac{{{i}}}{{2}}}}"} for i in range(6)]
    parts = {}
    for kind, rows in (("gsm8k", gsm8k), ("math", math)):
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = {"train_path": str(path), "validation_path": str(path), "duplicates": "keep"}
        parts[kind] = {"task": {"kind": kind, "prompt": "question_only", "reward": "question_only", **files}}
    config = {
        "model": {"path": str(tiny_model()), "dtype": "float32"},
        "task": {"kind": "mixture", "parts": parts},
        "sampling": {"max_tokens": 8},
        "generator": {"engine": "torch", "num_gpus": 0, "num_cpus": 0, "num_generators": 2},
        "scorer": {"num_workers": 1},
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(config))
    folder = tmp_path / "out"
    options = ["--n", "2", "--limit", "6", "--output", str(folder)]
    assert main(["evaluate", str(tmp_path / "mixture.yaml"), *options]) == 0
    assert "12 prompts of mixture x 2" in capsys.readouterr().out

    rows = pq.read_table(folder / "examples.parquet").to_pylist()
    truths = [str(i + 1) for i in range(6)] + [rf"\frac{{{i}}}{{2}}" for i in range(6)]
    assert [row["ground_truth"] for row in rows] == [truth for truth in truths for _ in range(2)]
    assert [row["task"] for row in rows] == ["gsm8k"] * 12 + ["math"] * 12
    reward_fn = get_reward_fn("question_only")
    for row in rows:
        earned = reward_fn(row["response"], row["ground_truth"])
        assert {name: row[name] for name in earned} == earned
        assert (row["num_tokens"] == 8) == (row["finish_reason"] == "length")
    data = json.loads((folder / "summary.json").read_text())
    assert data["summary"]["num_examples"] == 12
    assert data["summary"]["num_no_format"] == 24  # a random model writes no \boxed{}
    assert data["summary"]["truncated_frac"] == sum(r["finish_reason"] == "length" for r in rows) / 24
    assert data["summary"]["accuracy_by_task"] == {"gsm8k": 0.0, "math": 0.0}
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert {"generator-0.log", "generator-1.log", "scorer.log"} <= logs
    assert "learner.log" not in logs
