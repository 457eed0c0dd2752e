"""What an objective's options cost the Learner: seconds of a step, as a ratio to a step without them.

    python profiling/objectives.py [--rounds 8]

One Learner a variant in this process (the quickstart's shapes: 256 responses of 16 tokens, a random tiny model,
one thread), each trained on the same batches, in turns, so that a drift of the machine's speed meets all alike.
"""

import argparse
import statistics
import tempfile

import numpy as np

from grpo_ray.actors.learner import Learner
from grpo_ray.config import Config
from grpo_ray.config_loading import load_config
from grpo_ray.policy.loading import end_token_ids, load_tokenizer
from grpo_ray.policy.tiny import build_model, tiny_tokenizer
from grpo_ray.types import Completion, PromptItem, RolloutGroup, ScoredGroup, TrainBatch

VARIANTS: dict[str, list[str]] = {
    "one update": [],
    "reinforce_with_baseline": ["algorithm.loss=reinforce_with_baseline"],
    "gspo": ["algorithm.loss=gspo"],
    "cispo": ["algorithm.loss=cispo"],
    "proximal, truncated weights": [
        "algorithm.old_log_probs=proximal",
        "algorithm.off_policy_correction=truncate_token",
    ],
    "KL measured": ["algorithm.kl.reference=initial"],
    "KL penalty, ema": ["algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1"],
    "entropy bonus": ["algorithm.entropy_bonus=0.01"],
    "two updates": ["algorithm.train_batch_size=128"],
    "two epochs": ["algorithm.epochs_per_batch=2"],
    "two epochs, proximal": ["algorithm.epochs_per_batch=2", "algorithm.old_log_probs=proximal"],
}


def make_batch(config: Config, version: int) -> TrainBatch:
    rng, algorithm = np.random.default_rng(version), config.algorithm
    groups = []
    for group_id in range(algorithm.prompts_per_step):
        item = PromptItem(group_id, "", tuple(rng.integers(20, 300, 12).tolist()), "")
        completions = [
            Completion(
                "",
                rng.integers(20, 300, 16).astype(np.int32),
                np.full(16, -5.9, np.float32),
                np.full(16, version, np.int32),
                "stop",
            )
            for _ in range(algorithm.samples_per_prompt)
        ]
        advantages = rng.normal(size=len(completions)).astype(np.float32)
        ones = np.ones_like(advantages)
        groups.append(
            ScoredGroup(RolloutGroup(item, tuple(completions), "generator-0"), ones, ones, ones, advantages)
        )
    return TrainBatch(tuple(groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    base = load_config("configs/quickstart.yaml", ["learner.learning_rate=0"])
    assert base.model.tiny is not None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny_tokenizer(base)
        build_model(base.model.tiny, tokenizer, seed=0).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ends = end_token_ids(folder, load_tokenizer(folder))
        learners = {
            name: Learner(folder, load_config("configs/quickstart.yaml", overrides), ends)
            for name, overrides in VARIANTS.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in learners}
        for _ in range(options.rounds + 1):
            for name, learner in learners.items():
                report = learner.train_step(make_batch(base, learner.version))
                seconds[name].append(report.metrics["timing/train_s"])
    plain = statistics.median(seconds["one update"][1:])
    print(f"{'variant':<30}{'seconds':>9}{'ratio':>8}")
    for name, values in seconds.items():
        median = statistics.median(values[1:])  # the first warms up
        print(f"{name:<30}{median:>9.3f}{median / plain:>8.2f}")


if __name__ == "__main__":
    main()
