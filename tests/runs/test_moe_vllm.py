"""Runs of a mixture of experts with real vLLM, from a folder as the hub has it."""

from pathlib import Path

import pytest
from agreeing_run import metrics_of_agreeing_run


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.campaign
@pytest.mark.usefixtures("any_reward")
def test_sampler_and_learner_agree_after_each_sync(tiny_moe: Path, tmp_path: Path) -> None:
    """Each step moves the experts."""
    metrics = metrics_of_agreeing_run(tmp_path, "model.tiny=null", f"model.path={tiny_moe}")
    assert all(row["perf/prompt_frac"] < 0.5 for row in metrics)  # prompts are shared
