"""The Learner without Ray: steps, weights, checkpoints, safeguards; test_learner_updates.py has the losses."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import (
    ENDS,
    MakeLearner,
    TinyModel,
    check_names,
    file_size_limit,
    flat_weights,
    gradient,
    make_batch,
    make_completion,
    make_group,
    make_item,
    own_logprobs,
    resume,
    same_groups,
    tensors_of,
    train_step,
    written,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_ray.core.learner import Learner
from grpo_ray.core.staleness import StaleBatchError
from grpo_ray.learning.sequences import sequences_of
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.types import ScoredGroup, StepReport, TrainBatch


def weights(learner: Learner) -> torch.Tensor:
    return flat_weights(learner.model)


def test_step_is_adamw_on_the_clipped_gradient(make_learner: MakeLearner) -> None:
    options = {"learning_rate": 1e-2, "max_grad_norm": 0.01, "weight_decay": 0.1, "adam_eps": 1e-3}
    learner = make_learner(learner=options)
    groups = make_batch(learner)
    learner.accumulate_gradient(sequences_of(groups))
    unclipped, before = gradient(learner), weights(learner)
    norm = unclipped.norm().item()
    assert norm > 0.1
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    g = unclipped * 0.01 / norm
    # AdamW's first step: both moments, bias-corrected, are g and g**2.
    expected = before * (1 - 1e-2 * 0.1) - 1e-2 * g / (g.abs() + 1e-3)
    torch.testing.assert_close(weights(learner), expected, atol=1e-6, rtol=1e-5)
    assert learner.take_stats().resident_bytes > 50 * 2**20
    assert metrics["mismatch/kl"] > 0
    # No response switches from a version to the next.
    assert metrics["mismatch/tokens_after_switch"] == 0
    assert "mismatch/kl/after_switch" not in metrics


# ---- the lag of tokens ----


@pytest.mark.slow
@pytest.mark.parametrize(("max_lag", "too_old"), [(0, 4), (1, 3), (3, 1)])
def test_one_token_too_old_refuses_the_batch(make_learner: MakeLearner, max_lag: int, too_old: int) -> None:
    changes = {"weight_sync": {"max_lag": max_lag}, "learner": {"learning_rate": 1e-2}}
    learner, untouched = make_learner(**changes), make_learner(**changes)
    learner.version = untouched.version = 5
    batch, before = TrainBatch(tuple(make_batch(learner, versions=5))), weights(learner)
    last = batch.groups[1].rollout.completions[2].versions[-1:]  # even in a group without signal
    last[:] = too_old
    with pytest.raises(StaleBatchError, match=f"version {too_old} reached the Learner at version 5.*{max_lag}"):
        learner.train_step(batch)
    assert torch.equal(weights(learner), before)
    assert learner.version == 5
    # The next step is the same as that of a Learner which never saw the batch.
    last[:] += 1
    for each in (learner, untouched):
        assert each.train_step(batch).version == 6
    assert torch.equal(weights(learner), weights(untouched))


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
def test_lag_and_mismatch_after_a_switch_by_hand(make_learner: MakeLearner, share_prompts: str) -> None:
    """Two groups: a response of one version alone, two with one switch, and one with two."""
    learner = make_learner(weight_sync={"max_lag": 2}, learner={"share_prompts": share_prompts})
    learner.version = 2
    rows = [([0, 0, 0, 0], 0), ([0, 1, 1, 1], 1), ([0, 0, 0, 1, 2], 3), ([1, 1, 1, 1, 1, 2], 5)]
    rng = np.random.default_rng(0)
    completions, later = [], []
    for number, (versions, switch) in enumerate(rows):
        response = list(range(21, 21 + len(versions)))
        with torch.no_grad():
            own = own_logprobs(learner, [1, 2 + number // 2], response).numpy()
        log_ratio = rng.normal(0, 0.5, len(versions))
        completions.append(make_completion(response, (own - log_ratio).tolist(), versions))
        later += (np.exp(log_ratio) - 1 - log_ratio)[switch:].tolist() if switch else []
    groups = [
        make_group(make_item(number, [1, 2 + number]), completions[2 * number :][:2], [1, 0], [1.0, -1.0])
        for number in range(2)
    ]
    metrics = learner.train_step(TrainBatch(tuple(groups))).metrics
    assert metrics["lag/mean"] == pytest.approx((4 * 2 + (2 + 3 * 1) + (3 * 2 + 1) + 5 * 1) / (4 + 4 + 5 + 6))
    assert metrics["lag/max"] == 2.0
    assert metrics["mismatch/tokens_after_switch"] == len(later) == 6
    assert metrics["mismatch/kl/after_switch"] == pytest.approx(np.mean(later), rel=1e-4)


@pytest.mark.parametrize(("tied", "checksum"), [(True, False), (False, True)])
def test_snapshot_holds_every_weight_and_stays(make_learner: MakeLearner, tied: bool, checksum: bool) -> None:
    changes = {"weight_sync": {"checksum": checksum, "max_lag": 3}, "learner": {"learning_rate": 1e-2}}
    learner = make_learner(tied, **changes)
    learner.version = 3
    snapshot = learner.snapshot()[0]
    tensors = tensors_of(snapshot)
    assert snapshot.version == 3
    assert (snapshot.checksum is not None) == checksum
    assert ("lm_head.weight" in tensors) == (not tied)
    expected = dict(learner.model.state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert all(spec.offset_bytes % 64 == 0 for spec in snapshot.specs)
    before = snapshot.data.copy()
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    assert np.array_equal(snapshot.data, before)
    assert not np.array_equal(learner.snapshot()[0].data, before)


# ---- capture, write, resume ----


def train(learner: Learner, steps: Sequence[int]) -> list[dict[str, float]]:
    """Train one batch per step; return the metrics except those of clocks and memory."""
    metrics = []
    for seed in steps:
        found = {**train_step(learner, seed), "version": learner.version}
        metrics.append({n: v for n, v in found.items() if not n.startswith(("timing/", "memory/", "perf/"))})
    return metrics


def optimizer_state(learner: Learner) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{moment}": tensor.clone()
        for name, parameter in learner.model.named_parameters()
        for moment, tensor in learner._optimizer.state[parameter].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_training_resumes_bit_for_bit(make_learner: MakeLearner, tmp_path: Path, tied: bool) -> None:
    options = {"learner": {"learning_rate": 1e-2, "warmup_steps": 5, "weight_decay": 0.1}}
    if not tied:
        options["algorithm"] = {"epochs_per_batch": 2, "train_batch_size": 4, "old_log_probs": "proximal"}
    straight, first = make_learner(tied, **options), make_learner(tied, **options)
    expected = train(straight, range(4))
    assert train(first, range(2)) == expected[:2]
    second = resume(first, written(first, tmp_path / "step"))
    assert second.version == 2
    saved = load_file(tmp_path / "step" / "training" / "optimizer.safetensors")
    assert torch.equal(torch.get_rng_state(), saved["random/cpu"])
    assert train(second, range(2, 4)) == expected[2:]
    assert torch.equal(weights(second), weights(straight))
    ours, theirs = optimizer_state(second), optimizer_state(straight)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 * len(list(straight.model.parameters()))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert second.capture() == StepReport(4, second._last_report.metrics)  # type: ignore[union-attr]


@pytest.mark.slow
def test_steps_after_the_capture_change_nothing_written(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(learner={"learning_rate": 1e-2})
    train(learner, [1])
    expected, moments = weights(learner), optimizer_state(learner)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        logits = learner.model(ids, use_cache=False).logits
    assert learner.capture().version == 1
    train(learner, [2])
    with ThreadPoolExecutor(1) as pool:  # as Ray does: in parallel with a step
        writing = pool.submit(learner.write_captured, tmp_path)
        train(learner, [3])
        writing.result(60)
    assert not torch.equal(weights(learner), expected)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(torch.cat([p.flatten() for p in loaded.parameters()]), expected)
    with torch.no_grad():
        assert torch.equal(loaded(ids, use_cache=False).logits, logits)
    saved = load_file(tmp_path / "training" / "optimizer.safetensors")
    assert all(torch.equal(saved[f"adam/{name}"], moment) for name, moment in moments.items())
    assert learner._captured is None


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_folder_is_a_model_in_its_dtype(make_learner: MakeLearner, tmp_path: Path, tied: bool) -> None:
    learner = make_learner(tied, model={"dtype": "bfloat16"})
    train(learner, [1])
    folder = written(learner, tmp_path / "step")
    files = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert files <= set(os.listdir(folder))
    assert os.listdir(folder / "training") == ["optimizer.safetensors"]
    tensors = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (not tied)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    masters = load_file(folder / "training" / "optimizer.safetensors")
    for name, master in learner.masters.named.items():
        assert torch.equal(masters[f"weights/{name}"], master)
        assert torch.equal(tensors[name], master.bfloat16())
    assert AutoTokenizer.from_pretrained(folder).encode("sort 31245") == learner._tokenizer.encode("sort 31245")


def test_nothing_trained_yet_with_tied_weights_copied_once(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(tied=True)
    assert learner.capture() is None
    copies = learner._captured.weights
    assert copies["lm_head.weight"] is copies["model.embed_tokens.weight"]
    assert copies["lm_head.weight"].data_ptr() != learner.model.lm_head.weight.data_ptr()
    learner.write_captured(tmp_path)
    second = resume(learner, tmp_path)
    assert second.version == 0
    assert torch.equal(weights(second), weights(learner))
    assert train(second, range(2)) == train(learner, range(2))


def test_counters_in_a_file_s_metadata_are_read(make_learner: MakeLearner, tmp_path: Path) -> None:
    """Checkpoints had them there before a Learner had ranks."""
    learner = make_learner()
    train(learner, [0])
    file = written(learner, tmp_path / "step") / "training" / "optimizer.safetensors"
    tensors = load_file(file)
    counters = {name: str(int(tensors.pop(f"counters/{name}"))) for name in ("version", "skipped_in_a_row")}
    save_file(tensors, file, metadata=counters)
    assert resume(learner, tmp_path / "step").version == 1


def test_another_model_is_not_resumed(make_learner: MakeLearner, tiny_model: TinyModel, tmp_path: Path) -> None:
    learner = make_learner(tied=False)
    train(learner, [1])
    written(learner, tmp_path / "step")
    with pytest.raises(ValueError, match=r"has no weight lm_head\.weight"):
        Learner(str(tiny_model(True)), learner._config, ENDS, tmp_path / "step" / "training")


def test_full_disk_is_an_oserror_and_frees_the_copies(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner()
    learner.capture()
    with file_size_limit(20_000), pytest.raises(OSError, match="File too large"):
        learner.write_captured(tmp_path)
    assert learner._captured is None
    learner.capture()
    learner.write_captured(tmp_path)


# ---- updates that are not finite ----


def poisoned(groups: list[ScoredGroup]) -> TrainBatch:
    """Make a batch with an advantage that overflows the gradient."""
    groups[0].advantages[0] = np.inf
    return TrainBatch(tuple(groups))


@pytest.mark.slow
def test_update_that_is_not_finite_is_skipped(make_learner: MakeLearner, tmp_path: Path) -> None:
    learner = make_learner(learner={"learning_rate": 1e-2, "warmup_steps": 4})
    learner._skipped_folder = tmp_path / "skipped"
    assert train(learner, [1])[0]["optim/skipped_updates"] == 0.0
    expected, moments = weights(learner), optimizer_state(learner)
    for in_a_row in (1, 2):
        batch = poisoned(make_batch(learner, versions=learner.version))
        report = learner.train_step(batch)
        assert report.version == learner.version == 1 + in_a_row  # the batch is consumed
        assert report.metrics["optim/skipped_updates"] == 1.0
        assert report.metrics["optim/skipped_in_a_row"] == in_a_row
        assert not np.isfinite(report.metrics["loss/policy"])
        assert report.metrics["optim/lr"] == pytest.approx(1e-2 * (1 + in_a_row) / 4)
        assert np.isfinite(report.metrics["lag/max"])
        assert check_names(report.metrics) == []
        path = tmp_path / "skipped" / f"step-00000{1 + in_a_row}.parquet"
        assert same_groups(read_groups(path), batch.groups)
    assert torch.equal(weights(learner), expected)
    assert all(torch.equal(tensor, moments[name]) for name, tensor in optimizer_state(learner).items())
    resumed = resume(learner, written(learner, tmp_path / "step"))
    report = resumed.train_step(poisoned(make_batch(resumed, versions=3)))
    assert report.metrics["optim/skipped_in_a_row"] == 3.0
    unknown = make_batch(resumed, versions=4)  # as of weights that give no numbers
    for completion in (each for group in unknown for each in group.rollout.completions):
        completion.logprobs[:] = np.nan
    report = resumed.train_step(TrainBatch(tuple(unknown)))
    assert (report.metrics["optim/skipped_updates"], report.metrics["optim/skipped_in_a_row"]) == (0.0, 4.0)
    after = train(learner, [4])[0]  # the non-finite gradient is gone
    assert (after["optim/skipped_updates"], after["optim/skipped_in_a_row"]) == (0.0, 0.0)
    assert torch.isfinite(weights(learner)).all()
    assert not torch.equal(weights(learner), expected)


def test_gradient_or_weights_that_are_not_finite_are_seen_and_skip_updates(make_learner: MakeLearner) -> None:
    learner = make_learner(learner={"learning_rate": 1e-2})
    before, batch = weights(learner), TrainBatch(tuple(make_batch(learner)))
    learner.model.model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    (metrics,) = train(learner, [1])
    assert np.isfinite(metrics["loss/policy"])
    assert np.isnan(metrics["optim/grad_norm"])
    assert metrics["optim/skipped_updates"] == 1.0
    assert torch.equal(weights(learner), before)

    with torch.no_grad():
        next(learner.model.parameters())[:] = torch.nan
    metrics = learner.train_step(batch).metrics
    measured = "policy/entropy/exact", "mismatch/kl", "mismatch/logprob_diff/max"
    for name in ("loss/policy", "optim/grad_norm", *measured):
        assert np.isnan(metrics[name]), name
    assert metrics["optim/skipped_updates"] == 1.0


def test_batch_that_cannot_be_kept_does_not_end_the_training(
    make_learner: MakeLearner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    (tmp_path / "file").touch()
    learner._skipped_folder = tmp_path / "file" / "skipped"
    caplog.set_level("WARNING")  # a library that an earlier test has imported may have raised it
    assert learner.train_step(poisoned(make_batch(learner))).version == 1
    assert "step 1: the batch could not be kept: " in caplog.text


def test_batch_without_groups_is_refused(make_learner: MakeLearner) -> None:
    learner = make_learner()
    with pytest.raises(ValueError, match="the batch of version 0 has no groups"):
        learner.train_step(TrainBatch(()))
    assert learner.version == 0


@pytest.mark.parametrize(
    ("engine", "free", "moves"), [("vllm", 84, True), ("vllm", 85, False), ("torch", 99, True)]
)
def test_a_colocated_learner_moves_only_if_the_generators_share_is_not_free(
    make_learner: MakeLearner, monkeypatch: pytest.MonkeyPatch, engine: str, free: int, moves: bool
) -> None:
    """The Generators may take 0.85 of a device's 100 bytes."""
    learner, to = make_learner(generator={"engine": engine}), []
    monkeypatch.setattr(learner, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(learner, "_move", to.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 100))
    learner.make_room()
    assert to == [torch.device("cpu")] * moves
