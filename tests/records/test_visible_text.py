"""Texts with escape sequences, control, direction and invisible characters, on every way to a terminal."""

import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from builders import simple_group
from test_top import NOW, make_run, make_state, step

from examples.course.evaluate_vllm import evaluate_vllm
from grpo_ray.records.evaluation_summary import summarise_groups
from grpo_ray.records.json_lines import JsonLines
from grpo_ray.records.visible_text import UNSEEN, visible
from grpo_ray.tools.audit.audit import AuditReport
from grpo_ray.tools.cli import main
from grpo_ray.tools.evaluation.results import _readable, summary_table
from grpo_ray.watch.console import RunConsole
from grpo_ray.watch.run_state import ActorState, Ending, LiveStatus

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"  # a terminal puts this into the clipboard
HOSTILE = f"{CLIPBOARD}\x1b[31m \x9b31m \x9d0;t\x9c \x00\r\b\x7f \u202eab\u2066 \u00ad\u200b\ufeff \U000e0041"
HOSTILE += " [red]:smile:"
SHOWN = r"\x1b]52;c;ZXZpbA==\x07\x1b[31m"


def check(output: str) -> None:
    """Check an output that has no control codes of its own: the text is shown, and nothing is sent."""
    assert SHOWN in output.replace("\n", "")
    assert r"\u202eab\u2066" in output
    assert UNSEEN.findall(output) == []


def check_terminal(output: str) -> None:
    """Check an output with rich's own colours and movements."""
    assert SHOWN in output
    assert CLIPBOARD not in output
    assert UNSEEN.findall(re.sub(r"\x1b\[[?\d;]*[A-Za-z]|\r", "", output)) == []
    assert "\x1b[31m" not in output


def test_every_control_format_and_tag_character_is_written_out() -> None:
    assert visible(HOSTILE) == (
        r"\x1b]52;c;ZXZpbA==\x07\x1b[31m \x9b31m \x9d0;t\x9c \x00\r\x08\x7f \u202eab\u2066 "
        r"\xad\u200b\ufeff \U000e0041 [red]:smile:"
    )
    harmless = "two\nlines\tand a tab, é, e\u0301, שלום, 你好, 👍\ufe0f, ⟨x⟩, \\x1b"
    assert visible(harmless) == harmless
    assert visible("\ud800") == r"\ud800"
    once_missed = "\u061c\u00ad\u2060\u2064\u2028\u2029\u180e\U000e007f"
    assert not set(once_missed) & set(visible(once_missed))
    assert visible(visible(HOSTILE)) == visible(HOSTILE)


def test_the_page_knows_the_same_characters() -> None:
    script = Path("grpo_ray/tools/report/web/elements.js").read_text(encoding="utf-8")
    (text,) = re.findall(r"^const UNSEEN = /(.*)/gu;$", script, re.M)
    pattern = re.compile(re.sub(r"\\u\{(\w+)\}", lambda code: rf"\U{code[1]:0>8}", text))
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert pattern.findall(every) == UNSEEN.findall(every)


# ---- the ways to a terminal ----


@pytest.fixture(params=[False, True], ids=["a file", "a terminal"])
def is_terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make the output one of 300 columns; return True if it is a terminal."""
    monkeypatch.setenv("COLUMNS", "300")
    if request.param:
        monkeypatch.setenv("FORCE_COLOR", "1")
    return bool(request.param)


def test_a_runs_console(is_terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with RunConsole(num_steps=2) as console:
        console.status(HOSTILE)
        console.warning(HOSTILE)
        console.print(HOSTILE)
    printed = capsys.readouterr().out
    (check_terminal if is_terminal else check)(printed)
    assert is_terminal or printed.count(SHOWN) == printed.count("[red]:smile:") == 3


def test_a_frame_of_top(is_terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a file the run has ended, and on a terminal it has not."""
    actor = ActorState(name=f"a{HOSTILE}", doing=HOSTILE, for_s=1.0, num_calls=2)
    state = make_state(
        host=HOSTILE, phase=HOSTILE, warnings=(f"warning {HOSTILE}",), now=LiveStatus(step=4, actors=(actor,)),
        ending=None if is_terminal else Ending(kind="failed", text=f"ended {HOSTILE}"),
    )  # fmt: skip
    run = make_run(tmp_path / "run", state, [step(4) | {f"time/{HOSTILE}/train_s": 1.0}])
    JsonLines(run.events_path).append({"time": NOW, "kind": "x", "actor": None, "text": f"event {HOSTILE}"})
    assert main(["top", str(run.path), "--once"]) == 0
    printed = capsys.readouterr().out
    (check_terminal if is_terminal else check)(printed)
    assert f"event {SHOWN}" in printed
    assert f"{'warning' if is_terminal else 'ended'} {SHOWN}" in printed


def test_errors_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / HOSTILE.replace("\0", ""))]) == 2
    check(capsys.readouterr().err)


@pytest.mark.slow
def test_the_traceback_of_an_unexpected_error() -> None:
    fail = f"def fail(*_): raise AssertionError({HOSTILE!r})"
    program = f"from grpo_ray.tools import cli\n{fail}\ncli.parse = fail\ncli.main(['check'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 1
    check(done.stderr.decode())
    assert "Traceback (most recent call last)" in done.stderr.decode()


def test_the_problems_of_an_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", None, [])
    report = AuditReport(problems=[HOSTILE], notes=[HOSTILE])
    monkeypatch.setattr("grpo_ray.tools.audit.audit.audit", lambda *_: report)
    assert main(["audit", str(run.path)]) == 1
    check(capsys.readouterr().out)


def test_the_samples_and_the_table_of_an_evaluation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    row = {
        "task": "", "reward": 0.0, "num_tokens": 3, "finish_reason": "stop", "example_id": 0, "sample": 0,
        "error": HOSTILE, "prompt": HOSTILE, "response": HOSTILE, "ground_truth": HOSTILE,
    }  # fmt: skip
    text = _readable(row)
    check(text)
    assert text.count(SHOWN) == 4
    summary = summarise_groups(0, [simple_group(0)])
    RunConsole(0).print(summary_table(replace(summary, accuracy_by_task={HOSTILE: 0.5})))
    check(capsys.readouterr().out)


def test_the_warning_of_a_reward_that_raises() -> None:
    answer = SimpleNamespace(text="r", token_ids=[1], finish_reason="stop")
    llm: Any = SimpleNamespace(generate=lambda *_: [SimpleNamespace(outputs=[answer])])

    def reward_fn(response: str, truth: str) -> float:
        raise ValueError(HOSTILE)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate_vllm(llm, reward_fn, ["p"], SimpleNamespace(n=1), ["t"])  # type: ignore[arg-type]
    (warning,) = [w for w in caught if "could not be graded" in str(w.message)]
    check(str(warning.message))
