"""A reward in three grades: a wrong answer is better than none."""

from grpo_ray.rewards.answer_formats import AnswerIn, read_answer_in
from grpo_ray.rewards.base import RewardFn, scores
from grpo_ray.rewards.question_only import question_only_reward_fn
from grpo_ray.rewards.r1_zero import r1_zero_reward_fn

JUDGES: dict[AnswerIn, RewardFn] = {"tags": r1_zero_reward_fn, "boxed": question_only_reward_fn}


def graded_reward_fn(
    response: str,
    ground_truth: str,
    right: float = 1.0,
    wrong: float = -0.5,
    missing: float = -1.0,
    answer_in: AnswerIn = "tags",
) -> dict[str, float]:
    """`right` or `wrong` as `r1_zero` (boxed: `question_only`) judges; `missing` without an answer."""
    judged = JUDGES[answer_in](response, ground_truth)
    if judged["answer_reward"]:
        return scores(right, has_format=True, is_right=True)
    has_answer = bool(read_answer_in(answer_in, response))
    return scores(wrong if has_answer else missing, has_format=bool(judged["format_reward"]), is_right=False)
