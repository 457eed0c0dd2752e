"""`grpo-ray evaluate` from options to files: known answers, a run's checkpoints, interruptions."""

import asyncio
import contextlib
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from any_reward_cli import patch_graders
from builders import TinyModel, change_weights, trained_so, write_rows
from commands import Capture, printed, refused
from local_runs import make_config, train
from local_serving import KnownEngine, LocalServing, serve_locally

from grpo_ray.errors import RunError
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.signals import Interrupted
from grpo_ray.tools.evaluation.evaluate import evaluate
from grpo_ray.tools.evaluation.responses import Row
from grpo_ray.tools.evaluation.sampling import EvaluationConsole
from grpo_ray.tools.look import EvaluationOptions
from grpo_ray.types import SamplingSettings

__all__ = ["serve_locally"]

pytestmark = pytest.mark.usefixtures("model_cache")

Serve = Callable[..., list[LocalServing]]

# By question: the ground truth, and four answers known to be right (1), wrong (0) or in no format (-).
GSM8K = {
    "Ann has 3 pens and buys 4.": ("7", "1111"),
    "Bob has 9 cats and sells 2.": ("7", "1000"),
    "Cid runs 1,000 miles twice.": ("2,000", "01-0"),
    "Dot eats half of 12 figs.": ("6", "00--"),
    "Eve reads 5 books a day.": ("35", "----"),
}


def gsm8k_file(folder: Path) -> Path:
    rows = [{"question": q, "answer": f"So it is.\n#### {truth}"} for q, (truth, _) in GSM8K.items()]
    return Path(write_rows(folder / "test.jsonl", rows))


def gsm8k_answers(prompt: str, settings: SamplingSettings) -> Sequence[str]:
    truth, kinds = next(known for question, known in GSM8K.items() if question in prompt)
    forms = {"1": truth, "0": "-1"}  # in the format of either reward
    texts = {kind: rf"\boxed{{{x}}} </think> <answer> {x} </answer>" for kind, x in forms.items()}
    return [texts.get(kind, f"it is {truth}") for kind in kinds[: settings.num_samples]]


def options(target: Path, output: Path, *overrides: str, **changes: Any) -> EvaluationOptions:
    """Grade `exact_match` in this process, which is faster than in a worker."""
    if changes.get("task") is not None:
        changes = {"prompt": "question_only", "reward": "exact_match", **changes, "task": str(changes["task"])}
    overrides = ("generator.engine=torch", "recovery.restart_backoff_s=0.01", *overrides)
    return EvaluationOptions(str(target), max_tokens=16, output=str(output), overrides=overrides, **changes)


def read(folder: Path) -> tuple[dict[str, Any], list[Row]]:
    data = json.loads((folder / "summary.json").read_text())
    return data, pq.read_table(folder / "examples.parquet").to_pylist()


@pytest.mark.slow
def test_two_generators_share_the_known_answers_to_a_gsm8k_file(
    tmp_path: Path, tiny_model: TinyModel, serve_locally: Serve, capsys: Capture
) -> None:
    started, folder = serve_locally(gsm8k_answers), tmp_path / "e"
    words = [
        "evaluate", tiny_model(), "--task", gsm8k_file(tmp_path), "--prompt", "question_only", "--max-tokens",
        "16", "--reward", "exact_match", "--n", "4", "generator.engine=torch", "generator.num_generators=2",
    ]  # fmt: skip
    shown = printed(capsys, *words, "--output", folder)
    for text in ("no GPU here", "temperature 1, 0 to 16 tokens, 2 x torch on CPU", "accuracy", "0.3000"):
        assert text in shown
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    assert "is not empty and holds no evaluation" in refused(capsys, *words, "--output", tmp_path / "mine")
    for client in started[0].generators.values():
        assert asyncio.run(client.actor.take_stats()).seconds["generate"] > 0
    data, rows = read(folder)
    summary, task = data["summary"], data["task"]
    assert (task["kind"], task["prompt"], task["reward"]) == ("gsm8k", "question_only", "exact_match")
    assert (summary["num_examples"], summary["num_samples"]) == (5, 4)
    kinds = "".join(known for _, known in GSM8K.values())
    assert summary["num_correct"] == kinds.count("1") == 6
    assert summary["accuracy"] == 6 / 20
    # with 4, 1, 1, 0 and 0 right answers pass@2 is 1, 1/2, 1/2, 0, 0, and pass@4 is 1, 1, 1, 0, 0
    assert summary["pass_at_k"] == pytest.approx({"1": 0.3, "2": 0.4, "4": 0.6})
    assert summary["accuracy_interval"][0] < 0.3 < summary["accuracy_interval"][1]
    expected = {"1": "correct", "0": "wrong_answer", "-": "no_format"}
    assert [row["category"] for row in rows] == [expected[kind] for kind in kinds]
    assert [row["example_id"] for row in rows[::4]] == [0, 1, 2, 3, 4]
    assert [row["ground_truth"] for row in rows[::4]] == [truth for truth, _ in GSM8K.values()]
    assert rows[0]["prompt"] == "Ann has 3 pens and buys 4."
    assert not (folder / "parts").exists()
    readable = (folder / "examples.md").read_text()
    assert "## format 1, answer 1: 6 of 20 responses" in readable
    assert readable.count("### Example") == 20
    assert f"```text\n{rows[0]['response']}\n```" in readable


@contextlib.contextmanager
def interrupted_after(num_prompts: int, error: OSError | None) -> Iterator[None]:
    """Raise the error, or press Ctrl-C, once that many prompts are graded."""
    advance, number = EvaluationConsole.advance, itertools.count(1)

    def interrupt(self: EvaluationConsole, group: Any) -> None:
        advance(self, group)
        if next(number) == num_prompts:
            if error is not None:
                raise error
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvaluationConsole, "advance", interrupt)
        yield


def test_an_interrupted_evaluation_is_resumed_and_another_one_refused(
    tmp_path: Path, tiny_model: TinyModel, serve_locally: Serve, capsys: Capture
) -> None:
    asked: list[str] = []

    def answers(prompt: str, settings: SamplingSettings) -> Sequence[str]:
        asked.append(prompt)
        return gsm8k_answers(prompt, settings)

    serve_locally(answers)
    model = shutil.copytree(tiny_model(), tmp_path / "model")
    path, template, command = gsm8k_file(tmp_path), tmp_path / "mine.prompt", "grpo-ray evaluate M"
    template.write_text("Q: {question}\n")
    given = options(model, tmp_path / "e", task=path, num_samples=2, prompt=str(template), typed=command)
    full = OSError(errno.ENOSPC, "No space left on device")
    with interrupted_after(2, full), pytest.raises(RunError, match=r"No space left.*\n.*resume with: grpo"):
        evaluate(given)
    with interrupted_after(1, None), pytest.raises(Interrupted, match="with: grpo-ray evaluate M"):
        evaluate(given)
    done = {row["prompt"] for row in pq.read_table(tmp_path / "e" / "parts" / "00000.parquet").to_pylist()}
    assert len(done) >= 3
    questions, other = path.read_text(), 'holds another evaluation.*\n  prompts: was "5 of sha256 .*", is "5 of'
    path.write_text("".join(reversed(questions.splitlines(keepends=True))))
    with pytest.raises(RunError, match=other):
        evaluate(given)
    path.write_text(questions)
    template.write_text("Question: {question}\n")
    with pytest.raises(RunError, match=other):
        evaluate(given)
    template.write_text("Q: {question}\n")
    asked.clear()
    capsys.readouterr()
    _, rows = read(evaluate(given))
    assert re.search(r"5/5 prompts +accuracy [\d.]+ of those sampled now", capsys.readouterr().out)
    assert set(asked) == {row["prompt"] for row in rows} - done
    assert [row["example_id"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    asked.clear()
    evaluate(given)  # everything is done
    assert asked == []
    with pytest.raises(RunError, match=r"holds another evaluation.*\n  sampling.temperature: was 1.0, is 0.5$"):
        evaluate(replace(given, temperature=0.5))
    os.utime(model / "model.safetensors", (1, 1))
    with pytest.raises(RunError, match=r"holds another evaluation.*\n  weights\..*model: was"):
        evaluate(given)


def test_an_actor_that_does_not_start_ends_it_and_rows_after_the_limit_are_not_read(
    tmp_path: Path, tiny_model: TinyModel, serve_locally: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_locally(gsm8k_answers)
    path = gsm8k_file(tmp_path)
    late = options(tiny_model(), tmp_path / "late", "recovery.start_timeout_s=0.001", task=path)
    with monkeypatch.context() as patch:
        patch.setattr(KnownEngine, "start", lambda *_: asyncio.Event().wait())
        with pytest.raises(RunError, match=r"did not start within 0\.001 s"):
            evaluate(late)
    with path.open("a") as file:
        file.write(json.dumps({"question": "word " * 5000, "answer": "#### 1"}) + "\nno JSON\n")
    assert len(read(evaluate(options(tiny_model(), tmp_path / "e", task=path, limit=5)))[1]) == 5
    with pytest.raises(RunError, match="line 7: not valid JSON"):
        evaluate(options(tiny_model(), tmp_path / "all", task=path))
    with pytest.raises(RunError, match="line 6\\) do not fit the model's positions"):
        evaluate(options(tiny_model(), tmp_path / "six", task=path, limit=6))


def test_a_dead_generator_loses_nothing_and_a_prompt_that_always_fails_is_left_out_and_named(
    tmp_path: Path, tiny_model: TinyModel, serve_locally: Serve, capsys: Capture
) -> None:
    deaths = 0

    def answers(prompt: str, settings: SamplingSettings) -> Sequence[str]:
        nonlocal deaths
        if "Bob" in prompt and not deaths:
            deaths += 1
            started[0].generators["generator-0"].die()
        if "Dot" in prompt:  # which has no right answer
            raise ValueError("no answer to that")
        return gsm8k_answers(prompt, settings)

    started, given = serve_locally(answers), {"task": gsm8k_file(tmp_path), "num_samples": 4}
    data, rows = read(evaluate(options(tiny_model(), tmp_path / "e", **given)))
    assert deaths == 1
    assert data["not_sampled"] == [3]
    assert (data["summary"]["num_examples"], data["summary"]["num_correct"], len(rows)) == (4, 6, 16)
    assert "1 prompts failed every attempt" in capsys.readouterr().out


@pytest.mark.slow
def test_ungraded_responses_are_counted_separately(
    here: Path, tiny_model: TinyModel, serve_locally: Serve, capsys: Capture
) -> None:
    (here / "own_reward.py").write_text(
        "def reward_fn(response, ground_truth):\n"
        "    if '7' in response:\n"
        "        raise ValueError('not this one')\n"
        "    return {'reward': 1.0, 'format_reward': 1.0, 'answer_reward': 1.0}\n"
    )
    serve_locally(gsm8k_answers)
    given = options(tiny_model(), here / "e", task=gsm8k_file(here), reward="own_reward:reward_fn")
    data, rows = read(evaluate(given))
    errors = [row for row in rows if row["error"]]
    assert [row["example_id"] for row in errors] == [0, 1]
    assert all("not this one" in row["error"] and row["category"] == "not_graded" for row in errors)
    assert data["summary"]["num_errors"] == 2
    assert data["summary"]["accuracy"] == 3 / 5  # they count as wrong among the 5
    assert "2 responses could not be graded" in capsys.readouterr().out
    assert "## not graded: 2 of 5 responses" in (here / "e" / "examples.md").read_text()


@pytest.fixture(scope="module")
def trained(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of eight steps with different checkpoints 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch_graders(patch)
        train(make_config("checkpoint.keep=8", "evaluation.every_num_steps=4"), folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, trained: Path, any_reward: None) -> RunDirectory:
    return RunDirectory(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.slow
def test_a_runs_curve(run: RunDirectory, tmp_path: Path, serve_locally: Serve) -> None:
    """Weights that were swapped in sample what Generators started with them sample."""
    started = serve_locally()
    curve = evaluate(options(run.path, tmp_path / "curve", checkpoint="all", num_samples=8))
    assert len(started) == 1
    names = ["step-000000", "step-000002", "step-000004", "step-000006", "step-000008"]
    assert sorted(path.name for path in curve.glob("step-*")) == names
    texts = {name: [row["response"] for row in read(curve / name)[1]] for name in names}
    assert len({tuple(responses) for responses in texts.values()}) == len(names)
    for checkpoint, name in (("initial", names[0]), ("last", names[-1]), ("step-000004", names[2])):
        single = evaluate(options(run.path, tmp_path / checkpoint, checkpoint=checkpoint, num_samples=8))
        data, rows = read(single)
        assert [row["response"] for row in rows] == texts[name]
        assert data["summary"]["step"] == int(name.removeprefix("step-"))
    lines = (curve / "curve.csv").read_text().splitlines()
    assert lines[0].startswith("step,accuracy,accuracy_low,accuracy_high,")
    assert [line.split(",")[0] for line in lines[1:]] == ["0", "2", "4", "6", "8"]
    assert (curve / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_used_is_skipped_and_an_adapter_that_is_deleted_is_not_its_base(
    run: RunDirectory, tmp_path: Path, serve_locally: Serve, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    serve_locally()
    folder = run.checkpoints / "step-000004"
    change_weights(folder, lambda tensors: next(iter(tensors.values())).fill_(math.nan))
    trained_so(folder)
    curve = evaluate(options(run.path, tmp_path / "curve", checkpoint="all"))
    lines = (curve / "curve.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["step", "0", "2", "6", "8"]
    assert "step-000004 is skipped: model.path: " in " ".join(capsys.readouterr().out.split())
    alone, before = options(run.path, tmp_path / "e", checkpoint="step-000006"), read(curve / "step-000006")[1]
    assert read(evaluate(alone))[1] == before
    shutil.rmtree(curve / "step-000006")
    evaluate(options(run.path, curve, checkpoint="all"))  # resumes with the missing ones
    assert read(curve / "step-000006")[1] == before
    assert not (curve / "step-000004").exists()
    adapter = run.checkpoints / "step-000002"
    (adapter / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(EvaluationConsole, "status", lambda *_: shutil.rmtree(adapter, ignore_errors=True))
    with pytest.raises(RunError, match="nothing was evaluated: none of the weights could be loaded"):
        evaluate(options(run.path, tmp_path / "a", "model.adapter={}", checkpoint="step-000002"))


@pytest.mark.slow
def test_greedy(run: RunDirectory, tmp_path: Path, serve_locally: Serve) -> None:
    serve_locally()

    def responses(name: str, temperature: float, *overrides: str) -> list[str]:
        given = options(run.path, tmp_path / name, *overrides, temperature=temperature, limit=3)
        return [row["response"] for row in read(evaluate(given))[1]]

    greedy = responses("one", 0.0)
    assert len(greedy) == 3  # of the task's four prompts
    assert responses("two", 0.0, "generator.num_generators=2") == greedy
    assert responses("hot", 1.0) != greedy
    with pytest.raises(RunError, match="--n: greedy sampling"):
        evaluate(options(run.path, tmp_path / "c", temperature=0.0, num_samples=2))
