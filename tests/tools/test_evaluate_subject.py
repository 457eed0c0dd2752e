"""The subject and the task of an evaluation are recognised, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from builders import TinyModel, write_rows

from grpo_ray.config import Config
from grpo_ray.config.loading import ConfigError
from grpo_ray.errors import RunError
from grpo_ray.tasks import load_examples, load_validation
from grpo_ray.tools.evaluation.evaluation_plan import plan_evaluation
from grpo_ray.tools.evaluation.subject import ALL_ROWS, Weights, choose_task, find_subject
from grpo_ray.tools.look import EvaluationOptions

CONFIG = "model: {tiny: {}}\ntask: {kind: sorting}\ngenerator: {colocated: true, num_gpus: 1}\n" + (
    "learner: {num_gpus: 1}\nweight_sync: {max_lag: 0, transport: ipc}\n"
)


def asked(**options: Any) -> EvaluationOptions:
    return EvaluationOptions("owner/name", **options)


def write_run(folder: Path, rewards: dict[int, float], damaged: int | None = None) -> Path:
    """Write a run with a checkpoint and a validation reward at each step."""
    (folder / "evaluations").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    rows = [{"step": step, "reward": reward} for step, reward in rewards.items()]
    write_rows(folder / "evaluations" / "summary.jsonl", rows)
    for step in rewards:
        training = folder / "checkpoints" / f"step-{step:06d}" / "training"
        training.mkdir(parents=True)
        files = {"model.safetensors": 5} if step == damaged else {}
        state = {"step": step, "ledger": {}, "metrics": {}, "files": files}
        (training / "state.json").write_text(json.dumps(state))
        (training.parent / "config.json").write_text("{}")
    return folder


def test_the_three_kinds_of_target(tmp_path: Path, tiny_model: TinyModel) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    config = find_subject(str(tmp_path / "job.yaml"))
    assert (config.name, config.weights) == ("job", (Weights(0),))
    run = find_subject(str(write_run(tmp_path / "run", {2: 0.1, 4: 0.5})))
    assert (run.name, run.weights) == ("run", (Weights(4, tmp_path / "run" / "checkpoints" / "step-000004"),))
    checkpoint = find_subject(str(tmp_path / "run" / "checkpoints" / "step-000002"))
    assert checkpoint.weights == (Weights(2, tmp_path / "run" / "checkpoints" / "step-000002"),)
    assert checkpoint.data["task"] == {"kind": "sorting"}  # the run's, not a bare model's
    model = find_subject(str(tiny_model()))
    assert model.data["model"]["path"] == str(tiny_model())
    assert model.data["sampling"] == {"min_tokens": 0}  # the default is 4; a run keeps its own value
    assert find_subject("Qwen/Qwen2.5-Math-1.5B").data["model"]["path"] == "Qwen/Qwen2.5-Math-1.5B"


def test_a_machine_without_a_gpu_gets_defaults_that_work(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    plan = plan_evaluation(EvaluationOptions(str(tiny_model()), task="sorting"))
    assert [line[:13] for line in plan.subject.notices] == ["no GPU here: "]
    assert (plan.config.generator.num_gpus, plan.config.model.dtype) == (0, "float32")
    monkeypatch.setattr("grpo_ray.run.machine.GPU_DEVICES", ["/dev/null"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = plan_evaluation(EvaluationOptions(str(tiny_model()), task="sorting")).config
    assert (config.generator.num_gpus, config.model.dtype, config.generator.engine) == (1, "bfloat16", "vllm")


def test_the_checkpoints_of_a_run(tmp_path: Path) -> None:
    run = str(write_run(tmp_path / "run", {2: 0.1, 4: 0.5, 6: 0.5, 8: 0.2}, damaged=8))
    expected = {"last": [6], "best": [6], "all": [0, 2, 4, 6], "initial": [0], "step-000004": [4]}
    assert {c: [weights.step for weights in find_subject(run, c).weights] for c in expected} == expected
    (notice,) = find_subject(run, "last").notices
    assert notice.startswith("skipped, because it is damaged: ")
    assert "step-000008: model.safetensors is missing" in notice
    # The default is a checkpoint every 20 steps; a curve that lacks some says so.
    assert find_subject(str(write_run(tmp_path / "kept", {20: 0.1, 40: 0.2, 47: 0.2})), "all").notices == ()
    pruned = str(write_run(tmp_path / "pruned", {80: 0.1, 87: 0.2}))
    assert find_subject(pruned, "last").notices == ()
    (notice,) = find_subject(pruned, "all").notices
    assert notice == "the run kept 2 of its 5 checkpoints; train with checkpoint.keep=5 for a curve of all"


@pytest.mark.parametrize(
    ("target", "checkpoint", "message"),
    [
        ("runs/quick-2026", None, "no such run or model folder in runs; did you mean runs/quick-2025"),
        ("run/checkpoints/step-000003", None, "no such run or model folder in run/checkpoints"),
        ("no/such/folder", None, "nothing to evaluate. Give a .yaml file"),
        ("empty", None, "nothing to evaluate"),
        ("run", "step-000003", "'step-000003'; give last, best, all, initial, or one of: step-000002"),
        ("fresh", None, "has no checkpoint yet"),
        ("unvalidated", "best", "no checkpoint of .* was validated"),
        ("job.yaml", "last", "is a configuration; only a run's folder has checkpoints"),
        ("owner/name", "last", "is a model; only a run's folder has checkpoints"),
    ],
)
def test_wrong_targets_are_refused(here: Path, target: str, checkpoint: str | None, message: str) -> None:
    (here / "empty").mkdir()
    (here / "runs" / "quick-2025").mkdir(parents=True)
    (here / "job.yaml").write_text(CONFIG)
    write_run(here / "run", {2: 0.1})
    write_run(here / "fresh", {})
    write_run(here / "unvalidated", {2: 0.1})
    (here / "unvalidated" / "evaluations" / "summary.jsonl").write_text("")
    with pytest.raises(RunError, match=message):
        find_subject(target, checkpoint)
    with pytest.raises(ConfigError, match="there is no such file"):
        find_subject("absent.yaml")


def test_an_evaluation_has_no_learner_and_no_teacher_and_shares_no_device(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(f"{CONFIG}\ndistillation: {{teacher: /no/where, engine: torch}}\n")
    config = plan_evaluation(EvaluationOptions(str(tmp_path / "job.yaml"))).config
    assert config.distillation.teacher is None
    assert (config.learner.num_gpus, config.learner.num_cpus, config.generator.colocated) == (0, 0, False)
    assert config.gpus_per_generator == 1


def task_of(choice: EvaluationOptions, task: Any = None) -> dict[str, Any]:
    data = {"model": {}} if task is None else {"task": task}
    return choose_task(data, choice)["task"]  # type: ignore[no-any-return]


def test_an_adapter_may_be_an_override_and_the_command_to_resume_is_accepted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {2: 0.1})
    adapter = run / "checkpoints" / "step-000002"
    for target, has_name in ((run, True), (adapter, False)):
        command = plan_evaluation(EvaluationOptions(str(target), typed="grpo-ray evaluate")).command
        assert ("--checkpoint step-000002" in command) is has_name
    (tmp_path / "job.yaml").write_text(CONFIG)
    saved = {"base_model_name_or_path": "x", "target_modules": "[a-z]*"}
    (adapter / "adapter_config.json").write_text(json.dumps(saved))
    options = EvaluationOptions(str(tmp_path / "job.yaml"), overrides=(f"model.adapter.path={adapter}",))
    assert plan_evaluation(options).subject.weights == (Weights(0, adapter),)
    with pytest.raises(RunError, match="target_modules is the pattern"):
        plan_evaluation(EvaluationOptions(str(adapter.rename(tmp_path / "copy")), task="sorting"))


def test_files_are_recognised(tmp_path: Path) -> None:
    trees = {"prompt": "Write of trees.", "answer": "A tree.", "keywords": ["tree", "leaf"]}
    files = {
        "gsm8k": ({"question": "1+1?", "answer": "2 it is\n#### 2"}, {"kind": "gsm8k"}),
        "math": ({"problem": "1+1?", "level": 1, "solution": r"\boxed{2}"}, {"kind": "math"}),
        "keywords": (trees, {"kind": "keywords", "num_validation_prompts": ALL_ROWS}),
        "plain": ({"question": "1+1?", "answer": "2"}, {"kind": "file", "question_field": "question"}),
        "aime": ({"problem": "1+1?", "answer": 2}, {"kind": "file", "question_field": "problem"}),
    }
    for name, (row, expected) in files.items():
        path = write_rows(tmp_path / (f"{name}.parquet" if name == "math" else f"{name}.jsonl"), [row])
        task = task_of(asked(task=path))
        assert task.items() >= {**expected, "train_path": path, "validation_path": path}.items()
    named = asked(task=path, question_field="a", answer_field="b")
    assert task_of(named).items() >= {"kind": "file", "question_field": "a", "answer_field": "b"}.items()
    keywords = plan_evaluation(asked(task=str(tmp_path / "keywords.jsonl"))).config.task
    assert keywords.reward == "keyword_inclusion"
    (example,) = load_validation(keywords, 0).validation
    assert (example.question, example.ground_truth) == ("Write of trees.", "tree, leaf")


def test_the_configurations_own_kind_keeps_its_settings_and_uses_all_rows_of_its_files() -> None:
    task = {"kind": "sorting", "num_digits": 3}
    assert task_of(asked(), task) == task_of(asked(task="sorting"), task) == task
    limited = {"kind": "arithmetic", "num_validation_prompts": 5}
    assert task_of(asked(task="arithmetic", limit=5), task) == limited
    own = {"kind": "math", "validation_path": "mine.jsonl", "num_validation_prompts": 9}
    assert task_of(asked(task="math"), own) == {**own, "num_validation_prompts": ALL_ROWS}
    assert task_of(asked(), own) == own
    assert task_of(asked(task="math", limit=500), own)["num_validation_prompts"] == 500
    generated = {"kind": "keywords", "num_validation_prompts": 9}
    assert task_of(asked(task="keywords"), generated) == generated


def test_another_file_keeps_the_prompt_and_the_reward_of_a_task_of_files(tmp_path: Path) -> None:
    own = {"kind": "file", "train_path": "mine.jsonl", "prompt": "question_only", "reward": "mine:reward"}
    path = write_rows(tmp_path / "held-out.jsonl", [{"q": "1+1?", "a": "2"}])
    choice = asked(task=path, question_field="q", answer_field="a")
    given = {**own, "train_path": path, "question_field": "q", "answer_field": "a"}
    assert task_of(choice, own).items() >= given.items()
    task = task_of(choice, {**own, "kind": "gsm8k"})
    assert (task["kind"], task["prompt"], task["reward"]) == ("file", "question_only", "mine:reward")
    with pytest.raises(RunError, match="--task: episodes make their own questions"):
        task_of(asked(task=path), {"kind": "episodes"})
    mixture = {"kind": "mixture", "parts": {"easy": {"task": {"kind": "sorting"}}}}
    with pytest.raises(RunError, match=r"--prompt: .* task.parts.NAME.task.prompt=... for NAME easy"):
        task_of(asked(prompt="r1_zero"), mixture)


def test_only_the_validation_set_of_another_task_is_read() -> None:
    expected = {"num_validation_prompts": 7, "train_path": "openai/gsm8k", "validation_path": "openai/gsm8k",
                "train_split": "test", "validation_split": "test"}  # fmt: skip
    assert task_of(asked(task="gsm8k", limit=7)).items() >= expected.items()
    # a dot in a dataset's name is no suffix of a file
    assert task_of(asked(task="owner/name-v1.5"))["validation_path"] == "owner/name-v1.5"


@pytest.mark.parametrize(
    ("choice", "before", "after"),
    [
        (asked(prompt="question_only"), {"kind": "math"}, "question_only"),
        (asked(prompt="chat"), {"kind": "math", "reward": "r1_zero"}, "question_only"),
        (asked(prompt="r1_zero"), {"kind": "math", "reward": "question_only"}, "r1_zero"),
        (asked(prompt="question_only", reward="exact_match"), {"kind": "math"}, "exact_match"),
        (asked(prompt="question_only"), {"kind": "sorting"}, None),  # exact_match stays
        (asked(prompt="mine.txt"), {"kind": "math"}, None),
    ],
)
def test_the_reward_fits_a_prompt(choice: EvaluationOptions, before: dict[str, Any], after: str | None) -> None:
    assert task_of(choice, before).get("reward") == after


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (asked(), "--task: a model has no questions"),
        (asked(task="gsm9k"), r"'gsm9k' is not a task kind \(sorting, "),
        (asked(task="mixture"), "--task mixture: name the file"),
        (asked(task="data/test.json"), "'data/test.json' is not a .jsonl, .parquet or .csv file; convert"),
        (asked(task="x.JSONL", answer_field="b"), "is not a .jsonl, .parquet or .csv file"),
        (asked(task="./squad"), "is not a .jsonl, .parquet or .csv file; .* correct the path"),
        (asked(task="gsm8k", answer_field="b"), "--task gsm8k is not a file"),
        (asked(question_field="a"), "need a file; give it with --task"),
        (asked(task="odd.jsonl"), "its fields are ask, reply; name those of"),
    ],
)
def test_contradictory_options_are_refused(here: Path, choice: EvaluationOptions, message: str) -> None:
    write_rows(here / "odd.jsonl", [{"ask": "1+1?", "reply": "2"}])
    with pytest.raises(RunError, match=message):
        task_of(choice)
    with pytest.raises(ValueError, match="there is no such file"):
        task_of(asked(task="absent.jsonl"))


def test_overrides_win_and_a_tiny_model_keeps_its_own_task(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(CONFIG)
    overrides = ("task.num_digits=1", "sampling.max_tokens=9")
    plan = plan_evaluation(EvaluationOptions(str(tmp_path / "job.yaml"), "arithmetic", overrides=overrides))
    assert (plan.config.task.kind, plan.config.task.num_digits) == ("arithmetic", 1)
    assert plan.config.sampling.max_tokens == 9
    # The override belongs to the other task.
    assert (plan.model_config.task.kind, plan.model_config.task.num_digits) == ("sorting", 5)
    # A run's tiny model is its initial one; a configuration is not a run, so overrides apply to its model.
    overrides = ("task.num_validation_prompts=500", "run.seed=1", "task.prompt=question_only")
    run = write_run(tmp_path / "run", {2: 0.1})
    plan = plan_evaluation(EvaluationOptions(str(run), overrides=overrides))
    assert (plan.config.task.num_validation_prompts, plan.config.run.seed) == (500, 1)
    assert plan.model_config == plan_evaluation(EvaluationOptions(str(run))).model_config
    plan = plan_evaluation(EvaluationOptions(str(tmp_path / "job.yaml"), overrides=overrides))
    assert (plan.model_config.task.num_validation_prompts, plan.model_config.run.seed) == (500, 1)


@pytest.mark.parametrize("kind", ["sorting", "keywords", "file"])
def test_the_prompts_are_those_of_a_runs_validation(tmp_path: Path, kind: str) -> None:
    part: dict[str, Any] = {"kind": kind, "num_validation_prompts": 8}
    if kind == "file":
        for name, questions in (("train", range(20, 30)), ("validation", [0, 1, 2, 2, 3, 4, 5, 6, 7, 8])):
            rows = [{"question": f"{i}?", "answer": f"#### {i}"} for i in questions]
            part[f"{name}_path"] = write_rows(tmp_path / f"{name}.jsonl", rows)
    mixture = {"kind": "mixture", "parts": {"one": {"task": part}, "two": {"task": {"kind": "sorting"}}}}
    for data in (part, mixture):
        task = Config.model_validate({"model": {"path": "owner/name"}, "task": data}).task
        wanted, alone = load_examples(task, seed=3).validation, load_validation(task, seed=3)
        assert alone.validation == wanted
        assert not alone.train
        first = [e for name in ("", "one", "two") for e in [v for v in wanted if v.task == name][:2]]
        assert load_validation(task, seed=3, limit=2).validation == first
    if kind == "file":
        (tmp_path / "train.jsonl").unlink()
        assert load_validation(task, seed=3).validation == wanted
        (notice,) = load_validation(task, seed=3).notices
        assert notice == f"one: {tmp_path / 'validation.jsonl'}: 1 duplicate question dropped"
