"""Deltas between the versions that real steps make: the share sent, and the time to encode and to apply them.

A Learner trains a random model in bfloat16 on random batches at several learning rates, without warm-up; the
last two versions are timed on the Learner's one thread. `share` is the mean over all steps. The baseline is a
copy of all weights in memory.
"""

import itertools
import zlib
from collections.abc import Callable

import numpy as np

from benchmarks.results import Options, Row, take_turns
from benchmarks.tiny_learner import SMALL, make_batch, make_learners, model_folder
from benchmarks.weight_sync import SIZES
from grpo_ray.core.learner import Learner
from grpo_ray.transfer.delta import apply, encode, fingerprint

TITLE = "lossless deltas of the weights by learning rate, against a copy of all weights in memory"
COPY = "copy of all weights"
LEARNING_RATES = ("1e-6", "1e-5", "2e-4")  # the last is the quickstart's


def run(options: Options) -> list[Row]:
    shape = [] if options.quick else SIZES["medium"]
    common = ["model.dtype=bfloat16", "model.tiny.warmup=null", "learner.warmup_steps=0", *SMALL, *shape]
    variants = {rate: [*common, f"learner.learning_rate={rate}"] for rate in LEARNING_RATES}
    with model_folder(["model.tiny.warmup=null", *shape]) as folder:
        versions = {
            rate: versions_of(learner, num_steps=2 if options.quick else 10)
            for rate, learner in make_learners(folder, variants, options.quick).items()
        }
    cases: dict[str, Callable[[], object]] = {}
    facts: dict[str, dict[str, float]] = {}
    for rate, found in versions.items():
        add_cases(cases, facts, rate, found)
    last = versions[LEARNING_RATES[0]][-1]
    copied = np.zeros_like(last)  # touches its pages
    cases |= {COPY: lambda: np.copyto(copied, last), "fingerprint of all weights": lambda: fingerprint(last)}
    seconds = take_turns(cases, options.rounds or (2 if options.quick else 7))
    mib = last.nbytes / 2**20
    return [Row(name, values, COPY, mib, "MiB", facts.get(name, {})) for name, values in seconds.items()]


def versions_of(learner: Learner, num_steps: int) -> list[np.ndarray]:
    """Return the bytes of every version that real steps make."""
    found = [learner.snapshot()[0].data.copy()]
    for step in range(num_steps):
        learner.train_step(make_batch(learner._config, step))
        found.append(learner.snapshot()[0].data.copy())
    return found


def add_cases(
    cases: dict[str, Callable[[], object]],
    facts: dict[str, dict[str, float]],
    rate: str,
    versions: list[np.ndarray],
) -> None:
    """Add the work of Learner and Generator at a learning rate, and a general compressor for comparison."""
    old, new = versions[-2:]
    payload = encode(old, new)
    assert payload is not None
    restored = old.copy()
    apply(payload, restored)
    assert np.array_equal(restored, new)
    packed = payload.tobytes()
    cases |= {
        f"{rate}: encode": lambda: encode(old, new),
        f"{rate}: apply": lambda: apply(payload, restored),  # to any words: the time is the same
        f"{rate}: DEFLATE of the delta": lambda: zlib.compress(packed, 1),
    }
    sent = [encode(*pair) for pair in itertools.pairwise(versions)]
    shares = [1.0 if payload is None else payload.nbytes / new.nbytes for payload in sent]
    facts[f"{rate}: encode"] = {"share": float(np.mean(shares)), "largest": max(shares), "last": shares[-1]}
    facts[f"{rate}: DEFLATE of the delta"] = {"last": len(zlib.compress(packed, 1)) / new.nbytes}
