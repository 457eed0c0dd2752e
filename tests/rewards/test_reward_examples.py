"""The examples with rewards train for two steps in one process."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import grpo_ray
from examples.own_reward import train as own_reward
from examples.trl_reward import rewards as trl_rewards

ROOT = Path(__file__).parents[2]
SHORT = (
    "algorithm={num_steps: 2, prompts_per_step: 2, samples_per_prompt: 2}",
    "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, warmup: null}",
)


def train(example: str, tmp_path: Path, *overrides: str) -> grpo_ray.Run:
    config = ROOT / "examples" / example / "config.yaml"
    return grpo_ray.train(config, *SHORT, f"run.output_dir={tmp_path}", *overrides, local=True)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_functions_by_hand() -> None:
    assert own_reward.reward("12", parity=0) == 1
    assert own_reward.reward("13", parity=0) == own_reward.reward("x", parity=0) == 0
    assert trl_rewards.correctness([" 5", "15"], ["5", "5"]) == [2, 0]
    assert trl_rewards.only_digits([], ["5 ", "five", " "]) == [1, 0, None]


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_own_reward(tmp_path: Path) -> None:
    run = grpo_ray.train(
        own_reward.CONFIG, *SHORT, f"run.output_dir={tmp_path}",
        reward=own_reward.reward, examples=own_reward.EXAMPLES, local=True,
    )  # fmt: skip
    assert run.is_finished


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_trl_reward(tmp_path: Path) -> None:
    metrics = train("trl_reward", tmp_path).metrics()
    assert {"reward/correctness/mean", "reward/digits/mean"} <= {*metrics.column_names}


class Judge(BaseHTTPRequestHandler):
    """A server of chat completions that wants a key and grades by the length of the question."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_known = self.headers["Authorization"] == "Bearer s3cret" and self.path == "/v1/chat/completions"
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        grade = len(request["messages"][0]["content"]) % 11
        self.wfile.write(json.dumps({"choices": [{"message": {"content": f"{grade}"}}]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judge_url: str) -> None:
    monkeypatch.setenv("JUDGE_URL", judge_url)
    monkeypatch.setenv("JUDGE_MODEL", "any")
    monkeypatch.setenv("JUDGE_API_KEY", "wrong")
    retries = "task.reward=[{reward: examples.judge.judge:reward, network: true, retries: 0, secrets: [%s]}]"
    secrets = retries % "JUDGE_API_KEY, JUDGE_URL, JUDGE_MODEL"
    with pytest.raises(grpo_ray.errors.RunError, match=r"it fails on the first example .* 401"):
        train("judge", tmp_path, secrets)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret")
    run = train("judge", tmp_path)
    rewards = run.rollouts()["reward"].to_pylist()
    assert all(0 <= reward <= 1 for reward in rewards)
    assert run.metrics()["reward/errors"].to_pylist() == [0, 0]
    assert "s3cret" not in (run.path / "config.yaml").read_text()
