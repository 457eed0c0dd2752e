"""The Learner on one GPU: exactness, weight sync, speed and memory; see docs/profiling.md.

    python profiling/gpu.py --out gpu.json

From a checkout, with torch, transformers, pydantic and numpy: no Ray, no vLLM, no download. The weights are
random, in the sizes of Qwen2.5. Beside the JSON file it writes the same results as Markdown. Where Ray and vLLM
are installed, a whole colocated run of the quickstart follows.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "profiling")]  # a checkout need not be installed

import torch  # noqa: E402
from gpu_page.exactness import compare_all  # noqa: E402
from gpu_page.page import write_page  # noqa: E402
from gpu_page.shapes import SHAPES  # noqa: E402
from gpu_page.throughput import Case, child_command, measure, run_case  # noqa: E402
from gpu_page.weights import measure_weights  # noqa: E402
from gpu_page.whole_run import missing, run_quickstart  # noqa: E402

PARTS = ("exactness", "weights", "throughput", "whole_run")
PACKAGES = ("torch", "transformers", "pydantic", "flash-attn", "vllm", "ray")
TOKENS_PER_STEP = 65_536  # response tokens of the default batch: enough groups of 8 to hold them
BIG = ("7B",)  # with gradient checkpointing unless `--checkpointing` says otherwise


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.one_case:
        return _one_case(json.loads(options.one_case))
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu.py: torch sees no GPU; `--device cpu` tries the page with `--models tiny`", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": describe(device),
        "versions": _versions(),
        "arguments": list(sys.argv[1:] if arguments is None else arguments),
    }
    for part in options.parts:
        result[part] = RUN[part](options, device)
        write(result, options.out)  # after each part: nothing is lost if a later one fails
    print(options.out.with_suffix(".md").read_text())
    print(f"written to {options.out} and {options.out.with_suffix('.md')}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    add("--models", nargs="+", choices=list(SHAPES), default=["0.5B", "1.5B", "7B"])
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
    add("--one-case", metavar="JSON", help=argparse.SUPPRESS)  # how the page measures a case in a new process
    return parser


def _exactness(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    return compare_all(device, options.attention, "tiny" if options.models == ["tiny"] else "small")


def _weights(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    found = []
    for name in options.models:
        try:
            found.append(measure_weights(name, device))
        except Exception as error:  # the other parts go on
            found.append({"model": name, "error": f"{type(error).__name__}: {error}"})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _throughput(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    found = []
    for case in cases(options):
        found.append(run_case(case, device, options.peak_tflops, child_command(Path(__file__))))
        print(f"{case.model}, {case.response_tokens} tokens, {case.way}: {_short(found[-1])}", flush=True)
    return found


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


def _whole_run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"skipped": "it needs a GPU"}
    if lacking := missing():
        return {"skipped": f"{' and '.join(lacking)} cannot be imported"}
    with tempfile.TemporaryDirectory() as folder:
        return run_quickstart(Path(folder))


RUN = {"exactness": _exactness, "weights": _weights, "throughput": _throughput, "whole_run": _whole_run}


def _one_case(request: dict[str, Any]) -> int:
    case = Case(**{**request["case"], "overrides": tuple(request["case"]["overrides"])})
    print(json.dumps(measure(case, torch.device("cuda"), request["peak_tflops"])))
    return 0


def describe(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {"name": "CPU", "memory_gib": 0.0}
    properties = torch.cuda.get_device_properties(device)
    return {"name": properties.name, "memory_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(write_page(result))


if __name__ == "__main__":
    sys.exit(main())
