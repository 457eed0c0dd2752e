"""A configured reward as one function: a built-in by its name, a function of the user's, or a weighted sum.

`check_reward` finds out before a run that it exists, and that its arguments fit.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from grpo_ray.config.reward import Reward, RewardTerm, is_own, named_terms, terms_of
from grpo_ray.config.secrets import check_set
from grpo_ray.config.user_code import check_arguments, keyword_parameters
from grpo_ray.rewards.base import NOTHING, About, Graded, RewardFn, Scores, scores
from grpo_ray.rewards.builtin import ALGEBRAIC, REWARDS
from grpo_ray.rewards.math.equality import NO_TRUTH
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.types import TERM

T = TypeVar("T")

GroupFn = Callable[[Sequence[str], Sequence[str], About], list[Graded]]
"""(responses of a group, ground truths, facts about the prompt) to the outcome of each response."""


def get_reward_fn(reward: Reward) -> RewardFn:
    """Return the reward as a function of (response, ground truth).

    Raises:
        ValueError: there is no such reward, module or function.
    """
    if isinstance(reward, str) and ":" not in reward:
        return _built_in(reward)
    grade = GroupReward(reward)

    def reward_fn(response: str, ground_truth: str) -> Scores:
        (result,) = grade([response], [ground_truth], NOTHING)
        if isinstance(result, Exception):
            raise result
        return result

    return reward_fn


class GroupReward:
    """A reward as a GroupFn: it never raises, as what one response makes it raise is its outcome."""

    def __init__(self, reward: Reward) -> None:
        """
        Raises:
            ValueError: there is no such reward, module or function.
        """
        self._terms = named_terms(reward)
        self._functions: list[UserFunction | RewardFn] = [
            UserFunction.of(term) if ":" in term.reward else _built_in(term.reward) for term in self._terms
        ]

    @property
    def needs_group(self) -> bool:
        """True if the responses of a group must be graded together."""
        return any(isinstance(each, UserFunction) and each.needs_group for each in self._functions)

    def __call__(self, responses: Sequence[str], ground_truths: Sequence[str], about: About) -> list[Graded]:
        columns = [
            _outcomes(function, term, responses, ground_truths, about)
            for term, function in zip(self._terms, self._functions, strict=True)
        ]
        return [weighted_sum(self._terms, row) for row in zip(*columns, strict=True)]


def weighted_sum(terms: Sequence[RewardTerm], row: Sequence[Graded]) -> Graded:
    """Return the sum of weight x reward of one response's terms, with the rewards of those that have names.

    What one raised is the result. One that does not apply adds nothing. Format and answer are the first's.
    """
    for outcome in row:
        if isinstance(outcome, Exception):
            return outcome
    applied = [(term, each) for term, each in zip(terms, row, strict=True) if isinstance(each, dict) and each]
    if not applied:
        return {}
    total = sum(term.weight * each["reward"] for term, each in applied)
    own = {f"{TERM}{term.name}": each["reward"] for term, each in applied if term.name is not None}
    return {**applied[0][1], "reward": float(total), **own}


def _outcomes(
    function: UserFunction | RewardFn, term: RewardTerm, responses: Sequence[str], truths: Sequence[str],
    about: About,
) -> Sequence[Graded]:  # fmt: skip
    pairs = zip(responses, truths, strict=True)
    if not isinstance(function, UserFunction):
        return [tried(partial(function, *pair, **term.arguments)) for pair in pairs]
    if function.takes_group:
        return for_each(tried(lambda: function.graded_group(responses, truths, about)), len(responses))
    if function.needs_group:
        about = {**about, "completions": list(responses)}
    return [tried(partial(function.graded, *pair, about)) for pair in pairs]


def tried(call: Callable[[], T]) -> T | Exception:
    """Return the result of the call, or what it raised; running out of memory concerns the whole process."""
    try:
        return call()
    except MemoryError:
        raise
    except Exception as error:  # a function of the user's may raise anything
        return error
    except SystemExit as error:  # of code that it runs
        return RuntimeError(f"SystemExit: {error}").with_traceback(error.__traceback__)


def for_each(results: list[Graded] | Exception, size: int) -> list[Graded]:
    """Return the outcome of each response of a group; an exception is that of all."""
    return [results] * size if isinstance(results, Exception) else [*results]


def _built_in(name: str) -> RewardFn:
    if name not in REWARDS:
        raise ValueError(f"task.reward: {name!r} is not a reward; give one of {', '.join(REWARDS)}")
    return REWARDS[name]


def get_wrong_fn(term: RewardTerm, own: float | None) -> RewardFn | None:
    """Return a function that gives what the term gives a wrong answer, for one that it could not judge.

    It takes linear time: the algebra is spared, and a function of the user's is not called.

    Args:
        own: taken as the reward of a function of the user's; with None, it has no result.
    """
    if is_own((term,)) and own is None:
        return None

    def wrong_fn(response: str, ground_truth: str) -> Scores:
        truth = NO_TRUTH if term.reward in ALGEBRAIC else ground_truth
        if is_own((term,)):
            outcome = scores(own or 0.0, has_format=False, is_right=False)
        else:
            outcome = REWARDS[term.reward](response, truth, **term.arguments)
        result = weighted_sum((term,), (outcome,))
        assert not isinstance(result, Exception)
        return result

    return wrong_fn


def needs_isolation(reward: Reward) -> bool:
    """Return True for a reward that must be computed in a process that can be killed.

    It may run away, or it is a function of the user's own.
    """
    return uses_algebra(reward) or is_own(reward)


def uses_algebra(reward: Reward) -> bool:
    """Return True if a term of the reward compares answers by computer algebra."""
    return any(term.reward in ALGEBRAIC for term in terms_of(reward))


# ---- the check before anything expensive starts ----


def check_reward(
    reward: Reward, field: str = "task.reward", columns: Collection[str] | None = (),
    fields: Collection[str] = (),
) -> None:  # fmt: skip
    """Import the user's own functions, compare the arguments with the signatures, and look for the secrets.

    Args:
        columns: of the data, which functions may ask for by name; None: not known yet.
        fields: the names of the columns with the question and the answer.

    Raises:
        ValueError: names the field, what is wrong with it, and how to fix it.
    """
    terms = terms_of(reward)
    for index, term in enumerate(terms):
        place = field if len(terms) == 1 else f"{field}[{index}]"
        if term.secrets and ":" not in term.reward:
            raise ValueError(f"{place}: secrets: {term.reward} is built in and reads none; omit them")
        check_set(term.secrets, f"{field}: secrets")  # first: a module may read them as it is imported
        _check(term, place, columns, fields)


def _check(term: RewardTerm, field: str, columns: Collection[str] | None, fields: Collection[str]) -> None:
    if ":" in term.reward:
        function = UserFunction.of(term, field)
        if function.is_async and not term.network:
            raise ValueError(
                f"{field}: {term.reward} is an `async def`, which needs a term with the network; give "
                f"[{{reward: {term.reward}, network: true}}] (`grpo-ray reward`: --network), or write a `def`"
            )
        function.check(field, columns, fields)
        return
    what = f"{field}: {term.reward}"
    parameters = keyword_parameters(REWARDS[term.reward], "response, ground_truth", what)
    if parameters is not None:
        remedy = f"give `arguments` in a list: [{{reward: {term.reward}, arguments: {{{{}}: ...}}}}]"
        check_arguments(parameters, term.arguments, what, remedy)
