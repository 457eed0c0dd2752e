"""A guessing game of verifiers, in several turns: tasksets/zoo_higher_lower.py, played by a session."""

from pathlib import Path

from grpo_ray.config.user_code import import_from
from grpo_ray.episodes.adapters.verifiers import VerifiersEpisodes

import_from(Path(__file__).parent / "tasksets")  # verifiers finds a taskset by a name without dots
played = VerifiersEpisodes({"taskset": {"id": "zoo_higher_lower"}}, num_validation=28)
episode, examples = played.episode, played.examples
