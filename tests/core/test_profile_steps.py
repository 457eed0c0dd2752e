"""`learner.profile_steps`: the profiled steps, the contents of a trace, and a disk that refuses it."""

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path

import local_runs
import pytest
from builders import ENDS, TinyModel, changed, make_batch

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError
from grpo_ray.core.learner import Learner
from grpo_ray.records.run_files import RunDirectory, read_metrics
from grpo_ray.types import TrainBatch

pytestmark = pytest.mark.usefixtures("model_cache", "any_reward")


def names(trace: Path) -> Counter[str]:
    """Return how often each record_function's name begins in the trace."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(e["name"] for e in events if e.get("cat") == "user_annotation")


@pytest.mark.slow
def test_a_run_leaves_a_trace_of_each_profiled_step(tmp_path: Path) -> None:
    config = local_runs.make_config(
        "learner.profile_steps=[2,3]", "algorithm.num_steps=4", "learner.micro_batch_tokens=64"
    )
    local_runs.train(config, tmp_path / "run")
    traces = sorted((tmp_path / "run" / "profile").iterdir())
    assert [trace.name for trace in traces] == ["step-000002.json.gz", "step-000003.json.gz"]
    for step, trace in zip((2, 3), traces, strict=True):
        found = names(trace)
        assert found[f"step {step}"] == 1
        assert found["optimizer"] == 1
        assert found["forward"] == found["backward"] >= 1
        assert not {f"step {other}" for other in range(1, 5) if other != step} & found.keys()


@pytest.mark.slow
def test_the_parts_of_a_step_are_consecutive(
    tiny_config: Config, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = changed(tiny_config, learner={"profile_steps": [1, 1], "micro_batch_tokens": 24})
    learner = Learner(str(tiny_model()), config, ENDS, profile_folder=tmp_path / "profile")
    learner.train_step(TrainBatch(tuple(make_batch(learner))))
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "step-000001.json.gz").read_bytes()))
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation":
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    ((begin, end),) = spans["step 1"]
    parts = sorted(spans["forward"] + spans["backward"] + spans["optimizer"])
    assert len(spans["forward"]) > 1  # micro-batches
    assert begin <= parts[0][0]
    assert parts[-1][1] <= end
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(parts))
    assert any(e["name"] == "aten::mm" for e in trace["traceEvents"] if e.get("cat") == "cpu_op")


@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_a_warning_and_training_continues(tmp_path: Path) -> None:
    config = local_runs.make_config("learner.profile_steps=[1,1]", "algorithm.num_steps=2")
    run = RunDirectory(tmp_path / "run")
    run.create(config)
    run.profile.write_text("a file where the folder should be")
    recorder = local_runs.train(config, run.path)
    assert recorder.steps == [1, 2]
    (event,) = [e for e in read_metrics(run.events_path) if e["kind"] == "profile_failed"]
    assert "the profile of step 1 could not be written" in event["text"]
    assert any("the profile of step 1" in warning for warning in recorder.warnings)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("[3,2]", "steps 3 to 2 cannot be profiled"),
        ("[0,2]", "learner.profile_steps"),
        ("[1,21]", "at most 20"),
        ("[2]", "learner.profile_steps"),
        ("[9,9]", "begins with step 9, but the run ends with step 8"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(steps: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("[", r"\[")):
        local_runs.make_config(f"learner.profile_steps={steps}")
