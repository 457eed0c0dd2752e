"""Queries on the configuration's tree for its error messages: the keys and values that it allows.

Everything is read from the pydantic models, so a new field needs no line here. Names of other libraries, for
users who type them, are listed at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from difflib import SequenceMatcher, get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Tag
from pydantic.fields import FieldInfo

from grpo_ray.config import Config
from grpo_ray.config.section import Section

BOUND_SIGNS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}
UNIONS = (Union, UnionType)
TYPE_NAMES = {
    float: "number",
    int: "integer",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "any value",
}


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """Return the name in `names` that `name` probably misspells, if there is one."""
    matches = get_close_matches(name, names, n=1, cutoff=0.6)
    return matches[0] if matches else None


def nearest_keys(path: str, siblings: Sequence[str]) -> list[str]:
    """Return at most three dotted keys of the whole tree that `path` probably misspells, the nearest first.

    A key of the right name in another section is one; a deeper one counts less, one of the same section more.
    `siblings` are the keys that exist beside `path`: those of its section's kind, if there are several kinds.
    """
    parent, _, name = path.rpartition(".")
    beside = [f"{parent}.{sibling}".lstrip(".") for sibling in siblings]
    keys = list(dict.fromkeys(_keys(Config)))
    if path in keys:  # of another kind
        return []
    others = [key for key in keys if key.rpartition(".")[0] != parent]
    nearness = {}
    for key in (*beside, *others):
        alike = SequenceMatcher(None, name, key.rpartition(".")[2]).ratio()
        if alike > (0.65 if key in beside else 0.75):
            nearness[key] = alike + (0.2 if key in beside else -0.1 * key.count("."))
    near = [key for key, value in nearness.items() if value > max(nearness.values()) - 0.15]
    return sorted(near, key=lambda key: -nearness[key])[:3]


def key_meant(path: str) -> str | None:
    """Return the dotted key that `path`, or its name alone, is or probably means."""
    keys, (parent, _, name) = list(_keys(Config)), path.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    meant = [path] if path in keys else (other_name(name) or nearest_keys(path, siblings))
    return meant[0] if meant else None


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every key below a section; of a list or a mapping of names, only its own."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for inner in sections_of(field.annotation):
            yield from _keys(inner, f"{prefix}{name}.")


def resolve(location: Sequence[int | str]) -> tuple[str, Any]:
    """Return the dotted path of a pydantic error location, and the annotation found there (None: no such key).

    pydantic inserts the tag of a discriminated union into the location, although the user did not write it:
    `("task", "sorting", "num_digits")` is `task.num_digits`.
    """
    path = ""
    annotation: Any = Config
    for part in location:
        if (chosen := _tagged(annotation, part)) is not None:
            annotation = chosen
            continue
        annotation = _part(annotation, part)
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path, annotation


def describe(annotation: Any) -> str:
    """Describe the values that an annotation allows: `number >= 0`, `sequence_mean, token_mean or constant`."""
    if annotation in TYPE_NAMES:
        return TYPE_NAMES[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if (sections := sections_of(annotation)) and NoneType not in arguments:
        if len(sections) > 1:
            return f"a mapping of kind ({', '.join(map(kind_of, sections))}) and the fields of that kind"
        return f"a mapping of {', '.join(sections[0].model_fields)}"
    if origin is Annotated:
        bounds = _bounds(arguments[1:])
        return f"{describe(arguments[0])} {' and '.join(bounds)}" if bounds else describe(arguments[0])
    if origin is Literal:
        return either([str(value) for value in arguments])
    if origin in UNIONS:
        return either([describe(argument) for argument in arguments])
    if origin is dict:
        return f"a mapping of names, each to {describe(arguments[1])}"
    if origin is tuple and arguments[-1] is Ellipsis:
        return f"a list, each element {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(describe(argument) for argument in arguments)}"
    return str(annotation)


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, also of one that is annotated or in another; or the annotation alone."""
    inner = _bare(annotation)
    if get_origin(inner) not in UNIONS:
        return (annotation,)
    return tuple(each for one in get_args(inner) for each in alternatives(one))


def sections_of(annotation: Any) -> tuple[type[Section], ...]:
    """Return the sections among an annotation's alternatives."""
    found = map(_bare, alternatives(annotation))
    return tuple(one for one in found if isinstance(one, type) and issubclass(one, Section))


def kind_of(section: type[Section]) -> str:
    """Return the kind that tells this section from the others of its union."""
    kind: str = section.model_fields["kind"].default
    return kind


def _bare(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _tagged(annotation: Any, tag: int | str) -> Any:
    """Return the alternative that pydantic's tag in a location stands for; None if the part is no tag.

    A single section has no tag: the part is one of its keys.
    """
    sections = sections_of(annotation)
    if len(sections) > 1:
        return next((section for section in sections if kind_of(section) == tag), None)
    tagged = (one for one in alternatives(annotation) if Tag(str(tag)) in getattr(one, "__metadata__", ()))
    return next(tagged, None)


def _part(annotation: Any, part: int | str) -> Any:
    """Return the annotation of an element, a section's field with its constraints, or a mapping's value."""
    for one in map(_bare, alternatives(annotation)):
        origin, arguments = get_origin(one), get_args(one)
        if origin is dict:  # all names of a mapping share one annotation
            return arguments[1]
        if origin is tuple and isinstance(part, int):
            return arguments[0] if arguments[-1] is Ellipsis else arguments[min(part, len(arguments) - 1)]
        field = one.model_fields.get(part) if one in sections_of(one) else None
        if field is not None:  # pydantic stores its constraints separately
            return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return None


def _bounds(metadata: Sequence[Any]) -> list[str]:
    """Return `>= 0` for `Ge(0)`, also where it is wrapped in pydantic's `Field(ge=0)`."""
    bounds = []
    for item in metadata:
        if isinstance(item, FieldInfo):
            bounds += _bounds(item.metadata)
        elif type(item) in BOUND_SIGNS:
            sign, attribute = BOUND_SIGNS[type(item)]
            bounds.append(f"{sign} {getattr(item, attribute)}")
    return bounds


def either(words: Sequence[str]) -> str:
    """Return `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a dumped configuration's values by dotted path."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


# ---- pydantic's errors ----


def explained(detail: Mapping[str, Any]) -> str:
    """Return one line for one of pydantic's errors: the path, the given value and the allowed values."""
    kind, location, value = detail["type"], detail["loc"], detail["input"]
    path, annotation = resolve(location)
    if kind in ("extra_forbidden", "invalid_key"):
        return _explain_unknown_key(location)
    if kind == "value_error":
        return f"{path or 'configuration'}: {detail['ctx']['error']}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = ", ".join(map(kind_of, sections_of(annotation)))
        given = f"{value['kind']!r} is not valid" if kind == "union_tag_invalid" else "required, but not given"
        return f"{path}.kind: {given}; allowed: {kinds}"
    if location[-1] == "[key]":
        return f"{path}: the name {value!r} is not text; put it in quotes"
    if kind == "missing":
        return f"{path}: required, but not given; allowed: {describe(annotation)}"
    is_text = kind == "string_type" and isinstance(value, bool | int | float | date)
    remedy = "; to give it as text, put it in quotes" if is_text else ""
    return f"{path}: {value!r:.200} is not valid; allowed: {describe(annotation)}{remedy}"


MANY_KEYS = 12  # too many to list in a message


def _explain_unknown_key(location: Sequence[int | str]) -> str:
    path, _ = resolve([*location[:-1], str(location[-1])])
    _, section = resolve(location[:-1])
    names = [name for candidate in sections_of(section) for name in candidate.model_fields]
    if (other := other_name(str(location[-1]))) is not None:
        return f"{path}: unknown key; {other[1]}"
    hint = (
        f"allowed: {', '.join(names)}" if len(names) <= MANY_KEYS else "docs/configuration.md lists every key"
    )
    nearest = nearest_keys(path, names)
    return f"{path}: unknown key; {f'did you mean {either(nearest)}?' if nearest else hint}"


SWITCHES = {
    "algorithm.entropy_target": ("algorithm.entropy_step", "algorithm.entropy_bonus_max"),
    "algorithm.kl.coefficient": ("algorithm.kl.estimator",),
    "algorithm.overlong_buffer_tokens": ("algorithm.overlong_penalty",),
    "buffer.replay.frac": ("buffer.replay.",),
    "distillation.teacher": ("distillation.coefficient", "distillation.max_gap", "distillation.use_reward"),
}
"""Keys, each with those (or their beginnings) that nothing reads while it has its default value."""


def idle_keys(config: Config) -> tuple[str, ...]:
    """Return a notice for each key that was changed although nothing reads it."""
    changed = leaves(config.model_dump(exclude_defaults=True))
    unread = {switch: keys for switch, keys in SWITCHES.items() if switch not in changed}
    if config.algorithm.kl.reference != "ema":
        unread["algorithm.kl.reference: ema"] = ("algorithm.kl.ema_decay",)
    if not config.episode_tasks:
        unread["task.kind: episodes"] = ("episodes.",)
    idle = [(key, switch) for switch, keys in unread.items() for key in changed if key.startswith(keys)]
    return tuple(f"{key} has no effect without {switch}" for key, switch in idle)


TRL = {  # of 1.16.0: GRPOConfig and GRPOTrainer
    "max_steps": "algorithm.num_steps", "num_generations": "algorithm.samples_per_prompt",
    "per_device_train_batch_size": "algorithm.prompts_per_step, groups over all devices",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "task.max_prompt_tokens, with task.long_prompts",
    "lr_scheduler_type": "learner.lr_schedule", "warmup_ratio": "learner.warmup_steps, a number of steps",
    "adam_beta1": "learner.betas, a list of two", "adam_beta2": "learner.betas, a list of two",
    "beta": "algorithm.kl.coefficient, with algorithm.kl.reference: initial and "
    "algorithm.kl.estimator: unbiased",
    "use_bias_correction_kl": "algorithm.kl.estimator (unbiased for True, k3 for False)",
    "epsilon": "algorithm.cliprange (none for cispo)", "delta": "algorithm.dual_clip",
    "epsilon_high": "algorithm.cliprange_high (for cispo TRL's value minus 1)",
    "num_iterations": "algorithm.epochs_per_batch",
    "num_train_epochs": "algorithm.num_steps, a number of steps",
    "generation_batch_size": "algorithm.prompts_per_step, groups instead of completions",
    "steps_per_generation": "algorithm.train_batch_size, responses per update",
    "gradient_accumulation_steps": "algorithm.train_batch_size, responses per update",
    "num_generations_eval": "evaluation.samples_per_prompt", "entropy_coef": "algorithm.entropy_bonus",
    "top_k": "sampling.top_p, as there is no top_k",
    "top_entropy_quantile": "algorithm.token_selection: top_entropy",
    "vllm_importance_sampling_mode": "algorithm.off_policy_correction",
    "vllm_importance_sampling_clip_max": "algorithm.correction_cap",
    "off_policy_mask_threshold": "algorithm.off_policy_correction: opsm",
    "multi_objective_aggregation": "algorithm.advantage: gdpo, for normalize_then_sum",
    "sync_ref_model": "algorithm.kl.reference: ema, or algorithm.kl.refresh_every_num_steps",
    "vllm_tensor_parallel_size": "generator.num_gpus", "max_staleness": "weight_sync.max_lag",
    "eval_strategy": "evaluation.every_num_steps",
    "scale_rewards": "algorithm.advantage (mean_std, or mean for False), with algorithm.advantage_scale: "
    "batch",
    "loss_type": "algorithm.aggregation (sequence_mean for grpo, token_mean for dapo and bnpo, "
    "constant for dr_grpo), or algorithm.loss: cispo, sapo, luspo, vespo",
    "importance_sampling_level": "algorithm.loss (gspo for sequence, with algorithm.cliprange and "
    "algorithm.aggregation, of which gspo has defaults of its own)",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "reward_funcs": "task.reward, a name, module:function or a list of terms",
    "reward_weights": "task.reward, a list of {reward, weight}", "vllm_mode": "generator.colocated",
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization", "peft_config": "model.adapter",
    "environment_factory": "task.kind: episodes, with trl_episode (docs/environments.md)",
    "report_to": "tracking.trackers", "eval_steps": "evaluation.every_num_steps",
    "save_steps": "checkpoint.every_num_steps", "save_total_limit": "checkpoint.keep",
}  # fmt: skip
OTHER_NAMES = {"TRL": TRL, "torch": {"lr": "learner.learning_rate", "eps": "learner.adam_eps"}}
"""The keys that other libraries' names mean, by library, each with what else to know."""


def other_name(name: str) -> tuple[str, str] | None:
    """Return the key that another library's name means, and an explanation; None for a name of no library."""
    for library, names in OTHER_NAMES.items():
        if name in names:
            return names[name].split()[0].rstrip(",:"), f"{library}'s {name} is {names[name]}"
    return None
