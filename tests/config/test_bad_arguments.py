"""Configuration fields of a wrong type, each of them, and wrong command lines."""

import io
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from commands import Capture
from run_process import output_of

from examples.course import __main__ as course
from grpo_ray import __main__
from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.schema import sections_of
from grpo_ray.config.section import Section
from grpo_ray.tools.cli import main, parse
from grpo_ray.tools.look import EvaluationOptions
from grpo_ray.tools.submit.command import SubmitOptions

# ---- the configuration ----

TASKS = {
    "sorting": "task={kind: sorting}",
    "arithmetic": "task={kind: arithmetic}",
    "keywords": "task={kind: keywords}",
    "reasoning_gym": "task={kind: reasoning_gym, name: chain_sum}",
    "file": "task={kind: file, train_path: a.jsonl, validation_path: b.jsonl}",
    "episodes": "task={kind: episodes, episode: a:b, examples: c:d}",
    "mixture": "task={kind: mixture, parts: {one: {task: {kind: sorting}}, two: {task: {kind: arithmetic}}}}",
}


def leaves(section: type[Section], path: str) -> Iterator[tuple[str, Any]]:
    """Yield every field that holds a value rather than fields, with its annotation."""
    for name, field in section.model_fields.items():
        inner = sections_of(field.annotation)
        for candidate in inner:
            yield from leaves(candidate, f"{path}{name}.")
        if not inner:
            yield f"{path}{name}", field.annotation


LEAVES = sorted(set(leaves(Config, "")), key=lambda leaf: leaf[0])


def is_text(annotation: Any) -> bool:
    return annotation is str or any(map(is_text, get_args(annotation)))


@pytest.mark.parametrize(("path", "annotation"), LEAVES, ids=[path for path, _ in LEAVES])
def test_every_field_refuses_a_wrong_type(tmp_path: Path, path: str, annotation: Any) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {tiny: {}}\ntask: {kind: sorting}\n")
    base = []
    if path.startswith("task."):
        sections, name = sections_of(Config.model_fields["task"].annotation), path.split(".")[1]
        base = [TASKS[next(s.model_fields["kind"].default for s in sections if name in s.model_fields)]]
    for value in ("{x: 1}", "[[1]]", "5" if is_text(annotation) else "nonsense"):
        if value == "{x: 1}" and (get_origin(annotation) is dict or path == "task.reward"):
            continue  # names that are checked later, against vLLM's; or a term of the reward
        with pytest.raises(ConfigError) as caught:
            load_config(file, [*base, f"{path}={value}"])
        message = str(caught.value)
        assert any(text.strip().startswith(path) for text in message.splitlines()), message
        assert "is not valid; allowed: " in message


def test_the_walk_finds_the_fields() -> None:
    some = {"run.seed", "model.tiny.warmup.num_steps", "task.long_prompts", "task.num_digits", "task.parts"}
    assert {*some, "task.curriculum.min_weight", "task.operations"} <= {path for path, _ in LEAVES}


# ---- the command line ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "Train:\n  train       run a training job"),
        ("trian run.yaml", "no command 'trian'; did you mean train?"),
        ("zzz", "no command 'zzz'; see grpo-ray --help"),
        ("check run.yaml --num_steps 2", "--num_steps 2; write algorithm.num_steps=2, without dashes"),
        ("train a.yaml --algorithm.num_steps=2", "num_steps=2; write algorithm.num_steps=2, without"),
        ("train a.yaml --algorithm.num_step", "; write algorithm.num_steps=VALUE, without dashes"),
        ("train --learning-rate 1 a.yaml", "; write learner.learning_rate=1, without dashes"),
        ("train a.yaml --beta=1", "; write algorithm.kl.coefficient=1, without dashes"),
        ("report runs/a --num_steps=2", "unrecognized arguments: --num_steps=2\n"),
        ("train", "the following arguments are required: CONFIG"),
        ("check run.yaml --verbsoe", "unrecognized arguments: --verbsoe"),
        ("train a.yaml --lokal", "unrecognized arguments: --lokal; did you mean --local?"),
        ("train run.yaml -x", "unrecognized arguments: -x"),
        ("submit --follow a --stop b", "argument --stop: not allowed with argument --follow"),
        ("top runs/a --every 0", "argument --every: '0' is not a number above 0"),
        ("evaluate runs/a --top-p 2", "argument --top-p: '2' is not a number above 0 and at most 1"),
        ("report runs/a --seed x", "argument --seed: invalid int value: 'x'"),
        ("audit runs/a runs/b runs/c", "unrecognized arguments: runs/c"),
        ("course data keywords", "the following arguments are required: --output"),
        ("course data keywords --output x --num-keywords 4-2", "'4-2' is not a number such as 3, or"),
        ("course playground sorting --compare clip", "invalid choice: 'clip'"),
    ],
)
def test_wrong_arguments(arguments: str, message: str, capsys: Capture) -> None:
    words = arguments.split()
    with pytest.raises(SystemExit) as caught:
        course.run(words[1:]) if words[:1] == ["course"] else main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_subcommand_that_is_missing(capsys: Capture) -> None:
    assert course.run(["data"]) == 2
    assert f"{course.PROGRAM}: name the dataset to make: keywords" in capsys.readouterr().err
    assert course.run(["playground"]) == 2
    assert f"{course.PROGRAM}: name an example of the playground: " in capsys.readouterr().err


def test_options_arrive_as_their_dataclasses() -> None:
    _, submitted = parse(["submit", "a.yaml", "k=1", "--env", "A", "--env", "B", "--no-wait", "k=2"])
    assert submitted == SubmitOptions("a.yaml", ("k=1", "k=2"), no_wait=True, env=("A", "B"))
    _, evaluated = parse(["evaluate", "m", "--limit", "3", "--n", "2", "--temperature", "0"])
    assert evaluated == EvaluationOptions(
        "m", limit=3, num_samples=2, temperature=0.0,
        typed="grpo-ray evaluate m --limit 3 --n 2 --temperature 0",
    )  # fmt: skip
    _, sorting = parse(["playground", "sorting", "--kl", "1", "--steps", "9", "--kl", "2"], course.COMMANDS)
    assert dict(sorting.given) == {"kl": "2", "steps": "9"}
    _, keywords = parse(["data", "keywords", "--output", "x", "--num-keywords", "3"], course.COMMANDS)
    assert (keywords.output, keywords.num_keywords, keywords.temperature) == (Path("x"), (3, 3), 1.0)


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    code = "import os; from grpo_ray.tools.cli import main; r, w = os.pipe(); os.dup2(w, 1); os.close(r)\n"
    code += "raise SystemExit(main(['experiment', '--list']))"
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    code = "import os; os.close(2); from grpo_ray import __main__; from grpo_ray.tools import cli\n"
    code += "cli.main = lambda: print(os.open(os.devnull, 0) > 2, os.get_inheritable(2)); __main__.main()"
    assert output_of(sys.executable, "-c", code) == "True True\n"


@pytest.mark.slow
def test_an_interrupt_while_commands_load_prints_nothing() -> None:
    code = "import os, signal, sys; from grpo_ray.__main__ import main\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "sys.meta_path.insert(0, type('', (), {'find_spec': lambda *_: os.kill(os.getpid(), 2)}))\n"
    done = subprocess.run([sys.executable, "-c", code + "main()"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_what_an_encoding_lacks_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    shown = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setattr("grpo_ray.tools.cli.main", lambda: shown.write("0.5 \u2588"))
    assert (__main__.main(), written.getvalue()) == (5, b"0.5 ?")


@pytest.mark.slow
def test_help_lists_every_command_and_neither_it_nor_a_check_nor_a_driver_waits_for_torch() -> None:
    code = (
        "import sys; from grpo_ray.tools.cli import COMMANDS, main\n"
        "def look(*names): print(sorted({*names} & sys.modules.keys()), flush=True)\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(*(command.name for command in COMMANDS))\n"
        "look('torch', 'ray', 'transformers', 'vllm', 'matplotlib')\n"
        "status = main(['check', 'quickstart']); look('torch', 'ray', 'vllm', 'sympy')\n"
        "import grpo_ray.cluster.hosting; look('torch', 'vllm'); sys.exit(status)"  # it starts a run's actors
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    page, _, checked = done.stdout.partition("\n[]\n")
    assert [line for line in checked.splitlines() if line[0] == "["] == ["[]", "[]"]
    *page, names = page.splitlines()
    assert set(names.split()) <= {line.split()[0] for line in page if line.startswith("  ")}
    assert [line for line in page if line.endswith(":")] == ["options:", "Train:", "Look:", "More:"]
