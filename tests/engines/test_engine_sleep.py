"""vLLM's sleep in a colocated run, with an engine that records what it is asked: no GPU is needed."""

import asyncio
import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from small_run import QUICKSTART

from grpo_ray import engines
from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.sampling import DECIDED
from grpo_ray.engines import check_engine_args, vllm_engine
from grpo_ray.engines.base import EngineDied
from grpo_ray.engines.vllm_engine import VllmEngine, _set_environment
from grpo_ray.run.preparation import check_files
from grpo_ray.tools.cli import main


@pytest.fixture
def engine() -> VllmEngine:
    engine = VllmEngine.__new__(VllmEngine)
    engine._llm, engine._resumed = AsyncMock(), asyncio.Event()
    engine._sleeps, engine._lacks_cache, engine._num_pauses = True, False, 0
    return engine


async def test_weights_wake_for_the_sync_and_the_cache_after_it_if_it_is_colocated(engine: VllmEngine) -> None:
    asked: Any = engine._llm
    for is_colocated in (False, True):
        assert asked.mock_calls == []
        engine._sleeps = is_colocated
        await engine.sleep()
        await engine.wake()
    await engine.pause()
    await engine.resume()
    await engine.pause()
    await engine.resume()  # of another sync in the same turn
    pause = "engine_core.pause_scheduler_async keep False"
    woken = ["sleep 2", "wake_up ['weights']", pause, "wake_up ['kv_cache']", "resume_generation"]
    calls = [" ".join(map(str, [name, *args, *named.values()])) for name, args, named in asked.mock_calls]
    assert calls == [*woken, pause, "resume_generation"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", Mock(side_effect=OSError("Cannot allocate memory")))
    with pytest.raises(RuntimeError, match="no room to fork vLLM's engine"):
        vllm_engine._EngineProcess(target=print).start()


async def test_calls_end_with_an_engine_that_dies_within_them() -> None:
    llm = SimpleNamespace(errored=False, engine_core=SimpleNamespace(_call_utility_async=asyncio.sleep))
    vllm_engine._end_calls_at_death(llm)
    assert await llm.engine_core._call_utility_async(0.01, "answer") == "answer"
    asyncio.get_running_loop().call_later(0.01, setattr, llm, "errored", True)
    with pytest.raises(EngineDied):
        await llm.engine_core._call_utility_async(600.0)
    llm.engine_core._call_utility_async = AsyncMock(side_effect=ValueError("the first call after it"))
    vllm_engine._end_calls_at_death(llm)
    with pytest.raises(EngineDied):
        await llm.engine_core._call_utility_async("is_sleeping", engine=0)


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM's source")


def quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART, list(overrides))


def test_overrides_reach_into_the_mapping_and_nest() -> None:
    speculative = "generator.engine_args.speculative_config={method: ngram, num_speculative_tokens: 3}"
    config = quickstart("generator.engine_args.kv_cache_dtype=fp8", speculative)
    assert config.generator.engine_args == {
        "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    assert Config.model_validate(config.model_dump(mode="json")) == config  # as a resumed run reads it


def test_a_float32_head_is_vllms_or_that_of_a_float32_model() -> None:
    own = quickstart("generator.engine=my_engines:Mine", "model.head_dtype=float32", "model.dtype=float32")
    assert own.model.head_dtype == "float32"  # as every head is then
    assert quickstart("model.head_dtype=float32", "model.dtype=bfloat16").model.head_dtype == "float32"


@pytest.mark.slow
@needs_vllm
def test_unknown_names_are_refused_with_the_nearest_one_and_without_importing_vllm() -> None:
    refusal = r"no argument .max_num_batched_token.; did you mean max_num_batched_tokens\?"
    with pytest.raises(ValueError, match=refusal):
        check_files(quickstart("generator.engine_args.max_num_batched_token=4096"))
    before = "vllm" in sys.modules
    with pytest.raises(ValueError, match=refusal):
        check_engine_args(["max_num_batched_token"])
    assert ("vllm" in sys.modules) == before
    check_engine_args(["max_num_batched_tokens", "quantization", "kv_cache_dtype", "enable_expert_parallel"])
    check_engine_args(["enable_log_requests"])  # a field of the subclass


@needs_vllm
def test_every_decided_name_is_one_of_vllms() -> None:
    known = engines._known_names()
    assert known is not None
    assert set(DECIDED) <= known


def test_every_argument_that_the_engine_sets_is_refused_in_the_configuration() -> None:
    source = (Path(engines.__file__).parent / "vllm_engine.py").read_text()
    own = source[source.index("arguments = {") : source.index("trust, defaults")]
    common = source[source.index("common = {") : source.index("def _defaults")]
    names = set(re.findall(r'^ +"(\w+)":', own + common, re.M))
    assert len(names) > 15
    assert names <= set(DECIDED)


def test_names_are_not_checked_where_vllm_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    check_engine_args(["anything"])


def test_more_sequences_at_a_time_on_gpus() -> None:
    assert quickstart("generator.num_gpus=1").generator.max_num_seqs == 256  # the file says so
    plain: dict[str, Any] = {"model": {"tiny": {}}, "task": {"kind": "sorting"}}
    assert Config.model_validate(plain).generator.max_num_seqs == 512
    assert Config.model_validate({**plain, "generator": {"num_gpus": 0}}).generator.max_num_seqs == 256
    assert Config.model_validate({**plain, "generator": {"max_num_seqs": 7}}).generator.max_num_seqs == 7


def test_the_engines_defaults_on_gpus_and_cpus() -> None:
    from grpo_ray.engines.vllm_engine import _defaults

    assert _defaults(quickstart().generator) == {"block_size": 32, "max_num_batched_tokens": 2048}
    assert _defaults(quickstart("generator.max_num_seqs=5000").generator)["max_num_batched_tokens"] == 5000
    assert _defaults(quickstart("generator.num_gpus=1").generator) == {"max_num_batched_tokens": 8192}
    many = quickstart("generator.num_gpus=1", "generator.max_num_seqs=10000")
    assert _defaults(many.generator) == {"max_num_batched_tokens": 10000}


def test_a_plan_says_what_it_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", QUICKSTART, "generator.engine_args.quantization=fp8"])
    assert "not counted: generator.engine_args (quantization)" in capsys.readouterr().out


def test_an_engine_removes_the_sockets_of_ended_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", {**os.environ})
    (tmp_path / "grpo-ray-sockets-ended").mkdir()
    _set_environment(None)
    assert [*map(str, tmp_path.iterdir())] == [os.environ["VLLM_RPC_BASE_PATH"]]
