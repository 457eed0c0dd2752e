"""The actors of an evaluation in this process, optionally with an engine that gives known answers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import make_completion

from grpo_ray.actors.generator import Generator
from grpo_ray.actors.scorer import Scorer, scorer_arguments
from grpo_ray.cluster.local import LocalClient
from grpo_ray.cluster.placement import environment_names
from grpo_ray.config import Config
from grpo_ray.engines import make_engine
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.models.model_files import load_tokenizer
from grpo_ray.tools.evaluation import evaluate
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


class LocalServing:
    """The local counterpart of `hosting.ServingGroup`."""

    def __init__(self, config: Config, model: StartingModel, answers: Answers | None) -> None:
        def generator(name: str) -> Generator:
            index = int(name.rpartition("-")[2])
            known: Any = KnownEngine(model.path, answers) if answers is not None else None
            return Generator(name, known or make_engine(config, model.path, model.max_model_len, index))

        self._generator = generator
        names = [f"generator-{index}" for index in range(config.generator.num_generators)]
        self.generators = {name: LocalClient(name, lambda name=name: generator(name)) for name in names}  # type: ignore[misc]
        scorer = scorer_arguments(config)
        self.scorers = {"scorer": LocalClient("scorer", lambda: Scorer(*scorer))}
        self.teachers = dict[str, LocalClient]()
        self.environments = {
            name: LocalClient(name, lambda name=name: EnvironmentWorker(name, config, model))  # type: ignore[misc]
            for name in environment_names(config)
        }

    def by_name(self) -> dict[str, LocalClient]:
        return {**self.generators, **self.scorers, **self.environments}

    def restart_generator(self, name: str) -> LocalClient:
        self.generators[name].die()
        self.generators[name] = LocalClient(name, lambda: self._generator(name))
        return self.generators[name]

    def put(self, data: Any) -> Any:
        return data

    async def fetch(self, reference: Any) -> Any:
        return await reference


@pytest.fixture
def serve_locally(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[LocalServing]]:
    """Return `serve_locally(answers)`, which makes `evaluate` use local actors and returns the list of them."""

    def install(answers: Answers | None = None) -> list[LocalServing]:
        started: list[LocalServing] = []

        @contextlib.contextmanager
        def serving(
            placement: None, config: Config, model: StartingModel, logs: Path
        ) -> Iterator[LocalServing]:
            started.append(LocalServing(config, model, answers))
            yield started[-1]
            started[-1].scorers["scorer"].actor.close()

        monkeypatch.setattr(evaluate, "serving", serving)
        monkeypatch.setattr(evaluate.session, "connected", lambda needs_hub: contextlib.nullcontext())
        monkeypatch.setattr(evaluate.session, "placed", lambda config: contextlib.nullcontext())
        return started

    return install
