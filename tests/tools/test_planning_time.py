"""The time of a step, its communication and the splits of GPUs: figures by hand, and a run's own rates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import changed, write_rows
from commands import Capture, refused
from small_run import QUICKSTART
from test_planning import (
    QWEN,
    QWEN_1_5B,
    QWEN_7B,
    SHAPE_1_5B,
    SHAPE_7B,
    folder_of,
    plan_config,
    planned,
    small_model,
)

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import dump_config
from grpo_ray.tools.planning.command import PlanOptions
from grpo_ray.tools.planning.memory_plan import plan_memory
from grpo_ray.tools.planning.model_shape import GB, GPU_TYPES, Machine, ModelShape
from grpo_ray.tools.planning.splits import Split, best_split, divided, divisions, splits
from grpo_ray.tools.planning.step_time import (
    Collectives,
    MeasuredRun,
    Passes,
    StepTime,
    Workload,
    collectives,
    decoding,
    forward_flops,
    gather_seconds,
    measure,
    num_lookups,
    num_micro_batches,
    passes_on,
    sampling_s,
    snapshot_s,
    step_time,
    training_s,
)
from grpo_ray.watch.flops import PEAK_TFLOPS, ModelSize
from grpo_ray.watch.metrics_catalog import PAUSED

H100 = Machine(GPU_TYPES["H100"])
P_7B = SHAPE_7B.num_parameters


def work(response_tokens: float = 100, shape: ModelShape = SHAPE_1_5B, prompt_tokens: int = 256) -> Workload:
    return Workload(shape, prompt_tokens, response_tokens)


def with_ranks(num_ranks: int, replicas: int = 1, per_node: int = 8, **changes: dict[str, Any]) -> Config:
    return divided(plan_config(**changes), 1, num_ranks, replicas, min(per_node, num_ranks))


# ---- data sheets and operations ----


@pytest.mark.parametrize("name", GPU_TYPES)
def test_the_peaks_are_those_of_the_telemetry(name: str) -> None:
    gpu = GPU_TYPES[name]
    assert gpu.flops("bfloat16") == 1e12 * PEAK_TFLOPS[name][torch.bfloat16]
    assert gpu.flops("float32") == 1e12 * PEAK_TFLOPS[name][torch.float32]


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
def test_the_operations_are_those_that_the_learner_counts(share_prompts: str) -> None:
    """The Learner's count has no padding and no copies of prompts."""
    model, shape = small_model("llama")
    config = plan_config(
        learner={"share_prompts": share_prompts}, algorithm={"prompts_per_step": 3, "samples_per_prompt": 4}
    )
    copies = 1 if share_prompts == "auto" else 4
    lengths = 3 * copies * [(0, 250, 200), *(4 // copies - 1) * [(50, 250, 200)]]
    counted = ModelSize.of(model).forward_flops(lengths)
    assert sum(forward_flops(config, Workload(shape, 50, 200))) == pytest.approx(counted, rel=0.01)


def test_passes_by_hand() -> None:
    config = plan_config(algorithm={"epochs_per_batch": 2}, learner={"gradient_checkpointing": False})
    blocks, output = forward_flops(config, work())
    rate = 0.3 * 989e12
    forward_s = 2 * (blocks + output) / rate
    assert passes_on(H100.gpu, config, work()) == Passes(forward_s, 2 * forward_s)
    again = passes_on(H100.gpu, changed(config, learner={"gradient_checkpointing": True}), work())
    assert again.backward_s == pytest.approx((6 * blocks + 4 * output) / rate)  # the output layer is in chunks
    adapter = passes_on(H100.gpu, changed(config, model={"adapter": {"rank": 4}}), work())
    assert adapter.backward_s == adapter.forward_s
    # Lookups are forward passes alone.
    assert num_lookups(plan_config()) == 0
    assert num_lookups(plan_config(algorithm={"kl": {"reference": "initial"}})) == 1
    proximal = {"old_log_probs": "proximal", "kl": {"reference": "ema"}}
    assert num_lookups(plan_config(algorithm=proximal)) == 1  # of one update, every ratio is 1
    config = plan_config(algorithm={**proximal, "epochs_per_batch": 2})
    assert num_lookups(config) == 2
    passes = passes_on(H100.gpu, config, work())
    assert passes.lookup_s == passes.forward_s  # two lookups, two epochs


def test_micro_batches_are_dealt_to_ranks() -> None:
    """256 responses of 480 tokens with an eighth of a prompt of 256 are 512 tokens each, 8 in a micro-batch."""
    assert [num_micro_batches(with_ranks(n), work(480)) for n in (1, 2, 3, 8, 64)] == [32, 16, 11, 4, 1]
    minibatches = with_ranks(2, algorithm={"train_batch_size": 32})  # one of each group's responses
    assert num_micro_batches(minibatches, work(480)) == 3  # 32 x 736 / 4096 / 2
    assert num_micro_batches(with_ranks(2), work(10_000)) == 128  # one at a time


def test_decoding_by_hand() -> None:
    """A step of an engine reads the weights and the keys and values of 512 half-finished sequences."""
    running, step_s = decoding(H100.gpu, plan_config(), work(1024))
    assert running == 512
    weights, cached = 2 * 1_543_714_304, 512 * (256 + 512) * 28 * 1024
    assert step_s == pytest.approx((weights + cached) / (0.7 * 3350e9) + 0.005)
    prefill_s = 32 * 256 * 2 * 1_543_714_304 / (0.5 * 989e12)
    whole_s = prefill_s + 256 * 1024 * step_s / 512
    assert sampling_s(H100.gpu, plan_config(), work(1024)) == pytest.approx(whole_s)
    # On a smaller GPU it is limited by the room for keys and values.
    small = replace(H100.gpu, memory_gib=20.0)
    running, _ = decoding(small, plan_config(), work(1024, SHAPE_7B))
    cached = (256 + 512) * 56 * 1024
    assert running == (0.85 * 20 * 2**30 - 2 * P_7B) // cached
    found, _ = decoding(small, plan_config(generator={"num_gpus": 2}), work(1024, SHAPE_7B))
    assert found == (0.85 * 20 * 2**30 - P_7B) // (cached / 2)


# ---- communication ----


ON_CPUS: dict[str, dict[str, Any]] = {"learner": {"num_gpus": 0}, "generator": {"num_gpus": 0}}


def test_collectives_of_7b_by_hand() -> None:
    assert collectives(SHAPE_7B, plan_config(), H100) == Collectives()  # of one rank
    assert collectives(SHAPE_7B, changed(with_ranks(2), **ON_CPUS), H100) == Collectives()
    near, far = 0.7 * 450e9, 0.7 * 50e9
    of_node = collectives(SHAPE_7B, with_ranks(8), H100)
    assert of_node.gather_s == pytest.approx(2 * P_7B * 7 / 8 / near)
    assert of_node.reduce_s == pytest.approx(4 * P_7B * 7 / 8 / near)
    root = 2 * 152_064 * 3584 + 3584
    block = (P_7B - root) // 28
    assert of_node.exposed_s == pytest.approx((2 * (root + block) + 4 * root) * 7 / 8 / near)
    # Sixteen ranks on two nodes: the rings share the network of a node.
    assert collectives(SHAPE_7B, with_ranks(16), H100).gather_s == pytest.approx(2 * P_7B * 15 / 16 / far)
    # A replica per node: gathered on the node, and the eight shards of a node are all-reduced over the network.
    hybrid = collectives(SHAPE_7B, with_ranks(16, replicas=2), H100)
    assert hybrid.gather_s == of_node.gather_s
    assert hybrid.reduce_s == pytest.approx(of_node.reduce_s + 4 * P_7B / far)
    # A fast network is no faster than NVLink.
    fast = collectives(SHAPE_7B, with_ranks(16), replace(H100, network=4000 * GB))
    assert fast.gather_s == pytest.approx(2 * P_7B * 15 / 16 / near)


def test_adapters_are_reduced_and_an_nf4_base_is_not_gathered() -> None:
    adapter = {"rank": 16, "alpha": 32}
    trained = 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    lora = collectives(SHAPE_7B, with_ranks(8, model={"adapter": adapter}), H100)
    assert lora.gather_s == pytest.approx(2 * (P_7B + trained) * 7 / 8 / (0.7 * 450e9))
    assert lora.reduce_s == pytest.approx(4 * trained * 7 / 8 / (0.7 * 450e9))
    nf4 = collectives(SHAPE_7B, with_ranks(8, model={"adapter": adapter, "base_quantization": "nf4"}), H100)
    assert nf4.gather_s == pytest.approx(2 * trained * 7 / 8 / (0.7 * 450e9))
    # Computation hides communication up to the ends of a pass.
    passes = Collectives(gather_s=1.0, reduce_s=2.0, exposed_s=0.25)
    assert (passes.forward_s(0.5), passes.forward_s(4.0)) == (1.0, 4.0)
    assert (passes.backward_s(0.5), passes.backward_s(8.0)) == (3.25, 8.25)


def test_ranks_divide_the_passes_where_links_are_fast_and_wait_where_they_are_slow() -> None:
    free = Machine(replace(H100.gpu, link=1e30))
    passes = Passes(8.0, 24.0, lookup_s=4.0)
    config = plan_config(algorithm={"kl": {"reference": "initial"}})
    assert training_s(config, work(), free, passes) == (36.0, 0.0)
    total_s, exposed_s = training_s(divided(config, 1, 4, 1, 4), work(), free, passes)
    assert total_s == pytest.approx(36 * 1.1 / 4)
    assert exposed_s == pytest.approx(0.0)
    # Where links are slow, ranks wait.
    slow = Machine(replace(H100.gpu, link=GB))
    config = with_ranks(2)
    each = collectives(SHAPE_1_5B, config, slow)
    total_s, exposed_s = training_s(config, work(480), slow, Passes(1e-3, 3e-3))
    assert total_s == pytest.approx(16 * (2 * each.gather_s + each.reduce_s + each.exposed_s))
    assert exposed_s == pytest.approx(total_s - 4e-3 * 1.1 / 2)


def test_a_snapshot_is_gathered_copied_and_stored() -> None:
    one, eight = plan_config(), with_ranks(8)
    copied_s = 2 * P_7B / 20e9 + 2 * P_7B / 4e9
    assert snapshot_s(SHAPE_7B, one, H100) == pytest.approx(copied_s)
    gathered_s = gather_seconds(2 * P_7B, eight, H100)
    assert gathered_s == pytest.approx(2 * P_7B * 7 / 8 / (0.7 * 450e9))
    assert snapshot_s(SHAPE_7B, eight, H100) == pytest.approx(copied_s + gathered_s)
    nf4 = with_ranks(8, model={"adapter": {"rank": 16}, "base_quantization": "nf4"})
    assert snapshot_s(SHAPE_7B, nf4, H100) < copied_s + 0.01 * gathered_s  # the base is whole on every rank


@pytest.mark.parametrize(
    ("num_gpus", "gpus_per_node", "of_generator", "found"),
    [
        (4, 8, 1, [(1, 1, 3), (2, 1, 2), (3, 1, 1)]),
        (8, 4, 2, [(1, 1, 3), (2, 1, 3), (3, 1, 2), (4, 1, 2)]),
        (8, 4, 1, [(1, 1, 7), (2, 1, 6), (3, 1, 5), (4, 1, 4), (6, 2, 2)]),
        (6, 4, 1, [(1, 1, 5), (2, 1, 4), (3, 1, 3), (4, 1, 2)]),  # the second node has two
        (16, 8, 4, [*((n, 1, 3) for n in (1, 2, 3, 4)), *((n, 1, 2) for n in (5, 6, 7, 8))]),
        (2, 8, 2, []),
    ],
)
def test_divisions(num_gpus: int, gpus_per_node: int, of_generator: int, found: Any) -> None:
    """(Ranks, nodes that they are on, Generators); a Generator's GPUs are on one node."""
    assert list(divisions(num_gpus, gpus_per_node, of_generator)) == found


def split_with(step_s: float, num_ranks: int, fits: bool = True) -> Split:
    return Split(with_ranks(num_ranks), StepTime(0.0, step_s, 0.0, True), 0.0, fits)


def test_the_best_split_fits_and_has_the_fewest_ranks_within_a_percent() -> None:
    table = [split_with(10.0, 1), split_with(5.04, 2), split_with(5.0, 3), split_with(1.0, 4, fits=False)]
    assert best_split(table) is table[1]
    assert best_split([split_with(1.0, 1, fits=False)]) is None
    assert best_split([]) is None


def test_a_split_is_given_as_overrides() -> None:
    def overrides(*of_split: int) -> str:
        split = Split(divided(plan_config(), *of_split), StepTime(1.0, 1.0, 0.0, True), 0.0, True)
        return split.overrides(given)

    given = plan_config()
    assert overrides(3, 5, 1, 5) == "generator.num_generators=3 learner.num_ranks=5"
    assert overrides(4, 12, 2, 6) == "generator.num_generators=4 learner.num_ranks=12 learner.replicas=2"
    on_small_nodes = "generator.num_generators=2 learner.num_ranks=6 learner.ranks_per_node=3"
    assert overrides(2, 6, 1, 3) == on_small_nodes
    assert load_config(QWEN, on_small_nodes.split()).learner.num_ranks_per_node == 3
    given = divided(given, 4, 4, 2, 2)  # a configuration with values of its own for both keys
    assert overrides(3, 5, 1, 5).endswith("learner.num_ranks=5 learner.replicas=1 learner.ranks_per_node=5")


def test_splits_are_those_that_a_run_can_have() -> None:
    def ranks(num_gpus: int, **changes: dict[str, Any]) -> list[int]:
        found = splits(plan_config(**changes), work(), H100, num_gpus, None)
        return [split.config.learner.num_ranks for split in found]

    teachers = {"teacher": "a-model", "num_teachers": 2}
    assert ranks(4) == ranks(6, distillation=teachers, sampling={"min_tokens": 0}) == [1, 2, 3]
    assert ranks(4, learner={"moments": "8bit"}) == [1]


def test_a_copy_per_node_is_taken_only_where_it_is_faster() -> None:
    config = plan_config(learner={"micro_batch_tokens": 8192})

    def replicas(network: float) -> int:
        found = splits(config, work(1024, SHAPE_7B), replace(H100, network=network * GB), 16, None)
        (split,) = [split for split in found if split.config.learner.num_ranks == 12]
        assert split.config.learner.num_ranks_per_node == 6
        return split.config.learner.replicas

    assert (replicas(10), replicas(1000)) == (2, 1)
    # Shared GPUs are not divided.
    colocated = plan_config(generator={"colocated": True}, weight_sync={"max_lag": 0})
    assert not splits(colocated, work(), H100, 8, None)
    assert not splits(plan_config(**ON_CPUS), work(), H100, 8, None)


@pytest.mark.parametrize(("name", "model"), [("math-1.5b-8gpu", QWEN_1_5B), ("7b-16gpu", QWEN_7B)])
def test_configurations_have_the_recommended_split(name: str, model: dict[str, Any], tmp_path: Path) -> None:
    plan = plan_memory(PlanOptions(f"configs/qwen2.5-{name}.yaml", (folder_of(tmp_path, model),)))
    best = best_split(plan.splits)
    assert plan.fits
    assert plan.num_gpus == int(name.rpartition("-")[2].removesuffix("gpu"))
    assert best is not None
    assert best.config.generator == plan.config.generator
    given, recommended = plan.config.learner, best.config.learner
    assert recommended.num_ranks_per_node == given.num_ranks_per_node
    assert recommended.model_copy(update={"ranks_per_node": None}) == given


# ---- a run's own figures ----

ROW = {
    "throughput/sampled_tokens_per_s": 600.0, "utilization/generators": 0.75,
    "throughput/trained_tokens_per_s": 300.0, "utilization/learner": 0.5, "throughput/trained_tokens": 384.0,
    "rollout/response_tokens/mean": 64.0, "timing/step_s": 1.5, "timing/weight_sync/paused_s": 0.06,
}  # fmt: skip


def write_run(folder: Path, config: Config, rows: Sequence[dict[str, float]]) -> Path:
    folder.mkdir()
    dump_config(config, folder / "config.yaml")
    write_rows(folder / "metrics.jsonl", [{"step": step, **row} for step, row in enumerate(rows, start=1)])
    return folder


def test_rates_are_tokens_over_seconds_of_work_or_refused(tmp_path: Path, tiny_config: Config) -> None:
    config = changed(tiny_config, generator={"num_generators": 2})  # 12 rollouts per step
    slow = {**ROW, "timing/step_s": 99.0, "throughput/sampled_tokens_per_s": 1.0}
    idle = {**ROW, "throughput/sampled_tokens_per_s": 0.0, "utilization/generators": 0.0}
    found = measure(write_run(tmp_path / "run", config, [slow, slow, ROW, ROW, ROW, idle]))
    assert (found.sampled_tokens_per_s, found.trained_tokens_per_s) == (600 / (0.75 * 2), 300 / 0.5)
    assert (found.trained_frac, found.sync_s) == (384 / (12 * 64), pytest.approx(0.06))
    assert (found.response_tokens, found.step_s, found.num_steps) == (64, 1.5, 3)
    with pytest.raises(ValueError, match="no step in which"):
        measure(write_run(tmp_path / "idle", tiny_config, [{**ROW, "utilization/learner": 0.0}]))
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        measure(tmp_path / "none")


def test_rates_are_those_of_a_known_gpus_data_sheet(tmp_path: Path, capsys: Capture) -> None:
    message = refused(capsys, "plan", QUICKSTART, "--response-tokens", "10")
    assert "--response-tokens: without GPUs the time of a step needs" in message
    assert "--gpu-memory: the run uses no GPU" in refused(capsys, "plan", QUICKSTART, "--gpu-memory", "10")
    folder = folder_of(tmp_path, QWEN_1_5B)
    shown = planned(capsys, QWEN, folder, "--response-tokens", "100")
    assert "responses of 100 tokens, modelled from the data sheet of H100" in shown
    message = "--gpu-type voodoo2: no data sheet; known are A100, H100, H200, B200, L40S"
    assert message in refused(capsys, "plan", QWEN, folder, "--gpu-type", "voodoo2")
    h200 = PlanOptions(QWEN, (folder,), gpu_type="h200")
    found = [plan_memory(options).machine.gpu.memory_gib for options in (h200, replace(h200, gpu_memory=90))]
    assert found == [140, 90]


def test_a_plan_warns_where_rates_are_of_another_model_or_other_devices(
    tmp_path: Path, tiny_config: Config, capsys: Capture
) -> None:
    run_folder = str(write_run(tmp_path / "run", tiny_config, [ROW]))
    shown = planned(capsys, QWEN, folder_of(tmp_path, QWEN_1_5B), "--from", run_folder)
    for text in ("from another model (788,608 parameters)", "from other devices", "responses of 64 tokens"):
        assert text in shown
    own = (str(tmp_path / "run" / "config.yaml"), "--from", run_folder)
    assert "responses of 10 tokens" in planned(capsys, *own, "--response-tokens", "10")
    assert "!" not in planned(capsys, *own)


# ---- time at a run's rates ----


def measured(sampled: float, trained: float, **others: Any) -> MeasuredRun:
    rates = {"sampled_tokens_per_s": sampled, "trained_tokens_per_s": trained, "sync_s": 0.0}
    steps = {"num_steps": 3, "step_s": 1.0, "response_tokens": 100.0, "trained_frac": 1.0}
    return MeasuredRun(**{"config": plan_config(), **rates, **steps, **others})


def test_a_step_is_the_sum_when_synchronous_and_the_slower_side_when_not() -> None:
    rates = measured(1000, 4000, sync_s=0.5, trained_frac=0.5)
    config = plan_config(algorithm={"prompts_per_step": 10, "samples_per_prompt": 4, "epochs_per_batch": 2})
    overlapping = step_time(config, work(), H100, rates)
    # 4,000 tokens are sampled; 4,000 are trained in two epochs.
    assert (overlapping.sample_s, overlapping.train_s) == (4.0, 1.0)
    assert overlapping.step_s == 4.5
    assert step_time(changed(config, generator={"num_generators": 8}), work(), H100, rates).step_s == 1.0
    assert step_time(changed(config, weight_sync={"max_lag": 0}), work(), H100, rates).step_s == 5.5
    # Replayed groups are trained and not sampled.
    config = plan_config(buffer={"replay": {"frac": 0.25}})
    time = step_time(config, work(), H100, measured(1000, 1000))
    assert (time.sample_s, time.train_s) == (24 * 8 * 100 / 1000, 32 * 8 * 100 / 1000)


def test_measured_rates_are_those_of_the_runs_ranks() -> None:
    """Ranks other than the run's share its computation, and communicate as modelled."""
    fast = Machine(replace(H100.gpu, link=1e30))
    one, four = measured(1000, 1000), measured(1000, 1000, config=with_ranks(4))
    alone_s = 32 * 8 * 100 / 1000
    assert step_time(with_ranks(4), work(), fast, one).train_s == pytest.approx(alone_s * 1.1 / 4)
    assert step_time(with_ranks(4), work(), fast, four).train_s == alone_s
    assert step_time(plan_config(), work(), fast, four).train_s == pytest.approx(alone_s * 4 / 1.1)
    slow = Machine(replace(H100.gpu, link=GB))
    waiting = step_time(with_ranks(4), work(), slow, one)
    assert waiting.train_s == pytest.approx(alone_s * 1.1 / 4 + waiting.exposed_s)
    assert waiting.exposed_s > 0
    gathered_s = gather_seconds(2 * SHAPE_1_5B.num_parameters, with_ranks(4), slow)
    assert waiting.snapshot_s == pytest.approx(gathered_s)


def test_splits_are_printed_with_the_slower_side(tmp_path: Path, capsys: Capture) -> None:
    """9,000 tokens/s per Generator and of a rank: 76,800 take 8.53 s / Generators and 8.53 x 1.1 / ranks.

    Four ranks also wait 6 times for 3.5 ms that nothing hides, and gather a snapshot in 7 ms.
    """
    folder = folder_of(tmp_path, QWEN_1_5B)
    row = ROW | {f"throughput/{name}_tokens_per_s": 9000.0 for name in ("sampled", "trained")}
    row |= {"utilization/generators": 1.0, "utilization/learner": 1.0, PAUSED: 0.0}
    row |= {"rollout/response_tokens/mean": 300.0, "throughput/trained_tokens": 256 * 300.0}
    run_folder = write_run(tmp_path / "run", load_config(QWEN, [folder]), [row])
    shown = planned(capsys, QWEN, folder, "--gpus", "8", "--from", str(run_folder))
    for line in (
        "       7      1         1    28.9 GiB    1.22 s    8.53 s    8.53 s  Learner; Generators idle 86%",
        "*           4      4         1    10.5 GiB    2.13 s    2.38 s    2.38 s  Learner; Generators idle 10",
    ):
        assert line in shown
    assert "best: generator.num_generators=4 learner.num_ranks=4\n" in shown


def test_a_split_of_a_large_model_leaves_out_what_does_not_fit(tmp_path: Path, capsys: Capture) -> None:
    shown = planned(capsys, QWEN, folder_of(tmp_path, QWEN_7B), "--gpus", "8", status=1)
    lines = [line for line in shown.splitlines() if "GiB" in line and " s " in line]
    rows = [line.removeprefix("  *").split() for line in lines]
    assert [row[:2] for row in rows if row[-3:] == ["does", "not", "fit"]] == [["7", "1"]]
    assert len(rows) == 7
    assert "best: generator.num_generators=" in shown
