"""The writers of a keyword dataset's answers: a small grammar, or a model."""

import os
import random
from typing import Protocol

import torch

from grpo_ray.config import Config
from grpo_ray.config.task import KeywordsTaskConfig
from grpo_ray.core.pool import training_settings
from grpo_ray.engines import make_engine
from grpo_ray.engines.base import Engine
from grpo_ray.learning.model_files import check_local_model, is_local, load_tokenizer
from grpo_ray.run.preparation import TaskData, prepare_serving
from grpo_ray.tasks.keywords import Keywords, make_example, sentence
from grpo_ray.tasks.prompts import CHAT, Prompter
from grpo_ray.types import SamplingSettings


class AnswerWriter(Protocol):
    """A source of answers."""

    async def start(self) -> None:
        """Get ready to write."""

    async def write(self, keywords: Keywords) -> str:
        """Attempt an answer, which may lack keywords or be empty."""

    async def close(self) -> None:
        """Release what `start` acquired."""


class TemplateWriter:
    """A writer of sentences from the grammar; seed and words determine the sentence."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def start(self) -> None: ...

    async def write(self, keywords: Keywords) -> str:
        return sentence(random.Random(f"{self._seed}/{keywords}"), keywords)

    async def close(self) -> None: ...


class ModelWriter:
    """A writer that samples one completion per attempt; a truncated completion counts as empty."""

    def __init__(self, engine: Engine, prompter: Prompter, settings: SamplingSettings) -> None:
        self._engine, self._prompter, self._settings = engine, prompter, settings

    async def start(self) -> None:
        await self._engine.start(version=0)

    async def write(self, keywords: Keywords) -> str:
        item = self._prompter.item(0, make_example(keywords))
        (completion,) = await self._engine.generate(item.prompt_token_ids, self._settings)
        return "" if completion.is_truncated else completion.text.strip()

    async def close(self) -> None:
        await self._engine.shutdown()


def model_config(
    model: str, task: KeywordsTaskConfig, seed: int, temperature: float, max_tokens: int, engine: str
) -> Config:
    """Make the configuration for sampling: on a GPU if there is one, else on the CPU in float32."""
    on_gpu = torch.cuda.is_available()
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {"path": model, "dtype": "bfloat16" if on_gpu else "float32"},
            "task": task,
            "sampling": {"temperature": temperature, "min_tokens": 1, "max_tokens": max_tokens, "stop": ()},
            "generator": {"engine": engine, "num_gpus": int(on_gpu)},
        }
    )


def default_prompt(model: str) -> str:
    """Return `chat` if the model has a chat template, else `question_only`.

    Raises:
        ValueError: the model or its tokenizer cannot be loaded.
    """
    if is_local(model):
        check_local_model(model)
    return CHAT if load_tokenizer(model).chat_template else "question_only"


def start_model(config: Config, data: TaskData) -> ModelWriter:
    """Make the writer with its engine, which takes a while.

    Args:
        data: the result of `check_files` for the configuration.

    Raises:
        ValueError: the model cannot be downloaded, or does not fit its tokenizer.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log would bury ours on a terminal
    prepared = prepare_serving(config, data)
    prompter = Prompter(data.prompters[""].template, load_tokenizer(prepared.model.path))
    settings = training_settings(config.sampling, prepared.model.end_token_ids)
    return ModelWriter(
        make_engine(config, prepared.model.path, prepared.model.max_model_len, 0), prompter, settings
    )
