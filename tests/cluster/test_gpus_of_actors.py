"""The GPUs that Ray gives a run's actors, on a cluster that claims to have four."""

import os
from typing import Any

import pytest
import ray

from grpo_ray.cluster import session
from grpo_ray.cluster.placement import bundles_of
from grpo_ray.config.loading import load_config

Found = tuple[list[dict[str, str]], str]
SHARED = ("generator.colocated=true", "weight_sync.max_lag=0", "weight_sync.transport=ipc")
TWO = ("generator.num_generators=2", "learner.num_ranks=2")


def gpus(*changes: str) -> Found:
    """Return the GPUs of each bundle's actors, and those of generator-0 once it has been replaced."""

    class Actor:  # inside, so that it travels by value: workers cannot import this file
        def gpus(self) -> str:
            return os.environ["CUDA_VISIBLE_DEVICES"]

    config = load_config("quickstart", ["generator.num_gpus=1", "learner.num_gpus=1", *changes])
    with session.placed(config) as placement:

        def start(name: str) -> tuple[Any, str]:
            actor = ray.remote(Actor).options(**placement[name]).remote()
            return actor, ray.get(actor.gpus.remote())

        bundles = [[name for name in bundle.actors if "scorer" not in name] for bundle in bundles_of(config)]
        started = {name: start(name) for bundle in bundles for name in bundle}
        ray.kill(started["generator-0"][0])
        _, again = start("generator-0")
        return [{name: started[name][1] for name in bundle} for bundle in bundles if bundle], again


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_each_actor_sees_its_own_gpus_and_its_replacement_the_same() -> None:
    with session.connected():
        apart, shared, parallel = gpus(*TWO), gpus(*TWO, *SHARED), gpus("generator.num_gpus=2")
    for bundles, of_the_replacement in (apart, shared, parallel):
        (before,) = (bundle["generator-0"] for bundle in bundles if "generator-0" in bundle)
        assert of_the_replacement == before
    seen = [gpus for bundle in apart[0] for gpus in bundle.values()]
    assert len(seen) == len(set(seen)) == 4
    pairs = [sorted(name.split("-")[0] for name in bundle) for bundle in shared[0]]
    assert pairs == [["generator", "learner"]] * 2
    first, second = (set(bundle.values()) for bundle in shared[0])
    assert len(first) == len(second) == 1
    assert first != second
    assert len(parallel[0][0]["generator-0"].split(",")) == 2
