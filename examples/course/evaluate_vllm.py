"""`evaluate_vllm`: a zero-shot baseline in one call on a `vllm.LLM`, without Ray."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_ray.records.evaluation_summary import EvaluationSummary, summarise
from grpo_ray.records.visible_text import visible
from grpo_ray.rewards.base import NOTHING, RewardFn, verdict
from grpo_ray.rewards.isolation.worker import describe_error
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.tools.evaluation.responses import SCHEMA, Row, make_row, table_outcomes
from grpo_ray.tools.evaluation.results import write_results
from grpo_ray.types import PromptItem

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams


@dataclass(frozen=True)
class EvaluationResults:
    """The summary and the graded responses that `evaluate_vllm` returns."""

    summary: EvaluationSummary
    rows: list[Row]  # one per response, as in examples.parquet


def evaluate_vllm(
    vllm_model: "LLM",
    reward_fn: RewardFn,
    prompts: Sequence[str] | Sequence[PromptItem],
    eval_sampling_params: "SamplingParams",
    ground_truths: Sequence[str] | None = None,
    output: str | Path | None = None,
) -> EvaluationResults:
    """Sample `eval_sampling_params.n` responses per prompt, grade them, and summarise.

    The reward function is called in this process, without a time limit; a response for which it raises, or
    returns no reward, has an error and counts as wrong. `grpo-ray evaluate` grades in processes that can be
    killed.

    Args:
        prompts: texts with their template applied, or `PromptItem`s, which have their ground truths.
        ground_truths: one per prompt, if the prompts are texts.
        output: folder for `examples.parquet`, `summary.json` and `examples.md`, which must not exist.

    Raises:
        ValueError: there are no prompts, or not one ground truth per prompt.
        FileExistsError: `output` exists already.
    """
    items = _items(prompts, ground_truths)
    if output is not None and Path(output).exists():
        raise FileExistsError(f"output: {output} exists already; give another folder, or move it away")
    own = UserFunction(reward_fn, getattr(reward_fn, "__name__", repr(reward_fn)), {})
    inputs: Any = [
        {"prompt_token_ids": list(item.prompt_token_ids)} if item.prompt_token_ids else item.prompt
        for item in items
    ]
    outputs = vllm_model.generate(inputs, eval_sampling_params)
    rows = [
        _graded(item, sample, response, lambda text, truth: own.read(own.call(text, truth, NOTHING)))
        for item, answered in zip(items, outputs, strict=True)
        for sample, response in enumerate(answered.outputs)
    ]
    if errors := [row["error"] for row in rows if row["error"]]:
        text = f"{len(errors)} of {len(rows)} responses could not be graded: {visible(errors[0])}"
        warnings.warn(text, stacklevel=2)
    table = pa.Table.from_pylist(rows, SCHEMA)
    if output is None:
        return EvaluationResults(summarise(table_outcomes(table)), rows)
    Path(output).mkdir(parents=True)  # only now: a failed call leaves nothing that would block the next
    examples = Path(output) / "examples.parquet"
    pq.write_table(table, examples, compression="zstd")
    facts = {"sampling": repr(eval_sampling_params)}
    return EvaluationResults(write_results(Path(output), examples, 0, facts), rows)


def _items(
    prompts: Sequence[str] | Sequence[PromptItem], ground_truths: Sequence[str] | None
) -> list[PromptItem]:
    if not prompts:
        raise ValueError("prompts: there are none; give at least one")
    if ground_truths is None:
        items = [prompt for prompt in prompts if isinstance(prompt, PromptItem)]
        if len(items) < len(prompts):
            raise ValueError("ground_truths: texts have none; give one per text, or give PromptItems")
        return items
    if len(ground_truths) != len(prompts):
        raise ValueError(f"ground_truths: there are {len(ground_truths)} for {len(prompts)} prompts")
    texts = [prompt.prompt if isinstance(prompt, PromptItem) else prompt for prompt in prompts]
    pairs = enumerate(zip(texts, ground_truths, strict=True))
    return [PromptItem(index, text, (), truth) for index, (text, truth) in pairs]


def _graded(item: PromptItem, sample: int, response: Any, reward_fn: RewardFn) -> Row:
    try:
        rewards, error = reward_fn(response.text, item.ground_truth), ""
    except Exception as failure:  # a user's function may raise anything
        rewards = verdict(has_format=False, is_right=False)
        error = describe_error(failure)
    num_tokens, reason = len(response.token_ids), response.finish_reason
    return make_row(item, sample, response.text, num_tokens, reason, rewards, error)
