"""The configuration of episodes: their limits, their workers, and those that last over several versions."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt

from grpo_ray.config.secrets import SecretName
from grpo_ray.config.section import HomePath, Section

GRACE_S = 5.0  # for an episode to end after it was cancelled


class EpisodesConfig(Section):
    """Used if `task.kind` is `episodes`."""

    max_turns: PositiveInt = 32
    """Replies that an episode may sample."""
    max_tokens: PositiveInt = 4096
    """Maximum length of a turn's prompt and reply together, in tokens."""
    max_seconds: PositiveFloat = 600.0
    """Time limit of an episode, with its waits for turns and weight syncs, but without the time in which no
    Generator serves. An episode that takes longer has no reward, and leaves its group's baseline."""
    truncated_reward: FiniteFloat = 0.0
    """Reward when turns or tokens run out, unless the episode function catches that and returns its own."""
    error_reward: FiniteFloat | None = None
    """Reward of an episode in which the environment raises an error; default: none. If replies can cause such
    errors, set the reward of a wrong answer: otherwise an error pays better than being wrong."""
    turn_discount: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of the returns per turn, for episodes that return rewards per turn."""
    over_age: Literal["wait", "mask", "drop"] = "wait"
    """Episodes that exceed the lag: `wait` for them; with oversampling `drop` them, or `mask` old tokens."""
    renderer: str | None = None
    """A renderer of the package `renderers` (`qwen3`), or `auto`, the model's; default: the chat template."""
    tool_parser: str | None = None
    """Parser of tool calls: `transformers`, `renderer`, or one of vLLM's such as `hermes`. Tools need one."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template or the renderer, such as `enable_thinking`."""
    num_workers: PositiveInt = 1
    """EnvironmentWorker actors: processes in which episodes run."""
    max_concurrent: PositiveInt = 256
    """Episodes of a task that one worker runs at the same time."""
    num_cpus: NonNegativeFloat = 0
    """CPUs that each worker reserves in Ray."""
    confined: bool = True
    """Limit the tools that replies call to Python's own files and to `memory_gib`, with the threads of episodes
    and what they start. It is not a sandbox for hostile code: what `exec` runs in the worker's process reaches
    the network, and Ray's threads, which are not confined."""
    readable_paths: tuple[HomePath, ...] = ()
    """Files and folders that a confined environment can read; it can read modules anyway."""
    writable_paths: tuple[HomePath, ...] = ()
    """Folders that a confined environment can write to, besides a temporary one of its own."""
    secrets: tuple[SecretName, ...] = ()
    """Environment variables that environments need, by name. A worker has no other credentials: the rest,
    including Ray's token, are removed before it imports your modules."""
    memory_gib: PositiveFloat = 16.0
    """Memory of all confined environments of one worker, in GiB."""

    def num_rounds(self, num_episodes: int) -> int:
        """Return the times `max_seconds` in which a worker plays that many episodes, given its places."""
        return -(-num_episodes // self.max_concurrent)

    def _conflicts(self) -> Iterator[str]:
        if self.tool_parser == "renderer" and self.renderer is None:
            yield (
                "tool_parser is `renderer`, but there is no renderer; set episodes.renderer, such as `qwen3`, "
                "or choose another parser"
            )
