"""`grpo-ray evaluate` with its real actors on Ray: random models, files of questions, a run's checkpoints."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from builders import TinyModel, perturb
from test_evaluate_subject import write_run

from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.policy_model import PolicyModel
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


# ---- a run's checkpoints ----

QUESTIONS = ["Sort 31452", "1 + 1", "What is 7 * 3?", "Sort 90817", "Name a tree."]
MAX_TOKENS = 12


def greedy(path: Path, model: PolicyModel) -> list[str]:
    """Return each question's answer: the likeliest next token, one at a time, until the end token."""
    tokenizer = load_tokenizer(str(path))
    texts = []
    for question in QUESTIONS:
        ids = tokenizer(question, add_special_tokens=False)["input_ids"]
        start = len(ids)
        while len(ids) < start + MAX_TOKENS and (len(ids) == start or ids[-1] != tokenizer.eos_token_id):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits  # [1, seq, vocab]
            ids = [*ids, int(logits[0, -1].argmax())]
        texts.append(tokenizer.decode(ids[start:], skip_special_tokens=True))
    return texts


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray")
def test_the_greedy_answers_of_a_runs_checkpoints(tmp_path: Path, tiny_model: TinyModel) -> None:
    """One engine: it starts with the run's first model, and the checkpoints' weights are swapped in."""
    path = tiny_model()
    rows = [{"question": question, "answer": "2"} for question in QUESTIONS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = write_run(tmp_path / "run", {2: 0.1, 4: 0.2})
    file = str(tmp_path / "rows.jsonl")
    config = {
        "model": {"path": str(path), "dtype": "float32"},
        "task": {"kind": "file", "train_path": file, "validation_path": file, "prompt": "question_only"},
        "sampling": {"min_tokens": 0, "stop": []},
        "generator": {"engine": "torch", "num_gpus": 0, "num_cpus": 0},
        "scorer": {"num_workers": 1},
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    models = {0: load_policy(str(path))}
    for step in (2, 4):
        models[step] = load_policy(str(path))
        perturb(models[step], seed=step, scale=0.1)
        models[step].save_pretrained(run / "checkpoints" / f"step-{step:06d}")
        load_tokenizer(str(path)).save_pretrained(run / "checkpoints" / f"step-{step:06d}")
    given = ["--temperature", "0", "--max-tokens", str(MAX_TOKENS), "--output", str(tmp_path / "curve")]
    assert main(["evaluate", str(run), "--checkpoint", "all", *given]) == 0
    expected = {step: greedy(path, model) for step, model in models.items()}
    assert len({tuple(texts) for texts in expected.values()}) == 3
    for step, texts in expected.items():
        found = pq.read_table(tmp_path / "curve" / f"step-{step:06d}" / "examples.parquet").to_pylist()
        assert [row["response"] for row in found] == texts
