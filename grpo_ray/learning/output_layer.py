"""The output layer in float32, over weights of the model's own dtype."""

from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_ray.config.model import HeadDtype
from grpo_ray.learning.policy_model import PolicyModel


class Float32Head(nn.Linear):
    """A linear layer with a product in float32; its weights and their gradients keep their dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input.float(), self.weight.float(), None if self.bias is None else self.bias.float())


def with_head_dtype(model: PolicyModel, head_dtype: HeadDtype) -> PolicyModel:
    """Return the model, with its output layer changed in place to compute in `head_dtype`.

    Raises:
        ValueError: the output layer is none that can be computed in float32.
    """
    layer = model.get_output_embeddings()
    if head_dtype == "float32":
        if type(layer) is not nn.Linear:
            raise ValueError(
                f"model.head_dtype: the output layer of {type(model).__name__} is a {type(layer).__name__}, "
                "and only a linear layer can be computed in float32; set it to model"
            )
        layer.__class__ = Float32Head  # not a new layer: it may share its weights with the embeddings
    return model
