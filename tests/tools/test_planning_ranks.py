"""The plan of a rank's memory against what torch allocates: FSDP2 without other ranks, and on real ones."""

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_runs import make_config, train, until
from test_planning import peak_bytes, plan_config
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config.loading import ConfigError
from grpo_ray.core.controller import Controller
from grpo_ray.core.producer import SLICE
from grpo_ray.run.preparation import check_files
from grpo_ray.tools.planning.learner_memory import state_items, with_unsharded
from grpo_ray.tools.planning.model_shape import shape_of

SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 1024, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip


def sharded_model(sizes: dict[str, Any], num_ranks: int) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**sizes), attn_implementation="sdpa"
    )
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (num_ranks,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.get_submodule("model.layers").children():
        fully_shard(block, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def shard_bytes(tensor: torch.Tensor | None) -> int:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().nbytes


def measure_rank(rank: int, backend: str, num_ranks: int, port: int, sizes: dict[str, Any], found: str) -> None:
    """Write the bytes of rank 0's shards after a step, and of a pass's peak over two tokens."""
    store = FakeStore() if backend == "fake" else dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    model = sharded_model(sizes, num_ranks)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.tensor([[1, 2]])

    def compute() -> None:
        model(input_ids=tokens).logits[:, :1].float().logsumexp(-1).sum().backward()

    compute()
    optimizer.step()
    peak = peak_bytes(compute)
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    sums = [
        sum(map(shard_bytes, tensors))
        for tensors in (model.parameters(), [p.grad for p in model.parameters()], moments)
    ]
    if rank == 0:
        Path(found).write_text(" ".join(map(str, [*sums, peak])))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 512), (2, 32768), (3, 32768)])
@pytest.mark.parametrize("backend", ["fake", "gloo"])
@pytest.mark.kept("fake-2-512")
def test_a_rank_holds_what_is_planned(backend: str, num_ranks: int, vocab_size: int, tmp_path: Path) -> None:
    """With few tokens of a large vocabulary the peak is where the root's gradient is reduced.

    Otherwise it is where blocks are. Which of a neighbour's buffers are freed by then differs from run to run:
    at most one more block's are held than planned. The fake backend sends nothing, and needs no copy to reduce.
    """
    sizes = {**SIZES, "vocab_size": vocab_size}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    found = tmp_path / "found"
    arguments = (backend, num_ranks, port, sizes, str(found))
    if backend == "fake":
        measure_rank(0, *arguments)
    else:
        torch.multiprocessing.spawn(measure_rank, arguments, nprocs=num_ranks)
    *state, peak = map(int, found.read_text().split())
    shape, config = shape_of(sizes, "x"), plan_config(learner={"num_ranks": num_ranks})
    planned_state = [item.num_bytes for item in state_items(shape, config)]
    uneven = 0.005 if num_ranks == 3 else 0.0  # the first of three ranks has a row more of some matrices
    assert state == pytest.approx(planned_state, rel=uneven)
    items = with_unsharded([], shape, config)
    planned = sum(item.num_bytes for item in items)
    if vocab_size == 32768 and backend == "gloo":
        assert "after the backward pass" in items[-1].note
        assert planned == pytest.approx(peak, rel=0.08)
    else:
        one_more = (2 + 4) * shape.block_parameters  # gathered in bfloat16, to reduce in float32
        least = (0.6 if backend == "gloo" else 0.5) * planned  # oneDNN's scratch differs by processor
        assert least <= peak <= planned + 1.1 * one_more


@pytest.mark.parametrize("size", ["prompts_per_step=100000000", "samples_per_prompt=100000000"])
def test_more_responses_per_step_than_memory_holds_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match=r"prompts_per_step \(.*0 responses per step.*at most 4,194,304"):
        make_config(f"algorithm.{size}")


def test_more_responses_of_a_validation_than_memory_holds_are_refused() -> None:
    config = make_config("evaluation.samples_per_prompt=100000000")
    with pytest.raises(ValueError, match=r"evaluation\.samples_per_prompt: 100,000,000 responses to each of 4"):
        check_files(config)


@pytest.mark.slow
def test_the_driver_answers_while_a_very_large_step_is_dispatched(tmp_path: Path) -> None:
    num_groups = 5 * SLICE
    seen: list[int] = []

    async def meddle(actors: LocalActors, controller: Controller) -> None:
        await until(lambda: controller.live_status().num_sampling > 0)
        seen.append(controller.live_status().num_sampling)
        controller.stop()
        await until(lambda: False)

    config = make_config(f"algorithm.prompts_per_step={num_groups}")
    train(config, tmp_path / "run", meddle)
    assert 0 < seen[0] < num_groups
