"""A reward function of the user's own, named as `module:function`, and the three ways in which it is called.

    one at a time    reward(response, ground_truth, ...)
    `batched: true`  the same with lists, once per group
    as in TRL        reward(prompts, completions, **columns) with lists, once per group

More is given by name: `question`, `prompt`, `row` (a dict of the other columns), any column, and `completions`
(the group's responses).

Each may be an `async def` if its term has `network: true` (networked.py).
"""

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from numbers import Real
from typing import Any

from grpo_ray.config.reward import Reward, RewardTerm, terms_of
from grpo_ray.config.user_code import check_arguments, import_function, is_async, keyword_parameters
from grpo_ray.rewards.base import FACTS, About, Graded, Scores, scores

BY_NAME = ("question", "prompt", "row", "completions")
NAMES_OF_RESPONSES = ("completion", "completion_ids", "solution_str")  # in other libraries
LOGGERS = ("log_extra", "log_metric")  # of TRL; what they are told is dropped
TRUTHS = ("ground_truth", "truth", "answer", "solution", "target", "label", "gold", "reference", "expected")
TRL_GIVES = ("prompts", *LOGGERS)
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)


class UserFunction:
    """A function of the user's, and what it asks for."""

    def __init__(
        self, function: Callable[..., Any], name: str, arguments: Mapping[str, Any], is_batched: bool = False
    ) -> None:
        """
        Args:
            name: for messages.
            arguments: of the term, passed by name.
        """
        self._function, self._name, self._arguments = function, name, arguments
        try:
            self._parameters = dict(inspect.signature(function).parameters)
        except ValueError:  # C code without a signature
            self._parameters = {}
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        plain = inspect.unwrap(function)
        self.is_async = is_async(plain)
        is_own = "response" in self._parameters and "prompts" not in self._parameters
        self.is_of_trl = "completions" in self._parameters and not is_own  # where a column may be `response`
        self.takes_group = is_batched or self.is_of_trl  # in one call
        self.needs_group = self.takes_group or "completions" in self._parameters
        code = plain.__code__ if inspect.isfunction(plain) else None
        self.where = f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name

    @classmethod
    def of(cls, term: RewardTerm, field: str = "task.reward") -> "UserFunction":
        """Import the function of a term; raises ValueError as `import_function`."""
        return cls(import_function(term.reward, field), term.reward, term.arguments, term.batched)

    def check(self, field: str, columns: Collection[str] | None, fields: Collection[str] = ()) -> None:
        """Compare the signature with the term's arguments and with the columns of the data.

        Args:
            columns: of the rows, without the question and the answer; None: not known yet.
            fields: the names of these two, in this order.

        Raises:
            ValueError: names the field, and what does not fit.
        """
        what = f"{field}: {self._name}"
        if self._is_by_name(columns or ()):
            given = ("prompts", "completions") if self.is_of_trl else ("response", "ground_truth")
            own = {n: p for n, p in self._parameters.items() if n not in given and p.kind != p.VAR_POSITIONAL}
        else:
            self._check_places(what, {*(columns or ()), *[*fields][:1]})  # all but the answer
            own = keyword_parameters(self._function, "response, ground_truth", what) or {}
        filled = {*BY_NAME, *fields, *(columns or ())} | ({*TRL_GIVES} if self.is_of_trl else set())
        asked = {
            n: p
            for n, p in own.items()
            if n in self._arguments or p.kind is p.VAR_KEYWORD
            or (n not in filled and (columns is not None or p.default is not p.empty))
        }  # fmt: skip
        remedy = f"give `arguments` in a list: [{{reward: {self._name}, arguments: {{{{}}: ...}}}}]"
        if columns:
            remedy = f"there is no such column, only {', '.join(columns)}; add it to the data, or {remedy}"
        elif columns is not None:
            remedy += ", or add a column of that name to the data (`grpo-ray reward`: --row)"
        check_arguments(asked, self._arguments, what, remedy)

    def _check_places(self, what: str, columns: Collection[str]) -> None:
        """Refuse names of the first two parameters that mean something other than what their places give."""
        first, second, *_ = *self._parameters, "", ""
        is_other = second in (*BY_NAME, *columns, *NAMES_OF_RESPONSES)
        if first in (*BY_NAME, "ground_truth", "data_source") or is_other:
            raise ValueError(
                f"{what} would get the response as `{first}` and the ground truth as `{second}`, by their "
                "places; write `def reward(response, ...)`. It gets everything else by name: ground_truth, "
                "prompt, row, or a column"
            )

    def truth_as(self, columns: Collection[str]) -> str | None:
        """Return the parameter that is the ground truth by its place alone, though its name is another."""
        names = [*self._parameters]
        if self._is_by_name(columns) or names[:1] != ["response"] or len(names) < 2 or names[1] in TRUTHS:
            return None
        return names[1]

    def call(self, response: str, ground_truth: str, about: About) -> Any:
        """Call the function for one response; an `async def` returns what is to be awaited."""
        return self._apply(response, ground_truth, _values(about), about)

    def call_group(self, responses: Sequence[str], ground_truths: Sequence[str], about: About) -> Any:
        """Call the function once for the responses of a group; see `call`."""
        known = _values(about)
        if self.is_of_trl:  # there a column has its name whatever it is
            known |= {**about.get("fields", {}), **about.get("row", {})}
        values = {name: [value] * len(responses) for name, value in known.items()}
        values["completions"] = list(responses)
        if self.is_of_trl:
            values |= _as_in_trl(responses, about)
        return self._apply(list(responses), list(ground_truths), values, about)

    def read(self, result: Any) -> Scores:
        """Return the result as scores; a number counts as in the format, and as right if it is at least 1.

        Raises:
            ValueError: the result is neither a finite number nor a dict of finite numbers.
        """
        said = f"task.reward: {self.where} returned"
        given = result if isinstance(result, dict) else {"reward": result}
        if "reward" not in given or not given.keys() <= {"reward", *FACTS}:
            raise ValueError(
                f"{said} a dict of {', '.join(map(repr, given)) or 'nothing'}; it needs 'reward', and may have "
                "'format_reward' and 'answer_reward'"
            )
        given = {key: _plain(value) for key, value in given.items()}
        for key, value in given.items():
            if not isinstance(value, Real) or not abs(value) <= sys.float_info.max:  # type: ignore[operator]
                raise ValueError(f"{said} {value!r} as {key!r}; it must be a finite number")
            if key in FACTS and value not in (0, 1):
                raise ValueError(f"{said} {value!r} as {key!r}; it must be 0 or 1")
        reward = float(given["reward"])
        return scores(reward, given.get("format_reward", 1) == 1, given.get("answer_reward", reward >= 1) == 1)

    def read_group(self, result: Any, size: int) -> list[Graded]:
        """Check the result of `call_group`; what is None in it, or NaN as in TRL, has no scores.

        A value that is none of a reward's is the ValueError of its response alone.

        Raises:
            ValueError: it is no list of `size`.
        """
        values = result.tolist() if hasattr(result, "tolist") else result  # an array or a tensor
        if not isinstance(values, list | tuple) or len(values) != size:
            found = (
                f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
            )
            raise ValueError(
                f"task.reward: {self.where} returned {found} for {size} responses; return a list of {size}"
            )
        return [self._read_one(value) for value in values]

    def _read_one(self, value: Any) -> Graded:
        value = _plain(value)
        if value is None or (self.is_of_trl and isinstance(value, float) and math.isnan(value)):
            return {}
        try:
            return self.read(value)
        except ValueError as error:
            return error

    def _apply(self, response: Any, ground_truth: Any, values: dict[str, Any], about: About) -> Any:
        if self.is_of_trl:
            values = {"ground_truth": ground_truth, **values, **self._arguments}
        else:
            values = {**values, "response": response, "ground_truth": ground_truth, **self._arguments}
        by_position: tuple[Any, ...] = ()
        names = list(self._parameters)
        if not self._is_by_name(about.get("row", ())):
            given = "response", "ground_truth", *names[:2]
            by_position, names = (response, ground_truth), names[2:]
            values = {n: v for n, v in values.items() if n not in given}
        wanted = [name for name in names if self._parameters[name].kind not in UNNAMED]
        for name in wanted:
            if name not in values and self._parameters[name].default is inspect.Parameter.empty:
                columns = ", ".join(about.get("row", ())) or "none"
                raise LookupError(f"it asks for {name!r}, which this row lacks (its columns: {columns})")
        taken = values if self._takes_any else {n: values[n] for n in wanted if n in values}
        return self._function(*by_position, **(taken if self._parameters else self._arguments))

    def _is_by_name(self, columns: Collection[str]) -> bool:
        """Return True if the response and the truth are passed by name, and not as the first two parameters.

        `(response, tests)` gets the column `tests` if there is one, and otherwise the truth.
        """
        names = [n for n, p in self._parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        second = names[1] if len(names) > 1 else None
        is_named = second is None or second in (*BY_NAME, "ground_truth", *self._arguments, *columns)
        is_asked = any(n == "response" and p.kind not in UNNAMED for n, p in self._parameters.items())
        return self.is_of_trl or (is_asked and (is_named or names[0] != "response"))


def own_functions(reward: Reward) -> list[UserFunction]:
    """Return the functions of the user's among a reward's terms."""
    return [UserFunction.of(term) for term in terms_of(reward) if ":" in term.reward]


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch, or a Decimal, as a plain number."""
    if isinstance(value, Decimal):
        return float(value)
    return value.item() if getattr(value, "shape", None) == () else value


def _values(about: About) -> dict[str, Any]:
    """Return a copy of what a function may ask for by name: the columns, and over them what BY_NAME lists."""
    known = {name: about[name] for name in BY_NAME if name in about}
    return deepcopy({**about.get("fields", {}), **about.get("row", {}), **known})


def _as_in_trl(responses: Sequence[str], about: About) -> dict[str, Any]:
    """Return prompts and completions as TRL passes them: texts, or conversations with a chat template."""
    messages = about.get("messages")
    is_chat = messages is not None
    completions = [[{"role": "assistant", "content": r}] if is_chat else r for r in responses]
    prompts = [messages if is_chat else about.get("prompt", "")] * len(responses)
    return {"prompts": prompts, "completions": completions, **dict.fromkeys(LOGGERS, lambda *_, **__: None)}
