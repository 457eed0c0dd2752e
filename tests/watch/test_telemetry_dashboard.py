"""The Grafana dashboard and the Prometheus configuration match what a run exports."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import yaml
from builders import check_names

from grpo_ray.watch import ray_metrics
from grpo_ray.watch.ray_metrics import RayMetrics

PROFILING = Path("profiling")
NAMES = [
    ray_metrics.STAGE_SECONDS, ray_metrics.STAGE_TIME, ray_metrics.COLLECTIVE_TIME, ray_metrics.MEMORY_BYTES,
    ray_metrics.PHASE, ray_metrics.STEP, *ray_metrics.GAUGES.values(),
]  # fmt: skip


@pytest.fixture(scope="module")
def check(profiling_script: Callable[[str], ModuleType]) -> ModuleType:
    return profiling_script("check_dashboard")


def exported() -> set[str]:
    """Return the names that Prometheus scrapes, as profiling/check_dashboard.py found them."""
    counters = dict.fromkeys((ray_metrics.STAGE_TIME, ray_metrics.COLLECTIVE_TIME), ("_total",))
    endings = {ray_metrics.STAGE_SECONDS: ("_bucket", "_sum", "_count"), **counters}
    return {f"ray_{name}{ending}" for name in NAMES for ending in endings.get(name, ("",))}


def test_every_query_reads_what_is_exported_and_everything_exported_is_read(check: ModuleType) -> None:
    read = {name for queries in check.queries().values() for q in queries for name in check.metric_names(q)}
    assert read <= exported()
    assert exported() - read == {"ray_grpo_ray_stage_seconds_sum"}  # Ray's histogram sum is not exact


def test_the_names_are_stable_and_those_of_existing_metrics() -> None:
    """Users' dashboards and alerts rely on the names: do not change one without need."""
    assert {"grpo_ray_stage_seconds", "grpo_ray_reward", "grpo_ray_lag_max", "grpo_ray_buffer_groups",
            "grpo_ray_learner_utilization", "grpo_ray_collective_time_seconds",
            "grpo_ray_sampled_tokens_per_second", "grpo_ray_phase",
            } <= set(NAMES)  # fmt: skip
    assert check_names(ray_metrics.GAUGES) == []


def test_panels_do_not_overlap_and_have_units() -> None:
    panels = json.loads((PROFILING / "grafana" / "grpo_ray.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_prometheus_reads_the_service_discovery_of_ray() -> None:
    (job,) = yaml.safe_load((PROFILING / "prometheus.yml").read_text())["scrape_configs"]
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]


class FakeMetric:
    """A stand-in for Ray's metrics that records its calls."""

    told: ClassVar[dict[str, list[tuple[float, dict[str, str]]]]] = {}

    def __init__(self, name: str, *_: Any) -> None:
        self.values = self.told.setdefault(name, [])

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values.append((value, tags))

    observe = inc = set


def test_a_line_is_exported_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMetric, "told", {})
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, kind, FakeMetric)
    metrics = RayMetrics("sums")
    metrics.phase("train")
    metrics.phase("evaluate")
    collectives = {f"ranks/learner-{rank}/collectives_s": s for rank, s in enumerate((0.25, 0.0, 0.5))}
    stages = {"time/generator-0/wait_for_prompts_s": 1.25, "time/learner/move_s": 0.0}
    figures = {"reward/mean": 0.5, "memory/object_store_spilled_bytes": 7.0, "ranks/slowest": 1.0}
    metrics.line(3, {**stages, **collectives, **figures, "optim/lr": 1e-3})
    waiting = {"run": "sums", "actor": "generator-0", "stage": "wait_for_prompts"}
    moving = {"run": "sums", "actor": "learner", "stage": "move"}
    assert {name: values for name, values in FakeMetric.told.items() if values} == {
        "grpo_ray_phase": [
            (1, {"run": "sums", "phase": "train"}),
            (0, {"run": "sums", "phase": "train"}),
            (1, {"run": "sums", "phase": "evaluate"}),
        ],
        "grpo_ray_step": [(3, {"run": "sums"})],
        "grpo_ray_reward": [(0.5, {"run": "sums"})],
        "grpo_ray_stage_seconds": [(1.25, waiting), (0.0, moving)],
        "grpo_ray_stage_time_seconds": [(1.25, waiting)],
        "grpo_ray_collective_time_seconds": [
            (0.25, {"run": "sums", "actor": "learner-0"}),
            (0.5, {"run": "sums", "actor": "learner-2"}),  # Ray's counters refuse 0
        ],
        "grpo_ray_slowest_rank": [(1.0, {"run": "sums"})],
        "grpo_ray_memory_bytes": [(7.0, {"run": "sums", "process": "object_store_spilled"})],
    }
    assert sorted(FakeMetric.told) == sorted(NAMES)


def test_panels_of_ranks_may_be_empty_only_without_ranks(check: ModuleType) -> None:
    assert exported() >= check.OF_RANKS
    one, several = [{"step": 1}], [{"step": 1}, {"step": 2, "ranks/slowest": 0.0}]
    queries = [(title, query) for title, each in check.queries().items() for query in each]
    of_ranks = {title for title, query in queries if not check.is_due(query, one)}
    assert of_ranks == {"Time in collectives, by rank", "Slowest rank", "Imbalance of the ranks"}
    assert all(check.is_due(query, several) for _, query in queries)


@pytest.mark.parametrize(("setting", "expected"), [("False", False), ("1", True), (None, True)])
def test_nothing_is_exported_if_rays_metrics_are_off(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, expected: bool
) -> None:
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    if setting is not None:
        monkeypatch.setenv("RAY_enable_metrics_collection", setting)
    assert ray_metrics.are_on() is expected


@pytest.mark.parametrize(
    ("scored", "scraped", "expected"),
    [(0.97, 1.0, True), (0.95, 1.0, False), (1.0, 0.9, False)],
    ids=["within 2%", "does not add up", "the accounts differ"],
)
def test_accounts_are_compared(check: ModuleType, scored: float, scraped: float, expected: bool) -> None:
    row = {"timing/step_s": 2.0, "time/scorer/score_s": scored, "time/scorer/wait_for_groups_s": 1.0}
    same = {("scorer", "score"): 2 * scored, ("scorer", "wait_for_groups"): 2.0}
    others = {"timeline": same, "Prometheus": {**same, ("scorer", "score"): 2 * scored * scraped}}
    assert check.compare([{"step": step, **row} for step in (1, 2)], others) is expected


@pytest.mark.ray
@pytest.mark.campaign
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus; install it (Debian: apt-get install prometheus)"
)
def test_every_panel_has_data_on_a_real_prometheus(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = ["algorithm.num_steps=8", "evaluation.every_num_steps=4"]
    monkeypatch.setattr(sys, "argv", ["check_dashboard.py", *short])
    assert check.main() == 0, capsys.readouterr().out
