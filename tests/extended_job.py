"""A job with all additions of docs/extending.md: test_docs.py runs it with a changed copy as PYTHONPATH.

python tests/extended_job.py COPY
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from local_runs import make_config, train

import grpo_ray
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records.rollout_log import read_groups
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.tools.audit.audit import audit
from grpo_ray.tools.cli import main
from grpo_ray.transfer.snapshot import pack_weights


def train_with_own_task_loss_and_engine(folder: Path) -> None:
    model_path = tiny_model_folder(make_config())
    config = make_config(
        f"model.path={model_path}", "model.tiny=null", "run.seed=3",
        "task={kind: reversal, num_train_prompts: 24, num_validation_prompts: 4}",
        "generator.engine=uniform_engine:UniformEngine",
        "algorithm.loss=my_losses:spo", "algorithm.loss_options={strength: 0.5}",
        "algorithm.off_policy_correction=my_losses:agreeing", "algorithm.correction_options={limit: 20.0}",
    )  # fmt: skip
    recorder, run = train(config, folder), RunDirectory(folder)
    assert recorder.steps == [1, 2, 3, 4, 5, 6, 7, 8], recorder.steps
    assert all("loss/clip_frac" in line for line in read_metrics(run.metrics_path) if line["loss/policy"])
    report = audit(run)
    assert report.is_clean, str(report)
    assert max(line["lag/max"] for line in read_metrics(run.metrics_path)) <= 1

    num_tokens = len(load_tokenizer(str(model_path)))
    versions = set()
    for group in (group for path in run.rollouts.glob("*.parquet") for group in read_groups(path)):
        item = group.rollout.item
        assert item.prompt.split("Reverse ")[1][:4] == item.ground_truth[::-1]
        for completion in group.rollout.completions:
            # Before the fifth token the response cannot end.
            expected = [-math.log(num_tokens - (place < 4)) for place in range(len(completion.logprobs))]
            assert np.allclose(completion.logprobs, expected), completion
            versions |= set(completion.versions.tolist())
    assert versions <= set(range(8)), versions
    assert max(versions) >= 6, versions


def own_transport() -> None:
    from grpo_ray.engines.file_buffer import FileBuffer  # type: ignore[import-not-found]

    from grpo_ray.transfer.vllm_worker import LoadingWorker, message_of

    class Model:
        def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
            return [("weight", torch.empty(0))]

        def load_weights(self, weights: Any) -> set[str]:
            self.loaded = {name: tensor.clone() for name, tensor in weights}
            return set(self.loaded)

    worker, model = LoadingWorker(), Model()
    worker.device = torch.device("cpu")
    worker.model_config = SimpleNamespace(hf_text_config=None, quantization=None)
    buffer = FileBuffer()
    for version in (1, 2):
        weight = torch.arange(6.0).view(2, 3) + version
        snapshot = pack_weights([("weight", weight)], version, torch.float32)
        pages = buffer.write(snapshot)
        worker._receive_weights(model, message_of(snapshot, pages))
        assert torch.equal(model.loaded["weight"], weight)
    path = Path(buffer.path)
    assert path.exists()
    buffer.close()
    assert not path.exists()


if __name__ == "__main__":
    copy = Path(sys.argv[1])
    assert Path(grpo_ray.__file__).is_relative_to(copy), grpo_ray.__file__
    train_with_own_task_loss_and_engine(copy / "run")
    own_transport()
    sys.exit(main(["longest", str(copy / "run")]))
