"""A run on Ray with the teacher in vLLM; the policy samples in torch."""

from pathlib import Path

import numpy as np
import pytest
from builders import check_names, plain_logprobs
from small_run import QUICKSTART, SMALL
from test_distillation_runs import teacher_of
from test_run import run_actors
from transformers import AutoModelForCausalLM

from grpo_ray.config.loading import load_config
from grpo_ray.records.rollout_log import read_rollouts
from grpo_ray.records.run_files import read_metrics
from grpo_ray.tools.audit.audit import audit


@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.campaign
@pytest.mark.usefixtures("shared_ray", "model_cache")
def test_the_logprobs_of_a_teacher_in_vllm_are_those_of_a_plain_forward_pass(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    own = [*SMALL, "model.tiny.hidden_size=128", "sampling.min_tokens=0", "algorithm.num_steps=3"]
    teacher = teacher_of(load_config(QUICKSTART, own))
    overrides = [f"distillation.teacher={teacher}", "distillation.num_gpus=0", "distillation.num_cpus=0"]
    run = run_actors(load_config(QUICKSTART, [*own, *overrides]), tmp_path / "run")
    metrics = read_metrics(run.metrics_path)
    assert len(metrics) == 3
    assert check_names(set().union(*metrics) - {"step", "time"}) == []
    assert audit(run).problems == []
    model = AutoModelForCausalLM.from_pretrained(teacher)
    rows = [row for step in (1, 2, 3) for row in read_rollouts(run.rollouts_path(step))]
    for row in rows:
        expected = plain_logprobs(model, row["prompt_token_ids"], row["token_ids"]).detach().numpy()
        np.testing.assert_allclose(row["teacher_logprobs"], expected, atol=1e-4)
    assert len(rows) == 24
