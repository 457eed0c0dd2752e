"""Digests of the files that a configuration names, so that a resumed run notices when one was edited.

The training questions are in the digest of the PromptStream, which every checkpoint holds. A model on a hub
has no digest: the configuration names its commit.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from grpo_ray.config import Config
from grpo_ray.config.reward import terms_of
from grpo_ray.config.schema import leaves
from grpo_ray.config.task import field_of
from grpo_ray.errors import RunError
from grpo_ray.records.adapter_files import base_digest
from grpo_ray.records.durable import write_text
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompt_order import examples_digest
from grpo_ray.tasks.prompts import PromptTemplate, TextTemplate

MODEL, TINY, TEACHER = "model.path", "model.tiny", "distillation.teacher"
# The fields of `model`, `task`, `distillation` and `sft` that may name a file.
FILE_FIELDS = (
    "path", "train_path", "validation_path", "keywords_path", "prompt", "teacher", "examples",
    "validation_examples",
)  # fmt: skip
COLUMNS, FACTS = "the other columns of the questions", "the questions' rows"


def input_digests(
    config: Config, templates: Mapping[str, PromptTemplate], train: Sequence[Example],
    validation: Sequence[Example],
) -> dict[str, str]:  # fmt: skip
    """Return a digest of each template, the validation questions, each module with a reward, and local models.

    The name of each says what was edited if it changes. Modules that the reward's module imports are left out.
    """
    digests = {
        f"{field_of(name)}.prompt (the template's text)": _sha256(template.text.encode())
        for name, template in templates.items()
        if isinstance(template, TextTemplate)
    }
    digests["the validation questions and their answers"] = examples_digest(validation)
    rows = [example.row for example in (*train, *validation)]
    if any(rows):
        digests[f"{COLUMNS} (for the code that reads them)"] = _sha256(json.dumps(rows).encode())
    if facts := "\n".join(example.facts for example in (*train, *validation)).strip():
        digests[f"{FACTS} (for the code that reads them)"] = _sha256(facts.encode())
    digests |= _of_rewards(config)
    for field, value in leaves(config.model_dump(include={"algorithm", "generator"})).items():
        digests |= _of_modules(field, map(str, value if isinstance(value, list | tuple) else [value]))
    for name, part in config.episode_tasks.items():
        digests |= _of_modules(f"{field_of(name)}.episode", (part.episode, part.examples, part.warmup or ""))
    for field, folder in config.models.items():
        if Path(folder).is_dir():
            digests |= _of_model(field, Path(folder))
    return digests


def _of_rewards(config: Config) -> dict[str, str]:
    terms = ((f"{field_of(name)}.reward", terms_of(reward)) for name, reward in config.rewards.items())
    return dict(pair for field, own in terms for pair in _of_modules(field, (term.reward for term in own)))


def edited_rewards(run: RunDirectory, config: Config) -> list[str]:
    """Return a line for each imported module with a reward that is not the one that the run began with."""
    before = _read_digests(run) if run.inputs_path.exists() else {}
    edited = [name for name, digest in _of_rewards(config).items() if before.get(name, digest) != digest]
    return [f"{name}: not what this run began with" for name in edited]


def _of_model(field: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and digests of a model's small files, and of samples of its weights."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt", ".py") and path.is_file():
            yield f"{field} ({path.name})", _sha256(path.read_bytes())
    yield f"{field} (its weights)", str(base_digest(str(folder)))


def files_named(config: Config) -> dict[str, str]:
    """Return the values that may be paths, by their fields; a hub's model or a template's name is not there."""
    values = leaves(config.model_dump(include={"model", "task", "distillation", "sft"}))
    return {k: v for k, v in values.items() if v is not None and k.rpartition(".")[2] in FILE_FIELDS}


def file_digest(path: str) -> str:
    """Return a digest of a file of any size."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def write_digests(run: RunDirectory, digests: Mapping[str, str]) -> None:
    """Write the digests that later resumes are compared with."""
    write_text(run.inputs_path, json.dumps(digests, indent=1) + "\n")


def check_inputs(run: RunDirectory, digests: Mapping[str, str]) -> str | None:
    """Refuse to resume with other prompts, questions, rewards, tokenizers or models than the run began with.

    Returns:
        What to tell: an algorithm's own function was edited, which is allowed as its fields may change; or
        something could not be compared, because the run has no digest of it. None: nothing.

    Raises:
        RunError: names what was edited.
    """
    if not run.inputs_path.exists():
        return f"{run.inputs_path} is missing, so edits of the run's inputs were not looked for"
    before, fields = _read_digests(run), (MODEL, TINY, TEACHER, COLUMNS, FACTS)
    new = [field for field in fields if not any(name.startswith(f"{field} (") for name in before)]
    unknown = [name for name in digests if name.partition(" (")[0] in new]  # of a run of an earlier release
    edited = {name for name in {*before, *digests} - {*unknown} if before.get(name) != digests.get(name)}
    allowed = {name for name in edited if name.startswith(("algorithm.", "generator."))}
    if edited := edited - allowed:
        raise RunError(
            f"{'; '.join(sorted(edited))}: not what this run began with; undo the edit, or train a new run (to "
            f"continue with a harmless edit, remove {run.inputs_path})"
        )
    notes = [f"{run.inputs_path} has no digests of {name.partition(' (')[0]}" for name in unknown[:1]]
    both = sorted(allowed & before.keys() & digests.keys())
    return "; ".join([*notes, *(f"{name}: edited since the run was last started" for name in both)]) or None


def _read_digests(run: RunDirectory) -> dict[str, str]:
    try:
        return dict(json.loads(run.inputs_path.read_text(encoding="utf-8")).items())
    except (ValueError, AttributeError) as error:
        raise RunError(f"{run.inputs_path} is not readable ({error}); remove it to resume without it") from None


def _of_modules(field: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield names and digests of the modules of the user's own functions, which the checks have imported."""
    for name in sorted({name.partition(":")[0] for name in names if ":" in name}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            yield f"{field} (module {name}, {Path(file).name})", _sha256(Path(file).read_bytes())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
