"""The lecture's model: every position has its own weights, and no response position depends on another."""

import torch
from einops import einsum, rearrange, repeat
from torch import Tensor, nn


class SortingModel(nn.Module):
    """A model from prompts to log-probabilities at every response position.

    The prompt's embeddings, each multiplied by its position's matrix, are summed into one vector; each position
    of the response multiplies that vector by a matrix of its own. The embedding is also the output layer.
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
        """Map `[batch, pos]` integers to `[batch, pos, vocab]` log-probabilities."""
        embedded = self.embedding[prompts]  # [batch, pos, dim]
        hidden = einsum(embedded, self.encode, "batch pos inner, pos inner dim -> batch dim")
        decoded = einsum(hidden, self.decode, "batch inner, pos inner dim -> batch pos dim")
        logits = einsum(decoded, self.embedding, "batch pos dim, vocab dim -> batch pos vocab")
        return logits.log_softmax(dim=-1)


def sample_responses(log_probs: Tensor, num_responses: int, generator: torch.Generator) -> Tensor:
    """Draw every position independently: `[batch, pos, vocab]` to `[batch, response, pos]` integers."""
    positions = rearrange(log_probs.exp(), "batch pos vocab -> (batch pos) vocab")
    drawn = torch.multinomial(positions, num_responses, replacement=True, generator=generator)
    return rearrange(drawn, "(batch pos) response -> batch response pos", batch=len(log_probs))


def response_log_probs(log_probs: Tensor, responses: Tensor) -> Tensor:
    """Look up the log-probability of each token of the responses, in nats.

    Args:
        log_probs: `[batch, pos, vocab]`.
        responses: `[batch, response, pos]` integers.

    Returns:
        `[batch, response, pos]`.
    """
    repeated = repeat(log_probs, "batch pos vocab -> batch response pos vocab", response=responses.shape[1])
    return repeated.gather(-1, responses[..., None]).squeeze(-1)
