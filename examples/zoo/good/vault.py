"""A class as TRL's `environment_factory` takes it: a vault that says whether a code is too low or too high."""

import random
from typing import Any

from grpo_ray.episodes.adapters.trl import trl_episode
from grpo_ray.tasks.examples import Example, ExampleSets


class Vault:
    """A vault that opens with the right code, at most the third one tried."""

    def reset(self, ground_truth: str, **row: Any) -> str:
        self.code, self.num_tries, self.is_open = int(ground_truth), 0, False
        return " Its code is a number from 1 to 7, and you have three tries."

    def try_code(self, code: int) -> str:
        """
        Try a code on the vault.

        Args:
            code: The number to try.
        """
        self.num_tries += 1
        if self.num_tries > 3:
            return "locked"
        self.is_open = self.is_open or int(code) == self.code
        return "open" if self.is_open else "too low" if int(code) < self.code else "too high"

    def get_reward(self) -> float:
        return float(self.is_open)


episode = trl_episode(Vault)


def examples(seed: int) -> ExampleSets:
    codes = [str(1 + n % 7) for n in range(140)]
    random.Random(seed).shuffle(codes)
    found = [Example("Open the vault.", code) for code in codes]
    return ExampleSets(found[14:], found[:14])
