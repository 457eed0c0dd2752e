"""The base class of every section of the configuration, and the types that their fields share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


def _some_cores(cores: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if cores == ():
        raise ValueError("an empty list leaves no core to run on; name at least one, or give null for any")
    return cores


Cores = Annotated[tuple[NonNegativeInt, ...] | None, AfterValidator(_some_cores)]
"""Processor cores by their numbers; null means any."""
HomePath = Annotated[
    str, AfterValidator(lambda path: str(Path(path).expanduser()) if path[:1] == "~" else path)
]
"""A path, or another name; `~` is written out."""


class Section(BaseModel):
    """One level of the tree: immutable, and unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, validate_default=True
    )

    def _conflicts(self) -> Iterator[str]:
        """Yield what is wrong with values that are valid one by one; the first is reported, and ends it."""
        yield from ()

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self
