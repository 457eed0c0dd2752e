"""The torch engine's log-probabilities against the Learner's, and what it costs to make them equal.

A matrix product rounds differently with its shape: the engine computes a response token by token, the Learner
computes it whole, packed with others. The cases: as in a run; each response alone, which the engine would
compute once more at its end; layers in float64, logits and log-probabilities in float32 as always.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.results import Options, Row, take_turns
from benchmarks.tiny_learner import QUICKSTART, model_folder
from grpo_ray.config.loading import load_config
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.loading import cast_parameters, load_policy
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.types import SamplingSettings

TITLE = "the Learner's log-probabilities of sampled tokens, against the torch engine's"
USUAL, ALONE = "float32", "float32, each response alone"
CASES = {USUAL: ("float32", 4096), ALONE: ("float32", 1), "float64": ("float64", 4096)}


def run(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    cases = {}
    with model_folder() as folder:
        for name, (dtype, micro_batch_tokens) in CASES.items():
            model = load_policy(folder)
            cast_parameters(model.parameters(), getattr(torch, dtype))
            learner = ForwardBackward(load_config(QUICKSTART, []), (), torch.device("cpu"))
            learner.micro_batch_tokens = micro_batch_tokens
            sequences = asyncio.run(sample(folder, dtype, 2 if options.quick else 16))
            if name == ALONE:
                own = learner.with_proximal(model, sequences)
                sequences = [replace(s, behaviour_logprobs=np.asarray(s.proximal_logprobs)) for s in own]
            cases[name] = partial(learner.with_proximal, model, sequences)
    facts = {name: apart(look_up()) for name, look_up in cases.items()}
    seconds = take_turns(cases, options.rounds or (1 if options.quick else 4))
    return [Row(name, values, USUAL, facts=facts[name]) for name, values in seconds.items()]


async def sample(folder: str, dtype: str, num_prompts: int) -> list[TrainSequence]:
    """Sample eight responses to each of some random prompts, as a synchronous run does."""
    engine = TorchEngine(load_config(QUICKSTART, ["weight_sync.max_lag=0"]), folder, 64, seed=0)
    cast_parameters(engine._model.parameters(), getattr(torch, dtype))
    settings = SamplingSettings(num_samples=8, temperature=1.0, top_p=1.0, min_tokens=0, max_tokens=32)
    rng, found = np.random.default_rng(0), list[TrainSequence]()
    for group in range(num_prompts):
        prompt = tuple(rng.integers(20, 300, 12).tolist())
        completions = await engine.generate(prompt, settings)
        found += [TrainSequence(prompt, c.token_ids, c.logprobs, 1.0, group=group) for c in completions]
    return found


def apart(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Compare the sampler's and the Learner's log-probabilities of all tokens."""
    pairs = [(s.behaviour_logprobs, s.proximal_logprobs) for s in sequences if s.proximal_logprobs is not None]
    differences = np.concatenate([np.abs(sampler - learner) for sampler, learner in pairs])
    return {"largest difference": float(differences.max()), "share equal": float(np.mean(differences == 0))}
