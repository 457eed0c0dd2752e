"""The Learner on one GPU: exactness, weight sync, speed and memory; see docs/lab/profiling.md.

    python profiling/gpu.py --out gpu.json

From a checkout, with torch, transformers, pydantic, psutil and numpy: no Ray, vLLM or download. The weights are
random, in the sizes of Qwen2.5. Beside the JSON file it writes the same results as Markdown, after each case.
"""

import argparse
import asyncio
import itertools
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "profiling")]  # a checkout need not be installed

import torch  # noqa: E402
from benchmarks.machine import describe_versions, memory_gib  # noqa: E402
from gpu_page.engine import STAGES, EngineCase, MeasuredEngine, run_engine  # noqa: E402
from gpu_page.exactness import compare_all  # noqa: E402
from gpu_page.page import write_page  # noqa: E402
from gpu_page.shapes import SHAPES  # noqa: E402
from gpu_page.throughput import Case, measure, run_case  # noqa: E402
from gpu_page.weights import measure_weights  # noqa: E402

TOKENS_PER_STEP = 65_536  # response tokens of the default batch: enough groups of 8 to hold them
BIG = ("7B",)  # with gradient checkpointing unless `--checkpointing` says otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.one_case:
        return _one_case(json.loads(options.one_case))
    if options.one_engine:
        return _one_engine(json.loads(options.one_engine))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", 0)  # torch.distributed wants a number
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU; `--device cpu` tries the page with `--models tiny`", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": describe(device),
        "versions": describe_versions(),
        "arguments": list(sys.argv[1:] if arguments is None else arguments),
    }
    if options.resume and options.out.exists():
        result |= json.loads(options.out.read_text())
    deadline = time.monotonic() + options.seconds
    done, result["left_out"] = result.setdefault("done", []), []
    for part in options.parts:
        rows = result.setdefault(part, [])
        for case in RUN[part](options, device):
            name = f"{part}: {case.name}"
            if name in done:
                continue
            if time.monotonic() > deadline:
                result["left_out"].append(name)
                continue
            for row in case.measure():
                rows.append(row)
                write(result, options.out)  # nothing is lost if a later one fails
            done.append(name)
    write(result, options.out)
    print(options.out.with_suffix(".md").read_text())
    print(f"written to {options.out} and {options.out.with_suffix('.md')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(RUN), default=list(RUN), help="default: all")
    add("--models", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B", "7B"])
    add("--seconds", type=float, default=540.0, metavar="S", help="after which no further case begins")
    add("--response-tokens", nargs="+", type=int, default=[2048, 8192], metavar="N")
    add("--prompt-tokens", type=int, default=512, metavar="N")
    add(
        "--groups", type=int, metavar="N", help=f"per step; default: as many as hold {TOKENS_PER_STEP:,} tokens"
    )
    add("--samples-per-prompt", type=int, default=8, metavar="G")
    add("--ways", nargs="+", choices=("plain", "repeated", "shared"), default=["plain", "repeated", "shared"])
    add(
        "--attention", nargs="+", default=["auto"], metavar="NAME", help="model.attention of the Learner's ways"
    )
    add("--compile", nargs="+", default=["false"], metavar="VALUE", help="learner.compile")
    add("--checkpointing", nargs="+", metavar="VALUE", help="learner.gradient_checkpointing; default: for 7B")
    add("--micro-batch-tokens", nargs="+", type=int, default=[16_384], metavar="N")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further configuration of the Learner's ways")
    add("--rounds", type=int, default=3, metavar="N", help="measured steps per case, after one to warm up")
    add(
        "--peak-tflops",
        type=float,
        metavar="X",
        help="the device's dense peak, where the page does not know it",
    )
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    add(
        "--out", type=Path, default=Path("gpu.json"), metavar="FILE", help="JSON; the Markdown stands beside it"
    )
    add("--resume", action="store_true", help="go on with the results in --out: only what is not there yet")
    add("--stages", nargs="+", choices=STAGES, default=STAGES, help="of the part `engine`; default: all")
    add("--running", nargs="+", type=int, default=[256, 512], metavar="N", help="sequences that vLLM runs")
    add("--engine-tokens", type=int, default=512, metavar="N", help="response tokens of the part `engine`")
    add("--engine-args", default="{}", metavar="JSON", help="generator.engine_args of the part `engine`")
    add("--eager", action="store_true", help="vLLM without CUDA graphs")
    add("--one-case", metavar="JSON", help=argparse.SUPPRESS)  # how the page measures a case in a new process
    add("--one-engine", metavar="JSON", help=argparse.SUPPRESS)
    return parser


class Part(NamedTuple):
    """One measurement, and the rows that it gives."""

    name: str
    measure: Callable[[], Iterable[dict[str, Any]]]


def _exactness(options: argparse.Namespace, device: torch.device) -> list[Part]:
    shape = "tiny" if options.models == ["tiny"] else "small"
    return [Part("all", lambda: compare_all(device, options.attention, shape))]


def _weights(options: argparse.Namespace, device: torch.device) -> list[Part]:
    def measure(name: str) -> list[dict[str, Any]]:
        try:
            return [measure_weights(name, device)]
        except Exception as error:  # the other parts go on
            return [{"model": name, "error": f"{type(error).__name__}: {error}"}]
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()

    return [Part(name, partial(measure, name)) for name in options.models]


def _throughput(options: argparse.Namespace, device: torch.device) -> list[Part]:
    def measure(case: Case) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "--one-case"]
        found = run_case(case, device, options.peak_tflops, command, describe(device)["memory_gib"] * 2**30)
        print(f"{case.model}, {case.response_tokens} tokens, {case.way}: {_short(found)}", flush=True)
        return [found]

    names = "model", "response_tokens", "way", "attention", "compile", "checkpointing", "micro_batch_tokens"
    return [
        Part(", ".join(str(getattr(case, name)) for name in names), partial(measure, case))
        for case in cases(options)
    ]


def cases(options: argparse.Namespace) -> list[Case]:
    """Return every combination of the options; the plain way knows neither attention nor compile."""
    chosen = []
    for model, length, way in itertools.product(options.models, options.response_tokens, options.ways):
        groups = options.groups or max(1, TOKENS_PER_STEP // (length * options.samples_per_prompt))
        is_plain = way == "plain"
        for attention, compiled, checkpointing, tokens in itertools.product(
            ["sdpa"] if is_plain else options.attention,
            ["false"] if is_plain else options.compile,
            options.checkpointing or ["true" if model in BIG else "false"],
            options.micro_batch_tokens,
        ):
            chosen.append(
                Case(
                    model, way, length, options.prompt_tokens, groups, options.samples_per_prompt, tokens,
                    options.dtype, attention, compiled, checkpointing,
                    overrides=() if is_plain else tuple(options.set), rounds=options.rounds,
                )
            )  # fmt: skip
    return chosen


def _short(found: dict[str, Any]) -> str:
    if found.get("out_of_memory"):
        return f"out of memory ({found['phase']})"
    if "error" in found:
        return str(found["error"])
    return f"{found['forward_backward_s'] + found['update_s']:.3g} s per step"


def _engine(options: argparse.Namespace, device: torch.device) -> list[Part]:
    def measure(case: EngineCase) -> Iterator[dict[str, Any]]:
        request = json.dumps({"case": asdict(case), "device": str(device)})
        for found in run_engine(case, [sys.executable, __file__, "--one-engine", request]):
            print(f"{case.model}, vLLM: {json.dumps(found)[:300]}", flush=True)
            yield {"case": asdict(case), **found}

    if find_spec("vllm") is None:
        return [Part("skipped", lambda: [{"stage": "start", "error": "vllm cannot be imported"}])]
    made = [
        EngineCase(
            model, options.dtype, tuple(options.running), options.engine_tokens, options.engine_args,
            options.eager, tuple(options.stages),
        )
        for model in options.models
    ]  # fmt: skip
    return [Part(f"{c.model}, {c.engine_args}, {'eager' * c.enforce_eager}", partial(measure, c)) for c in made]


RUN = {"exactness": _exactness, "weights": _weights, "throughput": _throughput, "engine": _engine}


def _one_case(request: dict[str, Any]) -> int:
    case = Case(**{**request["case"], "overrides": tuple(request["case"]["overrides"])})
    print(json.dumps(measure(case, torch.device("cuda"), request["peak_tflops"])))
    return 0


def _one_engine(request: dict[str, Any]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        case, device = EngineCase(**request["case"]), torch.device(request["device"])
        asyncio.run(MeasuredEngine(case, device, Path(folder)).run())
    return 0


def describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": "CPU", "memory_gib": memory_gib()}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(write_page(result))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no engine outlives the page on the GPU
    sys.exit(main())
