"""Credentials in an environment: recognising variables that hold one, and leaving them out.

`run_without(COMMAND, ...)` becomes a command without credentials, for the scripts in launch/.
"""

import ctypes
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, NoReturn

from pydantic import AfterValidator

SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|WEBHOOK|CONN(?:ECTION)?_?STR|(?:API|ACCESS|PRIVATE)_?KEY|^AWS_"
    # A word that ends the name: OPENAI_KEY, OPENAI_KEY_2; but neither MONKEY nor KEYBOARD, PWD nor PATH.
    r"|(?:^|_)(?:KEY|PAT|PASS|DSN|JWT|AUTH|SAS)(?:_?\d+)?$|_PWD(?:_?\d+)?$"
    # No credential itself, but any process that reaches the agent's socket signs with the user's keys.
    r"|^SSH_AUTH_SOCK$",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(r"://[^/?#\s@]+@")  # a URL with user:password@, or with a token for a user

RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
# Not credentials: TOKENIZERS_PARALLELISM, TIKTOKEN_CACHE_DIR, HF_TOKEN_PATH, VLLM_MAX_BAD_WORDS_TOTAL_TOKENS,
# RAY_TLS_SERVER_KEY (a path, which Ray's processes need).
SETTING = re.compile(
    r"^TOKENIZERS_|^TIKTOKEN_|^RAY_TLS_|^HF_(?:HUB_DISABLE_IMPLICIT_TOKEN|\w*TOKENS?_PATH)$|^VLLM_(?!API_KEY)"
)
# Needed to fetch a gated model, including a proxy's password.
HUB_ACCESS = (
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy",
)  # fmt: skip

# Needed by a grading process to find Python, its libraries and the locale.
REWARD_VARIABLES = (
    "PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "PYTHONNOUSERSITE", "OMP_NUM_THREADS",
)  # fmt: skip


def is_secret(name: str, value: str) -> bool:
    """Return whether a variable looks like a credential, by its name or because its value is a URL with one."""
    if name in RAY_TOKEN:
        return False
    is_named_so = SECRET_NAME.search(name) and not SETTING.search(name)
    return bool(is_named_so or SECRET_VALUE.search(value))


def public_environment(environment: Mapping[str, str], keep: Collection[str] = ()) -> dict[str, str]:
    """Return `environment` without its secrets, except for those named in `keep`."""
    return {name: value for name, value in environment.items() if name in keep or not is_secret(name, value)}


def reward_environment(secrets: Collection[str] = ()) -> dict[str, str]:
    """Return the environment of a grading process: an allow-list, because it reads what a policy wrote.

    It has the secrets that a term of the reward lists.
    """
    allowed = {*REWARD_VARIABLES, *secrets}
    return {name: value for name, value in os.environ.items() if name in allowed or name.startswith("LC_")}


def _name_alone(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):  # it may be the key itself, so no message repeats it
        raise ValueError("give the name of the secret's environment variable, never its value")
    return name


SecretName = Annotated[str, AfterValidator(_name_alone)]


def check_set(names: Iterable[str], field: str) -> None:
    """Refuse the name of a secret that this process's environment lacks, by a ValueError of the field."""
    for name in names:
        if not os.environ.get(name):
            raise ValueError(
                f"{field}: {name} is not set; export it where the run is started, or omit its name"
            )


def values_of(names: Iterable[str]) -> dict[str, str]:
    """Return the named variables of this process's environment, for the actors that are to have them."""
    return {name: os.environ[name] for name in names if name in os.environ}


def keep_only(secrets: Mapping[str, str]) -> None:
    """Replace all credentials in this process's environment, Ray's token among them, by `secrets`.

    They are also overwritten in the memory that the process was started with, which /proc/PID/environ shows for
    as long as it lives. Libraries may hold copies elsewhere.
    """
    for name in [name for name, value in os.environ.items() if name in RAY_TOKEN or is_secret(name, value)]:
        del os.environ[name]
    address = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # env_start; 0: not known
    for entry in Path("/proc/self/environ").read_bytes().split(b"\0") if address else ():
        name, _, value = entry.decode(errors="replace").partition("=")
        if name in RAY_TOKEN or is_secret(name, value):
            ctypes.memset(address, 0, len(entry))
        address += len(entry) + 1
    os.environ.update(secrets)


def run_without(*command: str) -> NoReturn:
    """Replace this process by the command, with an environment without credentials."""
    os.execvpe(command[0], command, public_environment(os.environ))
