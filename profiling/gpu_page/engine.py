"""vLLM on the device, without Ray: its start, its speed, and weight syncs that are exact to the token.

The stages run one after another in a process of their own, each with a limit, and each prints what it found as
a line of JSON as soon as it is known. With `ipc` the weights stay on the GPU; otherwise they come through pages
of the host's memory.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, Timer
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from gpu_page.shapes import build_model
from gpu_page.steps import step_config
from grpo_ray.config import Config
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.sequences import TrainSequence
from grpo_ray.transfer.messages import WeightSnapshot
from grpo_ray.transfer.snapshot import pack_on_device, pack_weights
from grpo_ray.types import Completion, SamplingSettings

STAGES = ("start", "sample", "mismatch", "sync", "in_flight", "sleep")
LIMITS_S, LIMIT_S = {"start": 180.0, "sample": 180.0}, 90.0
VOCAB = 300  # of the tokenizer; the models' own is larger
END = (2,)
Groups = list[tuple[Completion, ...]]


@dataclass(frozen=True)
class EngineCase:
    """One engine, and how much it is asked for."""

    model: str
    dtype: str = "bfloat16"
    running: tuple[int, ...] = (256, 512)  # sequences at a time, in groups of 8
    response_tokens: int = 512
    engine_args: str = "{}"  # JSON, of `generator.engine_args`
    enforce_eager: bool = False
    stages: tuple[str, ...] = STAGES


def run_engine(case: EngineCase, command: list[str]) -> Iterator[dict[str, Any]]:
    """Yield what each stage found, as it is found; a process that hangs or dies ends the case alone."""
    limit_s = sum(LIMITS_S.get(stage, LIMIT_S) for stage in case.stages) + 60
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reading = Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reading.start()
    ended = Timer(limit_s, lambda: os.killpg(process.pid, signal.SIGKILL))
    ended.start()
    has_failed = False
    try:
        for line in process.stdout:
            if line.startswith('{"stage"'):
                found = json.loads(line)
                has_failed |= "error" in found
                yield found
        if process.wait() or has_failed:  # vLLM's processes say the cause on their standard error
            reading.join(60)  # a process that is left behind may keep it open
            yield {"stage": "process", "error": f"ended with {process.returncode}: {''.join(errors)[-6000:]}"}
    finally:
        ended.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _tokenizer(size: int) -> PreTrainedTokenizerBase:
    """Make a tokenizer of as many tokens as the model has: texts of others take vLLM 15 times as long."""
    from grpo_ray.learning.tiny_tokenizer import END_TOKEN, train_tokenizer

    trained = train_tokenizer(["0 1 2 3 4 5 6 7 8 9 + - ="] * 10, VOCAB)
    vocab = trained.get_vocab()
    vocab |= {f"Ġ{number}": number for number in range(len(vocab), size)}
    return Qwen2Tokenizer(vocab=vocab, merges=[], eos_token=END_TOKEN, pad_token=END_TOKEN, unk_token=END_TOKEN)


class MeasuredEngine:
    """The stages of a case in this process; their findings are printed."""

    def __init__(self, case: EngineCase, device: torch.device, folder: Path) -> None:
        self._case, self._device, self._folder = case, device, folder
        self._dtype = getattr(torch, case.dtype)
        self._on_gpu = device.type == "cuda"
        self._transports = ("pages", "ipc") if self._on_gpu else ("pages",)
        self._versions = itertools.count(1)
        self._shared: list[torch.Tensor] = []

    async def run(self) -> None:
        for stage in self._case.stages:
            started = time.perf_counter()
            work: Callable[[], Awaitable[dict[str, Any]]] = getattr(self, f"_{stage}")
            try:
                found = await asyncio.wait_for(work(), LIMITS_S.get(stage, LIMIT_S))
            except Exception as error:  # the other stages go on, but for an engine that did not start
                found = {"error": f"{type(error).__name__}: {error}"[:2000]}
            print(json.dumps({"stage": stage, "seconds": time.perf_counter() - started, **found}), flush=True)
            if stage == "start" and "error" in found:
                return
        await self._engine.shutdown()

    async def _start(self) -> dict[str, Any]:
        from grpo_ray.engines import make_engine

        self._models = [
            build_model(self._case.model, self._device, is_plain=True, seed=seed).to(self._dtype)
            for seed in range(2)
        ]
        self._models[0].save_pretrained(self._folder)
        _tokenizer(self._models[0].config.vocab_size).save_pretrained(self._folder)
        self._config = self._engine_config()
        written = time.perf_counter()
        self._engine: Any = make_engine(self._config, str(self._folder), max_model_len=2048, seed=0)
        await self._engine.start(0)
        await self._sampled(1, 4)
        return {"engine_start_s": time.perf_counter() - written}

    def _engine_config(self) -> Config:
        case = self._case
        size = ["generator.kv_cache_gib=0.1", "generator.gpu_memory_utilization=0.2"]
        if self._on_gpu:
            size = [
                "generator.gpu_memory_utilization=0.5",
                "weight_sync.transport=ipc",
                "weight_sync.max_lag=0",
            ]
            size += ["generator.colocated=true"]
        eager = f"generator.enforce_eager={str(case.enforce_eager).lower()}"
        changes = [f"model.dtype={case.dtype}", f"generator.engine_args={case.engine_args}", eager, *size]
        return step_config(self._device, [*changes, "sampling.min_tokens=4", "sampling.temperature=0.7"])

    async def _sample(self) -> dict[str, Any]:
        """Tokens per second of AsyncLLM alone and of the engine through its own methods, in turns."""
        found = {}
        for running in self._case.running:
            rates: dict[str, list[float]] = {"raw": [], "engine": []}
            for _ in range(2):
                for side, sampled in (("raw", self._sampled_raw), ("engine", self._sampled)):
                    started = time.perf_counter()
                    groups = await sampled(running // 8, self._case.response_tokens)
                    num_tokens = sum(len(c.token_ids) for group in groups for c in group)
                    rates[side].append(num_tokens / (time.perf_counter() - started))
            best = {side: max(values) for side, values in rates.items()}
            found[str(running)] = {**best, "ratio": best["engine"] / best["raw"]}
        return {"tokens_per_s": found}

    async def _mismatch(self) -> dict[str, Any]:
        """Compare the sampler's log-probabilities of its tokens with the Learner's, at the same weights."""
        prompts, settings = self._prompts(4), self._settings(64, 4, 0.7)
        groups = await asyncio.gather(*(self._engine.generate(prompt, settings) for prompt in prompts))
        sequences = [
            TrainSequence(prompt, c.token_ids, c.logprobs, 1.0)
            for prompt, group in zip(prompts, groups, strict=True)
            for c in group
        ]
        passes = ForwardBackward(self._config, END, self._device)
        model = build_model(self._case.model, self._device)
        model.load_state_dict(self._models[0].state_dict())
        own = passes.with_proximal(model.to(self._dtype), sequences)
        pairs = [(s.proximal_logprobs, s.behaviour_logprobs) for s in own]
        log_ratio = np.concatenate([first - second for first, second in pairs if first is not None])
        return {
            "logprob_max": float(np.abs(log_ratio).max()),
            "logprob_mean": float(np.abs(log_ratio).mean()),
            "kl": float((np.exp(log_ratio) - 1 - log_ratio).mean()),  # k3 of Schulman 2020
            "kernel": passes.attention_kernel,
        }

    async def _sync(self) -> dict[str, Any]:
        """Load other weights and the first again: logprobs change (greedy tokens may not), and come back.

        A GPU rounds by the batch and by what is cached: each greedy sampling is alone and follows a sync.
        """
        found: dict[str, Any] = {}
        await self._load(0, self._transports[0])
        tokens, logprobs = await self._greedy()
        checksums = await self._checksums()
        for transport in self._transports:
            other_s = await self._load(1, transport)
            _, others = await self._greedy()
            back_s = await self._load(0, transport)
            tokens_back, logprobs_back = await self._greedy()
            found[transport] = {
                "staged_and_paused_s": [other_s, back_s],
                "logprobs_changed_by": float(np.abs(others - logprobs).max()),
                "logprobs_came_back_within": float(np.abs(logprobs_back - logprobs).max()),
                "tokens_came_back": tokens_back == tokens,
                "checksums_came_back": await self._checksums() == checksums,
            }
        return {"transports": found}

    async def _in_flight(self) -> dict[str, Any]:
        """Load weights while requests run: tokens of both versions, and finite log-probabilities."""
        running = asyncio.create_task(self._sampled(8, 1500))  # long enough to be under way
        await asyncio.sleep(0.5)
        seconds = await self._load(1, self._transports[-1])
        groups = await running
        await self._load(0, self._transports[-1])
        versions = [np.unique(c.versions) for group in groups for c in group]
        finite = all(np.isfinite(c.logprobs).all() for group in groups for c in group)
        spanning = sum(len(each) == 2 for each in versions)
        return {"staged_and_paused_s": seconds, "of_two_versions": spanning, "all_finite": finite}

    async def _sleep(self) -> dict[str, Any]:
        """Give the GPU's memory up, take it back, and sample the same tokens after a sync."""
        await self._load(0, self._transports[-1])
        first, used = (await self._greedy())[0], [self._used_gib()]
        await self._engine.sleep()
        used.append(self._used_gib())
        await self._engine.wake()
        await self._load(0, self._transports[-1])
        used.append(self._used_gib())
        return {"used_gib": used, "same_tokens": (await self._greedy())[0] == first}

    def _used_gib(self) -> float:
        free, total = torch.cuda.mem_get_info(self._device) if self._on_gpu else (0, 0)
        return (total - free) / 2**30

    async def _load(self, model: int, transport: str) -> tuple[float, float]:
        """Return the seconds of staging, and those of the pause."""
        named = [(name, weight.detach()) for name, weight in self._models[model].named_parameters()]
        version, snapshot = next(self._versions), None
        if transport == "ipc":
            snapshot, self._shared = pack_on_device(named, version, self._dtype, self._device)
            torch.cuda.synchronize()
        else:
            snapshot = pack_weights(named, version, self._dtype)
        assert isinstance(snapshot, WeightSnapshot)
        started = time.perf_counter()
        await self._engine.stage(snapshot)
        staged = time.perf_counter()
        await self._engine.pause()
        await self._engine.load()
        await self._engine.finish(version)
        await self._engine.resume()
        return staged - started, time.perf_counter() - staged

    async def _checksums(self) -> Any:
        return await self._engine._llm.collective_rpc("compute_weight_checksums")

    async def _greedy(self) -> tuple[list[list[int]], np.ndarray]:
        settings = self._settings(32, 32, 0.0, num_samples=1)
        found = [c for prompt in self._prompts(4) for c in await self._engine.generate(prompt, settings)]
        return [c.token_ids.tolist() for c in found], np.concatenate([c.logprobs for c in found])

    async def _sampled(self, num_groups: int, num_tokens: int) -> Groups:
        settings = self._settings(num_tokens, num_tokens, 1.0)
        requests = (self._engine.generate(prompt, settings) for prompt in self._prompts(num_groups))
        return list(await asyncio.gather(*requests))

    async def _sampled_raw(self, num_groups: int, num_tokens: int) -> list[Any]:
        from grpo_ray.engines.vllm_engine import _sampling_params, only_output

        params = _sampling_params(self._settings(num_tokens, num_tokens, 1.0))
        ask, wave = self._engine._llm.generate, next(self._versions)
        requests = (
            only_output(ask({"prompt_token_ids": list(prompt)}, params, f"raw-{wave}-{n}"))
            for n, prompt in enumerate(self._prompts(num_groups))
        )
        return [output.outputs for output in await asyncio.gather(*requests)]

    def _prompts(self, num: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(num)
        return [tuple(rng.integers(3, VOCAB, 64).tolist()) for _ in range(num)]

    def _settings(
        self, max_tokens: int, min_tokens: int, temperature: float, num_samples: int = 8
    ) -> SamplingSettings:
        return SamplingSettings(
            num_samples=num_samples, temperature=temperature, top_p=1.0, max_tokens=max_tokens,
            min_tokens=min_tokens, stop=(), end_token_ids=END,
        )  # fmt: skip
