"""The Teacher: logprobs of a group's tokens by another model, each token in its own context."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from builders import ENDS, TinyModel, changed, make_completion, make_item, plain_logprobs
from episode_groups import random_episode
from transformers import AutoModelForCausalLM

from grpo_ray.config import Config
from grpo_ray.core.teacher import Teacher
from grpo_ray.engines.torch_engine import TorchTeacher
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.types import Episode, RolloutGroup

PROMPT = (40, 41, 42)


@pytest.fixture
def teacher_path(tiny_model: TinyModel) -> str:
    return str(tiny_model(tied=False))


@pytest.fixture
def make_teacher(tiny_config: Config, teacher_path: str) -> Callable[..., Teacher]:
    def make(**changes: dict[str, Any]) -> Teacher:
        distillation = {"teacher": teacher_path, "engine": "torch", "num_gpus": 0}
        config = changed(tiny_config, distillation=distillation, **changes)
        return Teacher("teacher-0", TorchTeacher(config, ENDS))

    return make


def look_up(teacher: Teacher, group: RolloutGroup) -> tuple[np.ndarray, int]:
    return asyncio.run(teacher.look_up(group))


@pytest.mark.slow
@pytest.mark.parametrize(("share_prompts", "temperature", "min_tokens"), [("auto", 1.0, 0), ("never", 0.7, 3)])
def test_logprobs_are_those_of_a_plain_forward_pass(
    make_teacher: Callable[..., Teacher], teacher_path: str, share_prompts: str, temperature: float,
    min_tokens: int,
) -> None:  # fmt: skip
    teacher = make_teacher(
        sampling={"temperature": temperature, "min_tokens": min_tokens},
        learner={"share_prompts": share_prompts, "micro_batch_tokens": 16},  # several micro-batches
    )
    responses = [[50, 51, 52, 53, 0], [60], [61, 62, 63, 64, 65, 66, 67, 17]]
    group = RolloutGroup(make_item(0, PROMPT), tuple(map(make_completion, responses)), "generator-0")
    found, num_tokens = look_up(teacher, group)
    model = AutoModelForCausalLM.from_pretrained(teacher_path)
    expected = [plain_logprobs(model, PROMPT, r, temperature, min_tokens, ENDS) for r in responses]
    assert (found.dtype, num_tokens) == (np.float32, 14)
    np.testing.assert_allclose(found, np.concatenate([e.detach().numpy() for e in expected]), atol=1e-4)


def test_each_token_of_an_episode_is_judged_in_its_own_branch(
    make_teacher: Callable[..., Teacher], teacher_path: str
) -> None:
    rng = np.random.default_rng(3)
    episodes = [random_episode(rng, branch=0.5) for _ in range(6)]
    assert max(len(episode.sequences) for episode in episodes) > 1
    group = RolloutGroup(make_item(0, PROMPT), tuple(episodes), "environment-0")
    found, num_tokens = look_up(make_teacher(sampling={"min_tokens": 0}), group)
    model = AutoModelForCausalLM.from_pretrained(teacher_path)
    expected = np.concatenate([of_episode(model, episode) for episode in episodes])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert num_tokens == sum(episode.num_tokens for episode in episodes) > 0


def of_episode(model: Any, episode: Episode) -> np.ndarray:
    logprobs = np.zeros(len(episode.token_ids))
    for sequence in episode.sequences:
        own = slice(sequence.start, sequence.end)
        prompt, response = sequence.prompt_token_ids, episode.token_ids[own].tolist()
        logprobs[own] = plain_logprobs(model, prompt, response).detach().numpy()
    return np.where(episode.mask, logprobs, 0.0)


def test_a_logprob_that_is_not_finite_is_an_error() -> None:
    class Broken:
        async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
            return [np.array([-1.0, -np.inf], np.float32) for _ in sequences]

        async def shutdown(self) -> None: ...

    group = RolloutGroup(make_item(7, PROMPT), (make_completion([50, 51]),), "generator-0")
    with pytest.raises(ValueError, match="no finite logprob for a token of group 7"):
        look_up(Teacher("teacher-0", Broken()), group)
