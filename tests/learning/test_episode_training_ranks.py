"""Episodes on several gloo ranks: the gradient of one rank, also where ranks share an episode's branches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import ENDS, changed
from episode_batches import random_batch
from rank_workers import on_ranks
from test_ranks import SMOOTH, merged, same, steps

from grpo_ray.config import Config
from grpo_ray.core.learner import Learner

SETTINGS: dict[str, dict[str, Any]] = {
    "branches on both ranks": {"learner": {"micro_batch_tokens": 1}},
    "minibatches of whole episodes": {
        "algorithm": {"old_log_probs": "proximal", "train_batch_size": 3, "epochs_per_batch": 2}
    },
    "padded rows and token means": {
        "learner": {"share_prompts": "never"},
        "algorithm": {"aggregation": "token_mean", "kl": {"coefficient": 0.1, "reference": "initial"}},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks_give_the_gradient_of_one(
    name: str, tiny_config: Config, tiny_model: Callable[..., Path]
) -> None:
    sizes = {"algorithm": {"prompts_per_step": 3, "samples_per_prompt": 3}}
    config, model = changed(tiny_config, **merged(SMOOTH, sizes, SETTINGS[name])), str(tiny_model())
    learner = Learner(model, config, ENDS)
    batches = [random_batch(seed, learner.model, config)[0] for seed in (1, 2)]
    many = on_ranks(2, steps, model, changed(config, learner={"num_ranks": 2}), batches)
    same(many[0], steps(None, model, config, batches))
