"""Writing the Learner's state to a disk that fills up: always an OSError, which a run survives."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from builders import file_size_limit

from grpo_ray.policy.loading import load_policy, load_tokenizer
from grpo_ray.policy.training_state import capture_state, write_state


@pytest.mark.parametrize("is_model_written", [False, True], ids=["model", "tokenizer"])
def test_a_disk_that_fills_up_is_an_os_error_whoever_finds_it(
    is_model_written: bool,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = load_policy(str(tiny_model())), load_tokenizer(str(tiny_model()))
    state = capture_state(model, torch.optim.AdamW(model.parameters()), {"version": 1}, {})
    (tmp_path / "training").mkdir()
    if is_model_written:  # the disk fills up after the model's files, in tokenizer.json, which Rust writes
        monkeypatch.setattr(model, "save_pretrained", lambda *_, **__: None)
    with file_size_limit(2000), pytest.raises(OSError, match="too large") as caught:
        write_state(state, model, tokenizer, tmp_path)
    assert caught.value.errno == errno.EFBIG
