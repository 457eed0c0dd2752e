"""An environment class as TRL's GRPOTrainer takes it (`environment_factory`), as an episode.

Its public methods are the tools, described by their annotations and docstrings (Google style). `reset` begins
an episode and may return an observation, and `get_reward` scores it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema

from grpo_ray.episodes.outcome import EpisodeEnded, Outcome
from grpo_ray.episodes.runner import EpisodeFn
from grpo_ray.episodes.session import Session
from grpo_ray.episodes.tool_calls import ToolCall
from grpo_ray.tasks.examples import Example

NO_TOOLS = ("reset", "get_reward")


def trl_episode(
    environment_class: type[Any], *, columns: Callable[[Example], Mapping[str, Any]] | None = None,
    reward: Callable[[Any], float] | None = None,
) -> EpisodeFn:  # fmt: skip
    """Return an episode function that offers the environment's methods as tools until a reply calls none.

    A new environment is made for each episode. As in TRL, a call that fails is answered with its error, the
    text that `reset` returns is appended to the question, and an episode that reaches a limit is scored as it
    stands. The calls of one reply run one after the other.

    Args:
        columns: arguments of `reset`, in TRL the row of the data set; default: `prompt` (messages), `question`,
            `ground_truth` and `seed`. Those that `reset` does not take are left out.
        reward: of the environment after the last reply, if it has no `get_reward`.

    Raises:
        ValueError: there is no class, no `reset` or no reward, or a tool lacks its annotations or docstring.
    """
    if not isinstance(environment_class, type):
        raise ValueError(
            f"trl_episode takes a class, which it calls for each episode, not {environment_class!r}"
        )
    tools = describe_tools(environment_class)
    if not callable(getattr(environment_class, "reset", None)):
        raise ValueError(f"{environment_class.__name__} has no method reset, which begins an episode")
    if reward is None and not callable(getattr(environment_class, "get_reward", None)):
        raise ValueError(f"{environment_class.__name__} has no method get_reward; add one, or give `reward`")

    async def episode(session: Session, example: Example) -> Outcome:
        environment: Any = environment_class()
        row = (columns or _columns)(example)
        observation = await _finished(environment.reset(**_taken(environment.reset, row)))
        content = example.question + ("" if observation is None else _text(observation))
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        num_calls = num_failed = 0
        try:
            while (reply := await session.chat(messages, tools=tools)).tool_calls:
                messages.append(reply.message)
                for call in reply.tool_calls:
                    result, is_failed = await _result(environment, call, tools)
                    num_calls, num_failed = num_calls + 1, num_failed + is_failed
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
                    )
        except EpisodeEnded:  # a limit: the environment is scored as it stands
            pass
        earned = await _finished(environment.get_reward() if reward is None else reward(environment))
        return Outcome(float(earned), metrics={"num_calls": float(num_calls), "num_failed": float(num_failed)})

    return episode


def describe_tools(environment_class: type[Any]) -> list[dict[str, Any]]:
    """Return the schemas of the class's tools: its public methods but `reset` and `get_reward`, by name.

    Raises:
        ValueError: a method lacks an annotation or a docstring.
    """
    tools = []
    for name, member in inspect.getmembers(
        environment_class, lambda m: inspect.isfunction(m) or inspect.ismethod(m)
    ):
        if name not in NO_TOOLS and not name.startswith("_"):
            is_bound = isinstance(inspect.getattr_static(environment_class, name), staticmethod | classmethod)
            try:
                tools.append(get_json_schema(member if is_bound else MethodType(member, environment_class)))
            except Exception as error:  # transformers raises its own, of several kinds
                raise ValueError(
                    f"{environment_class.__name__}.{name} cannot be offered as a tool: {error}. Annotate its "
                    "arguments, describe each under `Args:` in its docstring, or begin its name with `_`"
                ) from error
    return tools


async def _result(environment: Any, call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return a call's answer, and whether it failed."""
    if call.name not in {tool["function"]["name"] for tool in tools}:
        return str({"error": f"Tool {call.name} not found."}), True
    try:
        return _text(await _finished(getattr(environment, call.name)(**call.arguments))), False
    except Exception as error:
        return str({"error": str(error)}), True


async def _finished(value: Any) -> Any:
    """Return the value of a method, which may be an `async def`."""
    return await value if inspect.isawaitable(value) else value


def _text(result: Any) -> str:
    """Return the text of an observation or of a tool's result.

    Raises:
        ValueError: it has content other than text.
    """
    if isinstance(result, list) and all(isinstance(part, dict) and "type" in part for part in result):
        if any(part["type"] != "text" for part in result):
            raise ValueError("the environment shows content other than text; only text is supported")
        return "".join(part["text"] for part in result)
    return str(result)


def _columns(example: Example) -> dict[str, Any]:
    row = {"question": example.question, "ground_truth": example.ground_truth, "seed": example.seed}
    return {"prompt": [{"role": "user", "content": example.question}], **row}


def _taken(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}
