"""Environments of verifiers (`verifiers.v1`) as episodes: they talk to the session's URL."""

import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_ray.episodes.adapters import required
from grpo_ray.episodes.outcome import Outcome
from grpo_ray.episodes.session import Session
from grpo_ray.tasks.examples import Example, ExampleSets

MODEL = "policy"  # the session's only one


class VerifiersEpisodes:
    """A verifiers environment: its tasks are the examples, and its reward is the episode's."""

    def __init__(
        self, env: Mapping[str, Any], *, num_train: int = 1000, num_validation: int = 64,
        reward: Callable[[Any], float] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            env: the `env` section of a verifiers configuration, such as `{"taskset": {"id": "my_taskset"}}`. A
                seat without a harness is a plain chat (verifiers itself would give it a shell), and one without
                a runtime runs on this machine.
            num_train: tasks to train on, after those to validate with; fewer if the taskset has fewer.
            num_validation: the first N tasks, which are not trained on.
            reward: of a finished verifiers episode; default: the only trace's.

        Raises:
            ImportError: verifiers is not installed.
            ValueError: verifiers refuses the configuration.
        """
        self._verifiers = required("verifiers.v1")
        self._runtimes = required("verifiers.v1.runtimes")
        self._local_runtime = required("verifiers.v1.runtimes.subprocess")
        chat = required("grpo_ray.episodes.adapters.verifiers_chat")
        self._harness = chat.ChatConfig(id=chat.HARNESS_ID)
        sys.modules.setdefault(chat.HARNESS_ID, chat.plugin())  # verifiers finds harnesses by module
        self._num_train, self._num_validation = num_train, num_validation
        self._reward = reward or _only_reward
        self._config = self._with_defaults(self._verifiers.resolve_env_config(dict(env)))

    def examples(self, seed: int) -> ExampleSets:
        """Return the tasks in the taskset's order: an example's `ground_truth` is the task's place in it.

        Raises:
            ValueError: there are no tasks to train on.
        """
        found = [Example(task.data.prompt_text, str(place)) for place, task in enumerate(self._tasks)]
        validation, train = found[: self._num_validation], found[self._num_validation :]
        if not train:
            raise ValueError(
                f"the taskset {self._config.taskset.id} has {len(found)} tasks; ask for fewer than "
                f"{self._num_validation} to validate with (num_validation)"
            )
        return ExampleSets(train, validation)

    async def episode(self, session: Session, example: Example) -> Outcome:
        """Run the environment on the example's task.

        Raises:
            RuntimeError: the environment failed.
        """
        env = self._verifiers.load_environment(self._config)  # of its own: serving belongs to one event loop
        # Each run has a working folder, by default below the home, where a confined worker may not write.
        self._local_runtime.CACHE_DIR = Path(tempfile.gettempdir())
        client = self._verifiers.EvalClientConfig(base_url=session.base_url, api_key_var="")
        context = self._verifiers.ModelContext(model=MODEL, client=client)
        async with env.serving():
            played = await env.run_episode(self._tasks[int(example.ground_truth)], context)
        if not played.ok:
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            raise RuntimeError("\n".join(f"{error.type}: {error.message}" for error in errors))
        return Outcome(self._reward(played), metrics=_metrics(played))

    @cached_property
    def _tasks(self) -> list[Any]:
        taskset = self._verifiers.load_taskset(self._config.taskset)
        return list(islice(taskset, self._num_validation + self._num_train))

    def _with_defaults(self, config: Any) -> Any:
        """Return the configuration with a harness and a runtime for each seat that names none."""
        bundled = self._verifiers.default_harness_id(config.taskset.id) == config.taskset.id
        changed = {}
        for name, seat in config:
            if isinstance(seat, self._verifiers.AgentConfig):
                update = {"harness": self._harness} if seat.harness is None and not bundled else {}
                if "runtime" not in seat.model_fields_set:
                    update["runtime"] = self._runtimes.SubprocessConfig()
                changed[name] = seat.model_copy(update=update)
        return config.model_copy(update=changed)


def _only_reward(played: Any) -> float:
    traces = [trace for trace in played.traces if trace.agent.trainable]
    if len(traces) != 1:
        raise ValueError(
            f"the environment played {len(traces)} traces of the policy, each with its own reward; give "
            "`reward`, a function of the verifiers episode"
        )
    return float(traces[0].reward)


def _metrics(played: Any) -> dict[str, float]:
    """Return each reward before its weight, and each metric, by name; of several traces the last."""
    found: dict[str, float] = {}
    for trace in played.traces:
        found |= {name: float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
        found |= {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return found
