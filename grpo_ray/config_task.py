"""The configuration of the task: what is asked, and how answers are rewarded."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from grpo_ray.config_reward import Reward
from grpo_ray.config_section import Section


class SortingTaskConfig(Section):
    """Sort the digits of a number: learnable by a tiny model in a minute."""

    kind: Literal["sorting"] = "sorting"
    num_digits: Annotated[int, Field(ge=2, le=9)] = 5
    num_train_prompts: PositiveInt = 2000
    num_validation_prompts: PositiveInt = 64
    prompt: str = "short"
    """Template: `question_only`, `r1_zero`, `short`, or a file with `{question}`."""
    reward: Reward = "exact_match"
    """A reward's name, `module:function`, or a list of weighted terms."""


class FileTaskConfig(Section):
    """Questions and answers from JSONL or Parquet files."""

    kind: Literal["file"] = "file"
    train_path: str
    """`.jsonl` or `.parquet`, one example a row."""
    validation_path: str
    num_validation_prompts: PositiveInt = 256
    """The first so many rows of the validation file are evaluated."""
    question_field: str = "question"
    answer_field: str = "answer"
    answer_marker: str | None = None
    """Keep only what follows the marker's last occurrence as ground truth: GSM8K's is `####`."""
    duplicates: Literal["drop", "keep"] = "drop"
    """A question that occurs again with the same answer; with another answer it is refused unless kept."""
    max_prompt_tokens: PositiveInt | None = None
    """Longest prompt, template included; default: what the model's positions leave beside the response."""
    long_prompts: Literal["refuse", "skip", "truncate"] = "refuse"
    """What happens to longer ones: an error, left out and counted, or cut on the left and counted."""
    prompt: str = "r1_zero"
    """Template: `question_only`, `r1_zero`, `short`, or a file with `{question}`."""
    reward: Reward = "r1_zero"
    """A reward's name, `module:function`, or a list of weighted terms."""
