"""The Python interface: a run from Python objects, in a script, in a notebook's event loop, and in a thread."""

import asyncio
import importlib.util
import inspect
import json
import math
import signal
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from commands import Capture, printed

import grpo_ray
from grpo_ray.config.loading import ConfigError
from grpo_ray.config.user_code import pickled
from grpo_ray.errors import RunError

CONFIG: dict[str, Any] = {
    "model": {
        "dtype": "float32",
        "tiny": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "warmup": None},
    },
    "task": {"prompt": "short"},
    "sampling": {"max_tokens": 4, "min_tokens": 0},
    "algorithm": {"num_steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2},
    "generator": {"num_gpus": 0},
    "learner": {"num_gpus": 0, "learning_rate": 1e-3},
    "evaluation": {"every_num_steps": 2},
    "checkpoint": {"every_num_steps": 1},
    "weight_sync": {"max_lag": 0},
}
EXAMPLES = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n % 3} for n in range(12)]
pytestmark = pytest.mark.usefixtures("here")


def train(*overrides: str, **options: Any) -> grpo_ray.Run:
    margin = 2  # of the closure, which travels along

    def reward(response: str, ground_truth: str, level: int) -> float:
        return len(response) % margin + level

    given = {"reward": reward, "examples": EXAMPLES, "local": True} | options
    return grpo_ray.train(CONFIG, *overrides, **given)


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_a_run_from_a_closure_and_a_list(capsys: Capture) -> None:
    seen: list[int] = []

    def take_away(step: int, metrics: dict[str, Any]) -> None:
        """Change what it is given, for another tool."""
        seen.append(step)
        metrics.clear()

    torch.manual_seed(5)
    expected, _ = torch.rand(1), torch.manual_seed(5)
    run = train(on_step=take_away)
    assert torch.equal(torch.rand(1), expected)  # a run's seed is not the caller's
    assert seen == [1, 2, 3]
    assert run.is_finished
    assert run.path.parent == Path("runs").absolute()  # also after a change of folder
    metrics = run.metrics()
    assert metrics["step"].to_pylist() == [1, 2, 3]
    assert all(0 <= value <= 3 for value in metrics["reward/mean"].to_pylist())
    assert run.evaluations()["step"].to_pylist() == [0, 2, 3]
    rollouts = run.rollouts()
    assert rollouts.num_rows == 3 * 2 * 2
    assert rollouts.schema.metadata[b"grpo_ray.rollouts"] == b"1"
    assert run.rollouts(2).equals(rollouts.filter(pa.compute.equal(rollouts["step"], 2)))
    assert grpo_ray.read_rollouts(run.path).equals(rollouts)
    assert {json.loads(text)["row"]["level"] for text in rollouts["about"].to_pylist()} <= {0, 1, 2}
    assert len(run.plot().axes) == 2
    assert run.plot()._repr_png_()[1:4] == b"PNG"  # type: ignore[attr-defined]  # what a notebook shows
    model, tokenizer = run.model()
    assert model.config.hidden_size == 32
    assert tokenizer("1 + 1?")["input_ids"]
    # It goes on from the command line, where the closure and the examples are found in the moved directory.
    run = grpo_ray.Run(run.path.rename("moved"))
    assert "its reward: " in capsys.readouterr().out
    printed(capsys, "resume", run.path, "algorithm.num_steps=4", "--local")
    assert grpo_ray.Run(run.path).metrics()["step"].to_pylist() == [1, 2, 3, 4]
    audit = "audit", run.path, "--run-reward-code"
    assert "are not checked" not in printed(capsys, *audit)
    (module,) = (run.path / "given").glob("*.py")
    module.write_text(module.read_text() + "# edited\n")
    assert f"(module {module.stem}, {module.name}): not what this run began with" in printed(capsys, *audit)
    evaluated = grpo_ray.evaluate(run, local=True, run_reward_code=True, limit=1, output="evaluated")
    assert evaluated.num_examples == 1


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_a_resume_keeps_the_reward_and_is_refused_with_other_data(capsys: Capture) -> None:
    """A new process pickles the same function to other bytes, so a pickle cannot say whether it is the same."""
    again = ("run.name=job", "run.if_exists=resume")
    run = train(*again, "algorithm.num_steps=1", reward=lambda response: 0.25)
    train(*again, "algorithm.num_steps=2", reward=lambda response: 0.75)
    assert "the run goes on with its own reward, which is stored in runs/job/given" in capsys.readouterr().out
    assert run.metrics()["reward/mean"].to_pylist() == [0.25, 0.25]
    others = [{"question": f"{n}?", "answer": "1", "level": 0} for n in range(12)]
    with pytest.raises(RunError, match=r"cannot be resumed with .the given examples.; leave it"):
        train(*again, "algorithm.num_steps=3", examples=others, reward=lambda response: 0.75)
    assert run.resume("algorithm.num_steps=3", local=True).is_finished
    assert run.metrics()["reward/mean"].to_pylist() == [0.25] * 3
    checkpoint = run.path / "checkpoints" / "step-000003"
    found = grpo_ray.evaluate(checkpoint, local=True, run_reward_code=True, limit=1, output="evaluated")
    assert found.reward == 0.25


@pytest.mark.slow
@pytest.mark.usefixtures("any_reward")
async def test_a_run_in_a_notebook_another_in_a_thread_and_one_stopped_by_its_program() -> None:
    first = train("run.name=first", on_step=lambda step, _: np.int64(step) == 2)
    second = await asyncio.to_thread(train, "run.name=second", "algorithm.num_steps=1")
    assert first.metrics()["step"].to_pylist() == [1, 2]  # that of the step it stopped at, too
    assert not (first.path / "checkpoints" / "step-000003").exists()
    assert not first.is_finished
    with pytest.raises(RunError, match="profile_steps: step 2 is trained already"):
        first.resume("learner.profile_steps=[1,2]", local=True)
    assert second.is_finished
    assert first.resume(local=True).is_finished
    assert first.metrics()["step"].to_pylist() == [1, 2, 3]
    (first.path / "metrics.jsonl").unlink()
    assert not first.is_finished  # the last line comes after the last validation


@pytest.mark.slow
@pytest.mark.usefixtures("any_reward")
def test_the_programs_own_error_ends_the_run_as_it_is() -> None:
    def fail(step: int, metrics: Any) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(on_step=fail)
    for wish in (SystemExit, KeyboardInterrupt):
        ends = Mock(side_effect=wish("enough"))
        with pytest.raises(wish, match="enough"):
            train(f"run.name={wish.__name__}", "checkpoint.every_num_steps=9", on_step=ends)
        assert Path(f"runs/{wish.__name__}/checkpoints/step-000001").exists()


@pytest.mark.slow
async def test_ctrl_c_in_a_notebook_stops_evaluate(monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    async def without_end(*_: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        await asyncio.sleep(1000)

    monkeypatch.setattr("grpo_ray.tools.evaluation.evaluate.Evaluator.run", without_end)
    Path("mine.yaml").write_text(json.dumps(CONFIG | {"task": {"kind": "sorting"}}))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a notebook's, not asyncio.run's
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt, match=r"the same call of .* with output='evaluations/mine-"):
        grpo_ray.evaluate("mine.yaml", local=True)


def test_mistakes_are_said_and_leave_nothing_behind() -> None:
    async def waits(step: int, metrics: dict[str, Any]) -> None: ...

    odd = [*EXAMPLES, {"question": "?", "answer": "1", "tests": 1}]
    for options, message in (
        ({"examples": [1]}, r"examples\[0\] is 1; give a dict with question and answer, or a pair of them"),
        ({"examples": 5}, "examples: a int is not a list of rows"),
        ({"validation": []}, "validation has no rows; leave it out"),
        ({"examples": EXAMPLES[:1]}, "examples has 1; give more: to train on, and a tenth to validate with"),
        ({"examples": [*EXAMPLES, {"question": "?"}]}, r"(?<!\w)examples\[12\]: no field 'answer'"),
        ({"validation": [{"question": "?"}]}, r"(?<!\w)validation\[0\]: no field 'answer'"),
        ({"on_step": lambda step: None}, r"on_step: the function must take \(step, metrics\)"),
        ({"on_step": lambda step, metrics, *, name: None}, "on_step: the function needs name; it is called"),
        ({"on_step": waits}, "on_step: nothing would wait for an `async` function"),
        ({"on_step": type("", (), {"__call__": waits})()}, "on_step: nothing would wait for an `async`"),
        ({"reward": "r1_zero"}, "reward: a str is not a function"),
        ({"reward": threading.Lock().acquire}, "reward: it cannot be sent to other processes: .* pickle"),
        ({"on_step": 5}, "on_step: a int is not a function"),
        ({"examples": [{"question": np.int64(3), "answer": math.nan}] * 3}, r"examples\[0\]: 'answer' is nan"),
        ({"examples": None, "validation": EXAMPLES}, "validation needs `examples` too"),
        ({"examples": odd, "reward": lambda response, tests: 0}, r"examples\[0\]: no column 'tests'"),
        ({"reward": lambda response, ground_truth, colour: 0}, "needs colour; .* no such column, only level"),
    ):
        with pytest.raises((ValueError, RunError), match=message):
            train(**options)
    for wrong, message in (
        (CONFIG | {"task": {"kind": "sorting"}}, "examples: a task of kind 'sorting' makes its own"),
        (CONFIG | {"task": {"kind": ["file"]}}, r"task.kind: \['file'\] is not valid"),
        (CONFIG | {"run": []}, r"run: \[\] is not valid"),
        (CONFIG | {"run": {"name": 5}}, "run.name: 5 is not valid"),
        (CONFIG | {"task": [1]}, r"task: \[1\] is not valid"),
        (CONFIG | {"run": {"if_exists": "resume"}}, "`resume` needs run.name"),
        ([1], "config: a list is neither a file's path nor a mapping"),
    ):
        with pytest.raises((ValueError, RunError), match=message):
            grpo_ray.train(wrong, examples=EXAMPLES, local=True)
    for options, message in (
        ({"temperature": -1.0}, r"temperature: '-1.0' is not a number of at least 0"),
        ({"temperature": 0.001}, r"'0.001' is not a number of at least 0.01 and at most 2, or 0"),
        ({"task": ["x"]}, r"task: \['x'\] is not text"),
        ({"run_reward_code": "no"}, "'no' is neither True nor"),
        ({"limits": 3}, "no option 'limits'; did you mean 'limit'"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_ray.evaluate("anything", local=True, **options)
    with pytest.raises(ValueError, match="target: a dict is neither a run nor the path"):
        grpo_ray.evaluate(CONFIG, local=True)  # type: ignore[arg-type]
    assert not any(Path("runs").glob("*"))
    with pytest.raises(RunError, match="no run"):
        grpo_ray.Run("nowhere")
    with pytest.raises(RunError, match="no rollouts"):
        grpo_ray.read_rollouts("nowhere")
    with pytest.raises(ConfigError, match="num_stepz"):  # a name in quotes is the run's name without them
        train('run.name="quoted"', "algorithm.num_stepz=1")
    # A corrected call replaces the refused one, also after an import that found its folder gone.
    with pytest.raises(ConfigError, match="num_stepz"):
        train("run.name=again", "algorithm.num_stepz=1")
    assert importlib.util.find_spec("no_module_4711") is None
    with pytest.raises(RunError, match="needs first"):
        train("run.name=again", reward=lambda response, ground_truth, first: 1.0)
    with pytest.raises(RunError, match="needs second"):
        train("run.name=again", reward=lambda response, ground_truth, second: 1.0)
    mine = Path("runs/mine/given/train.jsonl")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    Path("runs/mine/config.yaml").write_text("task: {kind: sorting}\n")
    with pytest.raises(RunError, match="runs/mine exists already"):
        train("run.name=mine")
    assert [path.read_text() for path in mine.parent.iterdir()] == ["mine"]


def test_a_reward_takes_its_cached_helpers_along(monkeypatch: pytest.MonkeyPatch) -> None:
    @lru_cache(maxsize=8)
    def fib(n: int) -> int:
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    fib.__module__ = fib.__wrapped__.__module__ = "__main__"
    again = cloudpickle.loads(pickled(lambda n: (fib(n), fib.cache_parameters())))
    assert again(30) == (832040, {"maxsize": 8, "typed": False})
    assert fib.cache_info().currsize == 0  # it was another one


def test_what_is_public_keeps_its_names() -> None:
    assert {name: [*inspect.signature(getattr(grpo_ray, name)).parameters] for name in grpo_ray.__all__} == {
        "Run": ["path"],
        "evaluate": ["target", "overrides", "options"],
        "read_rollouts": ["path"],
        "train": ["config", "overrides", "reward", "examples", "validation", "on_step", "local"],
    }
    public = [name for name in dir(grpo_ray.Run) if not name.startswith("_")]
    assert public == ["evaluations", "is_finished", "metrics", "model", "path", "plot", "resume", "rollouts"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = grpo_ray.nothing
