"""Writing the Learner's state to a disk that fills up: always an OSError, which a run survives."""

import errno
from pathlib import Path

import pytest
import torch
from builders import TinyModel, file_size_limit

from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.master_weights import MasterWeights
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.learning.ranks import Ranks
from grpo_ray.learning.training_state import capture_state, write_state


@pytest.mark.parametrize("is_model_written", [False, True], ids=["model", "tokenizer"])
def test_a_disk_that_fills_up_is_an_os_error_whoever_finds_it(
    is_model_written: bool, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, tokenizer = load_policy(str(tiny_model())), load_tokenizer(str(tiny_model()))
    state = capture_state(
        MasterWeights(model, torch.float32), torch.optim.AdamW(model.parameters()), {"version": 1}, {}
    )
    (tmp_path / "training").mkdir()
    if is_model_written:  # the disk fills up after the model's files, in tokenizer.json, which Rust writes
        (tmp_path / "config.json").write_text("{}")
        monkeypatch.setattr(model, "save_pretrained", lambda *_, **__: None)
    with file_size_limit(2000), pytest.raises(OSError, match="too large") as caught:
        write_state(state, model, tokenizer, torch.float32, tmp_path, Ranks())
    assert caught.value.errno == errno.EFBIG


def test_a_learner_on_the_cpu_of_a_gpu_node_does_not_touch_the_gpu(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking CUDA for its random state makes a context of some hundred MiB on the first GPU."""

    def refuse(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refuse)
    model = load_policy(str(tiny_model()))
    capture_state(
        MasterWeights(model, torch.float32), torch.optim.AdamW(model.parameters()), {"version": 3}, {}
    )


def test_a_capture_takes_over_the_memory_of_one_that_is_written(tiny_model: TinyModel) -> None:
    model = load_policy(str(tiny_model(tied=True)))
    masters, optimizer = MasterWeights(model, torch.bfloat16), torch.optim.AdamW(model.parameters())
    first = capture_state(masters, optimizer, {"version": 1}, {})
    places = {name: tensor.data_ptr() for name, tensor in first.weights.items()}
    with torch.no_grad():
        for master in masters.parameters:
            master.add_(1)
    second = capture_state(masters, optimizer, {"version": 2}, {}, spare=first)
    assert {name: tensor.data_ptr() for name, tensor in second.weights.items()} == places
    assert all(torch.equal(second.weights[name], master) for name, master in masters.named.items())
    assert second.weights["lm_head.weight"] is second.weights["model.embed_tokens.weight"]
