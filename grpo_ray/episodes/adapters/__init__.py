"""Episode functions made of other packages' environments; each package is imported when it is first needed.

gymnasium.py     an environment of Gymnasium: observations as messages, replies as actions
trl.py           an environment class as TRL's GRPOTrainer takes it: its methods are tools
verifiers.py     an environment of verifiers, over the session's URL; verifiers_chat.py: its plain chat loop
rehearsal.py     warm-up pairs for a tiny model, from episodes that a script plays
"""

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
