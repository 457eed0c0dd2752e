"""The actors of an evaluation in this process, optionally with an engine that gives known answers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from builders import make_completion

from grpo_ray.cluster.local import LocalClient, LocalServing
from grpo_ray.config import Config
from grpo_ray.core.generator import Generator
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.tools.evaluation import evaluate
from grpo_ray.tools.evaluation.evaluation_plan import EvaluationPlan
from grpo_ray.types import Completion, SamplingSettings, StartingModel

Answers = Callable[[str, SamplingSettings], Sequence[str]]  # (prompt, settings) -> one response per sample


class KnownEngine:
    """An `Engine` without weights that replies with known texts."""

    def __init__(self, model_path: str, answers: Answers) -> None:
        self._tokenizer, self._answers = load_tokenizer(model_path), answers

    async def start(self, version: int) -> None: ...

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        texts = self._answers(self._tokenizer.decode(list(prompt_token_ids)), settings)
        assert len(texts) == settings.num_samples
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return tuple(make_completion(i, text=text) for i, text in zip(ids, texts, strict=True))


class KnownServing(LocalServing):
    """Actors with Generators that give known answers."""

    answers: Answers

    def _start_generator(self, name: str) -> LocalClient:
        engine: Any = KnownEngine(self._model.path, self.answers)
        return self._client(name, lambda: Generator(name, engine))


@pytest.fixture
def serve_locally(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[LocalServing]]:
    """Return `serve_locally(answers)`, which makes `evaluate` use local actors and returns the list of them."""

    def install(answers: Answers | None = None) -> list[LocalServing]:
        started: list[LocalServing] = []
        kind = type("Serving", (KnownServing,), {"answers": staticmethod(answers)}) if answers else LocalServing

        @contextlib.contextmanager
        def served(
            plan: EvaluationPlan, config: Config, model: StartingModel, console: object
        ) -> Iterator[LocalServing]:
            started.append(kind(config, model, plan.folder.path))
            yield started[-1]
            started[-1].stop()

        monkeypatch.setattr(evaluate, "_served", served)
        return started

    return install
