"""The GPUs that Ray gives a run's actors, on a cluster that claims to have four."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, ray
from grpo_ray.cluster.environment import enable_token_auth, private_ray_folder
from grpo_ray.cluster.placement import bundles_of
from grpo_ray.cluster.session import placed
from grpo_ray.config.loading import load_config

class Actor:
    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]

def start(placement, name):
    actor = ray.remote(Actor).options(**placement.options(name)).remote()
    return actor, ray.get(actor.gpus.remote())

def gpus(*changes):
    config = load_config("configs/quickstart.yaml", ["generator.num_gpus=1", "learner.num_gpus=1", *changes])
    with placed(config) as placement:
        bundles = [[name for name in bundle.actors if "scorer" not in name] for bundle in bundles_of(config)]
        started = {name: start(placement, name) for bundle in bundles for name in bundle}
        ray.kill(started["generator-0"][0])
        replacement, again = start(placement, "generator-0")
        found = [{name: started[name][1] for name in bundle} for bundle in bundles if bundle]
    return found, again

enable_token_auth()
ray.init(address="local", num_gpus=4, num_cpus=16, include_dashboard=False, log_to_driver=False,
         _temp_dir=private_ray_folder())
shared = "generator.colocated=true", "weight_sync.max_lag=0", "weight_sync.transport=ipc"
two = "generator.num_generators=2", "learner.num_ranks=2"
print(json.dumps([gpus(*two), gpus(*two, *shared), gpus("generator.num_gpus=2")]))
"""


@pytest.mark.ray
def test_each_actor_sees_its_own_gpus_and_its_replacement_the_same() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    apart, shared, parallel = json.loads(done.stdout.splitlines()[-1])
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
