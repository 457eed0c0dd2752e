"""Invalid data files and prompts: each has a defined outcome, which the user is told."""

import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from builders import TinyModel

from grpo_ray.config import Config
from grpo_ray.config.task import FileTaskConfig
from grpo_ray.run.preparation import TaskData, check_files, prepare
from grpo_ray.tasks import files, load_examples
from grpo_ray.tasks.prompts import load_template
from grpo_ray.types import PromptItem


def line(question: str, answer: str = "2") -> bytes:
    return json.dumps({"question": question, "answer": answer}).encode() + b"\n"


VALIDATION = line("validate?")


def write_task(folder: Path, train: bytes, validation: bytes = VALIDATION, **fields: Any) -> FileTaskConfig:
    """Write the files and make a task of them, with the shortest template by default."""
    (folder / "train.jsonl").write_bytes(train)
    (folder / "validation.jsonl").write_bytes(validation)
    paths = {"train_path": str(folder / "train.jsonl"), "validation_path": str(folder / "validation.jsonl")}
    return FileTaskConfig(**{**paths, "prompt": "short", **fields})


def questions(examples: Sequence[Any]) -> list[str]:
    return [example.question for example in examples]


def refusal(given: FileTaskConfig | Config) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        check_files(given) if isinstance(given, Config) else load_examples(given, seed=0)
    return str(caught.value)


def test_duplicates_are_dropped_and_counted(tmp_path: Path) -> None:
    train = line("a?") + line("b?") + line(" a? ") + line("a?") + line("c?") + line("v?")
    task = write_task(tmp_path, train, line("v?") + line("w?") + line("w?"))
    sets = load_examples(task, seed=0)
    assert questions(sets.train) == ["a?", "b?", "c?"]
    assert questions(sets.validation) == ["v?", "w?"]
    assert sets.notices == (
        f"{task.train_path}: 2 duplicate questions dropped",
        f"{task.train_path}: 1 duplicate question of {task.validation_path} kept out of training",
        f"{task.validation_path}: 1 duplicate question dropped",
    )
    rows = [{"question": "a?", "answer": "1", "level": level} for level in (1, 2, 1)]
    rows.append({"question": "b?", "answer": "1", "level": 1})
    Path(task.train_path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = task.model_copy(update={"reward": "mine:reward"})
    expected = "2 duplicate questions dropped, 1 with other columns: `task.duplicates: keep` uses them"
    assert load_examples(own, seed=0).notices[0].endswith(expected)


def test_duplicates_are_kept_when_asked(tmp_path: Path) -> None:
    task = write_task(tmp_path, line("a?") + line("a?", "3") + line("v?"), line("v?", "5"), duplicates="keep")
    sets = load_examples(task, seed=0)
    assert [(e.question, e.ground_truth) for e in sets.train] == [("a?", "2"), ("a?", "3"), ("v?", "2")]
    assert (questions(sets.validation), sets.notices) == (["v?"], ())


def test_a_question_with_two_answers_is_refused_with_both_places(tmp_path: Path) -> None:
    task = write_task(tmp_path, line("a?") + b"\n" + line("b?") + line("a?", "3") + line("b?", "4"))
    message = refusal(task)
    assert f"{task.train_path}, line 4: the question 'a?' has the answer '3', but '2' in " in message
    assert f"'2' in {task.train_path}, line 1 (and 1 more like it); correct or remove one" in message
    assert "or set task.duplicates to keep" in message
    across = write_task(tmp_path, line("a?"), line("v?") + line("a?", "3"))
    assert f"{across.validation_path}, line 2: the question 'a?'" in refusal(across)
    assert f"'2' in {across.train_path}, line 1; correct" in refusal(across)


def test_a_training_file_that_is_all_validation_is_refused(tmp_path: Path) -> None:
    task = write_task(tmp_path, VALIDATION)
    message = f"{task.train_path}: every question is also in {task.validation_path}, so none is left"
    assert message in refusal(task)
    assert "set task.duplicates to keep" in refusal(task)


# ---- lines and rows ----


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"question": "caf\xe9", "answer": "1"}', "byte 17 is not UTF-8; save the file as UTF-8"),
        ('{"question": "x"}'.encode("utf-16"), "byte 0 is not UTF-8"),
        (b"\0\0\0\0", "not valid JSON"),
        (b'{"question": "x\0", "answer": "1"}', "not valid JSON (Invalid control character at, column 16)"),
        (line("a\0b"), "'question' holds a NUL character; remove it"),
        (line("\ud83d"), "'question' holds half of a surrogate pair"),
        (line("x", "\udc00"), "'answer' holds half of a surrogate pair"),
        (b'{"question": "x", "answer": ' + b"9" * 5000 + b"}", "not usable as JSON (Exceeds the limit"),
        (b"[" * 200_000, "not usable as JSON (maximum recursion depth"),
        (b'{"question": "x", "answer": 1e999}', "'answer' is inf; it must be text or a number"),
        (b'{"question": "x", "answer": {"a": 1}}', "'answer' is {'a': 1}; it must be text or a number"),
        (b'{"question": "x", "answer": false}', "'answer' is False; it must be text or a number"),
        (b"null", "holds a NoneType; each line must be a JSON object"),
        (line(""), "'question' is empty"),
        (b'{"question": "x"}', "no field 'answer'; the fields are question."),
        (json.dumps({"question": ["x"] * 100_000, "answer": "1"}).encode(), "'question' is ['x', 'x'"),
    ],
)
def test_a_bad_line_is_named_shortly(tmp_path: Path, bad: bytes, message: str) -> None:
    task = write_task(tmp_path, line("fine?") + bad)
    assert f"{task.train_path}, line 2: {message}" in refusal(task)
    assert len(refusal(task)) < 300 + len(str(tmp_path))


def test_valid_files_of_every_kind(tmp_path: Path) -> None:
    number = b'{"question": 5, "answer": ' + b"9" * 400 + b"}"  # larger than any float
    windows = b"\xef\xbb\xbf" + line("a?").replace(b"\n", b"\r\n") + b"\r\n" + line("b?") + number
    sets = load_examples(write_task(tmp_path, windows), seed=0)
    assert questions(sets.train) == ["a?", "b?", "5"]
    assert sets.train[2].ground_truth == "9" * 400


def test_a_line_of_gigabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    task = write_task(tmp_path, line("fine?"))
    with open(task.train_path, "r+b") as file:
        file.seek(0, 2)
        file.truncate(2**30)  # a sparse file: 1 GiB without a line end, none of it on disk
    tracemalloc.start()
    try:
        message = refusal(task)
        assert tracemalloc.get_traced_memory()[1] < 4 * files.MAX_LINE_BYTES
    finally:
        tracemalloc.stop()
    assert f"{task.train_path}, line 2: longer than 16 MiB; write one example per line" in message


@pytest.mark.slow
def test_the_longest_line_allowed(tmp_path: Path) -> None:
    padding = files.MAX_LINE_BYTES - len(line("x"))
    task = write_task(tmp_path, line("x" + " " * padding) + line("y"))
    assert questions(load_examples(task, seed=0).train)[1] == "y"


def parquet(folder: Path, **columns: Any) -> FileTaskConfig:
    task = write_task(folder, b"", train_path=str(folder / "train.parquet"))
    pq.write_table(pa.table(columns), task.train_path)
    return task


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    latin = pa.array([b"ok"] * 1500 + [b"caf\xe9"])
    column = pa.StringArray.from_buffers(len(latin), latin.buffers()[1], latin.buffers()[2])
    task = parquet(tmp_path, question=column, answer=["1"] * 1501, duplicates=[None] * 1501)
    assert f"{task.train_path}, row 1501: byte 3 of 'question' is not UTF-8" in refusal(task)
    for bad in (b"binary", [1, 2], {"a": 1}):
        task = parquet(tmp_path, question=["a", "b"], answer=pa.array([bad, bad]))
        assert f"{task.train_path}, row 1: 'answer' is {bad!r}; it must be text or a number" in refusal(task)


def test_a_truncated_or_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    task = parquet(tmp_path, question=[f"{i} " * 20 for i in range(3000)], answer=list(range(3000)))
    whole = Path(task.train_path).read_bytes()
    for bad in (b"", whole[:2000], whole[:-1], whole[:200] + bytes(700) + whole[900:]):
        Path(task.train_path).write_bytes(bad)
        message = refusal(task)
        assert f"{task.train_path}: not readable as Parquet" in message
        assert "write the file again" in message


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path, line("a?"))
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "data.tsv").write_text("question\tanswer\n1\t2\n")
    (tmp_path / "long.csv").write_text(f"question,answer\n{'x' * 200_000},2\n")
    ((_, long),) = files.read_rows(tmp_path / "long.csv", ["question"])
    assert len(long["question"]) == 200_000
    (tmp_path / "comma.csv").write_text("question,answer\n1,2\n1, or 2?,3\n")
    (tmp_path / "open.csv").write_text('question,answer\n"1,2\n')
    (tmp_path / "latin.csv").write_bytes("question,answer\né,2\n".encode("latin-1"))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "twice.csv").write_text("question,answer,answer\n1,2,3\n")
    (tmp_path / "wide.csv").write_text(",".join(["x", "x", *map(str, range(100_000))]))  # not quadratic
    for path, problem in (
        (tmp_path / "folder.parquet", "is a folder; give the path of a .jsonl"),
        (tmp_path / "none.parquet", "there is no such file"),
        (tmp_path / "data.tsv", "unknown kind of file '.tsv'; convert it to .jsonl, .parquet or .csv"),
        (tmp_path / "twice.csv", "has more than one column 'answer'"),
        (tmp_path / "wide.csv", "has more than one column 'x'"),
        (tmp_path / "empty.jsonl", "holds no examples; give a file with at least one"),
        (Path("/dev/null"), "is not a regular file"),
    ):
        for field in ("train_path", "validation_path"):
            assert f"{path}: {problem}" in refusal(task.model_copy(update={field: str(path)}))

    for name, problem in (
        ("comma", "line 3: not as many values as columns; quote values with commas"),
        ("open", "at or after line 1: not valid CSV in UTF-8 (unexpected end of data); save the file again"),
        ("latin", "at or after line 1: not valid CSV in UTF-8 ('utf-8' codec can't decode byte 0xe9"),
    ):
        changed = {"train_path": str(tmp_path / f"{name}.csv")}
        assert f"{name}.csv, {problem}" in refusal(task.model_copy(update=changed))

    def denied(*_: object, **__: object) -> None:  # root may read everything, so mode bits would not help
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", denied)
        assert f"{task.train_path}: cannot be read (Permission denied); give a file that you" in refusal(task)
    table = parquet(tmp_path, question=["a"], answer=["b"])
    monkeypatch.setattr(files.pq, "ParquetFile", denied)
    assert f"{table.train_path}: cannot be read (Permission denied)" in refusal(table)


@pytest.fixture
def local(tiny_config: Config, tiny_model: TinyModel) -> Callable[..., Config]:
    """Return a function that makes a configuration of a task, with a model of 512 positions."""

    def config(task: FileTaskConfig, **sections: dict[str, Any]) -> Config:
        data = tiny_config.model_dump() | {"model": {"path": str(tiny_model()), "dtype": "float32"}}
        for name, fields in sections.items():
            data[name] |= fields
        return Config.model_validate(data | {"task": task.model_dump()})

    return config


LONG = "9" * 600  # longer than the limit in tokens, whichever merges the tokenizer has
CHOICES = "set task.long_prompts to skip (left out) or truncate (cut on the left)"


def test_a_long_prompt_is_refused_with_its_line(tmp_path: Path, local: Callable[..., Config]) -> None:
    task = write_task(tmp_path, line("a?") + line(LONG * 3))
    message = refusal(local(task))
    assert "sampling.max_tokens: 16 response tokens after the longest prompt (" in message
    assert f" tokens: {task.train_path}, line 2) do not fit the model's positions (512)" in message
    assert CHOICES in message
    assert refusal(local(task, sampling={"max_tokens": 512})).endswith("(512); shorten it")  # no prompt fits
    task = write_task(tmp_path, line("a?") + line("b" * 30), max_prompt_tokens=30)
    message = refusal(local(task))
    assert f"{task.train_path}, line 2: the prompt has " in message
    assert f"more than task.max_prompt_tokens (30); raise it, or {CHOICES}" in message


@pytest.mark.parametrize(
    ("fields", "sections", "limit"),
    [
        ({}, {}, 512 - 16),
        ({}, {"generator": {"max_model_len": 100}}, 100 - 16),
        ({"max_prompt_tokens": 60}, {"generator": {"max_model_len": 100}}, 60),
        ({"max_prompt_tokens": 600}, {"sampling": {"max_tokens": 112}}, 400),  # no room for these
    ],
)
def test_long_prompts_are_skipped_or_cut(
    tmp_path: Path, local: Callable[..., Config], fields: dict, sections: dict, limit: int
) -> None:
    train = line("a?") + line(LONG * 3) + line("b?") + line(LONG * 4)
    validation = line("v?") + line("w" + LONG * 3)

    def checked(long_prompts: str, said: str) -> tuple[Config, TaskData, int, list[PromptItem]]:
        config = local(write_task(tmp_path, train, validation, long_prompts=long_prompts, **fields), **sections)
        task = check_files(config)
        prepared = prepare(config, task)
        expected = (
            f"{config.task.train_path}: 2 prompts longer than {limit} tokens {said}",
            f"{config.task.validation_path}: 1 prompt longer than {limit} tokens {said}",
        )
        assert prepared.notices == task.notices == expected
        items = [*map(prepared.prompts.item, range(len(task.train))), *prepared.validation]
        assert max(len(item.prompt_token_ids) for item in items) == task.longest_prompt
        return config, task, prepared.model.max_model_len, items

    _, task, _, _ = checked("skip", "skipped")
    assert (questions(task.train), questions(task.validation)) == (["a?", "b?"], ["v?"])
    assert task.longest_prompt < 40
    config, task, max_model_len, items = checked("truncate", "cut on the left")
    assert (len(task.train), len(task.validation), task.longest_prompt) == (4, 2, limit)
    cut = [item for item in items if len(item.prompt_token_ids) == limit]
    assert len(cut) == 3
    end = load_template("short").text.rpartition("{question}")[2]
    assert all(item.prompt.startswith("9") and item.prompt.endswith("9" + end) for item in cut)
    assert all(item.prompt.startswith("User: ") for item in items if item not in cut)
    assert max_model_len == (config.generator.max_model_len or limit + config.sampling.max_tokens)


def test_limits_that_leave_nothing_are_refused(tmp_path: Path, local: Callable[..., Config]) -> None:
    task = write_task(tmp_path, line("a?"), max_prompt_tokens=3, long_prompts="skip")
    message = refusal(local(task))
    assert f"{task.train_path}: every prompt is longer than 3 tokens (the shortest has " in message
    assert "task.long_prompts = skip leaves none; raise task.max_prompt_tokens" in message
    task = write_task(tmp_path, line("a?"), max_prompt_tokens=3, long_prompts="truncate")
    message = refusal(local(task))
    assert "task.long_prompts: a prompt cut to 3 tokens keeps nothing of its question" in message
    task = write_task(tmp_path, line("a?"), long_prompts="truncate")
    assert "a prompt cut to 0 tokens" in refusal(local(task, sampling={"max_tokens": 600}))
