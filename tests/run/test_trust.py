"""A run's folder by an attacker: no command that reads it runs its code, and each does what it can."""

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import TinyModel, Touch, edit_json, trained_so
from commands import Capture, printed, refused
from local_runs import make_config, train
from local_serving import serve_locally as serve_locally
from report_runs import add_checkpoint, make_run
from test_report_page import script_data

from grpo_ray import Run
from grpo_ray.cluster import reaper
from grpo_ray.config.loading import load_config
from grpo_ray.config.user_code import import_function
from grpo_ray.records.run_files import RunDirectory, dump_config
from grpo_ray.tools.cli import main
from grpo_ray.tools.trust import BUNDLED, code_in

REWARD = "evil_reward:grade"
EVIL_ALGORITHM = {f: f"evil_loss:{f}" for f in ("loss", "off_policy_correction", "advantage")}
AUTO_MAP = {f"Auto{kind}": f"evil.Evil{kind}" for kind in ("Config", "ModelForCausalLM")}
AUTO_MAP |= {"AutoTokenizer": ["evil.EvilTokenizer", None]}


def poison(model: Path, marker: Path) -> None:
    """Give a model code of its own, for classes that transformers lacks; loading any makes the marker."""
    (model / "evil.py").write_text(
        f"open({str(marker)!r}, 'w')\n"
        "from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM\n"
        "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
        "class EvilConfig(Qwen2Config): model_type = 'evil'\n"
        "class EvilModelForCausalLM(Qwen2ForCausalLM): config_class = EvilConfig\n"
    )
    edit_json(model / "config.json", auto_map=AUTO_MAP, model_type="evil")
    edit_json(model / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="EvilTokenizer")
    for name in ("pytorch_model.bin", "optimizer.pt", "vocab.pkl"):
        (model / name).write_bytes(pickle.dumps(Touch(marker)))


def corrupt(run: RunDirectory, **sections: dict[str, Any]) -> None:
    data = yaml.safe_load(run.config_path.read_text())
    data |= {name: data[name] | values for name, values in sections.items()}
    run.config_path.write_text(yaml.safe_dump(data))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


@pytest.fixture(scope="module")
def honest(model_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a run with files that are in order."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(make_config("algorithm.num_steps=4"), folder)
    return folder


@pytest.fixture
def evil(honest: Path, tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Return a copy of the run after an attacker's work, as the current folder of a careless user."""
    run = RunDirectory(shutil.copytree(honest, tmp_path / "run"))
    for checkpoint in run.checkpoints.glob("step-*"):
        poison(checkpoint, marker)
        trained_so(checkpoint)
    corrupt(run, model={"trust_remote_code": True}, task={"reward": REWARD}, algorithm=EVIL_ALGORITHM)
    touch = f"open({str(marker)!r}, 'w')\n"
    (run.path / "evil_loss.py").write_text(touch)
    (run.path / "evil_reward.py").write_text(f"{touch}def grade(response, truth):\n    return 0.0\n")
    monkeypatch.chdir(run.path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "evil_reward", raising=False)
    return run


def keep_to_transformers(run: RunDirectory) -> None:
    """Name classes that transformers has: the checkpoints then load without the code beside them."""
    for path in run.checkpoints.glob("step-*/tokenizer_config.json"):
        edit_json(path, tokenizer_class="PreTrainedTokenizerFast")
        edit_json(path.with_name("config.json"), model_type="qwen2")
        trained_so(path.parent)


def report(run: RunDirectory, *options: str) -> dict[str, Any]:
    assert main(["report", str(run.path), *options]) == 0
    data: dict[str, Any] = script_data((run.path / "report.html").read_text(encoding="utf-8"))["runs"][0]
    return data


@pytest.mark.slow
def test_report_of_an_evil_run_has_no_tokens_but_on_request(evil: RunDirectory, marker: Path) -> None:
    data = report(evil)
    assert not marker.exists()
    assert data["facts"]["steps"] == "4"
    assert data["rollouts"][0]["response"] is not None
    assert "tokens" not in data["rollouts"][0]
    assert "the run's model.trust_remote_code is ignored" in data["notices"][0]
    assert data["notices"][-1].startswith("responses are not split into tokens")
    data = report(evil, "--trust-remote-code")
    assert marker.exists()
    assert not any("ignored" in notice for notice in data["notices"])


@pytest.mark.slow
def test_report_shows_all_of_known_classes_and_unpickles_nothing(evil: RunDirectory, marker: Path) -> None:
    keep_to_transformers(evil)
    assert report(evil, "--log-ratio", "last")["rollouts"][0]["ratios"]
    for weights in evil.checkpoints.glob("step-*/model.safetensors"):
        weights.unlink()
        trained_so(weights.parent)
    assert "no log-ratios" in " ".join(report(evil)["notices"])
    assert not marker.exists()


def test_top_loads_nothing_and_yaml_makes_no_object(evil: RunDirectory, marker: Path, capsys: Capture) -> None:
    assert "reward" in printed(capsys, "top", evil.path, "--once")
    evil.config_path.write_text(f"run: !!python/object/apply:os.system ['touch {marker}']\n")
    for command in ("report", "audit", "evaluate"):
        assert "not valid YAML" in refused(capsys, command, evil.path)
    assert not marker.exists()


@pytest.mark.slow
def test_audit_runs_rewards_that_are_code_on_request(evil: RunDirectory, marker: Path, capsys: Capture) -> None:
    shown = printed(capsys, "audit", evil.path)
    assert not marker.exists()
    assert "4 steps, 16 groups" in shown
    assert "no problem" in shown
    assert "note: the run's model.trust_remote_code is ignored" in shown
    assert f"note: rewards are not checked, because {REWARD} is code" in shown
    corrupt(evil, task={"reward": "brevity"})  # which is built in, and not what the run had
    assert "it earns" in printed(capsys, "audit", evil.path, status=1)
    assert not marker.exists()
    corrupt(evil, task={"reward": REWARD})
    main(["audit", str(evil.path), "--run-reward-code"])
    assert marker.exists()


def test_audit_reads_a_chat_template_without_the_models_code(
    tmp_path: Path, marker: Path, tiny_model: TinyModel, capsys: Capture
) -> None:
    model = Path(shutil.copytree(tiny_model(), tmp_path / "model"))
    poison(model, marker)
    (tmp_path / "data.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 4)
    data = str(tmp_path / "data.jsonl")
    task = {"kind": "file", "train_path": data, "validation_path": data, "duplicates": "keep"}
    task |= {"prompt": "chat", "reward": "exact_match"}
    config = load_config("configs/quickstart.yaml", [
        f"model={json.dumps({'path': str(model), 'trust_remote_code': True})}", f"task={json.dumps(task)}",
    ])  # fmt: skip
    run = make_run(tmp_path / "run", config, num_steps=0)
    assert "the run's model.trust_remote_code is ignored" in printed(capsys, "audit", run.path, status=1)
    assert not marker.exists()
    main(["audit", str(run.path), "--trust-remote-code"])
    assert marker.exists()


def evaluate(run: Path, output: Path, *options: str) -> int:
    overrides = "generator.engine=torch", "recovery.restart_backoff_s=0.01"
    return main(["evaluate", str(run), *overrides, "--limit", "1", "--output", str(output), *options])


@pytest.mark.slow
def test_evaluate_refuses_a_reward_that_is_code_and_samples_an_evil_run_with_another_one(
    evil: RunDirectory, marker: Path, tmp_path: Path, serve_locally: Any, capsys: Capture
) -> None:
    for target in ("", "config.yaml", "checkpoints/step-000004"):
        assert evaluate(evil.path / target, tmp_path / "e") == 2
        assert f"{REWARD} is code that the run's configuration names" in capsys.readouterr().err
    assert not (tmp_path / "e").exists()
    serve_locally()
    assert evaluate(evil.path, tmp_path / "e", "--reward", "exact_match") == 2
    assert "model.path: " in capsys.readouterr().err  # its classes exist only as code
    keep_to_transformers(evil)
    assert evaluate(evil.path, tmp_path / "e", "--reward", "exact_match", "--checkpoint", "all") == 0
    assert "the run's model.trust_remote_code is ignored" in " ".join(capsys.readouterr().out.split())
    assert not marker.exists()
    assert (tmp_path / "e" / "step-000004" / "summary.json").exists()
    evaluate(evil.path, tmp_path / "trusted", "--reward", "exact_match", "--trust-remote-code")
    assert marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--run-reward-code"], ["--reward", REWARD], [f"task.reward={REWARD}"]])
def test_evaluate_runs_a_reward_that_the_command_line_allows(
    evil: RunDirectory, marker: Path, tmp_path: Path, serve_locally: Any, how: list[str]
) -> None:
    serve_locally()
    keep_to_transformers(evil)
    assert evaluate(evil.path, tmp_path / "e", *how) == 0
    assert marker.exists()


@pytest.mark.slow
def test_a_configuration_of_the_users_own_is_believed_as_by_train(
    tmp_path: Path, marker: Path, evil: RunDirectory, serve_locally: Any
) -> None:
    serve_locally()
    dump_config(load_config(evil.config_path, ["model.trust_remote_code=false"]), tmp_path / "mine.yaml")
    assert evaluate(tmp_path / "mine.yaml", tmp_path / "e") == 0
    assert marker.exists()  # its reward


# ---- functions of this package that are not meant to be named ----

OURS = "grpo_ray.cluster.reaper:_main"  # called with a folder's seed, it kills the process of that pid
GAME, SORTING = "configs/guess-number.yaml", "configs/quickstart.yaml"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "x", "target_modules": ["q_proj"]}
FIELDS = {f"task.{name}": GAME for name in ("episode", "examples", "warmup")}
FIELDS |= dict.fromkeys(("task.reward", "generator.engine", "generator.engine_args.scheduler_cls"), SORTING)


@pytest.mark.parametrize("field", FIELDS)
def test_audit_and_evaluate_call_no_other_function_of_this_package(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(reaper, "_main", lambda *args: calls.append(args))
    run = make_run(tmp_path / "run", load_config(FIELDS[field], [f"{field}={OURS}"]), num_steps=0)
    noted = f"{OURS} is code" in printed(capsys, "audit", run.path, status=1)
    assert noted is (field in ("task.examples", "task.reward"))  # it needs none of the others
    command = ["evaluate", run.path, "--checkpoint", "initial", "--output", tmp_path / "e"]
    assert f"{field}: {OURS} is code that the run's configuration names" in refused(capsys, *command)
    if field == "task.warmup":  # a tiny model's initial weights are built from the run's own task
        message = refused(capsys, *command, "--task", "sorting", "--reward", "exact_match")
        assert f"task.warmup: {OURS} is code" in message
        # The base of an adapter, too.
        run = make_run(tmp_path / "adapted", load_config(GAME, [f"{field}={OURS}", "model.adapter={}"]))
        (tmp_path / "adapter").mkdir()
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(ADAPTER))
        add_checkpoint(run, 6, tmp_path / "adapter")
        assert message in refused(capsys, "evaluate", run.path, "--task", "sorting", "--reward", "exact_match")
        others = {"report": ["--log-ratio", "last"], "export": ["--merged", tmp_path / "merged"]}
        for words in ([name, run.path, *options] for name, options in others.items()):
            assert refused(capsys, *words) == message
            assert "task.warmup: " in refused(capsys, *words, "--run-reward-code")
            assert calls.pop()  # its arguments
        with pytest.raises(RuntimeError, match="is code that the run's configuration names"):
            Run(run.path).model()
    assert calls == []


def test_the_bundled_functions_exist_and_are_all_that_our_configurations_name() -> None:
    for field, names in BUNDLED.items():
        for name in names:
            assert callable(import_function(name, field))
    for path in Path("configs").rglob("*.yaml"):
        assert code_in(load_config(path)) == [], path
