"""The configuration of the task: what is asked, and how answers are rewarded."""

import re
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from grpo_ray.config.reward import Reward
from grpo_ray.config.section import Section

Operation = Literal["+", "-", "*"]


class CurriculumConfig(Section):
    """Prompts whose group had no signal when last seen (equal rewards) are asked less: they teach nothing."""

    min_weight: Annotated[float, Field(ge=0.01, le=1)] = 0.1
    """Share of the epochs in which such a prompt is asked; every other prompt is asked in each."""


class PlainTaskConfig(Section):
    """What every kind of task has, but a mixture."""

    prompt: str = "r1_zero"
    """`question_only`, `r1_zero`, `short`, `chat` (the model's chat template), or a file with `{question}`."""
    system_prompt: str | None = None
    """The system message before the question; for `prompt: chat` alone."""
    reward: Reward = "r1_zero"
    """A reward's name, `module:function`, or a list of weighted terms."""
    curriculum: CurriculumConfig | None = None
    """Ask prompts that taught nothing when last seen less often; default: every prompt once an epoch."""

    @property
    def rewards(self) -> dict[str, Reward]:
        """The reward of each part, by `PromptItem.task`; a task of one part has one, named ""."""
        return {"": self.reward}

    @model_validator(mode="after")
    def _system_prompt_has_its_place(self) -> "PlainTaskConfig":
        if self.system_prompt is not None and self.prompt != "chat":
            raise ValueError(
                f"system_prompt: only prompt `chat` has a place for it, not {self.prompt!r}; "
                "set task.prompt to chat, or write the text into a template file"
            )
        return self


class SortingTaskConfig(PlainTaskConfig):
    """Sort the digits of a number: learnable by a tiny model in a minute."""

    kind: Literal["sorting"] = "sorting"
    num_digits: Annotated[int, Field(ge=2, le=9)] = 5
    """Of each number."""
    num_train_prompts: PositiveInt = 2000
    """Numbers to train on, all different."""
    num_validation_prompts: PositiveInt = 64
    """Further numbers, to validate with."""
    prompt: str = "short"
    reward: Reward = "exact_match"


class ArithmeticTaskConfig(PlainTaskConfig):
    """Calculate: `What is 12 + 7 * 3?` is answered by `33`."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: tuple[Operation, ...] = ("+", "-", "*")
    """Drawn at random between the terms; `*` goes before `+` and `-`."""
    num_terms: Annotated[int, Field(ge=2, le=4)] = 2
    """Numbers of a question."""
    num_digits: Annotated[int, Field(ge=1, le=4)] = 2
    """Terms are numbers of at most so many digits."""
    num_train_prompts: PositiveInt = 2000
    """Questions to train on, all different."""
    num_validation_prompts: PositiveInt = 64
    """Further questions, to validate with."""
    prompt: str = "short"
    reward: Reward = "exact_match"

    @field_validator("operations")
    @classmethod
    def _some_operation(cls, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if not operations:
            raise ValueError("an empty list leaves nothing to calculate; name +, - or *")
        return operations


class KeywordsTaskConfig(PlainTaskConfig):
    """Write a sentence with given words: generated prompts, or the files of `grpo-ray data keywords`."""

    kind: Literal["keywords"] = "keywords"
    train_path: str | None = None
    """`.jsonl` or `.parquet` with `prompt`, `answer` (for a warm-up) and `keywords`; default: generated."""
    validation_path: str | None = None
    """The same, to validate with."""
    keywords_path: str | None = None
    """What prompts are generated from: a text file, a word a line; default: 256 nouns that come along."""
    num_keywords: tuple[PositiveInt, PositiveInt] = (2, 3)
    """Fewest and most keywords of a generated prompt."""
    num_train_prompts: PositiveInt = 2000
    """Generated; of a file all are taken."""
    num_validation_prompts: PositiveInt = 64
    """Generated; of a file the first so many."""
    prompt: str = "question_only"
    reward: Reward = "keyword_inclusion"

    @model_validator(mode="after")
    def _one_source(self) -> "KeywordsTaskConfig":
        if (self.train_path is None) != (self.validation_path is None):
            raise ValueError("give both of train_path and validation_path, or neither to generate prompts")
        if self.train_path is not None and self.keywords_path is not None:
            raise ValueError("keywords_path is for generated prompts; leave it or train_path out")
        if self.num_keywords[0] > self.num_keywords[1]:
            raise ValueError(f"num_keywords is {list(self.num_keywords)}: give the fewest, then the most")
        return self


class ExamplesTaskConfig(PlainTaskConfig):
    """Questions and answers from files, here or in a dataset on the hub."""

    train_path: str
    """`.jsonl` or `.parquet`, one example a row; or a dataset on the hub as `owner/name`."""
    validation_path: str
    """The same, to validate with."""
    subset: str | None = None
    """Of a dataset on the hub, if it has several; default: the one that the dataset itself calls default."""
    train_split: str = "train"
    """Of a dataset on the hub."""
    validation_split: str = "test"
    """Of a dataset on the hub."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; default: its newest."""
    num_validation_prompts: PositiveInt = 256
    """The first so many examples for validation are evaluated."""
    question_field: str = "question"
    """The field of a row that holds the question."""
    answer_field: str = "answer"
    """The field of a row that holds the ground truth, or ends in it."""
    answer_marker: str | None = None
    """Keep only what follows the marker's last occurrence as ground truth: GSM8K's is `####`."""
    answer_is_boxed: bool = False
    r"""Keep only the content of the last `\boxed{}` as ground truth, as in MATH."""
    duplicates: Literal["drop", "keep"] = "drop"
    """A question that occurs again with the same answer; with another answer it is refused unless kept."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, template included; default: what the model's positions leave beside the response."""
    long_prompts: Literal["refuse", "skip", "truncate"] = "refuse"
    """What happens to longer ones: an error, left out and counted, or cut on the left and counted."""

    @model_validator(mode="after")
    def _consistent(self) -> "ExamplesTaskConfig":
        if self.answer_marker is not None and self.answer_is_boxed:
            raise ValueError("answer_marker and answer_is_boxed both say where the ground truth is; give one")
        if self.long_prompts == "truncate" and self.prompt == "chat":
            raise ValueError(
                "long_prompts: `truncate` cuts on the left, where a chat template opens the conversation; "
                "use skip"
            )
        return self


class FileTaskConfig(ExamplesTaskConfig):
    """Any dataset, by the names of two of its fields."""

    kind: Literal["file"] = "file"


class Gsm8kTaskConfig(ExamplesTaskConfig):
    """GSM8K (Cobbe et al. 2021): `question`, and `answer` with the number after `####`."""

    kind: Literal["gsm8k"] = "gsm8k"
    train_path: str = "openai/gsm8k"
    validation_path: str = "openai/gsm8k"
    subset: str | None = "main"
    answer_marker: str | None = "####"


class MathTaskConfig(ExamplesTaskConfig):
    r"""MATH (Hendrycks et al. 2021): `problem`, and `solution` with the answer in its last `\boxed{}`."""

    kind: Literal["math"] = "math"
    train_path: str = "DigitalLearningGmbH/MATH-lighteval"
    validation_path: str = "DigitalLearningGmbH/MATH-lighteval"
    question_field: str = "problem"
    answer_field: str = "solution"
    answer_is_boxed: bool = True


PlainTask = (
    SortingTaskConfig
    | ArithmeticTaskConfig
    | KeywordsTaskConfig
    | FileTaskConfig
    | Gsm8kTaskConfig
    | MathTaskConfig
)


class MixturePart(Section):
    """One task of a mixture."""

    weight: PositiveFloat = 1.0
    """Prompts are drawn from the parts in proportion to their weights."""
    task: Annotated[PlainTask, Field(discriminator="kind")]
    """Any task but a mixture, with its own prompt, reward and curriculum."""


class MixtureTaskConfig(Section):
    """Several tasks at once, each with its own prompt and reward."""

    kind: Literal["mixture"] = "mixture"
    parts: dict[str, MixturePart]
    """By name: letters, digits, `_` and `-`; metrics of a part end in its name."""

    @property
    def rewards(self) -> dict[str, Reward]:
        """The reward of each part, by its name."""
        return {name: part.task.reward for name, part in self.parts.items()}

    @model_validator(mode="after")
    def _parts_are_some(self) -> "MixtureTaskConfig":
        if not self.parts:
            raise ValueError("parts: a mixture needs at least one part")
        for name in self.parts:
            if re.fullmatch(r"[\w-]+", name, re.ASCII) is None:
                raise ValueError(f"parts: the name {name!r} must be of letters, digits, `_` and `-`")
        return self


Task = PlainTask | MixtureTaskConfig
