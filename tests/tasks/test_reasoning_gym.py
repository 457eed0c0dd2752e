"""Tasks of reasoning-gym: their sets, their verifiers as rewards, and a run on one."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import TinyModel
from small_run import QUICKSTART, SMALL

from grpo_ray.config.task import ReasoningGymTaskConfig
from grpo_ray.records.run_files import read_metrics
from grpo_ray.tasks import load_examples
from grpo_ray.tools.cli import main

pytest.importorskip("reasoning_gym", reason="requirements/reasoning-gym.txt, which takes a C compiler")

from grpo_ray.tasks.reasoning_gym import draw_sets, verified

RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}


def row_of(name: str, **config: Any) -> dict[str, Any]:
    return {"name": name, "config": config, "seed": 7, "size": 10, "index": 3}


def test_sets_are_of_different_seeds_and_share_no_question() -> None:
    numbers = {"num_train_prompts": 60, "num_validation_prompts": 30}
    task = ReasoningGymTaskConfig(name="chain_sum", config={"max_terms": 2, "max_digits": 1}, **numbers)
    sets = draw_sets(task, 0)
    train, validation = ([example.question for example in some] for some in (sets.train, sets.validation))
    assert (len(set(train)), len(set(validation))) == (60, 30)
    assert not set(train) & set(validation)
    assert draw_sets(task, 0) == sets != draw_sets(task, 1)
    for example in sets.train[:5]:
        assert verified(example.ground_truth, "", example.row) == RIGHT
        (terms,) = re.findall(r"\d(?: [-+] \d)+", example.question)
        assert eval(terms) == int(example.ground_truth)


def test_the_verifier_judges_the_answer() -> None:
    row = row_of("chain_sum")
    (truth,) = {e["answer"] for e in [_entry(row)]}
    assert verified(f"First, <answer>0</answer> no: <answer> {truth} </answer>", "", row) == RIGHT
    within = verified(f"It is {truth}", "", row)
    assert 0 < within["reward"] < 1
    assert (within["format_reward"], within["answer_reward"]) == (1.0, 0.0)
    assert verified("", "", row)["reward"] == 0.0
    assert verified("nonsense", "", row_of("prime_factorization"))["reward"] == 0.0  # that verifier raises
    many = row_of("countdown")  # many expressions are right
    assert verified(_entry(many)["metadata"]["expression"], "", many) == RIGHT


def _entry(row: dict[str, Any]) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(row["name"], seed=row["seed"], size=row["size"])[row["index"]]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("chain_sums", {}, "task.name: reasoning_gym has no 'chain_sums'; did you mean chain_sum?"),
        ("chain_sum", {"terms": 3}, r"task.config: chain_sum .*terms.*; its fields are min_terms"),
        ("chain_sum", {"max_terms": 1}, "task.config: chain_sum of reasoning_gym refuses it"),
        ("leg_counting", {"min_animals": 1.5}, r"task.config: leg_counting .* fails at 0 \(.*; change its"),
        ("spell_backward", {"data_file": "none.txt"}, "task.config: spell_backward .* refuses it .*none.txt"),
        ("composite", {"datasets": ["leg_counting"]}, "task.config: composite of reasoning_gym refuses it"),
        ("coin_flip", {"max_trials": 3, "min_trials": 3}, "num_validation_prompts: .* only 8 .* of the 64"),
    ],
)
def test_what_the_package_does_not_have(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_sets(ReasoningGymTaskConfig(name=name, config=config), 0)


@pytest.mark.slow
def test_sets_are_the_same_in_all_processes() -> None:
    """A set of texts is in another order in each of them, unless its hashes have a fixed seed."""
    task = ReasoningGymTaskConfig(name="isomorphic_strings", num_train_prompts=20, num_validation_prompts=4)
    sets, ours = load_examples(task, 0), draw_sets(task, 0)
    assert load_examples(task, 0) == sets != ours
    functions = ReasoningGymTaskConfig(name="list_functions", num_train_prompts=40, num_validation_prompts=4)
    assert draw_sets(functions, 0) == draw_sets(functions, 0)  # it takes Python's own random numbers, too
    known = {example.question for example in ours.train}
    other = next(example for example in sets.train if example.question not in known)
    with pytest.raises(ValueError, match=r"^isomorphic_strings draws another question .* PYTHONHASHSEED=0"):
        verified("True", "", other.row, other.question)
    with pytest.raises(ValueError, match="reasoning_gym has no 'chain_sums'"):
        load_examples(ReasoningGymTaskConfig(name="chain_sums"), 0)


def test_the_package_is_imported_with_the_verifier_and_with_nothing_else() -> None:
    """It takes seconds, which would else count for the first answer's time limit, in each new worker again."""
    modules = ("grpo_ray.tasks", "grpo_ray.tasks.reasoning_gym")
    code = "import sys; " + "; ".join(f"import {one}; print('reasoning_gym' in sys.modules)" for one in modules)
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\nTrue\n"


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_a_run_is_graded_by_the_verifier_and_audited(tmp_path: Path, tiny_model: TinyModel) -> None:
    """The point is the way of a row to the isolated verifier and into the audit: the model is random."""
    fields = {"kind": "reasoning_gym", "name": "isomorphic_strings", "prompt": "question_only"}
    task = json.dumps({**fields, "num_train_prompts": 24, "num_validation_prompts": 4})
    small = [each for each in SMALL if not each.startswith(("model.tiny", "task."))]
    model = ["model.tiny=null", f"model.path={tiny_model()}"]
    run = [f"run.output_dir={tmp_path}", "run.name=run", "scorer.num_workers=1", *model, f"task={task}"]
    assert main(["train", QUICKSTART, *small, *run, "algorithm.num_steps=2", "--local"]) == 0
    assert all(row["reward/errors"] == 0 for row in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert main(["audit", str(tmp_path / "run")]) == 0
