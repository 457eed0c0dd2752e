"""A Learner of several gloo ranks against one rank: gradients, metrics, snapshots and checkpoints."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, changed, file_size_limit, make_batch, tensors_of
from episode_batches import random_batch
from rank_workers import meeting, on_ranks
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner
from grpo_ray.learning import shards
from grpo_ray.learning.ranks import Ranks, Seat
from grpo_ray.learning.sharded import local_part, whole
from grpo_ray.types import ScoredGroup, TrainBatch

EXACT = 1e-6
DTYPES = ("float32", "bfloat16")
SMOOTH = {"learner": {"adam_eps": 1e-2, "learning_rate": 1e-3}}  # an update in proportion to the gradient
NO_CLIP = {"algorithm": {"cliprange": 99.0}}
"""A token at the clip's edge has a gradient or none, by a rounding of bfloat16; without one nothing jumps."""
COUNTED = ("lag/", "loss/clip_frac", "optim/lr", "optim/num", "optim/skipped", "throughput/trained_tokens")
"""Metrics that no order of additions changes."""


def merged(*changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Merge changes of a configuration, section by section."""
    result: dict[str, dict[str, Any]] = {}
    for each in changes:
        for section, values in each.items():
            result[section] = {**result.get(section, {}), **values}
    return result


def steps(
    seat: Seat | None, model: str, config: Config, batches: Sequence[Sequence[ScoredGroup]],
    checkpoint: Path | None = None, written_to: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train on the batches; return the gradients of all updates, the metrics and the final snapshot.

    Args:
        checkpoint: the training continues from it.
        written_to: the folder of the checkpoint after the first batch.
    """
    path = str(checkpoint) if checkpoint is not None and config.model.adapter is None else model
    training = checkpoint / "training" if checkpoint is not None else None
    learner = Learner(path, config, ENDS, training, initial_path=model, seat=seat)
    gradients: list[torch.Tensor] = []
    update = learner._update

    def recorded(loss: float) -> dict[str, float]:
        of_each = [torch.zeros_like(p) if p.grad is None else p.grad for p in learner.masters.parameters]
        gradients.append(torch.cat([whole(gradient).flatten() for gradient in of_each]))
        return update(loss)

    learner._update = recorded  # type: ignore[method-assign]
    metrics, files = [], {}
    for number, groups in enumerate(batches):
        metrics.append(learner.train_step(TrainBatch(tuple(groups))).metrics)
        if written_to is not None and number == 0:
            written_to.mkdir(exist_ok=True)
            learner.capture()
            files = learner.write_captured(written_to)
    result = {
        "gradients": torch.stack(gradients).numpy() if gradients else None,
        "metrics": metrics,
        "weights": learner.snapshot()[0],
        "exact": torch.cat([whole(p).flatten() for p in learner.masters.parameters]).numpy(),
        "held": sum(local_part(p).numel() for p in learner.masters.parameters),
        "files": files,
    }
    learner._ranks.close()
    return result


def runs(seat: Seat, ports: Sequence[int], model: str, *arguments: Sequence[Any]) -> list[dict[str, Any]]:
    """Run `steps` with one tuple of further arguments after another; they meet at one port each."""
    places = [replace(seat, port=port) for port in ports]
    return [steps(place, model, *own) for place, own in zip(places, zip(*arguments, strict=True), strict=True)]


@pytest.fixture
def batches(tiny_config: Config, tiny_model: TinyModel) -> list[list[ScoredGroup]]:
    learner = Learner(str(tiny_model()), tiny_config, ENDS)
    return [make_batch(learner, seed) for seed in range(2)]


def same(found: dict[str, Any], expected: dict[str, Any], exact: float = EXACT) -> None:
    """Compare two results of `steps`: later gradients are those of weights that differ in their rounding."""
    pairs = zip(found["gradients"], expected["gradients"], strict=True)
    apart = [np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-9) for one, other in pairs]
    assert apart[0] < exact, apart
    assert max(apart) < 4 * exact, apart
    for one, other in zip(found["metrics"], expected["metrics"], strict=True):
        assert {name for name in one if not name.startswith("ranks/")} == set(other)
        for name, value in other.items():
            if name.startswith(COUNTED):
                assert one[name] == value, name
            elif not name.startswith(("timing/", "perf/")):
                assert one[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert np.abs(found["exact"] - expected["exact"]).max() < 1e-6


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "constant with entropy, KL measured, large micro-batches recomputed, narrow moments": {
        "algorithm": {
            "aggregation": "constant", "entropy_bonus": 0.01,
            "kl": {"coefficient": 0.0, "reference": "initial"},
        },
        "learner": {
            "micro_batch_tokens": 4096, "gradient_checkpointing": "full",
            "moments": "bfloat16", "betas": (0.9, 0.95),
        },
    },
    "cispo's token mean, top entropy, unbiased KL": {
        "algorithm": {
            "loss": "cispo", "token_selection": "top_entropy", "selection_options": {"share": 0.5},
            "kl": {"coefficient": 0.1, "reference": "initial", "estimator": "unbiased"},
        }
    },
    "gspo with dropped responses and clip-cov": {
        "algorithm": {
            "loss": "gspo", "train_batch_size": 6,
            "token_selection": "clip_cov", "selection_options": {"share": 0.1, "low": 0.0},
            "off_policy_correction": ("mask_product", "opsm"), "correction_options": {"delta": 0.0},
        }
    },
    "ipo's sequence sum, scale of the batch, one sequence per micro-batch": {
        "algorithm": {
            "loss": "ipo", "loss_options": {"kl_tau": 0.01}, "aggregation": "sequence_sum",
            "advantage": "mean", "advantage_scale": "batch",
        },
        "learner": {"micro_batch_tokens": 1},
    },
    "proximal, corrected, a prompt mean over two epochs of minibatches": {
        "algorithm": {
            "aggregation": "prompt_mean", "old_log_probs": "proximal", "off_policy_correction": "mask_band",
            "train_batch_size": 4, "epochs_per_batch": 2,
        }
    },
    "gmpo in padded rows, KL to an average": {
        "algorithm": {"loss": "gmpo", "kl": {"coefficient": 0.1, "reference": "ema", "ema_decay": 0.5}},
        "learner": {"share_prompts": "never"},
    },
    "REINFORCE++": {
        "algorithm": {
            "kl": {"coefficient": 0.1, "reference": "ema", "ema_decay": 0.5, "placement": "reward_to_go"},
            "advantage": "raw", "advantage_scale": "whiten_tokens",
        }
    },
}  # fmt: skip
OF_TWO_STEPS = ("KL", "REINFORCE++")
"""Parts of the names of those in which the first step leaves something to the second."""


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.kept("2")
def test_every_setting_gives_the_gradients_of_one_rank(
    size: int, tiny_config: Config, tiny_model: TinyModel, batches: list[list[ScoredGroup]]
) -> None:
    configs = [changed(tiny_config, **merged(SMOOTH, changes)) for changes in SETTINGS.values()]
    stores = [meeting() for _ in configs]
    sharded = [changed(config, learner={"num_ranks": size}) for config in configs]
    model, ports = str(tiny_model()), [store.port for store in stores]
    given = [batches[: 1 + any(part in name for part in OF_TWO_STEPS)] for name in SETTINGS]
    many = on_ranks(size, runs, ports, model, sharded, given)
    for number, (name, config) in enumerate(zip(SETTINGS, configs, strict=True)):
        one = steps(None, model, config, given[number])
        try:
            same(many[0][number], one)
            for other in many[1:]:
                assert np.array_equal(other[number]["gradients"], many[0][number]["gradients"])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


EPISODES: dict[str, dict[str, Any]] = {
    "branches on both ranks": {"learner": {"micro_batch_tokens": 1}},
    "minibatches of whole episodes": {
        "algorithm": {"old_log_probs": "proximal", "train_batch_size": 3, "epochs_per_batch": 2}
    },
    "padded rows and token means": {
        "learner": {"share_prompts": "never"},
        "algorithm": {
            "aggregation": "token_mean",
            "train_batch_size": 3,  # later updates are away from the reference
            "kl": {"coefficient": 0.1, "reference": "initial"},
        },
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EPISODES)
@pytest.mark.kept("branches on both ranks")
def test_two_ranks_give_the_gradient_of_one_on_episodes(
    name: str, tiny_config: Config, tiny_model: TinyModel
) -> None:
    sizes = {"algorithm": {"prompts_per_step": 3, "samples_per_prompt": 3}}
    config, model = changed(tiny_config, **merged(SMOOTH, sizes, EPISODES[name])), str(tiny_model(tied=False))
    batches = [random_batch(1, Learner(model, config, ENDS).model, config)[0]]
    many = on_ranks(2, steps, model, changed(config, learner={"num_ranks": 2}), batches)
    same(many[0], steps(None, model, config, batches))


@pytest.mark.slow
def test_a_mixture_of_experts(tiny_config: Config, tiny_moe: Path) -> None:
    """Its fused experts are gathered before they are split into the weights of the checkpoint."""
    config = changed(tiny_config, **SMOOTH)
    batches = [make_batch(Learner(str(tiny_moe), config, ENDS))]
    many = on_ranks(2, steps, str(tiny_moe), changed(config, learner={"num_ranks": 2}), batches)
    one = steps(None, str(tiny_moe), config, batches)
    same(many[0], one, 5 * EXACT)
    sent, expected = (tensors_of(each["weights"]) for each in (many[0], one))
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in sent
    torch.testing.assert_close(sent, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_replicas_give_the_gradient_of_one_rank_and_others_resume_them(
    tiny_config: Config, tiny_model: TinyModel, batches: list[list[ScoredGroup]], tmp_path: Path
) -> None:
    """The model is a TransformerLM; those of transformers are in the other tests."""
    config = changed(tiny_config, **SMOOTH, model={"implementation": "grpo_ray"})
    model = str(tiny_model(own=True))
    many = changed(config, learner={"num_ranks": 4, "replicas": 2})
    folder = tmp_path / "step"
    found = on_ranks(4, steps, model, many, batches[:1], None, folder, replicas=2)
    assert np.array_equal(steps(None, model, config, [], folder)["exact"], found[0]["exact"])
    one = steps(None, model, config, batches[:1])
    same(found[0], one)
    assert sum(rank["held"] for rank in found) == 2 * one["held"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "head_dtype"),
    [
        *((kind, dtype, "model") for kind in ("full", "lora", "dora", "4 bits") for dtype in DTYPES),
        ("full", "bfloat16", "float32"),
        ("lora", "bfloat16", "float32"),
    ],
)
@pytest.mark.kept("full-bfloat16-float32", "dora-bfloat16-model", "4 bits-float32-model")
def test_adapters_and_dtypes(
    kind: str, dtype: str, head_dtype: str, tiny_config: Config, tiny_model: TinyModel,
    batches: list[list[ScoredGroup]],
) -> None:  # fmt: skip
    model: dict[str, Any] = {"dtype": dtype, "head_dtype": head_dtype}
    if kind != "full":
        model["adapter"] = {"rank": 4, "dora": kind == "dora"}
    if kind == "4 bits":
        model["base_quantization"] = "nf4"
    kl = {"algorithm": {"kl": {"coefficient": 0.1, "reference": "ema", "ema_decay": 0.5}}}
    config = changed(tiny_config, **merged(SMOOTH, kl), model=model)
    is_wide = kind == "4 bits"  # its blocks have 64 weights
    path = str(tiny_model(hidden_size=64 if is_wide else 32))
    many = on_ranks(2, steps, path, changed(config, learner={"num_ranks": 2}), batches)
    one = steps(None, path, config, batches)
    if dtype == "float32":
        same(many[0], one, 2 * EXACT if is_wide else EXACT)  # one rank's own rounding, in other micro-batches
    else:  # the sums over a batch's gradients are rounded to bfloat16 in other places
        difference = np.linalg.norm(many[0]["gradients"][0] - one["gradients"][0])
        assert difference < 0.02 * np.linalg.norm(one["gradients"][0])
    sent, expected = (tensors_of(each["weights"]) for each in (many[0], one))
    torch.testing.assert_close(sent, expected, rtol=0.02, atol=1e-3 if dtype == "bfloat16" else 1e-5)
    assert many[1]["weights"].num_bytes == 0


CONTINUED: dict[str, dict[str, dict[str, Any]]] = {
    "float32": {},
    "bfloat16 and a moving reference": {
        "model": {"dtype": "bfloat16"},
        "algorithm": {"kl": {"coefficient": 0.1, "reference": "ema", "ema_decay": 0.5}},
    },
    "an adapter": {"model": {"adapter": {"rank": 4}}, "algorithm": {"kl": {"reference": "initial"}}},
    "a bfloat16 adapter and a refreshed reference": {
        "model": {"adapter": {"rank": 4}, "dtype": "bfloat16"},
        "algorithm": {"kl": {"reference": "initial", "coefficient": 0.1, "refresh_every_num_steps": 1}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.kept("float32")
def test_resuming_with_as_many_ranks_is_exact_and_with_others_is_close(
    name: str, tiny_config: Config, tiny_model: TinyModel, batches: list[list[ScoredGroup]], tmp_path: Path,
) -> None:  # fmt: skip
    """Train a step, write a checkpoint, and train another, with the same number of ranks or another."""
    of_one = changed(tiny_config, **merged(SMOOTH, NO_CLIP, CONTINUED[name]))
    of_two, model = changed(of_one, learner={"num_ranks": 2}), str(tiny_model())
    folders, second = [tmp_path / "1", tmp_path / "2"], [aged(batches[1], 1)]
    both = batches[:1] + second
    whole_runs = [
        steps(None, model, of_one, both, None, folders[0]),
        on_ranks(2, steps, model, of_two, both, None, folders[1])[0],
    ]
    for folder, run in zip(folders, whole_runs, strict=True):
        files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        assert files == run["files"]
    stores = [meeting() for _ in folders]
    ports = [store.port for store in stores]
    to_two, as_before = on_ranks(2, runs, ports, model, [of_two] * 2, [second] * 2, folders)[0]
    assert np.array_equal(as_before["exact"], whole_runs[1]["exact"])
    assert np.array_equal(as_before["gradients"], whole_runs[1]["gradients"][1:])
    for continued in (to_two, steps(None, model, of_one, second, folders[1])):
        apart = continued["exact"] - whole_runs[0]["exact"]
        assert np.abs(apart).max() < (1e-6 if of_one.model.dtype == "float32" else 1e-3)


def late(seat: Seat) -> list[int]:
    """Join the others, the second rank later than a collective may take."""
    if seat.rank == 1:
        time.sleep(2 * seat.collective_timeout_s)
    return Ranks(seat).gathered(seat.rank)


@pytest.mark.slow
def test_a_rank_may_start_later_than_a_collective_may_take() -> None:
    assert on_ranks(2, late, collective_timeout_s=2.0) == [[0, 1], [0, 1]]


def writes(seat: Seat, folder: Path) -> list[str]:
    """Write shards while the second rank has no room, then no memory, then both; return the outcomes."""
    ranks, outcomes = Ranks(seat), []
    tensors = {"x": distribute_tensor(torch.arange(4096.0), ranks.writing_mesh, [Shard(0)])}
    no_room = partial(file_size_limit, 100)
    no_memory = partial(patch.object, shards, "save", side_effect=MemoryError("no memory"))
    for name, trouble in (("room", no_room), ("memory", no_memory), ("both", contextlib.nullcontext)):
        try:
            with trouble() if seat.rank == 1 else contextlib.nullcontext():
                parts = {n: local_part(t) for n, t in tensors.items()}
                shards.write_shards(parts, shards.shards_of(tensors), folder / name, ranks)
            read = shards.read_shards(folder / name, tensors.get)["x"]
            outcomes.append(f"read {whole(read).sum().item():g}")
        except (OSError, RuntimeError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.slow
def test_a_rank_that_cannot_write_its_shards_fails_all_and_the_next_checkpoint_succeeds(tmp_path: Path) -> None:
    for outcomes in on_ranks(2, writes, tmp_path):
        assert outcomes[0] == "OSError: rank 1: [Errno 27] File too large"
        assert outcomes[1] == "RuntimeError: rank 1: no memory"
        assert outcomes[2] == f"read {torch.arange(4096.0).sum().item():g}"


def aged(groups: Sequence[ScoredGroup], version: int) -> list[ScoredGroup]:
    """Return the groups as sampled by another version."""
    return [
        replace(group, rollout=replace(group.rollout, completions=tuple(
            replace(c, versions=np.full_like(c.versions, version)) for c in group.rollout.completions
        ))) for group in groups
    ]  # fmt: skip
