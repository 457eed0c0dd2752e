"""The configuration of the task: its questions, prompts and rewards."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from grpo_ray.config.reward import Reward
from grpo_ray.config.section import HomePath, Section, not_empty

Operation = Literal["+", "-", "*"]
OPENING_TAGS = ("<think>", "<answer>")
TAGGED = ("r1_zero", "short", "few_shot_sorting")  # bundled templates that end with an opening tag
Term = Annotated[int, Field(ge=0, lt=10**4)]
ImportPath = Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]


def opens_tag(prompt: str) -> bool:
    """Return True if the template, a bundled one or a file, ends with a tag that the response closes."""
    if prompt in TAGGED:
        return True
    try:
        text = Path(prompt).read_bytes().decode(errors="replace")
    except (OSError, ValueError):  # a bundled one, or a mistake, which is refused when the template is loaded
        return False
    return text.rstrip().endswith(OPENING_TAGS)


class CurriculumConfig(Section):
    """Less frequent sampling of prompts that teach nothing: the advantages of their last group were all 0."""

    min_weight: Annotated[float, Field(ge=0.01, le=1)] = 0.1
    """Share of epochs that include such a prompt; every other prompt is in each epoch."""


class PlainTaskConfig(Section):
    """Fields of every kind of task except mixtures."""

    prompt: HomePath = "r1_zero"
    """Template: `question_only`, `r1_zero`, `short`, `few_shot_sorting` (for sorting), `chat` (the model's
    own), or a file with `{question}`, which may begin with examples."""
    system_prompt: str | None = None
    """System message before the question (`prompt: chat` only)."""
    reward: Reward = "r1_zero"
    """Name of a reward, `module:function`, or a list of weighted terms."""
    curriculum: CurriculumConfig | None = None
    """Sample prompts less often if they last taught nothing; default: every prompt once per epoch."""

    def _conflicts(self) -> Iterator[str]:
        if self.system_prompt is not None and self.prompt != "chat":
            yield (
                f"system_prompt needs prompt `chat`, not {self.prompt!r}; set task.prompt to chat, or write "
                "the text into a template file"
            )


class SortingTaskConfig(PlainTaskConfig):
    """Sorting the digits of a number: a tiny model learns it in a minute."""

    kind: Literal["sorting"] = "sorting"
    num_digits: Annotated[int, Field(ge=2, le=9)] = 5
    """Digits per number."""
    num_train_prompts: PositiveInt = 2000
    """Distinct numbers to train on."""
    num_validation_prompts: PositiveInt = 64
    """Further numbers to validate with."""
    prompt: HomePath = "short"
    reward: Reward = "exact_match"


class ArithmeticTaskConfig(PlainTaskConfig):
    """Arithmetic: `What is 12 + 7 * 3?` is answered by `33`."""

    kind: Literal["arithmetic"] = "arithmetic"
    operations: Annotated[
        tuple[Operation, ...], not_empty("an empty list leaves nothing to calculate; name +, - or *")
    ] = ("+", "-", "*")
    """Operations to draw between the terms; `*` takes precedence over `+` and `-`."""
    num_terms: Annotated[int, Field(ge=2, le=4)] = 2
    """Numbers per question."""
    num_digits: Annotated[int, Field(ge=1, le=4)] = 2
    """Maximum digits per number."""
    ranges: Annotated[tuple[tuple[Term, Term], ...], Field(min_length=2, max_length=4)] | None = None
    """First and last number of each term, such as `[[1, 49], [1, 9]]`, in place of `num_terms` and
    `num_digits`. A sum or product is then drawn in one order only: `7 + 2`, or `2 + 7`."""
    num_train_prompts: PositiveInt = 2000
    """Distinct questions to train on."""
    num_validation_prompts: PositiveInt = 64
    """Further questions to validate with."""
    prompt: HomePath = "short"
    reward: Reward = "exact_match"

    @field_validator("ranges")
    @classmethod
    def _first_to_last(cls, ranges: tuple[tuple[int, int], ...] | None) -> tuple[tuple[int, int], ...] | None:
        if wrong := [list(each) for each in ranges or () if each[0] > each[1]]:
            raise ValueError(f"{wrong[0]} holds no number; give the first, then the last")
        return ranges


class KeywordsTaskConfig(PlainTaskConfig):
    """Writing a sentence with given words: generated prompts, or files."""

    kind: Literal["keywords"] = "keywords"
    train_path: HomePath | None = None
    """`.jsonl` or `.parquet` file with `prompt`, `answer` (for a warm-up), `keywords`; default: generated."""
    validation_path: HomePath | None = None
    """File in the same format to validate with."""
    keywords_path: HomePath | None = None
    """Text file of words to generate prompts from, one per line; default: 256 bundled nouns."""
    num_keywords: tuple[PositiveInt, PositiveInt] = (2, 3)
    """Minimum and maximum keywords per generated prompt."""
    num_train_prompts: PositiveInt = 2000
    """Prompts to generate for training; a file is used whole."""
    num_validation_prompts: PositiveInt = 64
    """Prompts to validate with: generated, or the first N of the file."""
    prompt: HomePath = "question_only"
    reward: Reward = "keyword_inclusion"

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if (self.train_path is None) != (self.validation_path is None):
            yield "give both of train_path and validation_path, or neither to generate prompts"
        if self.train_path is not None and self.keywords_path is not None:
            yield "keywords_path is for generated prompts; omit it or train_path"
        if self.num_keywords[0] > self.num_keywords[1]:
            yield f"num_keywords is {list(self.num_keywords)}: give the minimum, then the maximum"


class ReasoningGymTaskConfig(PlainTaskConfig):
    """A generated task of the package reasoning-gym, which also verifies the answers."""

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    """Name of the dataset, such as `chain_sum`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Values of the dataset's own configuration, such as `{max_terms: 3}`."""
    num_train_prompts: Annotated[int, Field(ge=1, le=100_000)] = 2000
    """Different questions to train on."""
    num_validation_prompts: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Questions to validate with, from other seeds; none of them is trained on."""
    prompt: HomePath = "chat"
    reward: Reward = "grpo_ray.tasks.reasoning_gym:verified"


class ExamplesTaskConfig(PlainTaskConfig):
    """Questions and answers from local files or a dataset on the hub."""

    train_path: HomePath
    """`.jsonl`, `.parquet` or `.csv` file with one example per row, or a dataset on the hub as `owner/name`."""
    validation_path: HomePath
    """File or dataset to validate with, in the form of `train_path`."""
    subset: str | None = None
    """Subset of a dataset on the hub that has several; default: the dataset's own default."""
    train_split: str = "train"
    """Split of a dataset on the hub to train on."""
    validation_split: str = "test"
    """Split of a dataset on the hub to validate with."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; default: its latest."""
    num_validation_prompts: PositiveInt = 256
    """Validate with the first N examples."""
    question_field: str = "question"
    """Field of a row that holds the question: text, or with `prompt: chat` a list of messages."""
    answer_field: str = "answer"
    """Field that holds, or ends with, the ground truth; dots lead into it (`reward_model.ground_truth`)."""
    answer_marker: Annotated[str, Field(min_length=1)] | None = None
    """Take only the text after the marker's last occurrence as ground truth; GSM8K's marker is `####`."""
    answer_is_boxed: bool = False
    r"""Take only the content of the last `\boxed{}` as ground truth, as in MATH."""
    duplicates: Literal["drop", "keep"] = "drop"
    """`drop`: use a repeated question once, or refuse it if its answers differ. `keep`: use every one."""
    max_prompt_tokens: PositiveInt | None = None
    """Maximum prompt length in tokens with the template; default: the model's limit minus the response."""
    long_prompts: Literal["refuse", "skip", "truncate"] = "refuse"
    """Handling of longer prompts: `refuse` is an error, `skip` leaves them out, `truncate` cuts on the left."""

    def _conflicts(self) -> Iterator[str]:
        yield from super()._conflicts()
        if self.answer_marker is not None and self.answer_is_boxed:
            yield "answer_marker and answer_is_boxed both say where the ground truth is; give only one"
        if self.long_prompts == "truncate" and self.prompt == "chat":
            yield (
                "long_prompts: `truncate` cuts on the left, where a chat template opens the conversation; "
                "use skip"
            )


class FileTaskConfig(ExamplesTaskConfig):
    """Any dataset, given the names of two of its fields."""

    kind: Literal["file"] = "file"


class Gsm8kTaskConfig(ExamplesTaskConfig):
    """GSM8K (Cobbe et al. 2021): `question`, and `answer` with the number after `####`."""

    kind: Literal["gsm8k"] = "gsm8k"
    train_path: HomePath = "openai/gsm8k"
    validation_path: HomePath = "openai/gsm8k"
    subset: str | None = "main"
    answer_marker: Annotated[str, Field(min_length=1)] | None = "####"


class MathTaskConfig(ExamplesTaskConfig):
    r"""MATH (Hendrycks et al. 2021): `problem`, and `solution` with the answer in its last `\boxed{}`."""

    kind: Literal["math"] = "math"
    train_path: HomePath = "DigitalLearningGmbH/MATH-lighteval"
    validation_path: HomePath = "DigitalLearningGmbH/MATH-lighteval"
    question_field: str = "problem"
    answer_field: str = "solution"
    answer_is_boxed: bool = True


class EpisodesTaskConfig(Section):
    """Episodes of several turns: a function of yours plays them, with tools or an environment."""

    kind: Literal["episodes"] = "episodes"
    episode: ImportPath
    """`module:function`, an `async def` of (session, example) that returns the reward or an Outcome."""
    examples: HomePath
    """`module:function` of (seed) that returns an ExampleSets, or a `.jsonl` or `.parquet` file to train on."""
    validation_examples: HomePath | None = None
    """File to validate with, if `examples` is a file."""
    question_field: str = "question"
    """Field of a file's row that holds the question."""
    answer_field: str = "answer"
    """Field of a file's row that holds the ground truth."""
    num_validation_prompts: PositiveInt = 256
    """Validate with the first N examples."""
    warmup: ImportPath | None = None
    """`module:function` of (seed, number) that returns the pairs (transcript, reply) for `model.tiny`."""
    curriculum: CurriculumConfig | None = None
    """Sample prompts less often if they last taught nothing; default: every prompt once per epoch."""

    def _conflicts(self) -> Iterator[str]:
        if (":" in self.examples) == (self.validation_examples is not None):
            yield "validation_examples: give a file if `examples` is one; omit it for a `module:function`"


PlainTask = (
    SortingTaskConfig
    | ArithmeticTaskConfig
    | KeywordsTaskConfig
    | ReasoningGymTaskConfig
    | FileTaskConfig
    | Gsm8kTaskConfig
    | MathTaskConfig
    | EpisodesTaskConfig
)


class MixturePart(Section):
    """One task of a mixture."""

    weight: PositiveFloat = 1.0
    """Relative share of the prompts drawn from this part."""
    task: Annotated[PlainTask, Field(discriminator="kind")]
    """Any task except a mixture, with its own prompt, reward and curriculum."""


class MixtureTaskConfig(Section):
    """Several tasks at once, each with its own prompt and reward."""

    kind: Literal["mixture"] = "mixture"
    parts: dict[str, MixturePart]
    """Parts by name (letters, digits, `_` and `-`); metrics of a part end with its name."""

    def _conflicts(self) -> Iterator[str]:
        if not self.parts:
            yield "parts: a mixture needs at least one part"
        for name in self.parts:
            if re.fullmatch(r"[\w-]+", name, re.ASCII) is None:
                yield f"parts: the name {name!r} may only have letters, digits, `_` and `-`"


Task = PlainTask | MixtureTaskConfig


def parts_of(task: Task) -> dict[str, PlainTask]:
    """Return the task's parts by `Example.task`; only a mixture has other parts than itself, named ""."""
    if isinstance(task, MixtureTaskConfig):
        return {name: part.task for name, part in task.parts.items()}
    return {"": task}


def field_of(part: str) -> str:
    """Return the field of a task's part, by its name in `parts_of`."""
    return f"task.parts.{part}.task" if part else "task"
