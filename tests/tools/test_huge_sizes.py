"""Sizes that no machine has memory for are refused, and the driver answers while it begins a large step."""

from pathlib import Path

import pytest
from local_runs import make_config, train, until

from grpo_ray.cluster.local import LocalActors
from grpo_ray.config.loading import ConfigError
from grpo_ray.core.controller import Controller
from grpo_ray.core.producer import SLICE
from grpo_ray.run.preparation import check_files


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
