"""`grpo-ray reward`: one reward on one answer, in the process in which a run would grade it."""

import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ValidationError

from grpo_ray.config.reward import REWARD_NAMES, RewardTerm, ScorerConfig
from grpo_ray.config.user_code import importable, is_function_name
from grpo_ray.errors import shown_plainly
from grpo_ray.records.visible_text import print_visible
from grpo_ray.rewards.base import Ungradable
from grpo_ray.rewards.configured import check_reward
from grpo_ray.rewards.grader import Grader
from grpo_ray.tools.arguments import Argument, Command, Flag, Option
from grpo_ray.types import PromptItem


@dataclass(frozen=True)
class RewardOptions:
    reward: Annotated[
        str, Argument("REWARD", "FILE.py:FUNCTION, module:function, or the name of a built-in reward")
    ]
    response: Annotated[str, Option("TEXT", "the answer to grade")]
    ground_truth: Annotated[str, Option("TEXT", "the ground truth to compare with")] = ""
    question: Annotated[str, Option("TEXT", "the question, for functions that take it")] = ""
    prompt: Annotated[str | None, Option("TEXT", "the prompt as the model sees it (default: the question)")] = (
        None
    )
    row: Annotated[str, Option("JSON", 'the other columns of the row, such as \'{"tests": "..."}\'')] = "{}"
    arguments: Annotated[str, Option("JSON", "the term's `arguments`")] = "{}"
    batched: Annotated[bool, Flag("call the function with lists, as `batched: true` does")] = False
    network: Annotated[bool, Flag("let the function use the network, as `network: true` does")] = False
    secret: Annotated[
        tuple[str, ...], Option("NAME", "an environment variable that the function may read; repeatable")
    ] = ()


def _reward(options: RewardOptions) -> int:
    with shown_plainly(), contextlib.redirect_stdout(sys.stderr):  # a module may print as it is imported
        row, arguments = _mapping("--row", options.row), _mapping("--arguments", options.arguments)
        name = importable(options.reward)
        if name not in REWARD_NAMES and not is_function_name(name):
            raise ValueError(f"{name!r} is not a reward; give FILE.py:FUNCTION, or {', '.join(REWARD_NAMES)}")
        fields = {"batched": options.batched, "network": options.network, "secrets": options.secret}
        try:
            term = RewardTerm.model_validate({"reward": name, "arguments": arguments, **fields})
        except ValidationError as error:
            raise ValueError(f"REWARD: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        named = {"question": options.question, "answer": options.ground_truth}  # as `kind: file` calls them
        check_reward((term,), "REWARD", [*row], named)
    about = json.dumps({"question": options.question, "row": row, "fields": named})
    prompt = options.question if options.prompt is None else options.prompt
    item = PromptItem(0, prompt, (), options.ground_truth, about=about)
    grader = Grader({"": (term,)}, ScorerConfig(num_workers=1))
    try:
        (result,) = grader.grade("", [(options.response, options.ground_truth)], item)
    finally:
        grader.close()
    if isinstance(result, dict):
        print(json.dumps(result))
        return 0
    counts = "counts as a wrong answer" if isinstance(result, Ungradable) else "is not trained on"
    print_visible(f"no reward; in a run this response {counts}: {result}")
    return 1


def _mapping(option: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option}: not valid JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(value, dict):
        raise ValueError(f'{option}: give a JSON object, such as {{"tests": "..."}}')
    return value


REWARD = Command(
    "reward", RewardOptions, _reward, "try a reward on one answer",
    "Grade one answer with a reward, isolated as in a run; print the scores as JSON.",
)  # fmt: skip
