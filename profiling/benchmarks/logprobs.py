"""Log-probabilities of the sampled tokens, forward and backward, against the obvious ways to compute them."""

from collections.abc import Callable

import torch

from benchmarks.results import Options, Row
from benchmarks.turns import take_turns
from grpo_ray.objectives import token_log_probs

TITLE = "token log-probabilities, forward and backward, by size of the vocabulary"
OBVIOUS = "log_softmax and gather"


def log_softmax_and_gather(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(-1, labels[..., None]).squeeze(-1)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return -flat.view(labels.shape)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    OBVIOUS: log_softmax_and_gather,
    "cross_entropy": cross_entropy,
    "token_log_probs (ours)": token_log_probs,
}


def run(options: Options) -> list[Row]:
    torch.set_num_threads(1)
    batch, length = (2, 16) if options.quick else (8, 64)
    rows = []
    for vocab in (512,) if options.quick else (512, 32_768, 151_936):
        generator = torch.Generator().manual_seed(vocab)
        logits = torch.randn(batch, length, vocab, generator=generator, requires_grad=True)
        labels = torch.randint(vocab, (batch, length), generator=generator)

        def step(
            way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
            logits: torch.Tensor = logits,
            labels: torch.Tensor = labels,
        ) -> None:
            logits.grad = None
            way(logits, labels).sum().backward()

        cases = {name: (lambda way=way, step=step: step(way)) for name, way in WAYS.items()}
        seconds = take_turns(cases, options.rounds or (2 if options.quick else 7))
        for name, values in seconds.items():
            case, base = f"{name}, vocabulary {vocab:,}", f"{OBVIOUS}, vocabulary {vocab:,}"
            rows.append(Row(case, values, base, batch * length, "tokens"))
    return rows
