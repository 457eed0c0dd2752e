"""Additions to the reward that do not ask whether the answer is right."""

from torch import Tensor


def overlong_penalties(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float) -> Tensor:
    """Soft overlong punishment (DAPO arXiv:2503.14476, Section 3.4, Eq. 13), scaled.

    0 up to `max_tokens - buffer_tokens` tokens, from there linearly down to `-penalty` at `max_tokens`, and
    `-penalty` beyond. To be added to the rewards before the advantages are taken.

    Args:
        lengths: `[G]`, the responses' lengths in tokens.
        max_tokens: the longest response allowed (the paper's L_max).
        buffer_tokens: the paper's L_cache; 0 turns the punishment off.
        penalty: at least 0, in units of reward (the paper's is 1).

    Returns:
        `[G]` float32, none above 0.

    Raises:
        ValueError: buffer_tokens is outside [0, max_tokens], or the penalty is negative.
    """
    if not 0 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens must be between 0 and max_tokens ({max_tokens}), got {buffer_tokens}")
    if not penalty >= 0:
        raise ValueError(f"penalty must be at least 0, got {penalty}")
    lengths = lengths.float()  # exact up to 2^24 tokens
    if buffer_tokens == 0:
        return lengths.new_zeros(lengths.shape)
    return penalty * ((max_tokens - buffer_tokens - lengths) / buffer_tokens).clamp(-1.0, 0.0)
