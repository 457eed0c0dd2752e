"""A configuration and a model small enough that every test takes a second or less, and one Ray to share.

Imports nothing heavy: the process that only hands out tests to the workers loads this module, too.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from process_census import CensusPlugin
from ray_nodes import ray_head, token_environment
from xdist.scheduler import LoadFileScheduling

from grpo_ray.config import Config
from grpo_ray.config.model import Implementation, TinyModelConfig
from grpo_ray.config.task import SortingTaskConfig
from grpo_ray.run.machine import let_waiting_threads_sleep
from grpo_ray.watch.clock import VirtualClock
from grpo_ray.watch.memory import imports_left_alone

gc.disable()  # until the tests are collected: its passes take a fifth of the time that imports need
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a hub
os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 would wait for whatever else the machine does
# Tests compute with one thread. Runs that they start and that ask for two must not spin while these wait for a
# core that another test has: a warm-up of 25 s took 195 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")
let_waiting_threads_sleep()


class Loggers(dict[str, Any]):
    """All loggers. pytest goes through them around each test, while threads of an earlier one may make more."""

    def values(self) -> Any:
        return list(super().values())


logging.root.manager.loggerDict = Loggers(logging.root.manager.loggerDict)

Joining = Callable[[], contextlib.AbstractContextManager[None]]
LONGEST = ("vllm", "ray", "slow")  # a file's first marker among these decides its place


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    settings.register_profile("no clock", deadline=None)  # no test fails because the machine is busy
    settings.load_profile("no clock")
    has_workers = bool(config.getoption("numprocesses", None)) and not hasattr(config, "workerinput")
    if "not campaign" in config.getoption("markexpr"):  # the campaign has no budget
        config.pluginmanager.register(CensusPlugin(counts_here=not has_workers))


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the files that take longest first, so that two workers end at about the same time."""
    leave_the_others_to_the_campaign(config, items)
    marked = {(item.path, marker.name) for item in items for marker in item.iter_markers()}
    files = {item.path for item in items}
    places = {
        file: next((place for place, name in enumerate(LONGEST) if (file, name) in marked), len(LONGEST))
        for file in files
    }
    items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, object, object]:
    gc.enable()
    with imports_left_alone():
        return (yield)


def leave_the_others_to_the_campaign(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark each case that the mark `kept` of its test does not name.

    Args:
        items: all that was collected, before any is deselected.

    Raises:
        pytest.UsageError: a test lacks a case that its mark names. If it was renamed, it would be left to the
            campaign without a word.
    """
    kept: dict[str, Sequence[str]] = {}
    cases: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("kept")
        if mark is not None:
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            kept[test] = mark.args
            cases.setdefault(test, set()).add(case)
            if case not in mark.args:
                item.add_marker(pytest.mark.campaign)
    if config.getoption("lf", False) or any("[" in arg for arg in config.args):
        return  # single cases were collected
    for test, names in kept.items():
        if missing := set(names) - cases[test]:
            problem = f"{test} is to keep {sorted(missing)}, and its cases are {sorted(cases[test])}"
            items[0].session.shouldfail = problem  # pytest-xdist shows this of a worker, and loses the error
            raise pytest.UsageError(problem)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own, in real or virtual time."""
    test, values = pyfuncitem.obj, pyfuncitem.funcargs
    if not inspect.iscoroutinefunction(test):
        return None
    run = VirtualClock().run if pyfuncitem.get_closest_marker("virtual_time") else asyncio.run
    run(test(**{name: values[name] for name in inspect.signature(test).parameters}))
    return True


class ByFile(LoadFileScheduling):
    """A file's tests go to one worker; so do all files that share a Ray, and all that import vLLM, for 14 s."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return _shared(file) or file


SHARED = {
    "one Ray": r"shared_ray|joining_ray",
    "one vLLM": r'importorskip\("vllm"\)|import vllm_worker|marks=pytest\.mark\.vllm',
}


@functools.cache
def _shared(file: str) -> str | None:
    text = (Path(__file__).parents[1] / file).read_text()
    return next((name for name, words in SHARED.items() if re.search(words, text)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


PACKAGED = {"make environments": ("could not import",), "make system-packages": ("Chromium", "prometheus")}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how to get what was skipped."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    for command, words in PACKAGED.items():
        if skipped := [reason for reason in reasons if any(word in reason for word in words)]:
            terminalreporter.write_line(f"{len(skipped)} tests were skipped; for what they need: {command}")


@pytest.fixture(scope="session")
def joining_ray() -> Iterator[Joining]:
    """`with joining_ray():` makes runs that start inside it join one Ray, which the tests of a worker share."""
    paths = [str(Path(__file__).parent), os.getcwd()]  # of the modules that tests name in configurations
    environment = {**token_environment(), "PYTHONPATH": os.pathsep.join(paths)}

    @contextlib.contextmanager
    def joining() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", address)
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                patch.setenv(name, environment[name])
            _read_environment_again()
            yield
        _read_environment_again()

    with ray_head(environment, "--num-cpus=16", "--num-gpus=4", "--include-dashboard=false") as (_, address):
        yield joining


def _read_environment_again() -> None:
    """Make Ray see a changed environment: it reads how to authenticate once, as it is imported."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@pytest.fixture
def shared_ray(joining_ray: Joining) -> Iterator[None]:
    """Runs that the test starts join the shared Ray."""
    with joining_ray():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `tmp_path` the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_module(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a current folder with a module of the user's own in it: the test file's `MODULE`, of its `CODE`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / f"{request.module.MODULE}.py").write_text(request.module.CODE)


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Return the `RunDirectory` of a run that does not exist yet."""
    from grpo_ray.records.run_files import RunDirectory

    return RunDirectory(tmp_path / "run")


@pytest.fixture
def tiny_config() -> Config:
    return Config.model_validate(
        {
            "model": {"tiny": {}, "dtype": "float32"},
            "task": {"kind": "sorting"},
            "sampling": {"min_tokens": 2, "max_tokens": 16},
            "algorithm": {"num_steps": 2, "prompts_per_step": 3, "samples_per_prompt": 4},
            "generator": {"engine": "torch", "num_gpus": 0, "max_num_seqs": 64},
            "learner": {"num_gpus": 0, "micro_batch_tokens": 64},
        }
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(tied=True, hidden_size=32, own=False)`: the folder of a random 2-layer model with tokenizer.

    The model is a Qwen2, or with `own` a TransformerLM.
    """
    folders: dict[tuple[bool, int, bool], Path] = {}

    def folder(tied: bool = True, hidden_size: int = 32, own: bool = False) -> Path:
        key = (tied, hidden_size, own)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(f"tiny-{'tied' if tied else 'untied'}-{hidden_size}")
            _write_model(folders[key], tied, hidden_size, "grpo_ray" if own else "transformers")
        return folders[key]

    return folder


def _write_model(folder: Path, tied: bool, hidden_size: int, implementation: Implementation) -> None:
    from builders import perturb

    from grpo_ray.learning.tiny_tokenizer import train_tokenizer
    from grpo_ray.run.tiny_model import build_model
    from grpo_ray.tasks.sorting import warmup_pairs

    pairs = warmup_pairs(SortingTaskConfig(), seed=0, num_pairs=300)
    tokenizer = train_tokenizer((prompt + response for prompt, response in pairs), vocab_size=300)
    shape = TinyModelConfig(
        hidden_size=hidden_size, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=2 * hidden_size,
        vocab_size=300, max_position_embeddings=512, tie_embeddings=tied, warmup=None,
    )  # fmt: skip
    model = build_model(shape, tokenizer, 0, implementation)
    perturb(model, seed=0, scale=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture
def copied_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners copy a model that another has read from the same folder; its files must not change."""
    from grpo_ray.core import learner

    load = learner.load_trained
    monkeypatch.setattr(learner, "load_trained", lambda *args: copy.deepcopy(_read(load, *args)))


_read = functools.cache(lambda load, *args: load(*args))


@pytest.fixture
def make_learner(
    request: pytest.FixtureRequest, tiny_config: Config, tiny_model: Callable[..., Path], copied_models: None
) -> Callable[..., Any]:
    """Return `make_learner(tied=True, family="transformers", checkpoint=None, learner={...}, ...)`.

    Sections change the tiny configuration, those of the test file's `SECTIONS` first.
    """
    from builders import ENDS, changed

    from grpo_ray.core.learner import Learner

    config = changed(tiny_config, **getattr(request.module, "SECTIONS", {}))

    def make(
        tied: bool = True, family: str = "transformers", checkpoint: Path | None = None,
        **sections: dict[str, Any],
    ) -> Learner:  # fmt: skip
        own = changed(changed(config, model={"implementation": family}), **sections)
        width = 64 if own.model.base_quantization == "nf4" else 32  # rows of whole blocks, which are quantized
        base = tiny_model(tied, width, own=family == "grpo_ray")
        if checkpoint is None:
            return Learner(str(base), own, ENDS)
        path = checkpoint if own.model.adapter is None else base
        return Learner(str(path), own, ENDS, checkpoint / "training")

    return make


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Path]) -> Path:
    """The folder of a random Qwen3-MoE with tokenizer: 2 layers of 4 experts, of which a token takes 2.

    The output layer has weights of its own.
    """
    import torch
    from builders import perturb
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from grpo_ray.learning.model_files import load_tokenizer

    folder = tmp_path_factory.mktemp("tiny-moe")
    tokenizer = load_tokenizer(str(tiny_model()))
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, intermediate_size=96, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    perturb(model, seed=0, scale=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A model cache of the file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RAY_CACHE", str(tmp_path_factory.mktemp("models")))
        yield


@pytest.fixture(scope="module")
def profiling_script() -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that imports a script of profiling/, with its folder on the path as when it runs."""
    profiling = Path(__file__).parents[1] / "profiling"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(profiling))
        yield importlib.import_module


@pytest.fixture
def any_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward that a random model earns sometimes, so that every step has a gradient."""
    from any_reward_cli import patch_graders

    patch_graders(monkeypatch)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No reward is tried before a run: that starts the same processes as the run."""
    from any_reward_cli import ParityGrader

    monkeypatch.setattr("grpo_ray.rewards.trial.Grader", ParityGrader)


@pytest.fixture
def environments_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Write the files of docs/environments.md into the current folder; return an importer of its modules."""
    text = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    for kind, name, body in re.findall(r"```(\w+)\n# (\S+)\n(.*?)```", text, re.S):
        assert name.endswith({"python": ".py", "yaml": ".yaml"}[kind])
        (tmp_path / name).write_text(body)
    shutil.copytree(Path(__file__).parents[1] / "examples/own_environment", tmp_path, dirs_exist_ok=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {path.stem for path in tmp_path.glob("*.py")}
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module
