"""Whole runs with an adapter, in this process: what Generators sample from, and the tools."""

import json
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from any_reward_cli import patch_graders
from builders import tensors_of
from local_runs import make_config, train
from peft import PeftModel
from transformers import AutoModelForCausalLM

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.tools.cli import main
from grpo_ray.tools.evaluation.evaluation_plan import plan_evaluation
from grpo_ray.tools.evaluation.sampling import _snapshot
from grpo_ray.tools.evaluation.subject import Weights, find_subject
from grpo_ray.tools.export.merge import base_folder
from grpo_ray.tools.look import EvaluationOptions
from grpo_ray.tools.report.rollout_rows import log_ratios

pytestmark = pytest.mark.slow
# Rows of whole blocks, so that every linear layer can be quantized.
LORA = ["model.adapter.rank=4", "model.tiny.hidden_size=64", "model.tiny.intermediate_size=128"]
NARROW = ["model.dtype=bfloat16", "model.base_quantization=nf4"]


@pytest.fixture(scope="module", autouse=True)
def something_to_learn_from(model_cache: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_graders(patch)
        yield


def lora_config(*overrides: str) -> Config:
    return make_config(*LORA, "learner.learning_rate=1e-2", *overrides)


SETTINGS = {
    "lora": [],
    "nf4": ["model.base_quantization=nf4"],
    "colocated": ["generator.colocated=true", "learner.share_prompts=never"],
    "own-dora": ["model.implementation=grpo_ray", "model.adapter.dora=true"],
}


@pytest.mark.parametrize("name", SETTINGS)
def test_generators_sample_from_what_is_trained(name: str, run: RunDirectory) -> None:
    """With nf4 the first version differs from the model on disk, and is sent before the first token."""
    exact = "weight_sync.max_lag=0", "algorithm.num_steps=4", "algorithm.samples_per_prompt=4"
    train(lora_config(*exact, *SETTINGS[name]), run.path)
    rows = read_metrics(run.metrics_path)
    assert len(rows) == 4
    assert all(row["rollout/zero_variance_groups"] < 4 for row in rows)  # of 4
    assert all(0 <= row["mismatch/kl"] < 1e-9 for row in rows)
    assert all(row["mismatch/logprob_diff/max"] < 1e-4 for row in rows)


@pytest.fixture(scope="module", params=[[], NARROW], ids=["float32", "bfloat16-nf4"])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "run"
    train(lora_config("algorithm.num_steps=4", *request.param), folder)
    return folder


def test_what_was_sampled_from_is_what_is_exported_and_evaluated(finished: Path, tmp_path: Path) -> None:
    config = lora_config("algorithm.num_steps=4")
    base_file = Path(base_folder(config)) / "model.safetensors"
    before = zlib.crc32(base_file.read_bytes())
    assert main(["export", str(finished), "--merged", str(tmp_path / "model")]) == 0
    assert zlib.crc32(base_file.read_bytes()) == before
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    checkpoint = finished / "checkpoints/step-000004"
    saved = json.loads((checkpoint / "adapter_config.json").read_bytes())
    assert saved["base_model_name_or_path"] == base_folder(config)
    base = AutoModelForCausalLM.from_pretrained(saved["base_model_name_or_path"])
    assert {n for n, p in exported.named_parameters()} == {n for n, p in base.named_parameters()}
    if exported.dtype == torch.float32:
        theirs = PeftModel.from_pretrained(base, str(checkpoint)).merge_and_unload()
        for name, parameter in exported.named_parameters():
            torch.testing.assert_close(parameter, theirs.get_parameter(name), rtol=1e-5, atol=1e-7)
    assert (tmp_path / "model/tokenizer.json").exists()
    assert main(["export", str(finished), "--merged", str(tmp_path / "model")]) == 2  # exists already
    # A run, its checkpoint, the adapter's folder alone and a run that begins with it are evaluated with it.
    alone = shutil.copytree(checkpoint, tmp_path / "alone", ignore=shutil.ignore_patterns("training"))
    run, single, copied = (find_subject(str(path)) for path in (finished, checkpoint, alone))
    assert run.weights == single.weights == (Weights(4, checkpoint),)
    assert copied.weights == (Weights(0, alone),)
    assert copied.data["model"]["adapter"]["rank"] == 4
    job = tmp_path / "job.yaml"
    job.write_text(f"model: {{tiny: {{}}, adapter: {{path: {checkpoint}}}}}\ntask: {{kind: sorting}}\n")
    assert plan_evaluation(EvaluationOptions(str(job))).subject.weights == (Weights(0, checkpoint),)
    own = load_config(finished / "config.yaml")
    served = tensors_of(_snapshot(own, Weights(4, checkpoint), 1))
    expected = tensors_of(_snapshot(own, Weights(0, tmp_path / "model"), 1))
    torch.testing.assert_close(served, expected, rtol=0, atol=0)


def test_a_report_compares_tokens_with_the_adapter_s_policy(finished: Path, tmp_path: Path) -> None:
    assert main(["report", str(finished), "--output", str(tmp_path / "page.html"), "--log-ratio", "last"]) == 0
    rows = [{"prompt_token_ids": [5, 6], "token_ids": [7, 8], "logprobs": [-1.0, -1.0]}]
    assert log_ratios(lora_config(), finished / "checkpoints/step-000004", rows)[0].shape == (2,)
