"""The interface of a policy, implemented by transformers' causal models and by TransformerLM."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn


class TreeAttention(Protocol):
    """Attention in a row of segments."""

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
        """Attend along each token's path.

        Args:
            queries: `[tokens, heads, head_dim]`.
            keys: `[tokens, kv_heads, head_dim]`; `heads / kv_heads` query heads share one.
            values: as keys.
            scale: factor of the scores; default: `head_dim ** -0.5`.

        Returns:
            `[tokens, heads, head_dim]`.
        """
        ...

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with every tensor changed: moved, or in page-locked memory."""
        ...


class PolicyOutput(Protocol):
    @property
    def logits(self) -> Tensor: ...  # [batch, positions kept, vocab]

    @property
    def past_key_values(self) -> object: ...  # the cache for the next call, if one was requested


class HiddenStates(Protocol):
    @property
    def last_hidden_state(self) -> Tensor: ...  # [batch, seq, width]


class PolicyModel(Protocol):
    """A torch module over token ids; its parameters have the names used in its Hugging Face folder."""

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        use_cache: bool = ...,
        logits_to_keep: int = 0,
    ) -> PolicyOutput:
        """Compute logits at the last `logits_to_keep` positions (0: at all) of `input_ids` `[batch, seq]`."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def base_model(self) -> Callable[..., HiddenStates]:
        """All but the output layer, called with the same arguments; with `tree`, over a packed row."""
        ...

    def get_output_embeddings(self) -> nn.Linear: ...

    @property
    def model(self) -> Any: ...  # everything before the output layer; its blocks are in `layers`

    def to(self, *args: Any, **kwargs: Any) -> Self: ...

    def train(self, mode: bool = True) -> Self: ...

    def eval(self) -> Self: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None
    ) -> None:
        """Pass each block through `torch.utils.checkpoint.checkpoint` with these options."""
        ...

    def modules(self) -> Iterator[nn.Module]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def get_submodule(self, target: str) -> nn.Module: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> object: ...

    def save_pretrained(
        self, folder: Path, state_dict: dict[str, Tensor] | None = None, max_shard_size: str = ...
    ) -> None:
        """Write a folder in Hugging Face format; a `state_dict` replaces the model's own weights."""
        ...
