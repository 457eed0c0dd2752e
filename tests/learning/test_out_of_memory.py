"""A Learner that runs out of GPU memory: smaller micro-batches, the same step."""

from pathlib import Path
from typing import Any

import local_runs
import pytest
import torch
from builders import MakeLearner, flat_weights, make_batch, simple_group

from grpo_ray.core.learner import Learner
from grpo_ray.errors import RunError
from grpo_ray.learning.out_of_memory import SmallerMicroBatches
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.types import TrainBatch

SECTIONS = {"learner": {"micro_batch_tokens": 4000, "learning_rate": 1e-3}}
MINIBATCHES = {"epochs_per_batch": 2, "train_batch_size": 6, "old_log_probs": "proximal"}
EVERYTHING = {**MINIBATCHES, "kl": {"reference": "ema"}}


def limit_memory(learner: Learner, max_tokens: int) -> list[int]:
    """Make layers run out of memory on larger micro-batches; return the list that their sizes go to.

    In a backward pass the first layer does, when the others' gradients are there already.
    """
    # The first pass tries how prompts can be shared.
    learner._forward_backward.with_proximal(learner.model, sequences_of([simple_group(0)]))
    seen: list[int] = []

    def refuse(is_full: bool) -> None:
        if is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore about it.")

    def check(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        size = output.shape[0] * output.shape[1]
        seen.append(size)
        if output.requires_grad:
            output.register_hook(lambda _: refuse(size > max_tokens))
        else:
            refuse(size > max_tokens)

    models: list[Any] = [learner.model]
    models += [learner._reference.model] if learner._reference is not None else []
    for model in models:
        model.model.layers[0].register_forward_hook(check)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share_prompts", "limit", "algorithm", "dtype"),
    [("auto", 24, EVERYTHING, "float32"), ("never", 60, {}, "bfloat16")],
)
def test_step_is_the_same_with_smaller_micro_batches(
    make_learner: MakeLearner, share_prompts: str, limit: int, algorithm: dict, dtype: str
) -> None:
    sections = {"algorithm": algorithm, "model": {"dtype": dtype}, "learner": {"share_prompts": share_prompts}}
    short, ample = make_learner(**sections), make_learner(**sections)
    sizes = limit_memory(short, limit)
    batch = TrainBatch(tuple(make_batch(ample)))
    report, expected = short.train_step(batch), ample.train_step(batch)
    left = short._forward_backward.micro_batch_tokens
    assert max(sizes) > limit
    assert left <= max(sizes) // 2
    assert "learner_out_of_memory" not in expected.events
    event = report.events["learner_out_of_memory"]
    assert ", learner.micro_batch_tokens 4000; continues with " in event
    assert f"continues with {left} (CUDA out of memory. Tried to allocate 2.00 GiB.)" in event
    assert report.version == 1
    assert report.metrics.keys() == expected.metrics.keys()
    rel = 1e-4 if dtype == "float32" else 0.1
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy/exact", "throughput/trained_tokens"):
        assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=rel, abs=1e-5), name
    if dtype == "float32":
        # Adam's first steps move a weight with a gradient of nearly 0 by rounding alone.
        difference = (flat_weights(short.model) - flat_weights(ample.model)).abs()
        assert difference.quantile(0.95) < 1e-6
    sizes.clear()
    again = short.train_step(TrainBatch(tuple(make_batch(ample, seed=1, versions=1))))
    assert "learner_out_of_memory" not in again.events  # the reduced size stays
    assert max(sizes) <= limit


@pytest.mark.slow
def test_each_size_is_tried_once(make_learner: MakeLearner) -> None:
    learner = make_learner(learner={"share_prompts": "never"})
    batch, before = TrainBatch(tuple(make_batch(learner))), flat_weights(learner.model)
    sizes = limit_memory(learner, 0)
    with pytest.raises(RunError, match=r"single sequence of \d+ tokens.*learner\.gradient_checkpointing"):
        learner.train_step(batch)
    assert sizes == sorted(set(sizes), reverse=True)
    assert torch.equal(flat_weights(learner.model), before)
    assert learner.version == 0
    assert not learner._optimizer.state


@pytest.mark.slow
def test_a_run_has_an_event_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = iter(["out of GPU memory with 64 tokens; continues with 32"])
    monkeypatch.setattr(SmallerMicroBatches, "take_report", lambda _: next(reports, None))
    local_runs.train(local_runs.make_config("algorithm.num_steps=2"), tmp_path / "run")
    events = read_metrics(RunDirectory(tmp_path / "run").events_path)
    (event,) = [e for e in events if e["kind"] == "learner_out_of_memory"]
    assert (event["step"], event["text"]) == (1, "out of GPU memory with 64 tokens; continues with 32")
