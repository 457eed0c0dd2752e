"""Prompts made of questions: with a text that contains `{question}`, or with the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_ray.config.task import EpisodesTaskConfig, PlainTask
from grpo_ray.tasks.examples import Conversation, Example
from grpo_ray.types import PromptItem

if TYPE_CHECKING:  # its import takes seconds
    from transformers import PreTrainedTokenizerBase

TEMPLATES = Path(__file__).parent / "templates"
PLACEHOLDER = "{question}"
CHAT = "chat"


@dataclass(frozen=True)
class TextTemplate:
    """A text in which `{question}` stands for the question."""

    text: str

    def render(self, question: str, tokenizer: "PreTrainedTokenizerBase | None" = None) -> str:
        # Not str.format: templates and questions are full of braces of LaTeX, code or JSON.
        return self.text.replace(PLACEHOLDER, question)


@dataclass(frozen=True)
class ChatTemplate:
    """The model's own chat template, up to the beginning of its answer."""

    system_prompt: str | None = None

    def messages(self, question: str) -> list[dict[str, str]]:
        """Return the conversation that the model answers."""
        messages = [{"role": "user", "content": question}]
        if isinstance(question, Conversation):
            messages = question.messages
        if self.system_prompt is not None and messages[0]["role"] != "system":  # a row's own wins
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages

    def render(self, question: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Write the conversation as text, special tokens included: tokenize it with `add_special_tokens=False`.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses a system message.
        """
        if not tokenizer.chat_template:
            raise ValueError(
                "task.prompt: `chat` needs the model's chat template, but its tokenizer has none; use a model "
                f"that was trained on conversations, or give one of {', '.join(template_names())}"
            )
        messages = self.messages(question)
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:  # such as a loop over tools, where there are none
            raise ValueError(
                f"task.prompt: the model's chat template refuses the question ({error}); "
                "some templates allow no task.system_prompt"
            ) from None
        check_shown(messages, text)
        return text


def check_shown(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a template that drops a message; it may drop calls and the assistant's earlier thoughts.

    Raises:
        ValueError: names the role.
    """
    for message in messages:
        if message["role"] not in ("assistant", "tool") and message["content"].strip() not in text:
            raise ValueError(
                f"the model's chat template leaves out a message of role {message['role']!r} "
                f"({message['content'][:40]!r}); use another role or template, or episodes.template_arguments"
            )


PromptTemplate = TextTemplate | ChatTemplate


def template_names() -> list[str]:
    """Return the names of the bundled templates."""
    return sorted(path.stem for path in TEMPLATES.glob("*.prompt"))


def load_template(name_or_path: str, system_prompt: str | None = None) -> PromptTemplate:
    """Return the bundled template of that name, or else the one in the file at that path.

    Raises:
        ValueError: there is none, or it has no place for the question.
    """
    if name_or_path == CHAT:
        return ChatTemplate(system_prompt)
    path = TEMPLATES / f"{name_or_path}.prompt" if name_or_path in template_names() else Path(name_or_path)
    try:
        text = path.read_bytes().decode("utf-8")  # bytes, so that no newline is translated
    except OSError as error:
        raise ValueError(
            f"task.prompt: cannot read {name_or_path!r} ({error.strerror}); "
            f"give one of {', '.join([*template_names(), CHAT])}, or the path of a file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the template as UTF-8 text") from None
    if PLACEHOLDER not in text:
        raise ValueError(f"{path}: the template has no {PLACEHOLDER}; write it where the question belongs")
    return TextTemplate(text)


def template_of(task: PlainTask) -> PromptTemplate:
    """Load the task's configured template; an episode makes its own prompts of the plain question."""
    if isinstance(task, EpisodesTaskConfig):
        return TextTemplate(PLACEHOLDER)
    return load_template(task.prompt, task.system_prompt)


def tokenized(
    template: PromptTemplate | None, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]
) -> list[list[int]]:
    """Return the tokens of rendered prompts; a chat template writes the first one, BOS, itself."""
    found: list[list[int]] = tokenizer([*prompts], add_special_tokens=False)["input_ids"]
    bos = None if isinstance(template, ChatTemplate) else getattr(tokenizer, "bos_token_id", None)
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return found
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in found]


@dataclass(frozen=True)
class Prompter:
    """A maker of prompts from a task's examples."""

    template: PromptTemplate
    tokenizer: "PreTrainedTokenizerBase | None"  # None: not here yet, so that prompts have no tokens
    max_tokens: int | None = None  # longer prompts are cut on the left; None: there are none
    with_facts: bool = False  # code of the user's may ask about the example

    def text(self, example: Example) -> str:
        """Render an example's prompt, which may be too long.

        Raises:
            ValueError: as the template; or the question is a conversation, and the template a text.
        """
        if isinstance(example.question, Conversation) and not isinstance(self.template, ChatTemplate):
            raise ValueError(
                f"{example.place}: the question is a list of messages, which only task.prompt `chat` renders; "
                "set task.prompt to chat, or task.question_field to a field of text"
            )
        return self.template.render(example.question, self.tokenizer)

    def item(self, group_id: int, example: Example) -> PromptItem:
        """Make a group's prompt of its example; raises ValueError as `text`."""
        prompt, tokenizer = self.text(example), self.tokenizer
        (ids,) = [[]] if tokenizer is None else tokenized(self.template, tokenizer, [prompt])
        if tokenizer is not None and self.max_tokens is not None and len(ids) > self.max_tokens:
            (first,) = tokenized(self.template, tokenizer, [""])
            # The end of the template must stay: the model answers it.
            kept = ids[len(ids) - self.max_tokens + len(first) :]
            ids, prompt = [*first, *kept], tokenizer.decode(kept)
        about = self._about(example) if self.with_facts else ""
        return PromptItem(group_id, prompt, tuple(ids), example.ground_truth, task=example.task, about=about)

    def _about(self, example: Example) -> str:
        facts = {"question": example.question, **(json.loads(example.facts) if example.facts else {})}
        if isinstance(self.template, ChatTemplate):
            facts["messages"] = self.template.messages(example.question)
        return json.dumps(facts)


Prompters = Mapping[str, Prompter]  # by `Example.task`


def make_items(examples: Sequence[Example], prompters: Prompters) -> list[PromptItem]:
    """Make the prompts of a validation set in its own order; `group_id` is the example's index."""
    return [prompters[example.task].item(index, example) for index, example in enumerate(examples)]
