"""Was every training prompt asked in its turn: once an epoch of the task, or of a mixture's part?"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_ray.config import Config
from grpo_ray.config.task import ExamplesTaskConfig
from grpo_ray.policy.loading import load_tokenizer
from grpo_ray.tasks import load_examples, make_order, parts_of
from grpo_ray.tasks.prompt_order import MixtureOrder
from grpo_ray.tasks.prompts import ChatTemplate, Tokenizer, template_of
from grpo_ray.tools.audit.checkpoint import CheckpointFacts
from grpo_ray.tools.audit.rollouts import Asked


@dataclass
class _Part:
    """A task, or a part of a mixture: its groups by their place in its own order."""

    asked: dict[int, Asked] = field(default_factory=dict)  # those that are done
    set_aside: set[int] = field(default_factory=set)
    unfinished: set[int] = field(default_factory=set)
    num_taken: int = 0


def audit_epochs(
    config: Config, prompts: Mapping[int, Asked], checkpoint: CheckpointFacts
) -> tuple[list[str], list[str]]:
    """What is wrong with the order of the groups that are done, and notes on what could not be looked at."""
    notes: list[str] = []
    training = _training_prompts(config, notes)
    if not prompts:
        return [], notes
    if training is not None and checkpoint.num_examples not in (None, len(training)):
        return [f"the prompt order has {checkpoint.num_examples} examples, the task {len(training)}"], notes
    problems = []
    for name, part in _by_part(config, prompts, checkpoint).items():
        expected = None if training is None else [asked for asked in training if asked.task == name]
        label = f"{name}, " if name else ""
        # Without the task at hand a mixture's parts are of unknown size.
        size = len(expected) if expected is not None else 0 if name else checkpoint.num_examples or 0
        num_epochs = max(part.asked, default=-1) // size + 1 if size else 0
        if parts_of(config.task)[name].curriculum is not None:  # it leaves no prompt out before it was seen
            problems += [f"{label}{text}" for text in _audit_prompts(part, expected or ())]
            num_epochs = min(num_epochs, 1)
        problems += [f"{label}{text}" for text in _audit_part(part, expected, size, num_epochs)]
    return problems, notes


def _by_part(config: Config, prompts: Mapping[int, Asked], checkpoint: CheckpointFacts) -> dict[str, _Part]:
    """Every group where it belongs; which part a mixture's group is of depends on the seed alone."""
    names = list(parts_of(config.task))
    order = make_order(config.task, dict.fromkeys(names, 1), config.run.seed)
    parts = {name: _Part() for name in names}
    num_taken = checkpoint.next_group_id or 0
    for group in range(max(num_taken, max(prompts) + 1)):
        index, place = order.locate(group) if isinstance(order, MixtureOrder) else (0, group)
        part = parts[names[index]]
        part.num_taken += group < num_taken
        if group in prompts:
            part.asked[place] = prompts[group]
        if group in checkpoint.set_aside:
            part.set_aside.add(place)
        if group in checkpoint.unfinished:
            part.unfinished.add(place)
    return parts


def _audit_part(part: _Part, training: Sequence[Asked] | None, size: int, num_epochs: int) -> Iterator[str]:
    """Each epoch asks every training prompt once, but for groups that were set aside."""
    expected = Counter(training) if training is not None else None
    for epoch in range(num_epochs):
        places = range(epoch * size, (epoch + 1) * size)
        asked = Counter(part.asked[place] for place in places if place in part.asked)
        num_set_aside = len(part.set_aside & set(places))
        # Whatever is not done by now stands in the checkpoint, or came after it.
        is_whole = not (part.unfinished & set(places)) and places.stop <= part.num_taken
        if expected is None and is_whole and not num_set_aside:
            expected = asked  # an epoch stands for the others where the task is not at hand
        if expected is None:
            continue
        for prompt, n in (asked - expected).items():
            yield f"epoch {epoch}: asks {prompt.text!r} {n} times too often, or with another ground truth"
        num_missing = (expected - asked).total() - num_set_aside
        if is_whole and num_missing > 0:
            yield f"epoch {epoch}: {num_missing} training prompts were not asked"


def _audit_prompts(part: _Part, training: Sequence[Asked]) -> Iterator[str]:
    """Every prompt is a training prompt, whenever it came."""
    known = set(training)
    for place, asked in sorted(part.asked.items()):
        if known and asked not in known:
            yield f"place {place}: asks {asked.text!r}, which is no training prompt, or with another truth"


def _training_prompts(config: Config, notes: list[str]) -> list[Asked] | None:
    """Every training example as it is asked, if they are at hand and asked as they are."""
    parts = parts_of(config.task)
    if any(isinstance(part, ExamplesTaskConfig) and part.long_prompts != "refuse" for part in parts.values()):
        notes.append("task.long_prompts: prompts may be cut or left out; epochs are compared alone")
        return None
    try:
        examples = load_examples(config.task, config.run.seed).train
        templates = {name: template_of(part) for name, part in parts.items()}
        tokenizer: Tokenizer | None = None
        if any(isinstance(template, ChatTemplate) for template in templates.values()):
            assert config.model.path is not None, "a model built here has no chat template"
            tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        return [
            Asked(templates[e.task].render(e.question, tokenizer), e.ground_truth, e.task)  # type: ignore[arg-type]
            for e in examples
        ]
    except (OSError, ValueError) as error:
        notes.append(f"the task is not at hand, so epochs are compared with each other alone: {error}")
        return None
