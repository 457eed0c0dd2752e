"""A single-turn task written as an episode is the plain run, to the last bit.

The one difference is in how the reference engine samples: a group's plain completions are one batch, and the
turns of episodes are requests of their own, so that products of matrices are rounded differently. Here each
completion is sampled by itself in both runs.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_episodes
import torch
from builders import write_rows
from local_runs import train
from run_process import untimed
from safetensors.torch import load_file

from grpo_ray.config.loading import load_config
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.tools.audit.audit import audit
from grpo_ray.types import Episode, ScoredGroup

SMALL = "tests/small_episodes.yaml"
pytestmark = pytest.mark.usefixtures("model_cache")
# What is only measured of episodes. An episode that ends by itself is not truncated, even if
# its reply was cut off: its function saw that, and said what it is worth.
OTHER = ("buffer/bytes", "episodes/", "eval/episodes/", "rollout/truncated_frac", "eval/truncated_frac")


def write_examples(folder: Path) -> list[str]:
    """Write the examples of `small_episodes` as files; return the overrides of the plain task."""
    sets = small_episodes.examples(0)
    paths = []
    for name, examples in (("train", sets.train), ("validation", sets.validation)):
        rows = [{"question": e.question, "answer": e.ground_truth} for e in examples]
        paths.append(write_rows(folder / f"{name}.jsonl", rows))
    task = {"kind": "file", "train_path": paths[0], "validation_path": paths[1], "prompt": "chat",
            "reward": "small_episodes:reward"}  # fmt: skip
    return [f"task={json.dumps(task)}"]


def run(folder: Path, *overrides: str) -> RunDirectory:
    directory = RunDirectory(folder)
    train(load_config(SMALL, ["weight_sync.max_lag=0", "algorithm.num_steps=2", *overrides]), folder)
    assert audit(directory).problems == []
    return directory


def compare(episodes: ScoredGroup, plain: ScoredGroup) -> None:
    items = [replace(g.rollout.item, prompt="", prompt_token_ids=(), about="") for g in (episodes, plain)]
    assert items[0] == items[1]
    for name in ("rewards", "answer_rewards", "advantages"):
        assert getattr(episodes, name).tobytes() == getattr(plain, name).tobytes(), name
    assert episodes.turn_advantages == ()
    for one, other in zip(episodes.rollout.completions, plain.rollout.completions, strict=True):
        assert isinstance(one, Episode)
        assert one.sequences[0].prompt_token_ids == plain.rollout.item.prompt_token_ids
        # An episode's text shows special tokens, because they stand between turns.
        assert one.text.removesuffix("<|endoftext|>") == other.text
        for name in ("token_ids", "logprobs", "versions"):  # not the reason of its end
            value, expected = getattr(one, name), getattr(other, name)
            assert (value.dtype, value.tobytes()) == (expected.dtype, expected.tobytes()), name


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine sample every completion in a batch of its own."""
    sample = TorchEngine._sample

    async def one_by_one(engine: TorchEngine, sequences: list[Any]) -> None:
        for sequence in sequences:
            await sample(engine, [sequence])

    monkeypatch.setattr(TorchEngine, "_sample", one_by_one)


@pytest.mark.slow
@pytest.mark.usefixtures("one_at_a_time", "untried")
def test_the_run_is_the_same(tmp_path: Path) -> None:
    common = ["model.tiny=null", f"model.path={tiny_model_folder(load_config(SMALL))}"]
    as_episodes = ["task.episode=small_episodes:one_turn", "task.warmup=null"]
    episodes = run(tmp_path / "episodes", *common, *as_episodes)
    plain = run(tmp_path / "plain", *common, *write_examples(tmp_path))
    for path in sorted(plain.rollouts.glob("*.parquet")):
        for one, other in zip(read_groups(episodes.rollouts / path.name), read_groups(path), strict=True):
            compare(one, other)
    rows = [[untimed(row) for row in read_metrics(r.metrics_path)] for r in (episodes, plain)]
    for one, other in zip(*rows, strict=True):
        shared = [name for name in other if not name.startswith(OTHER)]
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}
    assert any(row["optim/grad_norm"] for row in rows[0])
    for file in ("model.safetensors", "training/optimizer.safetensors"):
        one, other = (load_file(r.checkpoint_path(2) / file) for r in (episodes, plain))
        torch.testing.assert_close(one, other, rtol=0, atol=0)
