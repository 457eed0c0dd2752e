"""Secrets by name: what keeps them from an EnvironmentWorker and from rewards, and what hands them over."""

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from local_runs import make_config
from run_process import output_of

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.reward import secrets_in
from grpo_ray.config.secrets import values_of
from grpo_ray.core.scorer import Scorer
from grpo_ray.episodes.checking import check_episodes
from grpo_ray.records.run_files import dump_config
from grpo_ray.rewards.configured import check_reward
from grpo_ray.run.preparation import check_files

REWARDS = """
import os

AT_IMPORT = os.environ.get("JUDGE_KEY")

def sees(response, ground_truth):
    return float(os.environ.get("JUDGE_KEY") == AT_IMPORT == "a key") + 10 * ("OTHER_KEY" in os.environ)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "judging_4712.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    monkeypatch.setenv("OTHER_KEY", "another key")
    return "judging_4712:sees"


def with_reward(reward: Any, *overrides: str) -> Config:
    return make_config(f"task.reward={reward}", *overrides)


# It shows the entries of os.environ, of a child process, and of /proc/PID/environ, before and after.
WORKER = """
import os, subprocess, sys
from grpo_ray.config.secrets import keep_only

def show():
    print("\\0".join(f"{k}={v}" for k, v in os.environ.items()), end="\\1", flush=True)
    subprocess.run([sys.executable, "-c", 'print(open("/proc/self/environ").read(), end="\\1")'])
    print(open("/proc/self/environ").read(), end="\\1", flush=True)

show()
os.environ["REMOTE"] = "https://git"
keep_only({"TOOL_KEY": "given"})
show()
"""
SECRETS = {
    "RAY_AUTH_TOKEN": "0123456789", "RAY_AUTH_TOKEN_PATH": "/somewhere/secret", "HF_TOKEN": "a hub's",
    "TOOL_KEY": "a tool's", "HTTPS_PROXY": "http://me:word@proxy", "REMOTE": "https://word@git.example",
}  # fmt: skip


@pytest.mark.slow
def test_a_worker_keeps_the_listed_secrets_alone_and_what_is_no_secret_any_more() -> None:
    """The memory that the process was started with, which /proc shows, has not even the listed ones."""
    output = output_of(sys.executable, "-c", WORKER, env={**os.environ, **SECRETS, "PLAIN": "text"})
    *before, own, child, initial, _ = (text.split("\0") for text in output.split("\1"))
    assert len(before) == 3
    for entries in before:
        assert {f"{name}={value}" for name, value in SECRETS.items()} <= set(entries)
    for entries in (own, child):
        assert "PLAIN=text" in entries
        kept = {entry for entry in entries if entry.partition("=")[0] in SECRETS}
        assert kept == {"TOOL_KEY=given", "REMOTE=https://git"}
    assert "PLAIN=text" in initial
    assert not [value for value in SECRETS.values() if value in "\0".join(initial)]


def test_a_term_may_stand_alone(module: str) -> None:
    alone = with_reward(f"{{reward: '{module}', secrets: [JUDGE_KEY]}}")
    assert alone.task == with_reward(f"[{{reward: '{module}', secrets: [JUDGE_KEY]}}]").task
    assert alone.secrets == ["JUDGE_KEY"]
    # Those of episodes count only with episodes.
    assert make_config("episodes.secrets=[TOOL_KEY]").secrets == []
    assert load_config("configs/calculator.yaml", ["episodes.secrets=[TOOL_KEY]"]).secrets == ["TOOL_KEY"]


@pytest.mark.parametrize(
    "field", ["episodes.secrets=[sk-1234]", "task.reward=[{reward: 'a:b', secrets: ['sk 1234']}]"]
)
def test_a_value_in_place_of_a_name_is_refused_and_not_repeated(field: str) -> None:
    name = "the name of the secret's environment variable, never its value"
    with pytest.raises(ConfigError, match=name) as error:
        make_config(field)
    assert "1234" not in str(error.value)


def test_a_secret_that_is_not_set_is_refused_by_name_and_no_value_is_in_the_configuration(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_reward(f"{{reward: '{module}', secrets: [OTHER_KEY, JUDGE_KEY]}}")
    with pytest.raises(ValueError, match=r"^task\.reward: secrets: JUDGE_KEY is not set; export it"):
        check_files(config)
    monkeypatch.setenv("JUDGE_KEY", "")
    with pytest.raises(ValueError, match=r"^task\.reward: secrets: JUDGE_KEY is not set"):
        check_reward(config.rewards[""])
    monkeypatch.setenv("JUDGE_KEY", "a key")
    check_reward(config.rewards[""])
    dump_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "JUDGE_KEY" in text
    assert "a key" not in text
    with pytest.raises(ValueError, match=r"task\.reward: secrets: brevity is built in and reads none"):
        check_reward(with_reward("[{reward: brevity, secrets: [JUDGE_KEY]}]").rewards[""])

    episodes = load_config("configs/calculator.yaml", ["episodes.secrets=[TOOL_KEY]"])
    with pytest.raises(ValueError, match=r"^episodes\.secrets: TOOL_KEY is not set"):
        check_episodes(episodes)
    monkeypatch.setenv("TOOL_KEY", "a key")
    check_episodes(episodes)


@pytest.mark.slow
@pytest.mark.parametrize("names", [[], ["JUDGE_KEY"]], ids=str)
def test_a_reward_sees_its_keys_alone(module: str, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """A Scorer, on whatever machine, is given them by the driver. A module may read them as it is imported."""
    monkeypatch.setenv("JUDGE_KEY", "a key")
    config = with_reward(f"{{reward: '{module}', secrets: {names}}}", "scorer.num_workers=1")
    secrets = values_of(secrets_in(config.rewards.values()))
    assert secrets == dict.fromkeys(names, "a key")
    for name in names:
        monkeypatch.delenv(name)
    with closing(Scorer(config, secrets)) as scorer:
        (result,) = scorer._grader.grade("", [("a", "b")])
    assert isinstance(result, dict), result
    assert result["reward"] == len(names)
