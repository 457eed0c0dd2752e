"""`evaluate_vllm` on a stand-in for `vllm.LLM`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from examples.course.evaluate_vllm import evaluate_vllm
from grpo_ray.rewards import get_reward_fn
from grpo_ray.types import PromptItem

REPLIES = {
    "1 + 1": [r"it is \boxed{2}", r"\boxed{3}"],
    "2 + 2": [r"\boxed{5}", "four"],
    "3 + 3": [r"\boxed{6}", r"\boxed{6}"],
}
TRUTHS = ["2", "4", "6"]


class KnownLLM:
    """Answer as `vllm.LLM.generate` does: in the prompts' order, with `n` outputs each."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def generate(self, prompts: list[Any], sampling_params: Any) -> list[Any]:
        self.asked += prompts
        texts = [p if isinstance(p, str) else list(REPLIES)[p["prompt_token_ids"][0]] for p in prompts]
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(text=text, token_ids=[1] * len(text.split()), finish_reason="stop")
                    for text in REPLIES[prompt][: sampling_params.n]
                ]
            )
            for prompt in texts
        ]


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
