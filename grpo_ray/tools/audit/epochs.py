"""The audit of the prompt order: every training prompt sampled once per epoch of its task or mixture part."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_ray.config import Config
from grpo_ray.config.task import EpisodesTaskConfig, ExamplesTaskConfig, parts_of
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.tasks import load_examples, make_order
from grpo_ray.tasks.prompt_order import MixtureOrder
from grpo_ray.tasks.prompts import ChatTemplate, template_of
from grpo_ray.tools.audit.checkpoint import CheckpointFacts
from grpo_ray.tools.audit.rollouts import GroupPrompt
from grpo_ray.tools.trust import is_code


@dataclass
class _Part:
    """A task, or a part of a mixture: its groups by their index in its own order."""

    done: dict[int, GroupPrompt] = field(default_factory=dict)
    set_aside: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    num_taken: int = 0


def audit_epochs(
    config: Config, prompts: Mapping[int, GroupPrompt], checkpoint: CheckpointFacts, run_code: bool = False
) -> tuple[list[str], list[str]]:
    """Return problems with the order of the done groups, and notes on what could not be audited."""
    notes: list[str] = []
    training = _training_prompts(config, notes, run_code)
    if not prompts:
        return [], notes
    if training is not None and checkpoint.num_examples not in (None, len(training)):
        return [f"the prompt order has {checkpoint.num_examples} examples, the task {len(training)}"], notes
    problems = []
    for name, part in _by_part(config, prompts, checkpoint).items():
        expected = None if training is None else [asked for asked in training if asked.task == name]
        label = f"{name}, " if name else ""
        # Without the task's data the sizes of a mixture's parts are unknown.
        size = len(expected) if expected is not None else 0 if name else checkpoint.num_examples or 0
        num_epochs = max(part.done, default=-1) // size + 1 if size else 0
        if parts_of(config.task)[name].curriculum is not None:  # it skips no prompt before it has been seen
            problems += [f"{label}{text}" for text in _audit_prompts(part, expected or ())]
            num_epochs = min(num_epochs, 1)
        problems += [f"{label}{text}" for text in _audit_part(part, expected, size, num_epochs)]
    return problems, notes


def _by_part(
    config: Config, prompts: Mapping[int, GroupPrompt], checkpoint: CheckpointFacts
) -> dict[str, _Part]:
    """Sort the groups into parts; the part of a mixture's group depends on the seed alone."""
    names = list(parts_of(config.task))
    order = make_order(config.task, dict.fromkeys(names, 1), config.run.seed)
    parts = {name: _Part() for name in names}
    num_taken = checkpoint.next_group_id or 0
    for group in range(max(num_taken, max(prompts) + 1)):
        part_index, index = order.locate(group) if isinstance(order, MixtureOrder) else (0, group)
        part = parts[names[part_index]]
        part.num_taken += group < num_taken
        if group in prompts:
            part.done[index] = prompts[group]
        if group in checkpoint.set_aside:
            part.set_aside.add(index)
        if group in checkpoint.unfinished:
            part.unfinished.add(index)
    return parts


def _audit_part(
    part: _Part, training: Sequence[GroupPrompt] | None, size: int, num_epochs: int
) -> Iterator[str]:
    """Check that each epoch samples every training prompt once, except for groups that were set aside."""
    expected = Counter(training) if training is not None else None
    for epoch in range(num_epochs):
        indices = range(epoch * size, (epoch + 1) * size)
        asked = Counter(part.done[index] for index in indices if index in part.done)
        num_set_aside = len(part.set_aside & set(indices))
        # A group that is not done is unfinished in the checkpoint, or was taken after it.
        is_whole = not (part.unfinished & set(indices)) and indices.stop <= part.num_taken
        if expected is None and is_whole and not num_set_aside:
            expected = asked  # without the task's data, compare the other epochs with this one
        if expected is None:
            continue
        for prompt, n in (asked - expected).items():
            yield f"epoch {epoch}: samples {prompt.text!r} {n} times too often, or with another ground truth"
        num_missing = (expected - asked).total() - num_set_aside
        if is_whole and num_missing > 0:
            yield f"epoch {epoch}: {num_missing} training prompts were not sampled"


def _audit_prompts(part: _Part, training: Sequence[GroupPrompt]) -> Iterator[str]:
    """Check that every prompt is a training prompt, in whatever order."""
    known = set(training)
    for index, asked in sorted(part.done.items()):
        if known and asked not in known:
            yield (
                f"index {index}: samples {asked.text!r}, which is not a training prompt, or has another "
                "ground truth"
            )


def _training_prompts(config: Config, notes: list[str], run_code: bool) -> list[GroupPrompt] | None:
    """Return every training prompt; None: the data is missing, or prompts are shortened or left out."""
    parts = parts_of(config.task)
    named = [part.examples for part in parts.values() if isinstance(part, EpisodesTaskConfig)]
    code = [name for name in named if is_code("task.examples", name)]
    if code and not run_code:
        notes.append(
            f"epochs are only compared with each other, because {', '.join(code)} is code that the run's "
            "configuration names; if you trust it, audit with --run-reward-code"
        )
        return None
    if any(isinstance(part, ExamplesTaskConfig) and part.long_prompts != "refuse" for part in parts.values()):
        notes.append(
            "task.long_prompts: prompts may be cut or left out; epochs are only compared with each other"
        )
        return None
    try:
        examples = load_examples(config.task, config.run.seed).train
        templates = {name: template_of(part) for name, part in parts.items()}
        tokenizer = None
        if any(isinstance(template, ChatTemplate) for template in templates.values()):
            assert config.model.path is not None, "a model built here has no chat template"
            tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        return [
            GroupPrompt(templates[e.task].render(e.question, tokenizer), e.ground_truth, e.task)
            for e in examples
        ]
    except (OSError, ValueError) as error:
        notes.append(f"the task's data is missing, so epochs are only compared with each other: {error}")
        return None
