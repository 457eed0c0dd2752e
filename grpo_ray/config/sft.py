"""The configuration of supervised steps on demonstrations, before the first step of GRPO."""

from pydantic import PositiveFloat, PositiveInt

from grpo_ray.config.section import Section


class SftConfig(Section):
    path: str
    """`.jsonl` or `.parquet` file of demonstrations. A row has `messages`, the last one the assistant's; or a
    question, which `task.prompt` turns into a prompt, and a response."""
    prompt_field: str = "prompt"
    """Field of a row that holds the question."""
    response_field: str = "response"
    """Field of a row that holds the response to imitate."""
    num_steps: PositiveInt = 100
    """Supervised steps."""
    batch_size: PositiveInt = 32
    """Demonstrations per step, shuffled in every epoch."""
    learning_rate: PositiveFloat = 2e-5
    """Peak learning rate, after a linear ramp over a tenth of the steps; then linear decay to 0. The section
    `learner` has the optimizer's other values."""
