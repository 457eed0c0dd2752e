"""A synchronous run with an adapter, replaced in vLLM's LoRA layers at each sync."""

from pathlib import Path

import pytest
from agreeing_run import metrics_of_agreeing_run


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.campaign
@pytest.mark.usefixtures("model_cache", "any_reward")
def test_logprobs_of_vllms_lora_layers_and_the_learner_agree_after_each_sync(tmp_path: Path) -> None:
    """Each step moves the adapter."""
    metrics_of_agreeing_run(
        tmp_path, "model.tiny.warmup=null", "model.adapter.rank=4", "weight_sync.send=adapter"
    )
