"""The base class of every section of the configuration, and the types that their fields share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]  # Python's own waits refuse centuries
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9)]
GroupSize = Annotated[int, Field(ge=1, le=16_384)]  # as many as vLLM draws in one request
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def checked(fault: Callable[[Any], str | None]) -> AfterValidator:
    """Return the check of a value by a function that says what is wrong with it; None: nothing."""

    def check(value: Any) -> Any:
        if (text := fault(value)) is not None:
            raise ValueError(text)
        return value

    return AfterValidator(check)


def not_empty(problem: str) -> AfterValidator:
    """Return the check of a list, with the error of an empty one."""
    return checked(lambda values: problem if values == () else None)


Cores = Annotated[
    tuple[NonNegativeInt, ...] | None,
    not_empty("an empty list leaves no core to run on; name at least one, or give null for any"),
]
"""Processor cores by their numbers; null means any."""


def _at_home(path: str) -> str:
    try:
        return str(Path(path).expanduser()) if path[:1] == "~" else path
    except RuntimeError:
        raise ValueError(f"there is no home folder of {Path(path).parts[0]!r}; write the path out") from None


def _form(value: Any) -> str | None:
    if isinstance(value, str):
        return "name"
    return "list" if isinstance(value, list | tuple) else None


NAME_OR_LIST = Discriminator(
    _form, custom_error_type="name_or_list", custom_error_message="neither a name nor a list"
)
"""The form that was meant, by the tags `name` and `list`, so that errors concern that form alone."""

Name = Annotated[str, checked(lambda text: "a path cannot contain a null character" if "\0" in text else None)]
"""A part of a path."""
HomePath = Annotated[Name, AfterValidator(_at_home)]
"""A path, or another name; `~` is written out."""


def _parts_of(annotation: Any) -> Iterator[Any]:
    """Yield the types that make up an annotation, at every depth."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts_of(part)


class Section(BaseModel):
    """One level of the tree: immutable, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_yes_as_a_number(cls, given: Any) -> Any:
        """Refuse `yes`, which pydantic takes for 1."""
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            kinds = set(_parts_of(field.annotation)) if field and isinstance(value, bool) else set()
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} is {'yes' if value else 'no'}, which is not a number")
        return given

    def _conflicts(self) -> Iterator[str]:
        """Yield what is wrong with values that are valid one by one; the first is reported, and ends it."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self
