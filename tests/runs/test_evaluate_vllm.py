"""`evaluate_vllm` on a stand-in for `vllm.LLM`, and `grpo-ray evaluate` with its real actors on Ray."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from builders import TinyModel, write_rows
from commands import Capture, printed

from examples.course.evaluate_vllm import evaluate_vllm
from grpo_ray.rewards import get_reward_fn
from grpo_ray.types import PromptItem

REPLIES = {
    "1 + 1": [r"it is \boxed{2}", r"\boxed{3}"],
    "2 + 2": [r"\boxed{5}", "four"],
    "3 + 3": [r"\boxed{6}", r"\boxed{6}"],
}
TRUTHS = ["2", "4", "6"]


def output_of(text: str) -> Any:
    return SimpleNamespace(text=text, token_ids=[1] * len(text.split()), finish_reason="stop")


class KnownLLM:
    """Answer as `vllm.LLM.generate` does: in the prompts' order, with `n` outputs each."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def generate(self, prompts: list[Any], sampling_params: Any) -> list[Any]:
        self.asked += prompts
        asked = [p if isinstance(p, str) else list(REPLIES)[p["prompt_token_ids"][0]] for p in prompts]
        texts = [REPLIES[prompt][: sampling_params.n] for prompt in asked]
        return [SimpleNamespace(outputs=[output_of(text) for text in each]) for each in texts]


def test_the_accuracy_of_known_answers_is_exact(tmp_path: Path) -> None:
    reward_fn = get_reward_fn("question_only")
    folder = tmp_path / "baseline"
    results = evaluate_vllm(KnownLLM(), reward_fn, list(REPLIES), SimpleNamespace(n=2), TRUTHS, folder)  # type: ignore[arg-type]
    summary = results.summary
    assert (summary.accuracy, summary.num_examples, summary.num_samples) == (3 / 6, 3, 2)
    assert (summary.num_correct, summary.num_wrong_answer, summary.num_no_format) == (3, 2, 1)
    assert summary.pass_at_k == pytest.approx({"1": 1 / 2, "2": 2 / 3})
    assert summary.mean_response_tokens == (3 + 1 + 1 + 1 + 1 + 1) / 6
    assert pq.read_table(folder / "examples.parquet").to_pylist() == results.rows
    assert json.loads((folder / "summary.json").read_text())["summary"]["accuracy"] == 0.5
    assert "format 1, answer 0: 2 of 6 responses" in (folder / "examples.md").read_text()
    with pytest.raises(FileExistsError):
        evaluate_vllm(KnownLLM(), reward_fn, list(REPLIES), SimpleNamespace(n=2), TRUTHS, folder)  # type: ignore[arg-type]


def test_items_have_their_ground_truths_and_token_ids() -> None:
    """The handout's call with four arguments is enough."""
    llm = KnownLLM()
    items = [PromptItem(i, text, (i,), TRUTHS[i]) for i, text in enumerate(REPLIES)]
    summary = evaluate_vllm(llm, get_reward_fn("question_only"), items, SimpleNamespace(n=1)).summary  # type: ignore[arg-type]
    assert summary.accuracy == 2 / 3
    assert llm.asked == [{"prompt_token_ids": [i]} for i in range(3)]


def test_a_reward_that_fails_or_is_invalid_affects_only_its_response(tmp_path: Path) -> None:
    odd = {r"\boxed{2}": {"score": 1.0}, r"\boxed{5}": None, "four": {"reward": 0.2, "answer_reward": 0.2}}

    def reward_fn(response: str, truth: str) -> Any:
        if "3" in response:
            raise ZeroDivisionError("no such answer")
        return odd.get(response.removeprefix("it is "), 1.0)

    given = (list(REPLIES), SimpleNamespace(n=2), TRUTHS, tmp_path / "e")
    with pytest.warns(UserWarning, match="4 of 6 responses could not be graded: "):
        results = evaluate_vllm(KnownLLM(), reward_fn, *given)  # type: ignore[arg-type]
    summary = results.summary
    assert (summary.num_correct, summary.num_wrong_answer, summary.num_errors) == (2, 0, 4)
    assert [row["category"] for row in results.rows] == ["not_graded"] * 4 + ["correct"] * 2
    assert results.rows[1]["error"].startswith("ZeroDivisionError: no such answer (test_evaluate_vllm.py:")
    assert ") returned 0.2 as 'answer_reward'; it must be 0 or 1" in results.rows[3]["error"]
    assert pq.read_table(tmp_path / "e" / "examples.parquet").to_pylist() == results.rows


def test_a_failed_call_leaves_no_folder(tmp_path: Path) -> None:
    class Failing(KnownLLM):
        def generate(self, prompts: list[Any], sampling_params: Any) -> list[Any]:
            raise MemoryError

    given = (get_reward_fn("question_only"), list(REPLIES), SimpleNamespace(n=1), TRUTHS, tmp_path / "e")
    with pytest.raises(MemoryError):
        evaluate_vllm(Failing(), *given)  # type: ignore[arg-type]
    assert evaluate_vllm(KnownLLM(), *given).summary.accuracy == 2 / 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompts", "truths", "message"),
    [(["1 + 1"], None, "texts have none"), (["1 + 1"], ["2", "3"], "2 for 1 prompts"), ([], [], "none")],
)
def test_ground_truths_are_required(prompts: list[str], truths: list[str] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate_vllm(KnownLLM(), get_reward_fn("exact_match"), prompts, SimpleNamespace(n=1), truths)  # type: ignore[arg-type]


# ---- grpo-ray evaluate with its real actors on Ray: a random model, files of questions ----


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray")
def test_two_generators_and_the_scorer_evaluate_a_model_on_a_mixture(
    tmp_path: Path, tiny_model: TinyModel, capsys: Capture
) -> None:
    gsm8k = [{"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(8)]
    math = [{"problem": f"Halve {i}.", "solution": rf"\boxed{{\frac{{{i}}}{{2}}}}"} for i in range(6)]
    parts = {}
    for kind, rows in (("gsm8k", gsm8k), ("math", math)):
        path = write_rows(tmp_path / f"{kind}.jsonl", rows)
        files = {"train_path": path, "validation_path": path, "duplicates": "keep"}
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
    options = "--n", 2, "--limit", 6, "--output", folder
    assert "12 prompts of mixture x 2" in printed(capsys, "evaluate", tmp_path / "mixture.yaml", *options)
    rows = pq.read_table(folder / "examples.parquet").to_pylist()
    assert [row["task"] for row in rows] == ["gsm8k"] * 12 + ["math"] * 12
    data = json.loads((folder / "summary.json").read_text())
    assert data["summary"]["num_examples"] == 12
    assert data["summary"]["accuracy_by_task"] == {"gsm8k": 0.0, "math": 0.0}
    logs = {path.name for path in (folder / "logs").iterdir()}
    assert {"generator-0.log", "generator-1.log", "scorer.log"} <= logs
    assert "learner.log" not in logs
