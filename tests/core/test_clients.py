"""The Protocols of core/clients.py against the classes behind them."""

import inspect
from typing import Any, get_origin, get_type_hints

import pytest

from grpo_ray.core import clients
from grpo_ray.core.buffer import TrajectoryBuffer
from grpo_ray.core.generator import Generator
from grpo_ray.core.learner import Learner
from grpo_ray.core.scorer import Scorer
from grpo_ray.core.sync import WeightSync
from grpo_ray.core.teacher import Teacher
from grpo_ray.episodes.environment_worker import EnvironmentWorker
from grpo_ray.types import methods_with_bulk

PAIRS: list[tuple[Any, type]] = [
    (clients.GeneratorClient, Generator),
    (clients.EnvironmentClient, EnvironmentWorker),
    (clients.ScorerClient, Scorer),
    (clients.TeacherClient, Teacher),
    (clients.BufferClient, TrajectoryBuffer),
    (clients.LearnerClient, Learner),
    (clients.WeightSyncClient, WeightSync),
]


def methods_of(protocol: Any) -> list[str]:
    """Return the methods of a Protocol and its bases."""
    return [name for name, value in inspect.getmembers(protocol, inspect.isfunction) if name[0] != "_"]


def parameters_of(cls: Any, method: str) -> list[str]:
    """Return the parameters, without the one that Ray adds to the methods of a class that it has hosted."""
    return [name for name in inspect.signature(getattr(cls, method)).parameters if name != "_ray_trace_ctx"]


@pytest.mark.parametrize(("protocol", "actor"), PAIRS, ids=[actor.__name__ for _, actor in PAIRS])
def test_every_call_exists_with_these_parameters(protocol: Any, actor: type) -> None:
    assert len(methods_of(protocol)) > 2
    for name in methods_of(protocol):
        called, method = parameters_of(protocol, name), parameters_of(actor, name)
        assert called == method, f"{actor.__name__}.{name}"


@pytest.mark.parametrize(("protocol", "actor"), PAIRS, ids=[actor.__name__ for _, actor in PAIRS])
def test_calls_that_return_a_reference_are_marked(protocol: Any, actor: type) -> None:
    returned = {name: get_type_hints(getattr(protocol, name))["return"] for name in methods_of(protocol)}
    pairs = {name for name, annotation in returned.items() if get_origin(annotation) is tuple}
    assert pairs == methods_with_bulk(actor)
