"""Rows with a list of messages in place of a question."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from builders import write_rows

from grpo_ray.config.task import EpisodesTaskConfig, FileTaskConfig
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.dataset import dataset_examples
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import Prompter, load_template

USER = {"role": "user", "content": "What is 3 + 4?"}
SYSTEM = {"role": "system", "content": "Answer \u00e4s a number."}
EARLIER = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes?"}]


class Tokenizer:
    """A tokenizer with a chat template that shows every message."""

    chat_template = "a template"

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        return "".join(f"[{m['role']}]{m['content']}" for m in conversation) + "[assistant]"

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, token_ids: Any) -> str:
        return bytes(token_ids).decode()


def read(folder: Path, *questions: Any, kind: str = "jsonl") -> list[Example]:
    rows = [{"messages": question, "answer": str(number)} for number, question in enumerate(questions)]
    validation = write_rows(folder / "validation.jsonl", [{"messages": "plain", "answer": "0"}])
    paths = {"train_path": write_rows(folder / f"rows.{kind}", rows), "validation_path": validation}
    task = FileTaskConfig(**paths, question_field="messages", prompt="chat")
    return list(dataset_examples(task, 0).train)


def prompts(examples: list[Example], system_prompt: str | None = None) -> list[str]:
    prompter = Prompter(load_template("chat", system_prompt), Tokenizer())
    return [prompter.item(0, example).prompt for example in examples]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_go_through_the_chat_template(tmp_path: Path, kind: str) -> None:
    examples = read(tmp_path, [USER], [SYSTEM, *EARLIER, USER], kind=kind)
    alone = "[user]What is 3 + 4?[assistant]"
    whole = f"[system]Answer \u00e4s a number.[user]Hello[assistant]Yes?{alone}"
    assert prompts(examples) == [alone, whole]
    assert prompts(examples, "Be brief.") == [f"[system]Be brief.{alone}", whole]
    assert prompts(pickle.loads(pickle.dumps(examples))) == [alone, whole]


def test_text_and_messages_may_be_mixed_in_a_file(tmp_path: Path) -> None:
    texts = ["Say 3", json.dumps([SYSTEM])]  # a text that looks like messages is still a text
    expected = [f"[user]{text}[assistant]" for text in (*texts, USER["content"])]
    assert prompts(read(tmp_path, *texts, [USER])) == expected


def test_an_episode_begins_with_a_text(tmp_path: Path) -> None:
    read(tmp_path, "Say 3", [USER])
    rows, validation = tmp_path / "rows.jsonl", tmp_path / "validation.jsonl"
    files = {"examples": str(rows), "validation_examples": str(validation)}
    task = EpisodesTaskConfig(episode="games:play", question_field="messages", **files)
    with pytest.raises(ValueError, match="line 2: the question is a list of messages, but an episode"):
        load_examples(task, 0)


def test_dots_lead_into_nested_fields(tmp_path: Path) -> None:
    rows = [{"prompt": "Say 3", "reward_model": {"ground_truth": "3"}, "a.b": "x"}]
    path = write_rows(tmp_path / "rows.parquet", rows)
    paths = {"train_path": path, "validation_path": path, "duplicates": "keep"}
    for field, truth in (("reward_model.ground_truth", "3"), ("a.b", "x")):
        task = FileTaskConfig(**paths, question_field="prompt", answer_field=field)
        assert [e.ground_truth for e in dataset_examples(task, 0).train] == [truth]
    task = FileTaskConfig(**paths, question_field="prompt", answer_field="reward_model.style")
    with pytest.raises(ValueError, match=r"no field '.*style'; the fields are prompt, reward_model, a.b"):
        dataset_examples(task, 0)


def test_a_template_that_drops_a_message_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = Tokenizer.apply_chat_template
    monkeypatch.setattr(Tokenizer, "apply_chat_template", lambda self, m, **how: show(self, m[-1:], **how))
    assert prompts(read(tmp_path, [USER])) == ["[user]What is 3 + 4?[assistant]"]
    with pytest.raises(ValueError, match=r"leaves out a message of role 'system' \('Be brief.'\)"):
        prompts(read(tmp_path, [USER]), "Be brief.")


def test_a_template_of_text_refuses_messages(tmp_path: Path) -> None:
    prompter = Prompter(load_template("r1_zero"), Tokenizer())
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .* only task.prompt `chat` renders; "):
        prompter.item(0, read(tmp_path, [USER])[0])


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([], r"line 1: 'messages' has messages of nothing; the last must be the user's"),
        (EARLIER, r"'messages' has messages of user, assistant; the last must be the user's"),
        ([USER, SYSTEM, USER], r"messages of user, system, user; .* a system message must be the first"),
        ([USER, "x"], r"'messages'\[1\] is 'x'; each message must have a `role` of system, user, assistant,"),
        ([{"role": "tool", "content": "3"}, USER], r"'messages'\[0\] is .*'tool'"),
        ([{"role": ["user"], "content": "3"}], r"'messages'\[0\] is .*each message"),
        ([{**USER, "tool_calls": [1]}], r"'messages'\[0\] is .*and nothing else"),
        ([{**USER, "content": [{"type": "image"}]}], r"'messages'\[0\] is .*'image'.* a `content` of text"),
        ([{"role": "user", "content": " "}], r"'messages' is empty; fill it in"),
        ([{"role": "user", "content": "a\0"}], r"'messages' holds a NUL character"),
    ],
)
def test_wrong_messages_are_refused_by_their_place(tmp_path: Path, messages: Any, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        read(tmp_path, messages)
