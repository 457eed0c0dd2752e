"""Tasks: where questions and ground truths come from, and the order in which they are asked."""

from grpo_ray.config import FileTaskConfig, SortingTaskConfig
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.files import read_examples
from grpo_ray.tasks.sorting import sorting_examples


def load_examples(task: SortingTaskConfig | FileTaskConfig, seed: int) -> tuple[list[Example], list[Example]]:
    """The task's train and validation examples; the seed matters to generated tasks only."""
    if isinstance(task, SortingTaskConfig):
        return sorting_examples(task, seed)
    fields = (task.question_field, task.answer_field, task.answer_marker)
    train = read_examples(task.train_path, *fields)
    return train, read_examples(task.validation_path, *fields, limit=task.num_validation_prompts)
