"""A resume refuses by name, before the first change in the run's folder, and reads little of a long run."""

import asyncio
import contextlib
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from builders import TinyModel, change_weights, changed, make_buffer, parts, simple_group, write_rows
from commands import Capture, printed, refused
from huggingface_hub import constants
from local_runs import Recorder
from small_run import QUICKSTART

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.core.groups import GroupBook
from grpo_ray.errors import RunError
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.records import run_files
from grpo_ray.records.adapter_files import base_digest
from grpo_ray.records.checkpoint import CheckpointState, CheckpointStore
from grpo_ray.records.json_lines import lines_from_end
from grpo_ray.records.run_files import RunDirectory, dump_config, last_logged_step, read_metrics
from grpo_ray.run import restores, training
from grpo_ray.run.preparation import check_files
from grpo_ray.tasks.input_digests import check_inputs, write_digests
from grpo_ray.watch.run_log import RunLog

TEMPLATE = "Sort: {question}\nAnswer:"
REWARD = "def reward(response, truth):\n    return 1.0\n"
Started = list[tuple[Config, Any]]


@pytest.fixture
def config(here: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: TinyModel, any_reward: None) -> Config:
    """Return a configuration with a template, two files and a module of the user's."""
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "my_reward_of_resume", raising=False)
    (here / "sort.prompt").write_text(TEMPLATE)
    (here / "my_reward_of_resume.py").write_text(REWARD)
    for name in ("train", "validation"):
        write_rows(here / f"{name}.jsonl", [{"question": f"{name} {n}", "answer": str(n)} for n in range(24)])
    task = {
        "kind": "file", "train_path": "train.jsonl", "validation_path": "validation.jsonl",
        "prompt": "sort.prompt", "reward": "my_reward_of_resume:reward",
    }  # fmt: skip
    sections = {
        "model": {"path": str(tiny_model()), "dtype": "float32"},
        "task": task,
        "sampling": {"max_tokens": 8, "min_tokens": 2},
        "algorithm": {"num_steps": 8, "prompts_per_step": 4, "samples_per_prompt": 2},
        "generator": {"engine": "torch", "num_gpus": 0},
        "learner": {"num_gpus": 0},
    }
    return Config.model_validate(sections)


# ---- edited inputs ----


EDITS = {
    "task.prompt (the template's text)": ("sort.prompt", "Sort: {question}"),
    "the validation questions and their answers": (
        "validation.jsonl", '{"question": "validation 0", "answer": "1"}\n',
    ),
    "the questions' rows (for the code that reads them)": (
        "train.jsonl",
        "".join(f'{{"question": "train {n}", "answer": "{n % 23}"}}\n' for n in range(24)),
    ),
    "task.reward (module my_reward_of_resume, my_reward_of_resume.py)": (
        "my_reward_of_resume.py", REWARD.replace("1.0", "0.5"),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edit"), EDITS.items(), ids=[file for file, _ in EDITS.values()])
def test_an_edited_input_is_refused_by_name(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, name: str, edit: tuple[str, str]
) -> None:
    monkeypatch.setattr(training, "_hosted", lambda *_: pytest.fail("Ray was to be started"))
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    before = digests(config)
    write_digests(run, before)
    check_inputs(run, before)
    (tmp_path / edit[0]).write_text(edit[1])
    with pytest.raises(RunError, match=f"{re.escape(name)}: not what this run began with; undo the edit"):
        training.resume(str(run.path), [])
    run.inputs_path.unlink()  # as the message offers
    assert "is missing, so edits" in str(check_inputs(run, digests(config)))


def test_an_edited_function_of_the_algorithm_is_told(tmp_path: Path, here: Path, config: Config) -> None:
    module = here / "my_advantage_4713.py"
    module.write_text("def centred(inputs):\n    return inputs.rewards - inputs.rewards.mean()\n")
    own, run = changed(config, algorithm={"advantage": "my_advantage_4713:centred"}), RunDirectory(tmp_path)
    run.create_subfolders()
    write_digests(run, digests(own))
    assert check_inputs(run, digests(own)) is None
    module.write_text(module.read_text() + "\n")
    told = "algorithm.advantage (module my_advantage_4713, my_advantage_4713.py): edited since"
    assert str(check_inputs(run, digests(own))).startswith(told)
    assert check_inputs(run, digests(config)) is None  # the field may change


MODEL_EDITS = {
    "chat_template.jinja": lambda path: path.write_text("{{ messages[0].content }}"),
    "tokenizer.json": lambda path: path.write_text(path.read_text() + " "),
    "its weights": lambda path: change_weights(path.parent, shift),
}


def shift(tensors: dict[str, torch.Tensor]) -> None:
    """Change every value, as training does; no file's size changes."""
    for tensor in tensors.values():
        tensor += 0.01


@pytest.mark.parametrize(
    ("field", "file"),
    [*(("model.path", file) for file in MODEL_EDITS), ("distillation.teacher", "its weights")],
)
def test_an_edited_model_is_refused_by_name(tmp_path: Path, config: Config, field: str, file: str) -> None:
    run, folder, task = RunDirectory(tmp_path / "run"), tmp_path / "model", check_files(config)
    shutil.copytree(str(config.model.path), folder)
    section, _, name = field.partition(".")
    engine = {"engine": "torch"} if section == "distillation" else {}
    config = changed(config, **{section: {name: str(folder), **engine}})
    run.create(config)
    before = training._digests(config, task)
    write_digests(run, before)
    assert check_inputs(run, before) is None
    MODEL_EDITS[file](folder / file)
    with pytest.raises(RunError, match=f"^{re.escape(field)} \\({re.escape(file)}\\): not what this run began"):
        check_inputs(run, training._digests(config, task))


def test_a_run_of_an_earlier_release_has_no_digests_of_its_model(run: RunDirectory, config: Config) -> None:
    run.create(config)
    now = digests(config)
    write_digests(run, {name: digest for name, digest in now.items() if not name.startswith("model.path")})
    assert check_inputs(run, now) == f"{run.inputs_path} has no digests of model.path"


def test_a_tiny_model_built_otherwise_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(QUICKSTART)
    run.create(config)
    task = check_files(config)
    write_digests(run, training._digests(config, task))
    training.check_resume(run, config, task)
    monkeypatch.setattr("grpo_ray.run.tiny_model._RECIPE", 0)  # of another release
    with pytest.raises(RunError, match=r"^model.tiny \(as it is built\): not what this run began with"):
        training.check_resume(run, config, task)


@contextlib.contextmanager
def free(*_: object) -> Iterator[Any]:
    """Stand in for `_hosted`, on a machine with all that the run needs."""
    yield Mock(), None, None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Return the configurations and preparations of runs as they start, which then end at once."""
    runs: Started = []
    monkeypatch.setattr(training, "_hosted", free)
    monkeypatch.setattr(training, "_run_to_the_end", lambda *given: runs.append(given[:2]))
    return runs


COMMITS = ("a" * 40, "b" * 40)


@pytest.mark.slow
def test_a_resumed_run_loads_the_commit_that_it_began_with(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    """A hub's cache has two commits of a model, and the publisher moves `main` from one to the other."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache, folder = tmp_path / "hub" / "models--owner--name", str(config.model.path)
    for commit in COMMITS:
        shutil.copytree(folder, cache / "snapshots" / commit)
        (cache / "snapshots" / commit / "chat_template.jinja").write_text(commit[0])
    change_weights(cache / "snapshots" / COMMITS[1], shift)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(COMMITS[0])
    section = {"output_dir": str(tmp_path), "name": "run", "if_exists": "resume"}
    config = changed(config, model={"path": "owner/name"}, run=section)
    run = training.train(config, "run.yaml")
    (cache / "refs" / "main").write_text(COMMITS[1])
    training.resume(str(run.path), [])
    training.train(config, "run.yaml")  # which resumes; its file names no commit
    with pytest.raises(RunError, match=f"^model.path: this run has 'owner/name@{COMMITS[0]}' and cannot be"):
        training.resume(str(run.path), [f"model.path=owner/name@{COMMITS[1]}"])
    path = f"owner/name@{COMMITS[0]}"
    assert [(config.model.path, prepared.model.path) for config, prepared in started] == [(path, path)] * 3
    assert load_tokenizer(path).chat_template == "a"
    assert base_digest(path) == base_digest(folder)
    theirs = dict(load_policy(folder).named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in load_policy(path).named_parameters())
    assert not run.events_path.exists()  # nothing was changed or left unchecked


def digests(config: Config) -> dict[str, str]:
    return training._digests(config, check_files(config))


@pytest.mark.slow
def test_check_refuses_what_a_resume_would(run: RunDirectory, config: Config, capsys: Capture) -> None:
    config = changed(config, run={"output_dir": str(run.path.parent), "name": "run", "if_exists": "resume"})
    run.create(config)
    write_digests(run, digests(config))
    dump_config(config, Path("mine.yaml"))
    printed(capsys, "check", "mine.yaml")
    message = refused(capsys, "check", "mine.yaml", "algorithm.prompts_per_step=2")
    assert "prompts_per_step: this run has 4 and cannot be resumed with 2" in message


def test_a_column_that_some_rows_lack_is_named_with_the_first_of_them(tmp_path: Path, config: Config) -> None:
    reward = "def reward(response, ground_truth, level):\n    return float(response == level)\n"
    (tmp_path / "my_reward_of_resume.py").write_text(reward)
    rows = [{"question": f"train {n}", "answer": str(n), "level": "a"} for n in range(24)]
    write_rows(tmp_path / "train.jsonl", rows)
    with pytest.raises(ValueError, match=r"^validation\.jsonl, line 1: task\.reward: .* needs level"):
        check_files(config)
    (tmp_path / "my_reward_of_resume.py").write_text(reward.replace("level)", "level=None)", 1))
    del sys.modules["my_reward_of_resume"]
    check_files(config)


def test_another_temperature_is_refused_while_groups_are_buffered(run: RunDirectory, config: Config) -> None:
    now = changed(config, sampling={"temperature": 0.5})
    empty = write_checkpoint(run, 1, 0)
    for same_or_not in (config, now):
        training.check_same_sampling(config, same_or_not, empty)
    full = write_checkpoint(run, 2, 2)
    training.check_same_sampling(config, config, full)
    held = r"sampling.temperature: the buffer of .*step-000002 holds 2 groups sampled with 1.0, .* 0.5"
    with pytest.raises(RunError, match=held):
        training.check_same_sampling(config, now, full)


def test_a_refreshed_reference_is_not_given_up(config: Config) -> None:
    """Without refreshes the reference would jump back to the weights of step 0."""
    kls = ({"reference": "initial", "refresh_every_num_steps": every} for every in (1, 100, None))
    before, fewer, none = (changed(config, algorithm={"kl": kl}) for kl in kls)
    training.check_same_reference(before, fewer)
    again = r"refresh_every_num_steps: .* step 0 again; .* more than the run's 8 steps"
    with pytest.raises(RunError, match=again):
        training.check_same_reference(before, none)


def write_checkpoint(
    run: RunDirectory, step: int, num_groups: int, ledger: dict[str, Any] | None = None
) -> Any:
    run.path.mkdir(exist_ok=True)
    store = CheckpointStore(run)
    folder = store.begin(step)

    async def write() -> dict[str, int]:
        buffer = make_buffer(2)
        for group_id in range(num_groups):
            await buffer.put(*parts(simple_group(group_id)))
        await buffer.capture(99)
        return await buffer.write_captured(folder / "training")

    sizes = {f"training/{name}": size for name, size in asyncio.run(write()).items()}
    return store.commit(step, CheckpointState(step, ledger or {}, {}), sizes)


def test_a_refused_resume_changes_nothing_and_a_granted_one_keeps_the_earlier_values(
    run: RunDirectory, config: Config, monkeypatch: pytest.MonkeyPatch, started: Started
) -> None:
    run.create(config)
    run.state_path.write_text("{}")
    before = contents(run)

    with monkeypatch.context() as patch:
        patch.setattr(training, "_hosted", Mock(side_effect=RunError("the cluster is busy: GPU")))
        with pytest.raises(RunError, match="the cluster is busy"):
            training.resume(str(run.path), ["learner.learning_rate=9"])
    assert contents(run) == before

    text = run.config_path.read_text()
    run.config_path.write_text(text.partition("weight_sync:")[0])  # cut off: it would go on with the defaults
    with pytest.raises(RunError, match=r"config\.yaml was edited, or is damaged"):
        training.resume(str(run.path), [])
    run.config_path.write_text(text)

    shutil.rmtree(run.rollouts)
    for overrides in ([], ["learner.learning_rate=0.5"], []):
        training.resume(str(run.path), overrides)
    assert [config.learner.learning_rate for config, _ in started] == [1e-5, 0.5, 0.5]
    assert run.rollouts.is_dir()  # or no later checkpoint could be written
    unchecked, event = read_metrics(run.events_path)
    assert (unchecked["kind"], unchecked["step"]) == ("inputs_unchecked", 0)
    assert unchecked["text"].startswith(f"{run.inputs_path} is missing, so edits")
    assert event["kind"] == "config_changed"
    assert event["text"] == "resumed with other values: learner.learning_rate: was 1e-05, is 0.5"
    assert not run.state_path.exists()


@pytest.mark.usefixtures("started")
def test_a_ledger_of_other_questions_is_refused_and_changes_nothing(run: RunDirectory, config: Config) -> None:
    run.create(config)
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    write_checkpoint(run, 2, 0, {"seed": 0, "num_examples": 24, "examples_sha256": "of others"})
    before = contents(run)
    with pytest.raises(RunError, match="prompt order has examples_sha256 of others"):
        training.resume(str(run.path), ["learner.learning_rate=9"])
    assert contents(run) == before


@pytest.mark.usefixtures("started")
def test_a_run_without_a_whole_checkpoint_keeps_its_records(run: RunDirectory, config: Config) -> None:
    """It would begin again. A run that is killed before its first checkpoint does."""
    run.create(changed(config, checkpoint={"every_num_steps": 2}))
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n')
    training.resume(str(run.path), [])
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    unfinished = run.checkpoint_path(2).with_name("unfinished-step-000002-0123abcd")
    unfinished.mkdir()  # it was slow to write
    training.resume(str(run.path), [])
    unfinished.rmdir()
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    before = contents(run)
    with pytest.raises(RunError, match=r"has no whole checkpoint, .* the records of its 3 steps; put one back"):
        # As if the checkpoint were not due yet.
        training.resume(str(run.path), ["checkpoint.every_num_steps=9"])
    assert contents(run) == before


def test_a_resumed_run_that_loses_its_last_checkpoint_begins_again_with_its_first_prompts(
    run: RunDirectory, config: Config, started: Started
) -> None:
    """The prompts that a restore without a checkpoint falls back to are the run's first ones."""
    run.create(config)
    training.resume(str(run.path), [])
    book, first = GroupBook(config, started[0][1].prompts), started[0][1].prompts.state_dict()
    book.admit(8)
    write_checkpoint(run, 2, 0, book.state_dict())
    run.metrics_path.write_text('{"step": 1}\n{"step": 2}\n')
    training.resume(str(run.path), [])
    prompts = started[1][1].prompts
    prompts.load_state_dict(None)
    assert prompts.state_dict() == first


@pytest.mark.parametrize("moment", ["_check", "dump_config"])
def test_of_two_trains_at_once_one_runs_and_the_folder_has_its_configuration(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A faster start, which trains with 0.5, begins and ends its own while a slower one is at `moment`."""
    fast, slow = (
        changed(config, run={"output_dir": str(tmp_path), "name": "run"}, learner={"learning_rate": rate})
        for rate in (0.5, 0.25)
    )
    run, trained, kept = RunDirectory(tmp_path / "run"), [], []
    is_fast_through, is_slow_through = threading.Event(), threading.Event()

    def to_the_end(config: Config, *_: Any) -> None:
        trained.append(config.learner.learning_rate)
        kept.append(contents(run))
        if config == fast:
            is_fast_through.set()
            assert is_slow_through.wait(120)

    def start_fast() -> None:
        with contextlib.suppress(RunError):
            training.train(fast, "run.yaml")
        is_fast_through.set()

    thread = threading.Thread(target=start_fast)
    module: Any = training if moment == "_check" else run_files
    original = getattr(module, moment)

    def delayed(config: Config, *others: Any) -> Any:
        found = original(config, *others) if moment == "_check" else None
        if config == slow:
            thread.start()
            assert is_fast_through.wait(120)
        return found if moment == "_check" else original(config, *others)

    monkeypatch.setattr(training, "_hosted", free)
    monkeypatch.setattr(training, "_prepare", Mock())
    monkeypatch.setattr(training, "_run_to_the_end", to_the_end)
    monkeypatch.setattr(module, moment, delayed)
    try:
        with contextlib.suppress(RunError):
            training.train(slow, "run.yaml")
    finally:
        is_slow_through.set()
        thread.join()
    (rate,), (files,) = trained, kept
    assert rate == (0.5 if moment == "_check" else 0.25)  # of the one that had the lock first
    assert load_config(run.config_path).learner.learning_rate == rate
    assert contents(run) == files


def contents(run: RunDirectory) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run.path.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_restore_gives_up_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    display, slept = Recorder(), list[float]()
    monkeypatch.setattr(RunDirectory, "rewind", Mock(side_effect=OSError(30, "Read-only file system")))
    monkeypatch.setattr(restores, "RETRY_S", 60)
    monkeypatch.setattr(restores, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    run = RunDirectory(tmp_path)
    with pytest.raises(RunError, match=r"Read-only file system; make it writable, and resume"):
        restores._restore(CheckpointStore(run), run, display, "")
    assert len(display.warnings) == len(slept) == 600 / 60 - 1  # the last try has 60 s, too


def test_a_resume_reads_the_end_of_the_metrics_alone(tmp_path: Path) -> None:
    run, num_steps = RunDirectory(tmp_path), 5000
    for folder in (run.rollouts, run.evaluations, run.checkpoints):
        folder.mkdir()
    padding = "x" * 3000
    lines = [f'{{"step": {step}, "text": "{padding}"}}\n' for step in range(1, num_steps + 1)]
    run.metrics_path.write_text("".join(lines))
    begun = num_read()
    assert last_logged_step(run.metrics_path) == num_steps
    assert num_read() - begun <= 2**17
    begun = num_read()
    run.rewind(num_steps - 20)
    assert num_read() - begun <= 2 * (2**20 + 2**18)  # `check_records` and the cut
    assert run.metrics_path.stat().st_size == sum(map(len, lines[: num_steps - 20]))
    assert last_logged_step(run.metrics_path) == num_steps - 20
    begun = num_read()
    RunLog(run, Recorder()).close()
    assert num_read() - begun <= 2**18


def num_read() -> int:
    """Return the bytes that this thread has read from files."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


@pytest.mark.parametrize("block", [1, 2, 3, 7, 2**16])
@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\n\nbb\n", b"a\nbb\nhalf", b"\n\nlong line\n"])
def test_lines_from_the_end_are_those_of_the_file(tmp_path: Path, block: int, text: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(text)
    lines = list(lines_from_end(path, block))[::-1]
    assert b"".join(line for _, line in lines) == text
    assert [line for _, line in lines] == text.splitlines(keepends=True)
    assert all(text[offset:].startswith(line) for offset, line in lines)


def test_damaged_events_are_removed_and_the_others_counted(tmp_path: Path) -> None:
    run, display = RunDirectory(tmp_path), Recorder()
    good = '{"time": 1.5, "kind": "restored", "actor": null, "step": 3, "text": "?"}\n'
    run.events_path.write_text(good + "\0" * 20 + "\n" + good + '{"kind": "odd"}\n' + '{"kind": "half')
    log = RunLog(run, display)
    assert (log.num_events("restored"), log.num_events("odd")) == (2, 1)
    assert [row["kind"] for row in read_metrics(run.events_path)] == ["restored", "restored", "odd"]
    assert display.warnings == [f"{run.events_path}: 1 damaged lines are removed"]
