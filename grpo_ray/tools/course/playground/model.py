"""The lecture's model: separate weights for every position, and no position of the response sees another."""

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn


class SortingModel(nn.Module):
    """Prompts to the logits of every response position.

    The prompt's embeddings, each through a matrix of its position, are summed into one vector; each position of
    the response reads that vector through a matrix of its own. The embedding is the output layer too.
    """

    def __init__(
        self, vocab_size: int, dim: int, length: int, embedding_std: float, generator: torch.Generator
    ) -> None:
        super().__init__()

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.embedding = nn.Parameter(normal(vocab_size, dim) * embedding_std)
        self.encode = nn.Parameter(normal(length, dim, dim) / dim**0.5)
        self.decode = nn.Parameter(normal(length, dim, dim) / dim**0.5)

    def forward(self, prompts: Tensor) -> Tensor:
        """`[batch, pos]` integers to `[batch, pos, vocab]` log-probabilities."""
        embedded = self.embedding[prompts]  # [batch, pos, dim]
        hidden = einsum(embedded, self.encode, "batch pos inner, pos inner dim -> batch dim")
        decoded = einsum(hidden, self.decode, "batch inner, pos inner dim -> batch pos dim")
        logits = einsum(decoded, self.embedding, "batch pos dim, vocab dim -> batch pos vocab")
        return logits.log_softmax(dim=-1)


def sample_responses(log_probs: Tensor, num_responses: int, generator: torch.Generator) -> Tensor:
    """`[batch, pos, vocab]` to `[batch, response, pos]` integers, every position drawn independently."""
    positions = rearrange(log_probs.exp(), "batch pos vocab -> (batch pos) vocab")
    drawn = torch.multinomial(positions, num_responses, replacement=True, generator=generator)
    return rearrange(drawn, "(batch pos) response -> batch response pos", batch=len(log_probs))


def response_log_probs(log_probs: Tensor, responses: Tensor) -> Tensor:
    """`[batch, pos, vocab]` and `[batch, response, pos]` to `[batch, response, pos]`, in nats."""
    of_each = repeat(log_probs, "batch pos vocab -> batch response pos vocab", response=responses.shape[1])
    return of_each.gather(-1, responses[..., None]).squeeze(-1)
