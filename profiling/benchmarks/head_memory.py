"""Peak memory of the output layer with a real vocabulary, forward and backward, one process per case."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.machine import status_bytes
from benchmarks.results import Options, Row
from grpo_ray.objectives import chunked_log_probs, compute_entropy, token_log_probs

TITLE = "the output layer's peak memory beside its weights and input, forward and backward"
VOCAB, TOKENS, PLAIN_TOKENS = (
    151_936,
    8_192,
    1_024,
)  # the plain way would need more memory than most machines have
PLAIN, OURS = "all logits at once", "chunks (ours)"
GIB = 2**30


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probabilities and entropies from one tensor of logits, as without chunks."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    with torch.no_grad():
        entropy = compute_entropy(logits)
    return token_log_probs(logits, labels), entropy


WAYS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {PLAIN: all_logits, OURS: chunked_log_probs}


def run(options: Options) -> list[Row]:
    if not Path("/proc/self/clear_refs").exists():
        return [Row("all", skipped="peak memory is read from Linux's /proc")]
    vocab, tokens, plain_tokens = (2_000, 512, 256) if options.quick else (VOCAB, TOKENS, PLAIN_TOKENS)
    width = 64 if options.quick else 896
    cases = [
        ("bfloat16", PLAIN, plain_tokens),
        ("bfloat16", OURS, plain_tokens),
        ("float32", PLAIN, plain_tokens),
        ("float32", OURS, plain_tokens),
        ("float32", OURS, tokens),  # a minute; many for bfloat16 on a CPU without products of it
    ]
    rows = []
    # A new process per case has no memory that an earlier one left behind; starting one takes seconds.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=None if options.quick else 1) as pool:
        for dtype, way, count in cases:
            shape = f"width {width}, {dtype}"
            found = pool.submit(measure, way, vocab, width, dtype, count).result()
            facts = {"peak GiB": found["peak_bytes"] / GIB, "of it gradients GiB": found["grad_bytes"] / GIB}
            case, base = f"{way}, {count:,} tokens, {shape}", f"{PLAIN}, {plain_tokens:,} tokens, {shape}"
            rows.append(Row(case, (found["seconds"],), base, count, "tokens", facts))
    return rows


def measure(way: str, vocab: int, width: int, dtype: str, tokens: int) -> dict[str, float]:
    """Run one forward and backward pass in this process; return seconds, peak bytes and bytes of gradients."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        values = torch.empty(shape, dtype=getattr(torch, dtype)).normal_(std=0.02, generator=generator)
        return values.requires_grad_()

    hidden, weight = random(tokens, width), random(vocab, width)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    log_probs, _ = WAYS[way](random(2, width), random(3, width), labels[:2] % 3)
    log_probs.sum().backward()  # now what is loaded once is loaded
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present size
    before, started = status_bytes("VmRSS"), time.perf_counter()
    log_probs, _ = WAYS[way](hidden, weight, labels)
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "seconds": time.perf_counter() - started,
        "peak_bytes": status_bytes("VmHWM") - before,
        "grad_bytes": sum(g.numel() * g.element_size() for g in (hidden.grad, weight.grad)),
    }
