"""The configurations that chaos is drawn on: named overrides of CONFIG, which is the quickstart."""

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_ray.config.loading import load_config

SMALL = (  # steps of half a second, so that most of a campaign is faults
    "algorithm.prompts_per_step=8",
    "algorithm.samples_per_prompt=4",
    "task.num_validation_prompts=32",
    "learner.num_cpus=0.25",
    "generator.num_cpus=0.25",
    "learner.learning_rate=1.0e-5",  # or every answer is right soon, and there is nothing to train on
    "checkpoint.every_num_steps=3",
    "recovery.stall_timeout_s=30",
    "recovery.start_timeout_s=300",
    "weight_sync.phase_timeout_s=12",
)
TORCH = ("generator.engine=torch", "generator.num_generators=2")
BUDGETS = (  # that are never exhausted
    "recovery.max_restarts=10000",
    "recovery.max_restores=10000",
    "recovery.restart_backoff_s=0",
)
SORTING = "{{kind: sorting, num_digits: {}, num_train_prompts: {}, num_validation_prompts: 16}}"
PARTS = ", ".join(
    f"{name}: {{weight: {weight}, task: {SORTING.format(digits, prompts)}}}"
    for name, weight, digits, prompts in (("five", 3, 5, 2000), ("four", 1, 4, 500))
)
MIXTURE = f"{{kind: mixture, parts: {{{PARTS}}}}}"
TOLERANCE = "examples.rewards.numeric_tolerance:reward_fn"  # a function: processes grade with it


@dataclass(frozen=True)
class Scenario:
    """Overrides on top of SMALL, and the words that faults may need of it."""

    overrides: tuple[str, ...]
    words: frozenset[str] = frozenset({"local"})
    num_nodes: int = 0  # of a cluster, besides the head's


SCENARIOS = {
    "torch": Scenario(TORCH),
    "default-budgets": Scenario(TORCH, frozenset({"local", "default-budgets"})),
    "in-flight": Scenario(
        (*TORCH, "weight_sync.in_flight=true", "weight_sync.checksum=true"), frozenset({"local", "checksum"})
    ),
    "wires": Scenario(
        (*TORCH, "weight_sync.transport=collective", "weight_sync.checksum=true"),
        frozenset({"local", "checksum", "wires"}),
    ),
    "delta": Scenario((*TORCH, "weight_sync.delta=true"), frozenset({"local", "checksum"})),
    "synchronous": Scenario((*TORCH, "weight_sync.max_lag=0")),
    "replay": Scenario((*TORCH, "buffer.replay.frac=0.5")),
    "oversampling": Scenario((*TORCH, "algorithm.oversample_frac=0.5")),
    "dynamic": Scenario((*TORCH, "algorithm.dynamic_sampling_tries=3")),
    "lookahead": Scenario((*TORCH, "buffer.lookahead=5", "weight_sync.max_lag=2")),
    "mixture": Scenario(
        (*TORCH, f"task={{kind: mixture, parts: {{{PARTS}}}}}"), frozenset({"local", "mixture"})
    ),
    "graders": Scenario((*TORCH, f"task.reward={TOLERANCE}"), frozenset({"local", "graders"})),
    "vllm": Scenario(("generator.engine=vllm",), frozenset({"local", "vllm"})),
    "episodes": Scenario(  # of configs/guess-number.yaml
        (
            *TORCH,
            "episodes.num_workers=2",
            "episodes.max_seconds=8",
            "episodes.memory_gib=0.5",
            *(
                f"task.{part}=profiling.chaos.chaos_episodes:{name}"
                for part, name in (("episode", "episode"), ("examples", "examples"), ("warmup", "warmup_pairs"))
            ),
        ),
        frozenset({"local", "episodes"}),
    ),
    "ranks": Scenario(
        (*TORCH, "learner.num_ranks=2", "learner.collective_timeout_s=20"), frozenset({"local", "ranks"})
    ),
    "cluster": Scenario(
        (*TORCH, "placement.strategy=spread", "placement.wait_s=60"), frozenset({"cluster"}), num_nodes=2
    ),
}


def scenario_of(name: str) -> Scenario:
    """Return a scenario, or several as one: `replay+mixture`."""
    parts = [SCENARIOS[part] for part in name.split("+")]
    overrides = tuple(override for part in parts for override in part.overrides)
    words = frozenset(word for part in parts for word in part.words)
    return Scenario(overrides, words, max(part.num_nodes for part in parts))


def overrides_of(scenario: Scenario, config: str, others: Sequence[str]) -> list[str]:
    """Return a scenario's overrides; the tiny model that a mixture cannot build is built first."""
    budgets = () if "default-budgets" in scenario.words else BUDGETS
    overrides = [*SMALL, *budgets, *scenario.overrides]
    if "mixture" in scenario.words:
        from grpo_ray.run.tiny_model import tiny_model_folder  # it imports torch, which takes a while

        model = tiny_model_folder(load_config(config, SMALL))
        overrides += [f"model.path={model.resolve()}", "model.tiny=null"]
    return [*overrides, *others]
