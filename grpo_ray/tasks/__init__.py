"""Tasks: where questions and ground truths come from, and the order in which they are asked."""

from grpo_ray.config_task import FileTaskConfig, SortingTaskConfig
from grpo_ray.tasks.duplicates import drop_duplicates
from grpo_ray.tasks.examples import ExampleSets
from grpo_ray.tasks.files import read_examples
from grpo_ray.tasks.sorting import sorting_examples


def load_examples(task: SortingTaskConfig | FileTaskConfig, seed: int) -> ExampleSets:
    """The task's train and validation examples; the seed matters to generated tasks only.

    Raises:
        ValueError: names the file, and the line where one is wrong, and the fix.
    """
    if isinstance(task, SortingTaskConfig):
        return ExampleSets(*sorting_examples(task, seed))
    fields = (task.question_field, task.answer_field, task.answer_marker)
    train = read_examples(task.train_path, *fields)
    validation = read_examples(task.validation_path, *fields, limit=task.num_validation_prompts)
    if task.duplicates == "keep":
        return ExampleSets(train, validation)
    return drop_duplicates(train, validation, task.train_path, task.validation_path)
