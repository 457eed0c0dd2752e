"""Checks of everything that episodes need, before anything expensive starts."""

from typing import Any

from grpo_ray.config import Config
from grpo_ray.config.secrets import check_set
from grpo_ray.config.task import field_of
from grpo_ray.config.user_code import import_function
from grpo_ray.episodes.confinement import check_paths
from grpo_ray.episodes.renderer_template import check_renderer, make_template
from grpo_ray.episodes.runner import load_episode
from grpo_ray.learning.model_files import end_token_ids
from grpo_ray.rewards.isolation.messages import LARGEST_REWARD, is_storable


def check_episodes(config: Config) -> None:
    """Import the functions that the task names, and the package of the renderer.

    Raises:
        ValueError: one does not exist, or an episode is not an `async def` of two arguments; or a path that
            environments are to read or write does not exist, or a secret is not set; or there is no such
            renderer; or a reward is too large.
    """
    check_paths(config.episodes)
    if config.episode_tasks:
        check_set(config.episodes.secrets, "episodes.secrets")
    for name in ("truncated_reward", "error_reward"):
        reward = getattr(config.episodes, name)
        if reward is not None and not is_storable(reward):
            raise ValueError(f"episodes.{name} is {reward:g}; give a reward within +-{LARGEST_REWARD:g}")
    for name, task in config.episode_tasks.items():
        field = field_of(name)
        load_episode(task.episode, f"{field}.episode")
        if task.warmup is not None:
            import_function(task.warmup, f"{field}.warmup")
    if config.episode_tasks and config.episodes.renderer is not None:
        check_renderer(config.episodes.renderer)


def check_template(config: Config, tokenizer: Any) -> None:
    """Make the configured renderer and parser of tool calls.

    Args:
        tokenizer: a PreTrainedTokenizerBase, the model's.

    Raises:
        ValueError: there is none, or it does not fit tokenizer, end tokens or `episodes.template_arguments`.
    """
    if config.episode_tasks:
        path, trust = config.model.path, config.model.trust_remote_code
        ends = (tokenizer.eos_token_id,) if path is None else end_token_ids(path, tokenizer, trust)
        make_template(config.episodes, tokenizer, ends)
