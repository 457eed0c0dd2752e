"""Packages of environments, which only their adapters need."""

import importlib
from typing import Any


def required(module: str, by: str = "this episode") -> Any:
    """Return the module.

    Args:
        by: the field or part that needs it, for the message.

    Raises:
        ImportError: it cannot be imported; names the file of requirements to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{by} needs {module}, which cannot be imported ({error}); install "
            "requirements/environments.txt: `make environments`, or `pip install --no-deps -r` that file"
        ) from error
