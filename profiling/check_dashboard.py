"""Check the Grafana dashboard with a real Prometheus: start Ray, train a short run, run every panel's query.

    python profiling/check_dashboard.py [section.key=value ...]

Requires `prometheus` (Debian: apt-get install prometheus). It also compares three accounts of the time spent:
the report's, from metrics.jsonl, the timeline's and Prometheus's. The exit status is 1 if a query has no data,
the accounts differ, or an actor's stages do not add up to the time of the steps. The panels of the Learner's
ranks must have data only if there are several (learner.num_ranks=2).
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from grpo_ray.records.run_files import read_metrics
from grpo_ray.tools.report.series import make_series, stage_times
from grpo_ray.watch.metrics_catalog import SLOWEST

HERE = Path(__file__).parent
DASHBOARD = HERE / "grafana" / "grpo_ray.json"
CONFIG = HERE / "prometheus.yml"
INTERVAL_S = 1  # of Ray's reports and Prometheus's scrapes; the queries' windows are longer
RUN = [
    "generator.engine=torch", "model.tiny.hidden_size=32", "model.tiny.num_layers=1", "model.tiny.warmup=null",
    "task.num_train_prompts=24", "task.num_validation_prompts=4", "sampling.max_tokens=6",
    "algorithm.num_steps=16", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
    "evaluation.every_num_steps=8", "learner.slowdown_s=0.7",
    # A random model's answers differ in this, so there are advantages, without which some metrics are absent.
    "task.reward=[{reward: brevity, arguments: {free: 0, span: 60}}]",
    "learner.peak_tflops=0.05",  # for the utilization: no data sheet gives a CPU's
]  # fmt: skip
OF_RANKS = {  # exported only if the Learner has several ranks
    "ray_grpo_ray_collective_time_seconds_total", "ray_grpo_ray_slowest_rank", "ray_grpo_ray_rank_imbalance",
}  # fmt: skip

Seconds = Mapping[tuple[str, str], float]  # by actor and stage
Series = dict[str, Any]  # Prometheus's form: {"metric": labels, "values": [[time, text], ...]}


def queries() -> dict[str, list[str]]:
    """Return each panel's expressions, by its title."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return {panel["title"]: [target["expr"] for target in panel["targets"]] for panel in panels}


def metric_names(expression: str) -> set[str]:
    """Return the metrics that a query reads, by Ray's names for ours."""
    return set(re.findall(r"\bray_\w+", expression))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def started(
    command: list[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program during the block; it ends with all its children."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        _, alive = psutil.wait_procs(family, timeout=15)
        for member in alive:
            member.kill()


@contextlib.contextmanager
def ray_head(folder: Path) -> Iterator[dict[str, str]]:
    """Start a head node with a dashboard, and yield the environment for joining it; keep the path short."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_metrics_report_interval_ms": str(1000 * INTERVAL_S),
    }
    port = free_port()
    others = ("ray-client-server-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port")
    command = ["bash", str(HERE.parent / "launch" / "start_head.sh"), "--block", "--num-cpus=4"]
    command += [
        f"--port={port}",
        f"--dashboard-port={free_port()}",
        *(f"--{name}={free_port()}" for name in others),
    ]
    log, discovery = folder / "ray.log", folder / "ray" / "prom_metrics_service_discovery.json"
    with started([*command, f"--temp-dir={folder}/ray"], log, environment) as head:
        wait_for(lambda: b"Ray runtime started" in log.read_bytes() and discovery.exists(), head, log)
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{port}"}


@contextlib.contextmanager
def prometheus(folder: Path) -> Iterator[str]:
    """Run Prometheus with profiling/prometheus.yml, but Ray's folder and interval; gives its address."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = f"{INTERVAL_S}s"
    for job in config["scrape_configs"]:
        for discovery in job["file_sd_configs"]:
            files = [str(folder / "ray" / Path(file).name) for file in discovery["files"]]
            discovery |= {"files": files, "refresh_interval": f"{INTERVAL_S}s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with started(command, folder / "prometheus.log"):
        yield f"http://127.0.0.1:{port}"


def wait_for(
    is_ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path, timeout_s: float = 120
) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            state = "is not up" if process.returncode is None else "has ended"
            raise RuntimeError(f"{process.args!r} {state}:\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


def ask(address: str, query: str, since: float) -> list[Series]:
    """Return the query's series from `since` (seconds since the epoch) on."""
    span = {"query": query, "start": str(since), "end": str(time.time()), "step": str(INTERVAL_S)}
    with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(span)}") as answer:
        result: list[Series] = json.load(answer)["data"]["result"]
    return result


def as_grafana_does(query: str) -> str:
    """Fill in the variables: all runs, all actors."""
    variables = {"$run": ".*", "$actor": ".*", "$__rate_interval": f"{15 * INTERVAL_S}s"}
    for name, value in variables.items():
        query = query.replace(name, value)
    return query


def is_due(query: str, rows: list[dict[str, Any]]) -> bool:
    """Return True if a run with these lines in metrics.jsonl must have data for the query."""
    return not metric_names(query) <= OF_RANKS or any(SLOWEST in row for row in rows)


def num_values(series: list[Series]) -> int:
    return sum(text != "NaN" for each in series for _, text in each["values"])


def in_report(rows: list[dict[str, Any]]) -> Seconds:
    """Return the seconds in metrics.jsonl, as the report shows them."""
    actors = stage_times(make_series(rows, len(rows), {}, max_points=len(rows)).columns)
    return {(actor, stage): sum(s) for actor, stages in actors.items() for stage, s in stages.items()}


def in_timeline(path: Path) -> Seconds:
    events = json.loads(path.read_text())
    actors = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    seconds: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event["ph"] == "X":
            seconds[actors[event["tid"]], event["name"]] += event["dur"] / 1e6
    return seconds


def in_prometheus(address: str, since: float) -> tuple[int, Seconds]:
    """Return Prometheus's last step, and its seconds up to that step."""
    step = max(int(float(text)) for s in ask(address, "ray_grpo_ray_step", since) for _, text in s["values"])
    series = ask(address, "sum by (actor, stage) (ray_grpo_ray_stage_time_seconds_total)", since)
    labels = [(each["metric"]["actor"], each["metric"]["stage"]) for each in series]
    return step, {label: float(each["values"][-1][1]) for label, each in zip(labels, series, strict=True)}


def compare(rows: list[dict[str, Any]], others: dict[str, Seconds]) -> bool:
    """Print the share of the time that each account has.

    Returns whether each actor's stages add up to the time within 2%, and the accounts agree to 0.01% of it.
    """
    reported, whole = in_report(rows), sum(row["timing/step_s"] for row in rows)
    accounts = {"report": reported, **others}
    print(f"\nsteps 1 to {rows[-1]['step']}: {whole:.3f} s; seconds in", ", ".join(accounts))
    incomplete = []
    for actor in sorted({actor for actor, _ in reported}):
        told = [sum(s for (name, _), s in seconds.items() if name == actor) for seconds in accounts.values()]
        print(f"{actor:>14}: {told[0] / whole:.2%}  ({', '.join(f'{each:.3f} s' for each in told)})")
        if abs(told[0] - whole) > 0.02 * whole:
            incomplete.append(actor)
    differing = {
        f"{name}: {actor} {stage}": (seconds, account.get((actor, stage), 0.0))
        for name, account in others.items()
        for (actor, stage), seconds in reported.items()
        if abs(seconds - account.get((actor, stage), 0.0)) > 1e-4 * whole
    }
    print("actors whose stages do not add up:", incomplete or "none")
    print("stages that differ:", differing or "none")
    return not incomplete and not differing


def check(folder: Path, overrides: list[str]) -> bool:
    """Print the number of values per query; returns whether all is well."""
    since = time.time()
    with ray_head(folder) as environment, prometheus(folder) as address:
        train = [sys.executable, "-m", "grpo_ray", "train", "configs/quickstart.yaml", *RUN, *overrides]
        train += [f"run.output_dir={folder}", "run.name=run"]
        subprocess.run(train, env=environment, cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL)
        time.sleep(3 * INTERVAL_S)
        counts = {
            (f"{title} ({place})", query): num_values(ask(address, as_grafana_does(query), since))
            for title, targets in queries().items()
            for place, query in enumerate(targets, start=1)
        }
        step, scraped = in_prometheus(address, since)
    for (title, _), count in counts.items():
        print(f"{count:>6} values  {title}")
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert step == rows[-1]["step"], f"Prometheus has steps up to {step} only"
    others = {"timeline": in_timeline(folder / "run" / "timeline.json"), "Prometheus": scraped}
    return compare(rows, others) and all(count for (_, query), count in counts.items() if is_due(query, rows))


def main() -> int:
    if shutil.which("prometheus") is None:
        print("prometheus is not installed (Debian: apt-get install prometheus)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gp", ignore_cleanup_errors=True) as folder:
        return 0 if check(Path(folder), sys.argv[1:]) else 1


if __name__ == "__main__":
    sys.exit(main())
