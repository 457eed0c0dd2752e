"""A Learner's step with the pretrained model of the sums recipe, as a share of the processor's measured peak.

python profiling/bench.py pretrained_step model.path=FOLDER     (FOLDER: grpo-ray data smollm2 FOLDER)

The peak is that of a product of square matrices, the largest of several; the Learner's work is counted as in
`perf/mfu`: what the forward and backward pass must compute, prompts once per group where they are shared.
"""

import time

import torch

from benchmarks.results import Options, Row
from benchmarks.tiny_learner import SMALL, make_batch
from benchmarks.turns import take_turns
from grpo_ray.config.loading import load_config
from grpo_ray.core.learner import Learner
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer

TITLE = "a Learner's step with SmolLM2-135M (8 prompts x 8 responses, prompts of 39 tokens)"
TAKES_OVERRIDES = True
CONFIG = "configs/smollm2-sums.yaml"
PROMPT_TOKENS = 39
CASES: dict[str, tuple[int, list[str]]] = {
    "bfloat16, 11 tokens": (11, []),
    "bfloat16, 11 tokens, padded": (11, ["learner.share_prompts=never"]),
    "float32, 11 tokens": (11, ["model.dtype=float32"]),
    "bfloat16, 64 tokens": (64, []),
    "bfloat16, 64 tokens, 2 threads": (64, ["learner.num_threads=2"]),
    "bfloat16, 64 tokens, micro-batches of 1024": (64, ["learner.micro_batch_tokens=1024"]),
    "float32, 64 tokens": (64, ["model.dtype=float32"]),
}
SIZE = 2048  # of the matrices


def run(options: Options) -> list[Row]:
    base = load_config(CONFIG, options.overrides)
    assert base.model.path is not None
    ends = end_token_ids(base.model.path, load_tokenizer(base.model.path))
    peaks = {(dtype, threads): _peak(dtype, threads) for dtype in ("bfloat16", "float32") for threads in (1, 2)}
    rows = [
        Row(f"peak, {dtype}, {threads} threads", (2 * SIZE**3 / peak,), f"peak, {dtype}, 1 threads",
            facts={"GFLOP/s": peak / 1e9})
        for (dtype, threads), peak in peaks.items()
    ]  # fmt: skip
    for name, (num_tokens, overrides) in CASES.items():  # one model at a time in memory
        config = load_config(CONFIG, [*(SMALL if options.quick else []), *options.overrides, *overrides])
        peak = peaks[config.model.dtype, config.learner.num_threads]
        config = config.model_copy(
            update={"learner": config.learner.model_copy(update={"peak_tflops": peak / 1e12})}
        )
        learner, shares = Learner(base.model.path, config, ends), []

        def step(
            learner: Learner = learner, num_tokens: int = num_tokens, shares: list[float] = shares
        ) -> None:
            batch = make_batch(learner._config, learner.version, num_tokens, PROMPT_TOKENS)
            shares.append(learner.train_step(batch).metrics["perf/mfu"])

        (seconds,) = take_turns({name: step}, options.rounds or (1 if options.quick else 6)).values()
        facts = {"share of the peak": sorted(shares)[len(shares) // 2]}
        rows.append(
            Row(name, seconds, next(iter(CASES)), config.rollouts_per_step * num_tokens, "tokens", facts)
        )
    return rows


def _peak(dtype: str, num_threads: int) -> float:
    """Return the most FLOP/s of ten products."""
    torch.set_num_threads(num_threads)
    left, right = (torch.randn(SIZE, SIZE).to(getattr(torch, dtype)) for _ in range(2))
    fastest = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        left @ right
        fastest = min(fastest, time.perf_counter() - began)
    return 2 * SIZE**3 / fastest
