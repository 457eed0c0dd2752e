"""profiling/compare_trl.py, without TRL: both sides get the same work, and what is missing is said."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from grpo_ray.config.loading import load_config
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.rewards.builtin import brevity_reward_fn, exact_match_reward_fn


@pytest.fixture(scope="module")
def compare_trl(profiling_script: Callable[[str], ModuleType]) -> ModuleType:
    return profiling_script("compare_trl")


def test_the_rewards_are_the_same(compare_trl: ModuleType) -> None:
    from trl_side import REWARDS

    right = " ascending </think> <answer> 12369 </answer>"
    wrong = right.replace("12369", "16329")
    for text in (right, wrong, "12369", right[:-9], right + right, f"</think>{right}", right + " 1", ""):
        assert REWARDS["exact_match"](text, "12369") == exact_match_reward_fn(text, "12369")["reward"], text
    for text in ("", "x" * 10, "x" * 999, "x" * 2000):
        assert REWARDS["brevity"](text, "") == brevity_reward_fn(text, "", free=0, span=1000)["reward"]


def test_a_python_without_trl_is_refused(
    compare_trl: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_trl.main(["--trl-python", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'trl'\" >&2\nexit 1\n")
    empty.chmod(0o755)
    assert compare_trl.main(["--trl-python", str(empty)]) == 2
    shown = capsys.readouterr().err
    assert "cannot import trl with torch and datasets (ModuleNotFoundError: No module named 'trl')" in shown
    assert "the head of this file" in shown


@pytest.mark.slow
def test_both_sides_get_the_same_work(
    compare_trl: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.tiny_learner import model_folder

    with model_folder() as model:
        monkeypatch.setattr(compare_trl, "tiny_model_folder", lambda config: Path(model))
        tokenizer = load_tokenizer(model)
        jobs = {}
        own = {name: case for name, case in compare_trl.CASES.items() if not case.is_pretrained}
        for number, (name, case) in enumerate(own.items()):
            folder = tmp_path / str(number)
            folder.mkdir()
            overrides = [*compare_trl.COMMON, *case.overrides]
            if case.prompt_tokens is not None:
                overrides += compare_trl.write_long_prompts(case.prompt_tokens, folder)
            config = load_config(compare_trl.QUICKSTART, overrides)
            jobs[name] = job = compare_trl.trl_job(case, config, 6, folder)
            assert job["prompts_per_step"] * job["samples_per_prompt"] == config.rollouts_per_step == 256
            assert config.rollouts_per_step % job["micro_batch_rows"] == 0
            assert job["num_threads"] == 2
            assert job["learning_rate"] == config.learner.learning_rate == 0
        quick, long, prompts = jobs.values()
        assert (quick["max_tokens"], quick["min_tokens"], quick["reward"]) == (24, 0, "exact_match")
        assert (long["max_tokens"], long["min_tokens"]) == (192, 192)
        assert (prompts["max_tokens"], prompts["min_tokens"]) == (64, 64)
        texts = [text for text, _ in prompts["prompts"]]
        assert len(set(texts)) == len(texts)
        assert {len(tokenizer(text)["input_ids"]) for text in texts[:20]} == {250}


def test_both_sides_of_the_losses_have_every_case(profiling_script: Callable[[str], ModuleType]) -> None:
    """Each case is a configuration that grpo_ray takes, and its terms and bounds take effect."""
    script = profiling_script("compare_trl_losses")
    tensors = script.make_tensors(0)
    found = {name: script.ours(case, tensors) for name, case in script.CASES.items()}
    plain = found["grpo"][0]
    assert all(gradients[0].isfinite().all() and gradients[0].norm() > 0 for _, gradients in found.values())
    assert [name for name, (loss, _) in found.items() if name != "grpo" and abs(loss - plain) < 1e-6] == []
    assert found["entropy bonus"][1][1].norm() > 0
