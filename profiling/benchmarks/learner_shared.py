"""Forward and backward passes of the Learner: a prompt computed once per group, against once per response."""

from collections.abc import Callable

import torch

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import QUICKSTART, make_batch, model_folder
from benchmarks.turns import take_turns
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.policy_model import PolicyModel
from grpo_ray.learning.sequences import TrainSequence, sequences_of
from grpo_ray.watch.learner_metrics import Sums

TITLE = "the Learner's forward and backward passes with shared prompts (quickstart's model, G = 8, one thread)"
SHAPES = {(15, 16): 32, (15, 192): 16, (256, 64): 8, (512, 64): 8}  # prompt x response tokens: groups
QUICK = {(15, 16): 2, (64, 16): 2}
WAYS = {"repeated": "never", "shared": "auto"}
LONG = ["model.tiny.max_position_embeddings=1024"]


def run(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    rounds = options.rounds or (1 if options.quick else 5)
    with model_folder(LONG) as folder:
        model = load_policy(folder)
    rows = []
    for (prompt, response), num_groups in (QUICK if options.quick else SHAPES).items():
        shape = f"{prompt} x {response}"
        passes = {way: Passes(model, way, prompt, response, num_groups) for way in WAYS}
        cases: dict[str, Callable[[], object]] = {
            f"{shape}, prompts {way}": one.run for way, one in passes.items()
        }
        seconds = take_turns(cases, rounds)
        base = f"{shape}, prompts repeated"
        apart = difference(passes["shared"].gradient(), passes["repeated"].gradient())
        for (case, values), way in zip(seconds.items(), WAYS, strict=True):
            facts = {"tokens computed": passes[way].sums["computed_tokens"]}
            if case != base:
                facts["gradient difference"] = apart
            rows.append(Row(case, values, base, num_groups * 8 * response, "response tokens", facts))
    return rows


class Passes:
    """The passes of one step in one way."""

    def __init__(self, model: PolicyModel, way: str, prompt: int, response: int, num_groups: int) -> None:
        config = make_config(WAYS[way], num_groups, response)
        self._model = model
        self._sequences: list[TrainSequence] = sequences_of(make_batch(config, 0, response, prompt).groups)
        self._forward_backward = ForwardBackward(config, (), torch.device("cpu"))
        self.sums: Sums = {}

    def run(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None
        self.sums = self._forward_backward.backward(self._model, self._sequences)

    def gradient(self) -> torch.Tensor:
        """Compute the gradient once more, of all parameters in one vector."""
        self.run()
        return torch.cat([p.grad.flatten() for p in self._model.parameters() if p.grad is not None])


def make_config(share_prompts: str, num_groups: int, response: int) -> Config:
    overrides = [
        f"algorithm.prompts_per_step={num_groups}",
        f"sampling.max_tokens={response}",
        f"learner.share_prompts={share_prompts}",
    ]
    return load_config(QUICKSTART, [*LONG, *overrides])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference relative to the norm."""
    return float((one - other).norm() / other.norm())
