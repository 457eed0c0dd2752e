"""A configured reward as one function: a built-in by its name, a function of the user's, or a weighted sum.

`check_reward` finds out before a run that it exists, and that its arguments fit.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from grpo_ray.config.reward import Reward, RewardTerm, is_own, named_terms, terms_of
from grpo_ray.config.secrets import check_set
from grpo_ray.config.user_code import check_arguments, keyword_parameters
from grpo_ray.rewards.base import NOTHING, About, Graded, RewardFn, Scores, scores
from grpo_ray.rewards.builtin import ALGEBRAIC, REWARDS
from grpo_ray.rewards.math.equality import NO_TRUTH
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.types import TERM

T = TypeVar("T")


def get_reward_fn(reward: Reward) -> RewardFn:
    """Return the reward as a function of (response, ground truth).

    Raises:
        ValueError: there is no such reward, module or function.
    """
    if isinstance(reward, str) and ":" not in reward and reward not in REWARDS:
        raise ValueError(f"task.reward: {reward!r} is not a reward; give one of {', '.join(REWARDS)}")
    graders = [TermReward(term) for term in named_terms(reward)]

    def reward_fn(response: str, ground_truth: str) -> Scores:
        return summed(grade([response], [ground_truth], NOTHING)[0] for grade in graders)

    return reward_fn


class TermReward:
    """A term of a reward, called with responses to one prompt, their truths, and facts about the prompt.

    It never raises, as what one response makes it raise is its outcome.
    """

    def __init__(self, term: RewardTerm) -> None:
        """
        Raises:
            ValueError: there is no such reward, module or function.
        """
        self._term = term
        self._function = UserFunction.of(term) if ":" in term.reward else REWARDS[term.reward]

    @property
    def needs_group(self) -> bool:
        """True if the responses of a group must be graded together."""
        return isinstance(self._function, UserFunction) and self._function.needs_group

    def __call__(self, responses: Sequence[str], ground_truths: Sequence[str], about: About) -> list[Graded]:
        outcomes = self._outcomes(responses, ground_truths, about)
        return [weighted(self._term, outcome) for outcome in outcomes]

    def _outcomes(self, responses: Sequence[str], truths: Sequence[str], about: About) -> list[Graded]:
        function, pairs = self._function, zip(responses, truths, strict=True)
        if not isinstance(function, UserFunction):
            return [tried(partial(function, *pair, **self._term.arguments)) for pair in pairs]
        if function.takes_group:
            size = len(responses)
            (result,) = self._results([partial(function.call_group, responses, truths, about)])
            outcomes = _read(result, partial(function.read_group, size=size))
            return [outcomes] * size if isinstance(outcomes, Exception) else outcomes  # it is that of all
        if self.needs_group:
            about = {**about, "completions": list(responses)}
        results = self._results([partial(function.call, *pair, about) for pair in pairs])
        return [_read(result, function.read) for result in results]

    def _results(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what each call returns or, if it raises, that exception."""
        return [tried(call) for call in calls]


def weighted(term: RewardTerm, outcome: Graded) -> Graded:
    """Return weight x reward of a response, and beside it the reward by the term's name, if it has one."""
    if isinstance(outcome, Exception) or not outcome:
        return outcome
    own = {f"{TERM}{term.name}": outcome["reward"]} if term.name is not None else {}
    return {**outcome, "reward": float(term.weight * outcome["reward"]), **own}


def summed(parts: Iterable[Graded]) -> Scores:
    """Return the sum of what all terms give one response, or raise the first exception among them.

    A term that does not apply adds nothing. Format and answer are those of the first that applies. If none
    does, there are no scores.
    """
    applied = []
    for part in parts:
        if isinstance(part, Exception):
            raise part
        if part:
            applied.append(part)
    if not applied:
        return {}
    own = {name: value for part in applied for name, value in part.items() if name.startswith(TERM)}
    return {**applied[0], **own, "reward": sum(part["reward"] for part in applied)}


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


def _read(result: Any, read: Callable[[Any], T]) -> T | Exception:
    """Return what `read` makes of a call's result, or the exception that one of them ended with."""
    return result if isinstance(result, Exception) else tried(partial(read, result))


def wrong_scores(term: RewardTerm, response: str, ground_truth: str, own: float) -> Graded:
    """Return what the term gives a wrong answer, for one that it could not judge.

    It takes linear time: the algebra is spared, and a function of the user's gives `own`.
    """
    if is_own((term,)):
        return weighted(term, scores(own, has_format=False, is_right=False))
    truth = NO_TRUTH if term.reward in ALGEBRAIC else ground_truth
    return weighted(term, REWARDS[term.reward](response, truth, **term.arguments))


def needs_isolation(reward: Reward) -> bool:
    """Return True for a reward that may run away or is the user's, so that its process must be killable."""
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
