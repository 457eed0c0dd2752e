"""The files that Ray takes from a working directory, and credentials among them, which are not uploaded."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from pathspec import GitIgnoreSpec

# As in a .gitignore, and in lower case; capitals are recognised, too.
CREDENTIALS = (
    ".ssh/", ".gnupg/", ".aws/", ".azure/", ".oci/", ".kube/", ".kaggle/", ".huggingface/", ".terraform.d/",
    "**/.config/gcloud/", "**/.config/gh/", "**/.docker/config.json", "**/huggingface/token",
    "**/huggingface/stored_tokens",
    ".env*", "*.env", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".yarnrc*", ".pypirc", ".pgpass",
    ".my.cnf", ".s3cfg", ".boto", ".dockercfg", ".vault-token", ".databrickscfg", ".htpasswd",
    "auth_token", ".auth_token",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
    "*.pem", "*.key", "*.p8", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.ppk", "*.kdbx", "*.keytab",
    "*credentials*.json", "service-account*.json", "service_account*.json", "client_secret*.json",
    "kubeconfig", "kaggle.json", "secrets.json", "secrets.toml", "secrets.yaml", "secrets.yml",
)  # fmt: skip

HEAD_BYTES = 64 * 2**10
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]*PRIVATE KEY|^PuTTY-User-Key-File-|^AGE-SECRET-KEY-1", re.M)
CLOUD_ACCOUNT = re.compile(rb'"type"\s*:\s*"(?:service_account|authorized_user)"')
ITS_SECRET = re.compile(rb'"(?:private_key|refresh_token)"\s*:')


def uploaded_files(folder: Path, excludes: Sequence[str]) -> dict[Path, int]:
    """Return the files that Ray uploads from the folder, with their sizes; it does not compress them.

    What stays is in `excludes`, and in each folder's .gitignore and .rayignore.
    """
    names = [".gitignore", ".rayignore"]
    if os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE") == "1":  # as Ray's client decides
        names.remove(".gitignore")
    sizes: dict[Path, int] = {}

    def walk(inner: Path, lists: list[tuple[Path, GitIgnoreSpec]]) -> None:
        found = [inner / name for name in names if (inner / name).is_file()]
        texts = [path.read_text("utf-8", "replace") for path in found]
        lists = [*lists, *((inner, GitIgnoreSpec.from_lines(text.splitlines())) for text in texts)]
        for path in inner.iterdir():
            if any(spec.match_file(path.relative_to(root).as_posix()) for root, spec in lists):
                continue
            if path.is_dir():
                walk(path, lists)
            elif path.is_file():
                sizes[path] = path.stat().st_size

    walk(folder, [(folder, GitIgnoreSpec.from_lines(excludes))])
    return sizes


def find_credentials(folder: Path, excludes: Sequence[str]) -> list[Path]:
    """Return the files that would be uploaded and look like credentials, relative to the folder and sorted.

    Args:
        excludes: the patterns of what is not uploaded anyway.
    """
    named = GitIgnoreSpec.from_lines(CREDENTIALS)
    return sorted(
        file.relative_to(folder)
        for file in uploaded_files(folder, excludes)
        if named.match_file(file.relative_to(folder).as_posix().lower()) or holds_credential(file)
    )


def holds_credential(file: Path) -> bool:
    """Return True for a private key, whatever its name, and for a Google account's key.

    A source or a page that quotes such a key is none: a file of keys begins with one, or with a certificate.
    """
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except OSError:  # neither can Ray read it
        return False
    if head.startswith((b"-----BEGIN ", b"Bag Attributes", b"PuTTY-", b"AGE-SECRET-", b"# created: ")):
        return bool(PRIVATE_KEY.search(head))
    return head.startswith(b"{") and bool(CLOUD_ACCOUNT.search(head) and ITS_SECRET.search(head))


def exact_pattern(file: Path) -> str:
    """Return a pattern that matches the file; a character with a meaning in patterns is left open."""
    return "/" + re.sub(r"[\\*?\[\]\s]", "?", file.as_posix())
