"""Code that a run's folder brings: run only if the command line says so, whatever the run's own files say.

A run's `config.yaml` can name code in two ways: `model.trust_remote_code` runs Python that lies beside a model,
and a reward or an engine `module:function` imports a module. `grpo-ray report`, `audit`, `evaluate`,
`export` and `Run.model` in Python are also given runs of somebody else, so they believe neither.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from grpo_ray.config import Config
from grpo_ray.config.reward import Reward
from grpo_ray.config.schema import leaves
from grpo_ray.errors import RunError
from grpo_ray.tools.arguments import Flag

TrustRemoteCode = Annotated[
    bool, Flag("run the Python code shipped with the model (ignores model.trust_remote_code of the run)")
]
RunRewardCode = Annotated[
    bool, Flag("import and call the functions (module:function) that the run's configuration names")
]

GAMES = ("grpo_ray.episodes.calculator", "grpo_ray.episodes.guess_number")
# The functions of this package that a folder may name, by field. Any other one is code, too: it was not written
# to be called with a folder's values.
BUNDLED = {
    "task.reward": {"grpo_ray.tasks.reasoning_gym:verified"},
    "task.episode": {f"{game}:episode" for game in GAMES},
    "task.examples": {f"{game}:examples" for game in GAMES},
    "task.warmup": {f"{game}:warmup_pairs" for game in GAMES},
}

IGNORED = (
    "the run's model.trust_remote_code is ignored; if you trust this folder's author, --trust-remote-code runs "
    "the code shipped with its model"
)


def stay_offline() -> None:
    """Keep the hub's client from downloading what a run's configuration names; call before it is imported.

    What is in its cache is still read. A HF_HUB_OFFLINE that the user has set is kept.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def is_ignored(model: Any, trust_remote_code: bool) -> bool:
    """Return True if the section `model`, as read from the file, asks for code that will not be run."""
    return isinstance(model, dict) and bool(model.get("trust_remote_code")) and not trust_remote_code


def code_in(config: Config) -> list[tuple[str, str]]:
    """Return the fields that name code which an evaluation would import, and which is not bundled for them."""
    rewards = config.rewards.values()
    named = [("generator.engine", config.generator.engine)]
    named += [("task.reward", name) for reward in rewards for name in code_of(reward)]
    for task in config.episode_tasks.values():
        named += [("task.episode", task.episode), ("task.examples", task.examples)]
        named += [("task.warmup", task.warmup)] if task.warmup is not None else []
    found = [(field, name) for field, name in named if is_code(field, name)]
    arguments = leaves(config.model_dump(include={"generator": {"engine_args"}}))
    return found + [(k, str(v)) for k, v in arguments.items() if "module" in k or not _is_plain(v)]


def code_of_base(config: Config) -> list[tuple[str, str]]:
    """Return the code that a tiny model is built with, which may lie under an adapter."""
    return [named for named in code_in(config) if named[0] == "task.warmup"]


def refuse_code(code: Iterable[tuple[str, str]], typed: Sequence[str] = ()) -> None:
    """Refuse to import code that the run's configuration names and the command line, `typed`, does not."""
    for field, name in code:
        if not any(name in text for text in typed):
            raise RunError(
                f"{field}: {name} is code that the run's configuration names; if you trust it, give "
                f"--run-reward-code{', otherwise another --reward' if field == 'task.reward' else ''}"
            )


def _is_plain(argument: Any) -> bool:
    """Return True for numbers and words, such as `fp8`: vLLM imports dotted names and the paths of plugins."""
    if isinstance(argument, list | tuple):
        return all(map(_is_plain, argument))
    return isinstance(argument, int | float | None) or str(argument).replace("-", "_").isidentifier()


def is_code(field: str, name: str) -> bool:
    """Return True for a `module:function` that is not one of the functions bundled for the field."""
    return ":" in name and name not in BUNDLED.get(field, ())


def code_of(reward: Reward) -> list[str]:
    """Return the functions that the reward imports and that are not bundled, as `module:function`."""
    names = [reward] if isinstance(reward, str) else [term.reward for term in reward]
    return [name for name in names if is_code("task.reward", name)]
