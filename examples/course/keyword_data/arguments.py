"""The command `python -m examples.course data`."""

from examples.course.keyword_data.options import DataOptions, KeywordOptions
from grpo_ray.errors import RunError
from grpo_ray.tools.arguments import Command


def _data(options: DataOptions) -> int:
    raise RunError("name the dataset to make: keywords")


def _keywords(options: KeywordOptions) -> int:
    from examples.course.keyword_data.generate import make_keyword_dataset

    make_keyword_dataset(options)
    return 0


KEYWORDS = Command(
    "keywords", KeywordOptions, _keywords, "sentences that contain given words",
    "Make prompt/answer pairs for keyword inclusion. Every answer is checked for its keywords; 80% of the "
    "pairs are for training, 20% for validation, and no two prompts have the same keywords. After an "
    "interruption the same command resumes.",
)  # fmt: skip
DATA = Command("data", DataOptions, _data, "make a dataset", subcommands=(KEYWORDS,), metavar="DATASET")
