"""The gradient that a loss really has at every token, against that of the plain policy gradient."""

from torch import Tensor

from grpo_ray.config.losses import Aggregation
from grpo_ray.objectives.aggregation import aggregate_loss


def gradient_sums(
    gradient: Tensor,
    mask: Tensor,
    advantages: Tensor,
    aggregation: Aggregation,
    denominator: float,
    row_tokens: Tensor | None = None,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compare d loss / d logprob after a backward pass with REINFORCE's, `-A` times the aggregation's weight.

    A wrong normalizer changes the sum of the sizes, and a wrong mask leaves tokens without gradient, whatever
    function computed the loss. Adam hides a wrong factor from every other metric but the gradient's norm.

    Args:
        gradient: `[batch, seq]`, of the micro-batch's loss with respect to the policy's log-probabilities.
        mask: bool `[batch, seq]`, the sampled tokens.
        advantages: `[batch, 1]` or `[batch, seq]`.
        aggregation, denominator, row_tokens: as for `aggregate_loss`.
        weights: `[batch, seq]` or `[batch, 1]`, factors of the token losses; None: 1.

    Returns:
        Scalars to sum over micro-batches: `gradient_sum` (of the sizes at tokens with an advantage and a weight
        other than 0), `plain_gradient_sum` (REINFORCE's), `num_gradients` (those tokens), and
        `num_without_gradient` of them.
    """
    sizes = advantages.abs().expand_as(mask).float()
    if weights is not None:
        sizes = sizes * weights
    has_gradient = mask & (sizes != 0)
    return {
        "gradient_sum": gradient.abs().masked_fill(~has_gradient, 0.0).sum(),
        "plain_gradient_sum": aggregate_loss(sizes, mask, aggregation, denominator, row_tokens),
        "num_gradients": has_gradient.sum(),
        "num_without_gradient": (has_gradient & (gradient == 0)).sum(),
    }
