"""A taskset of verifiers, in one turn: tasksets/zoo_hours.py, played by a session."""

from pathlib import Path

from grpo_ray.config.user_code import import_from
from grpo_ray.episodes.adapters.verifiers import VerifiersEpisodes

import_from(Path(__file__).parent / "tasksets")  # verifiers finds a taskset by a name without dots
played = VerifiersEpisodes({"taskset": {"id": "zoo_hours"}}, num_validation=16)
episode, examples = played.episode, played.examples
