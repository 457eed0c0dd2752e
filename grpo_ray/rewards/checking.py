"""The check of a configured reward before anything expensive starts: it exists, and its arguments fit."""

from collections.abc import Collection

from grpo_ray.config.reward import Reward, RewardTerm, terms_of
from grpo_ray.config.secrets import check_set
from grpo_ray.config.user_code import check_arguments, keyword_parameters
from grpo_ray.rewards.builtin import REWARDS
from grpo_ray.rewards.user_function import UserFunction


def check_reward(
    reward: Reward,
    field: str = "task.reward",
    columns: Collection[str] | None = (),
    fields: Collection[str] = (),
) -> None:
    """Import the user's own functions, compare the arguments with the signatures, and look for the secrets.

    Args:
        columns: of the data, which functions may ask for by name; None: not known yet.
        fields: the names of the columns with the question and the answer.

    Raises:
        ValueError: names the field, what is wrong with it, and how to fix it.
    """
    for index, term in enumerate(terms_of(reward)):
        place = field if isinstance(reward, str) else f"{field}[{index}]"
        if term.secrets and ":" not in term.reward:
            raise ValueError(f"{place}: secrets: {term.reward} is built in and reads none; omit them")
        check_set(term.secrets, f"{field}: secrets")  # first: a module may read them as it is imported
        _check(term, place, columns, fields)


def _check(term: RewardTerm, field: str, columns: Collection[str] | None, fields: Collection[str]) -> None:
    if ":" in term.reward:
        function = UserFunction.of(term, field)
        if function.is_async and not term.network:
            raise ValueError(
                f"{field}: {term.reward} is an `async def`, which is for judges over the network, and its term "
                f"does not allow it; give [{{reward: {term.reward}, network: true}}], or write a `def`"
            )
        function.check(field, columns, fields)
        return
    what = f"{field}: {term.reward}"
    parameters = keyword_parameters(REWARDS[term.reward], "response, ground_truth", what)
    if parameters is not None:
        remedy = f"give `arguments` in a list: [{{reward: {term.reward}, arguments: {{{{}}: ...}}}}]"
        check_arguments(parameters, term.arguments, what, remedy)
