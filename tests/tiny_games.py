"""Guess-number's configuration for runs of seconds: the torch engine and a tiny random model."""

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config

TINY = ("hidden_size=32", "num_layers=1", "num_heads=2", "num_kv_heads=1", "warmup=null")


def game_config(episode: str, *overrides: str) -> Config:
    """Return the configuration with another episode function, `module:function`."""
    tiny = [f"model.tiny.{field}" for field in TINY]
    fixed = [*tiny, f"task.episode={episode}", "generator.engine=torch", "algorithm.prompts_per_step=4"]
    return load_config("configs/guess-number.yaml", [*fixed, *overrides])
