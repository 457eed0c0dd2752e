"""Calls that the source must not contain, credentials in the environment, and the folder of a run's own Ray."""

import ast
import os
import stat
import tempfile
from pathlib import Path

import pytest
from run_process import output_of

from grpo_ray.cluster import session
from grpo_ray.config import secrets as config_secrets
from grpo_ray.errors import RunError

PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLING_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "broadcast_obj", "all_gather_obj", "send_obj", "recv_obj", "StatelessProcessGroup",
    "async_save",
}  # fmt: skip
RUN_CODE = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
RUN_CODE |= {"yaml.unsafe_load", "yaml.full_load", "yaml.load_all"}
OPTIONS = ("Loader", "storage_reader", "no_dist", "shell", "allow_pickle", "trust_remote_code")


def problems_in(source: str) -> list[str]:
    """Find what could run foreign code, by the syntax tree, so that comments do not count."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    found = sorted({name.split(".")[0] for name in imported} & PICKLES)
    safe_loaders = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef) and "yaml.SafeLoader" in map(ast.unparse, node.bases)
    } | {"yaml.SafeLoader", "yaml.CSafeLoader"}
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        options = {each.arg: ast.unparse(each.value) for each in call.keywords if each.arg in OPTIONS}
        if name in RUN_CODE or name.split(".")[-1] in PICKLING_COLLECTIVES:
            found.append(name)
        if name == "yaml.load" and options.get("Loader") not in safe_loaders:
            found.append(name)
        if name == "load" and "storage_reader" in options and options.get("no_dist") != "True":
            found.append(f"{name}(no_dist=...)")  # its ranks send each other plans as pickles
        for option in {"shell", "allow_pickle"} & options.keys():
            if options[option] != "False":
                found.append(f"{name}({option}=...)")
        if options.get("trust_remote_code") == "True":
            found.append(f"{name}(trust_remote_code=True)")
        takes_it = (name.startswith("Auto") and name.endswith(".from_pretrained")) or name == "AsyncEngineArgs"
        if takes_it and "trust_remote_code" not in options:
            found.append(f"{name} without trust_remote_code")
    return found


def test_no_source_runs_foreign_code():
    found = {str(path): problems_in(path.read_text()) for path in Path("grpo_ray").rglob("*.py")}
    # It pickles the caller's own reward; the module that unpickles it is code of the run's, like `task.reward`.
    assert found.pop("grpo_ray/config/user_code.py") == ["cloudpickle"]
    assert {path: problems for path, problems in found.items() if problems} == {}


def test_the_search_finds_what_it_is_for():
    for source in [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text)",
        "eval(text)",
        "exec(text)",
        "subprocess.run(text, shell=True)",
        "np.load(path, allow_pickle=True)",
        "dist.all_gather_object(values, value)",
        "load(tensors, storage_reader=reader)",
        "AutoTokenizer.from_pretrained(path)",
        "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True)",
    ]:
        assert len(problems_in(source)) == 1, source
    harmless = "model.eval()  # eval(x)\nclass L(yaml.SafeLoader): pass\nyaml.load(text, Loader=L)"
    assert problems_in(harmless) == []


NAMES = """
HF_TOKEN github_token WANDB_API_KEY VLLM_API_KEY DB_PASSWORD MYSQL_PASSWD CLIENT_SECRET AWS_PROFILE
GOOGLE_APPLICATION_CREDENTIALS SOME_ACCESS_KEY GITHUB_PAT OPENAI_KEY OPENAI_KEY_2 MYSQL_PWD DB_PASS DB_DSN
AZURE_STORAGE_CONNECTION_STRING SQLCONNSTR_MAIN STORAGE_SAS NPM_AUTH SERVICE_JWT
"""
CREDENTIALS = {
    **dict.fromkeys(NAMES.split(), "x"),
    "PIP_INDEX_URL": "https://me:word@index.example/simple",
    "REMOTE": "https://word@git.example",
    "SLACK_WEBHOOK_URL": "https://hooks.example/x",
    "SSH_AUTH_SOCK": "/tmp/ssh-x/agent.1",
}


def test_what_looks_like_a_credential_is_hidden_and_put_back(monkeypatch):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with session.without_secrets(keep=("HF_TOKEN",)):
        assert CREDENTIALS.keys() & os.environ.keys() == {"HF_TOKEN"}
        child = output_of("env")
        assert CREDENTIALS.keys() & {line.partition("=")[0] for line in child.splitlines()} == {"HF_TOKEN"}
    with pytest.raises(RuntimeError), session.without_secrets():
        raise RuntimeError
    assert CREDENTIALS.items() <= os.environ.items()


SETTINGS = """
RAY_AUTH_TOKEN=x RAY_AUTH_TOKEN_PATH=x HF_TOKEN_PATH=/a/file TOKENIZERS_PARALLELISM=false
VLLM_MAX_BAD_WORDS_TOTAL_TOKENS=5 HTTPS_PROXY=http://proxy.example:3128 PATH=/bin MAIL=me@mail.example
PWD=/home/me OLDPWD=/home/me KEYBOARD=us MONKEY=x PATIENCE=3 RAY_AUTH_MODE=token TIKTOKEN_CACHE_DIR=/a/folder
RAY_TLS_SERVER_KEY=/etc/ray/tls.key LD_LIBRARY_PATH=/lib XDG_RUNTIME_DIR=/run/user/0 CUDA_VISIBLE_DEVICES=0
"""


def test_settings_stay():
    pairs = [setting.partition("=")[::2] for setting in SETTINGS.split()]
    assert [name for name, value in pairs if config_secrets.is_secret(name, value)] == []


def test_a_ray_folder_that_others_can_enter_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RunError, match="Ray's sockets allow 39: set a shorter TMPDIR"):
        session.private_ray_folder()
    monkeypatch.setattr(session, "LONGEST_FOLDER", 1000)
    folder = Path(session.private_ray_folder()).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert session.private_ray_folder() == str(folder / "ray")
    folder.chmod(0o755)
    with pytest.raises(RunError, match="only you can enter"):
        session.private_ray_folder()
    folder.rmdir()
    for occupy in (lambda: folder.symlink_to(tmp_path), lambda: folder.symlink_to("nowhere"), folder.touch):
        occupy()
        with pytest.raises(RunError, match="only you can enter"):
            session.private_ray_folder()
        folder.unlink()
