"""The production engine, its adapter, and the teacher: vLLM's AsyncLLM, which runs in its own processes."""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from grpo_ray.config import Config, GeneratorConfig
from grpo_ray.config.model import AdapterConfig, ModelConfig
from grpo_ray.config.sampling import EngineConfig
from grpo_ray.engines.base import EngineDied
from grpo_ray.learning.model_files import located
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.records.adapter_files import CONFIG, FIELDS, FILE
from grpo_ray.records.run_lock import make_locked
from grpo_ray.rewards.isolation.system_calls import call
from grpo_ray.transfer.kept_weights import KeptWeights
from grpo_ray.transfer.messages import Meeting, WeightSnapshot
from grpo_ray.transfer.shared_pages import Pages, SharedBuffer, pages_of
from grpo_ray.transfer.snapshot import as_tensor, unpack_weights
from grpo_ray.types import Completion, SamplingSettings

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
ROOM_BYTES = 2**30
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM has room for


class VllmEngine:
    """vLLM with the logprob and the weight version of every sampled token, and weights replaced in flight."""

    def __init__(self, config: Config, model_path: str, max_model_len: int, seed: int) -> None:
        generator, model, sync = config.generator, config.model, config.weight_sync
        self._recompute_kv, self._num_pauses = sync.recompute_kv, 0
        self._resumed = asyncio.Event()
        self._resumed.set()
        adapter = model.adapter if sync.send == "adapter" else None  # snapshots hold it, and no whole model
        self._adapter = None if adapter is None else ServedAdapter(adapter)
        self._on_gpu = generator.num_gpus > 0
        self._sleeps = generator.colocated and self._on_gpu  # vLLM can only free GPU memory
        self._lacks_cache = False
        arguments = {
            "seed": seed,
            "max_model_len": max_model_len,
            "logprobs_mode": "processed_logprobs",  # at the sampling temperature, like the draws
            "worker_extension_cls": "grpo_ray.transfer.vllm_worker.LoadingWorker",
            "enable_sleep_mode": self._sleeps,
            # No sync brings the weights of a speculative draft; without one the pattern matches nothing.
            **({"sleep_preserve_parameter_names": ["draft.*"]} if self._sleeps else {}),
            **(self._adapter.engine_arguments() if self._adapter is not None else {}),
        }
        trust, defaults = model.trust_remote_code, _defaults(generator)
        self._llm = start_llm(generator, model, model_path, trust, arguments, defaults)
        _end_calls_at_death(self._llm)
        self._buffer = SharedBuffer()
        self._staged: tuple[WeightSnapshot, Pages] | None = None
        self._request_ids = itertools.count()

    async def generate(
        self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings
    ) -> tuple[Completion, ...]:
        from grpo_ray.engines.vllm_texts import decode

        params = _sampling_params(settings)
        await self._resumed.wait()  # so that the prompt is computed by the version of its salt
        prompt = {"prompt_token_ids": list(prompt_token_ids), "cache_salt": str(self._num_pauses)}
        lora = None if self._adapter is None else self._adapter.request()
        request = self._llm.generate(prompt, params, str(next(self._request_ids)), lora_request=lora)
        output = await only_output(request)
        if not params.detokenize:
            tokenizer = self._llm.get_tokenizer()
            for sample in output.outputs:
                sample.text = decode(tokenizer, prompt_token_ids, sample.token_ids, params)
        return tuple(map(_completion, output.outputs))

    async def start(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))

    async def ping(self) -> None:
        await self._llm.is_sleeping()

    async def join(self, meeting: Meeting) -> None:
        await self._llm.collective_rpc("join_wire", args=(asdict(meeting),))

    async def stage(self, snapshot: WeightSnapshot) -> None:
        if self._adapter is not None:
            await asyncio.to_thread(self._adapter.stage, snapshot)
            return
        self._staged = snapshot, await self._pages(snapshot)  # which are read until the weights are loaded

    async def _pages(self, snapshot: WeightSnapshot) -> Pages:
        if not snapshot.data.nbytes:  # they are on the device, or still with the Learner
            return Pages("", 0, snapshot.num_bytes)
        # A GPU loads six times as fast from page-locked memory, which the store's pages cannot become.
        pages = None if snapshot.is_kept or self._on_gpu else pages_of(snapshot.data)
        return await asyncio.to_thread(self._buffer.write, snapshot) if pages is None else pages

    async def pause(self) -> None:
        self._resumed.clear()
        self._num_pauses += 1
        # Not `pause_generation`, which then sleeps 20 ms; each token carries its version from the engine.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def load(self) -> None:
        if self._adapter is not None:
            await self._adapter.load(self._llm)
            return
        from grpo_ray.transfer.vllm_worker import message_of

        assert self._staged is not None, "stage first"
        snapshot, pages = self._staged
        await self._llm.collective_rpc("load_weights_from", args=(message_of(snapshot, pages),))
        self._staged = None

    async def finish(self, version: int) -> None:
        await self._llm.update_weight_version(str(version))
        # Running requests are recomputed from their tokens, so that later tokens are sampled from the new
        # weights alone, not from new weights over keys and values of the old ones.
        if self._recompute_kv:
            await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def resume(self) -> None:
        if self._lacks_cache:  # only now: before, the device holds the weights twice
            await self._llm.wake_up(["kv_cache"])
            self._lacks_cache = False
        await self._llm.resume_generation()
        self._resumed.set()

    async def sleep(self) -> None:
        if self._sleeps:
            await self._llm.sleep(level=2)  # weights and KV cache are discarded: a sync follows each wake

    async def wake(self) -> None:
        if self._sleeps:
            await self._llm.wake_up(["weights"])
            self._lacks_cache = True

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)
        del self._llm  # now, while the modules that its finalizer calls are still loaded
        self._buffer.close()
        if self._adapter is not None:
            self._adapter.close()


async def only_output(request: AsyncIterator[Any]) -> Any:
    """Return the one output of a request that is FINAL_ONLY, when every sample has finished."""
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        async for output in request:
            return output
    except EngineDeadError as error:
        raise EngineDied(f"vLLM's engine died: {error}") from error
    except EngineGenerateError as error:  # it has no text, and Ray would not bring its cause
        raise RuntimeError(f"vLLM: {error.__cause__!r}") from error
    raise RuntimeError("vLLM ended a request without an output")


def _end_calls_at_death(llm: Any) -> None:
    """Let calls of the engine's process fail if it dies: vLLM 0.32 ends requests then, but no calls."""
    call = llm.engine_core._call_utility_async  # which all of them go through

    async def ending(*arguments: Any, **options: Any) -> Any:
        answer = asyncio.ensure_future(call(*arguments, **options))
        while not (await asyncio.wait([answer], timeout=1.0))[0] and not llm.errored:
            pass
        if llm.errored:
            raise EngineDied("vLLM's engine died") from (None if answer.cancel() else answer.exception())
        return answer.result()

    llm.engine_core._call_utility_async = ending


def start_llm(
    config: EngineConfig, model: ModelConfig, path: str, trust_remote_code: bool, own: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Set this process's environment for vLLM, and return an engine with the model at `path`.

    Args:
        own: the arguments of this engine alone.
        defaults: arguments that `engine_args` may change.
    """
    on_cpu = config.num_gpus == 0
    _set_environment(config if on_cpu else None)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    from grpo_ray.engines.vllm_texts import correct_stop_strings, omit_texts_of_logprobs

    omit_texts_of_logprobs()
    correct_stop_strings()
    if on_cpu:
        utils.get_mp_context = _Forking
    common = {
        "model": located(path, weights=True),
        "load_format": "safetensors",  # never a pickle
        "dtype": model.dtype,
        **({"hf_overrides": {"head_dtype": model.head_dtype}} if model.head_dtype != "model" else {}),
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if config.kv_cache_gib is None else int(config.kv_cache_gib * 2**30),
        "tensor_parallel_size": max(1, config.num_gpus),
        # Saves a process. Given by its class, because on a CPU vLLM reads the name "uni" as "mp".
        "distributed_executor_backend": UniProcExecutor if config.num_gpus <= 1 else "mp",
        "enforce_eager": config.enforce_eager or on_cpu,
        "generation_config": "vllm",  # the model's own sampling defaults would change the distribution
        "disable_log_stats": True,
    }
    arguments = {**(defaults or {}), **config.engine_args, **common, **own}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(trust_remote_code=trust_remote_code, **arguments))


def _defaults(config: GeneratorConfig) -> dict[str, Any]:
    """Return arguments that `engine_args` may change.

    vLLM's own default, 2,048 tokens per iteration, prolongs the prefill of new prompts, and that of all running
    requests after a weight sync. A group's samples share whole blocks of its prompt alone, and on a CPU a block
    has 128 tokens by default: shorter prompts were computed once per sample.
    """
    if config.num_gpus:
        return {"max_num_batched_tokens": max(8192, config.max_num_seqs)}
    return {"block_size": 32, "max_num_batched_tokens": max(2048, config.max_num_seqs)}  # kernels prefer >= 32


def _set_environment(cpu: EngineConfig | None) -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # vLLM never removes its sockets: the folder of an engine that has ended is removed by the next one.
    os.environ["VLLM_RPC_BASE_PATH"], _ = make_locked("grpo-ray-sockets-", tempfile.gettempdir())
    if cpu is not None:
        os.environ["OMP_NUM_THREADS"] = str(cpu.num_threads)
        # Compiling a sampler helper costs vLLM's first request 18 s, and saves nothing later.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        if cpu.cpu_cores is not None:
            os.sched_setaffinity(0, cpu.cpu_cores)  # the engine's processes inherit it


class _EngineProcess(ForkProcess):
    """vLLM's engine in a copy of this process: a new one would import vLLM again, for 15 s of a core."""

    def start(self) -> None:
        # In a new thread: the copy would wait for OpenMP's threads of this one, which it does not have.
        starting = Thread(target=super().start)
        starting.start()
        starting.join()
        if self.pid is None:
            raise RuntimeError("there is no room to fork vLLM's engine; the error is above, in this log")
        gc.collect()  # what importing left, while this process waits for the engine
        gc.freeze()

    def run(self) -> None:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # the folder's own
                if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    os.close(descriptor)  # or Ray would believe that the Generator lives as long as this
        if (ray := sys.modules.get("ray._raylet")) is not None:  # vLLM cannot change Ray's title
            ray.setproctitle("VLLM::EngineCore")
        gc.freeze()  # or each full pass, at vLLM's start and end, would copy the pages of all that was imported
        gc.unfreeze = lambda: None  # which vLLM calls before its last passes
        gc.enable()
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        # The memory of replaced weights is kept for the next: touching fresh pages takes longer than a copy.
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 2**31 - 1), (M_TRIM_THRESHOLD, 2**31 - 1)):
            call("mallopt", option, value)
        super().run()


class _Forking(ForkContext):
    Process = _EngineProcess


def _sampling_params(settings: SamplingSettings) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=settings.num_samples,
        temperature=settings.temperature,
        top_p=settings.top_p,
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        stop=list(settings.stop),
        stop_token_ids=list(settings.end_token_ids),
        include_stop_str_in_output=True,
        detokenize=bool(settings.stop),  # token by token only if a string may end a response
        logprobs=0,  # of the drawn token alone
        flat_logprobs=True,  # lists instead of a dict of objects per token
        seed=settings.seed,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _completion(sample: Any) -> Completion:
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a response with `{sample.finish_reason}`")
    token_ids = np.asarray(sample.token_ids, dtype=np.int32)
    assert list(sample.logprobs.token_ids) == list(sample.token_ids)
    logprobs = np.asarray(sample.logprobs.logprobs, dtype=np.float32)
    versions = np.empty(len(token_ids), dtype=np.int32)
    for span in sample.weight_versions:
        versions[span.start : span.end] = int(span.version)
    return Completion(sample.text, token_ids, logprobs, versions, sample.finish_reason)


class VllmTeacher:
    """vLLM without sampling: each sequence is one request, and all of a group run concurrently.

    vLLM reads no cached prefix for such requests, so a prompt is computed once per completion.
    """

    def __init__(self, config: Config, max_model_len: int) -> None:
        teacher = config.distillation
        assert teacher.teacher is not None
        own = {"max_model_len": max_model_len + 1}  # vLLM draws one token after the sequence
        self._llm = start_llm(teacher, config.model, teacher.teacher, False, own)
        self._request_ids = itertools.count()

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[np.ndarray]:
        return await asyncio.gather(*map(self._of_one, sequences))

    async def _of_one(self, sequence: TrainSequence) -> np.ndarray:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        tokens = sequence.tokens().tolist()
        request = self._llm.generate({"prompt_token_ids": tokens}, params, str(next(self._request_ids)))
        found = (await only_output(request)).prompt_logprobs
        assert found.token_ids == tokens[1:]
        return sequence.sampled(np.asarray(found.logprobs, np.float32)[len(sequence.prompt_token_ids) - 1 :])

    async def shutdown(self) -> None:
        await asyncio.to_thread(self._llm.shutdown)
        del self._llm  # now, while the modules that its finalizer calls are still loaded


class ServedAdapter:
    """The one adapter of an engine. Every request names it: on a CPU vLLM 0.32 would give the adapter of one
    request to another that names none.
    """

    def __init__(self, config: AdapterConfig) -> None:
        self._config = config
        self._kept = KeptWeights()
        memory = Path("/dev/shm")  # of a container it may have 64 MB
        has_room = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES
        folder, self._lock = make_locked(
            "grpo_ray-adapter-", str(memory) if has_room else tempfile.gettempdir()
        )
        self._folder = Path(folder)

    def engine_arguments(self) -> dict[str, Any]:
        rank = min(rank for rank in RANKS if rank >= self._config.rank)
        return {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}

    def request(self, load_inplace: bool = False) -> Any:
        """Return the argument of a request that is sampled with the adapter."""
        from vllm.lora.request import LoRARequest

        return LoRARequest("policy", 1, str(self._folder), load_inplace=load_inplace)

    def stage(self, snapshot: WeightSnapshot) -> None:
        """Write the snapshot's tensors, named as in PEFT's format, where `load` reads them."""
        tensors = dict(unpack_weights(snapshot.specs, as_tensor(self._kept.whole(snapshot))))
        save_file(tensors, self._folder / FILE, metadata={"format": "pt"})
        targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
        config = {name: getattr(self._config, field) for name, field in FIELDS.items()}
        config |= {"peft_type": "LORA", "bias": "none", "target_modules": targets}
        (self._folder / CONFIG).write_text(json.dumps(config))

    async def load(self, llm: Any) -> None:
        """Load the staged tensors in place of the earlier ones.

        vLLM's prefix cache tells adapters apart by name and path alone, so it must be reset afterwards.
        """
        # In place here alone: in a request it would be loaded anew each time.
        await llm.add_lora(self.request(load_inplace=True))

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
