"""Reward functions of the user's own: checks, results, the examples, and the ways in which they are called."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from builders import make_completion, make_item, make_scorer, write_rows
from commands import Capture, printed, refused
from small_run import QUICKSTART

import grpo_ray
from examples.own_reward import train as own_reward
from examples.rewards import json_object, numeric_tolerance, regex_format, shuffled
from examples.trl_reward import rewards as trl_rewards
from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.loading import load_config
from grpo_ray.config.reward import RewardTerm, ScorerConfig, named_terms, term_weights
from grpo_ray.config.task import EpisodesTaskConfig, FileTaskConfig
from grpo_ray.errors import RunError
from grpo_ray.objectives import advantages_of
from grpo_ray.records.rollout_log import read_groups, write_rollouts
from grpo_ray.rewards import get_reward_fn
from grpo_ray.rewards.answer_formats import written
from grpo_ray.rewards.base import Overrun, ScoringError, Ungradable
from grpo_ray.rewards.configured import TermReward, check_reward, summed
from grpo_ray.rewards.grader import Grader
from grpo_ray.rewards.networked import NetworkReward
from grpo_ray.rewards.trial import try_rewards
from grpo_ray.rewards.user_function import UserFunction
from grpo_ray.run.preparation import check_files, may_ask, with_trial
from grpo_ray.tasks.dataset import dataset_examples
from grpo_ray.tasks.prompts import ChatTemplate, Prompter, TextTemplate, template_of
from grpo_ray.types import PromptItem, RolloutGroup, ScoredGroup
from grpo_ray.watch.batch_metrics import rollout_metrics

EXAMPLES = "examples.rewards"


def result_of(value: Any) -> dict[str, float]:
    return UserFunction(lambda response, ground_truth: value, "mine:reward", {}).read(value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1, 1, 1)), (0.99, (0.99, 1, 0)), (-1.0, (-1, 1, 0)), (np.float32(0.5), (0.5, 1, 0)),
        (np.True_, (1, 1, 1)), (Decimal("0.5"), (0.5, 1, 0)), (torch.tensor(0.5), (0.5, 1, 0)),
        ({"reward": 0.3}, (0.3, 1, 0)), ({"reward": 0.3, "answer_reward": 1.0}, (0.3, 1, 1)),
        ({"reward": 1, "format_reward": 0, "answer_reward": 0}, (1, 0, 0)),
    ],
)  # fmt: skip
def test_a_number_or_a_dict(value: Any, expected: tuple[float, float, float]) -> None:
    result = result_of(value)
    assert result == dict(zip(("reward", "format_reward", "answer_reward"), expected, strict=True))
    assert all(type(number) is float for number in result.values())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "returned None as 'reward'; it must be a finite number"),
        (float("nan"), "returned nan as 'reward'; it must be a finite number"),
        ([1.0], r"returned \[1.0\] as 'reward'"),
        (10**400, "returned 10{400} as 'reward'; it must be a finite number"),
        ({}, "returned a dict of nothing; it needs 'reward'"),
        ({"reward": 1, "formt_reward": 1}, "returned a dict of 'reward', 'formt_reward'"),
        ({"reward": 1, "format_reward": 0.5}, "returned 0.5 as 'format_reward'; it must be 0 or 1"),
        ({"reward": 1, "answer_reward": None}, "returned None as 'answer_reward'"),
    ],
)
def test_any_other_result_is_refused(value: Any, message: str) -> None:
    place = r"\(test_reward_functions.py:\d+\)"
    with pytest.raises(ValueError, match=f"task.reward: mine:reward {place} {message}"):
        result_of(value)


MODULE = "my_rewards_4711"
CODE = """
from typing import Literal
BLEU = 3
def reward(response, ground_truth): return float(response == ground_truth)
def scaled(response: str, ground_truth: str, scale: float, mode: Literal["a", "b"] = "a") -> float: return scale
def anything(response, ground_truth, **options): return 0.5
class Judge:
    def __call__(self, response, ground_truth): return 0.25
judge = Judge()
"""


@pytest.fixture
def here(own_module: None, tmp_path: Path) -> Path:
    (tmp_path / "failing_4711.py").write_text("1 / 0")
    (tmp_path / "leaving_4711.py").write_text("raise SystemExit(3)")
    (tmp_path / "needing_4711.py").write_text("import no_such_library_4711")
    return tmp_path


@pytest.mark.usefixtures("here")
def test_a_module_in_the_current_folder_is_found() -> None:
    check_reward("my_rewards_4711:reward")
    assert get_reward_fn("my_rewards_4711:reward")("a", "a")["reward"] == 1
    assert get_reward_fn("my_rewards_4711:judge")("a", "a")["reward"] == 0.25
    term = RewardTerm(reward="my_rewards_4711:scaled", weight=2, arguments={"scale": 0.25})
    check_reward((term,))
    assert get_reward_fn((term,))("", "")["reward"] == 0.5
    check_reward((RewardTerm(reward="my_rewards_4711:anything", arguments={"a": 1, "b": "x"}),))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no_module_4711:f", {}, "there is no module 'no_module_4711' in "),
        ("my_rewards_4711.py:f", {}, "Leave out .py: my_rewards_4711:f"),
        ("my_rewards_4711:f", {}, "'my_rewards_4711' has no function 'f'; its file is "),
        ("sys:f", {}, "'sys' has no function 'f'; its file is none: it is a folder, or built in"),
        ("my_rewards_4711:BLEU", {}, "'BLEU' of 'my_rewards_4711' is a int, not a function"),
        ("failing_4711:reward", {}, "importing 'failing_4711' failed: ZeroDivisionError: division by zero"),
        ("leaving_4711:reward", {}, "importing 'leaving_4711' failed: SystemExit: 3"),
        ("needing_4711:reward", {}, "'needing_4711' imports 'no_such_library_4711', which is not installed"),
        ("my_rewards_4711:reward", {"scale": 1}, "has no argument 'scale'; it takes none"),
        ("my_rewards_4711:scaled", {"scael": 1}, "has no argument 'scael'; it takes scale, mode"),
        ("my_rewards_4711:scaled", {"scale": "x"}, "has scale='x': input should be a valid number"),
        ("my_rewards_4711:scaled", {"scale": "x" * 999}, "has scale='x{199}: input should be a valid number"),
        ("my_rewards_4711:scaled", {"scale": 1, "mode": "c"}, "has mode='c': input should be 'a' or 'b'"),
        ("brevity", {"free": -1}, "brevity has free=-1: input should be greater than or equal to 0"),
        ("graded", {"response": "x"}, "graded has no argument 'response'; it takes right, wrong, missing, "),
        ("format", {"answer_in": "tag"}, "format has answer_in='tag'"),
    ],
)
def test_a_reward_that_does_not_fit_is_refused_before_a_run(
    name: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"task\.reward: .*{message}"):
        check_reward((RewardTerm(reward=name, arguments=arguments),))


def test_numeric_tolerance() -> None:
    answers = ["about 3.14", "3.2 or 3.13", "3.3", "3.14 of 100", "none", "3,140.0e-3"]
    assert [numeric_tolerance.reward_fn(answer, "3.1416") for answer in answers] == [1, 1, 0, 0, -1, 1]
    term = RewardTerm(reward=f"{EXAMPLES}.numeric_tolerance:reward_fn", arguments={"tolerance": 0.2})
    check_reward((term,))
    assert get_reward_fn((term,))("80", "100") == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    assert get_reward_fn((term,))("79", "100") == {"reward": 0, "format_reward": 1, "answer_reward": 0}


def test_shuffled_rewards_are_the_earned_ones() -> None:
    def given(last: str) -> list[float]:
        return shuffled.shuffled([*map(str, range(9)), last], ["3"] * 10, [{}] * 10, "last_number")

    assert sorted(given("9")) == [0.0] * 9 + [1.0]
    assert given("9") == given("9")
    assert len({given(f"{number}").index(1.0) for number in range(9, 40)}) > 5  # anywhere


@pytest.mark.parametrize(
    ("response", "reward", "has_format", "is_right"),
    [
        ('{"name": "Ada", "age": 36}', 1.0, 1, 1),
        (' {"age": 36, "name": "Ada", "x": null}\n', 1.0, 1, 1),
        ('{"name": "Ada", "age": 37}', 0.6, 1, 0),
        ("{}", 0.2, 1, 0),
        ('["Ada", 36]', 0.0, 0, 0),
        ('{"name": "Ada", "age": 36', 0.0, 0, 0),
        ("[" * 100_000, 0.0, 0, 0),
    ],
)
def test_json_object(response: str, reward: float, has_format: float, is_right: float) -> None:
    result = get_reward_fn(f"{EXAMPLES}.json_object:reward_fn")(response, '{"name": "Ada", "age": 36}')
    expected = {"reward": pytest.approx(reward), "format_reward": has_format, "answer_reward": is_right}
    assert result == expected
    assert json_object.reward_fn(response, '{"name": "Ada", "age": 36}') == expected


def test_regex_format() -> None:
    pattern = r"(?s).+Check:.+</answer>"
    assert regex_format.reward_fn("so\nCheck: yes </answer>\n", "", pattern)["reward"] == 1
    assert regex_format.reward_fn("so\nyes </answer>", "", pattern)["reward"] == 0
    with pytest.raises(ValueError, match="regex_format:reward_fn needs pattern"):
        check_reward(f"{EXAMPLES}.regex_format:reward_fn")


# ---- the ways in which a function is called: by name, batched, as in TRL, over a network ----


ABOUT = {
    "prompt": "Q: 6 * 7? A:",
    "question": "6 * 7?",
    "row": {"level": 3, "tests": ["assert x == 42"]},
    "fields": {"question": "6 * 7?", "answer": "six times seven #### 42"},
}

FORMS = '''
import asyncio, functools, os, re, threading, urllib.request, json
import numpy as np

def rubric(prompt, completion, answer, **kwargs): return float(answer in completion)
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def columns(completions, question, ground_truth): return [len(q + t) for q, t in zip(question, ground_truth)]
def not_numbers(completions, **kwargs): return [float("nan"), 0.5, "x"]
def of_numpy(completions, **kwargs): return [np.float32("nan"), np.True_, np.array(0.5)]
def of_column(prompts, completions, response): return [float(len(r)) for r in response]
def by_place(response, ground_truth, /): return float(response == ground_truth)
def leaves(response): exec("import sys; sys.exit(3)")
def not_a_number(response): return [float("nan"), 0.5]
def legacy(answer, truth): return float(answer == truth)
def by_name(response, ground_truth, question, prompt, row): return len(question) + len(prompt) + row["level"]
def any_order(question, response): return float(question in response)
def unit_tests(response, tests): return float(len(tests) == 1 and tests[0].endswith(response))
def shadowed(response, answer): return float(answer == "42")
def half_broken(response, ground_truth): return float(response[0] == ground_truth[0])
def optional(response, ground_truth, hint="none"): return float(hint == "none")
def everything(response, ground_truth, **columns): return float(columns["level"] + len(columns))
def relative(response, ground_truth, completions): return sum(len(response) > len(c) for c in completions)
def batched(response, ground_truth, level): return [len(r) + l for r, l in zip(response, level, strict=True)]
def too_few(response, ground_truth): return [1.0]
@lambda f: functools.wraps(f)(lambda **texts: asyncio.run(f(**texts)))
async def in_its_own_loop(response, ground_truth): return 0.5
def by_answer(completions, answer): return [float(c == a) for c, a in zip(completions, answer, strict=True)]
def undecided(prompts, completions): return [None if c == "x" else 1.0 for c in completions]
def spins(response, ground_truth):
    while response == "spin": pass
    return 1.0
def swapped(text, question): return 1.0
def tested(text, tests): return 1.0

# From TRL's documentation (GRPOTrainer, "Using a custom reward function"), unchanged.
def length(completions, **kwargs):
    """Reward function that gives higher scores to longer completions."""
    return [float(len(completion)) for completion in completions]

def format_reward_func(completions, **kwargs):
    """Reward function that checks if the completion has a specific format."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    completion_contents = [completion[0]["content"] for completion in completions]
    matches = [re.match(pattern, content) for content in completion_contents]
    return [1.0 if match else 0.0 for match in matches]

def boxed(completions, ground_truth, **kwargs):
    # Regular expression to capture content inside \\\\boxed{}
    matches = [re.search(r"\\\\boxed\\{(.*?)\\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    # Reward 1 if the content is the same as the ground truth, 0 otherwise
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]

def ask(response):
    request = urllib.request.Request(
        os.environ["FORMS_URL"], json.dumps({"text": response}).encode(),
        {"Authorization": "Bearer " + os.environ.get("FORMS_KEY", "")},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["score"]

def judge(response, ground_truth): return ask(response)

async def async_judge(response, ground_truth, question):
    return await asyncio.to_thread(ask, response)

hanging = threading.Event()
def hangs(response, ground_truth): return len(response) if response != "hang" else hanging.wait()
async def sleeper(response, ground_truth):
    await asyncio.sleep(3600)
print("imported")
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "forms_4711.py").write_text(FORMS)
    monkeypatch.syspath_prepend(tmp_path)


def own(function: str, /, **fields: Any) -> RewardTerm:
    return RewardTerm(reward=f"forms_4711:{function}", **fields)


def rewards_of(term: RewardTerm, responses: Sequence[str], about: Any = ABOUT) -> list[float | str]:
    results = TermReward(term)(responses, ["42"] * len(responses), about)
    return [str(each) if isinstance(each, Exception) else each.get("reward", "none") for each in results]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("legacy", [1, 0]),
        ("by_place", [1, 0]),
        ("leaves", ["SystemExit: 3"] * 2),
        ("by_name", [6 + 12 + 3] * 2),
        ("any_order", [0, 0]),
        ("unit_tests", [1, 0]),  # the column `tests`, not the truth
        ("shadowed", [1, 1]),  # the answer's own column is the truth, so a second parameter stays the truth
        ("optional", [1, 1]),
        (own("unit_tests", arguments={"tests": "x"}), [0, 0]),  # arguments come before columns
        (own("optional", arguments={"hint": "a"}), [0, 0]),
        ("everything", [3 + 6] * 2),  # level, tests, question, answer, prompt, row
        ("relative", [0, 1]),
    ],
)
def test_a_function_gets_what_it_asks_for(function: str | RewardTerm, expected: list[float]) -> None:
    term = own(function) if isinstance(function, str) else function
    assert rewards_of(term, ["42", "6 * 7"]) == expected


def test_a_parameter_that_gets_the_truth_by_its_place_alone_is_named() -> None:
    assert UserFunction.of(own("unit_tests")).truth_as(["level"]) == "tests"
    assert UserFunction.of(own("unit_tests")).truth_as(["tests"]) is None
    assert [UserFunction.of(own(name)).truth_as([]) for name in ("legacy", "shadowed", "batched")] == [None] * 3


@pytest.mark.parametrize(
    ("term", "columns", "message"),
    [
        (own("unit_tests"), ["level"], None),  # the second parameter is the truth then
        (own("batched", batched=True), ["tests"], "needs level; there is no such column, only tests; add it"),
        (own("batched", batched=True), [], "needs level; give `arguments` in a list"),
        (own("batched", batched=True), None, None),
        (own("batched", batched=True), ["level"], None),
        (own("length"), [], None),
        (own("sleeper"), [], "is an `async def`, which needs a term with the network"),
        (own("sleeper", network=True), [], None),
        (own("rubric"), [], "would get the response as `prompt` and the ground truth as `completion`, by"),
        (own("compute_score"), [], "would get the response as `data_source` and the ground"),
        (own("swapped"), [], "would get the response as `text` and the ground truth as `question`, by"),
        (own("tested"), ["tests"], "would get the response as `text` and the ground truth as `tests`, by"),
        (own("tested"), [], None),
    ],
)
def test_the_signature_is_compared_with_the_columns(
    term: RewardTerm, columns: list[str] | None, message: str | None
) -> None:
    if message is None:
        check_reward((term,), columns=columns)
        return
    with pytest.raises(ValueError, match=rf"task\.reward: forms_4711:\w+ {message}"):
        check_reward((term,), columns=columns)


def test_a_batched_function_gets_lists() -> None:
    assert rewards_of(own("batched", batched=True), ["a", "abc"]) == [4, 6]
    (error,) = rewards_of(own("batched", batched=True), ["x"], {"row": {"other": 1}})
    assert error == "it asks for 'level', which this row lacks (its columns: other)"
    first, second = rewards_of(own("too_few", batched=True), ["a", "b"])
    assert first == second
    assert "too_few (forms_4711.py:24) returned 1 values for 2 responses; return a list of 2" in str(first)


def test_functions_of_trl_work_as_they_are() -> None:
    assert rewards_of(own("length"), ["a", "abc"]) == [1, 3]
    assert rewards_of(own("boxed"), [r"\boxed{42}", "42"]) == [1, 0]
    chat = {**ABOUT, "messages": [{"role": "user", "content": "6 * 7?"}]}
    assert rewards_of(own("format_reward_func"), ["<think>a</think><answer>42</answer>", "42"], chat) == [1, 0]
    assert rewards_of(own("undecided"), ["x", "y"]) == ["none", 1]


def test_in_trls_form_every_column_has_its_own_name() -> None:
    about = {"question": "[messages]", "row": {"question": "Q?", "ground_truth": "42!"}}
    assert rewards_of(own("columns"), ["a"], about) == [5]
    assert rewards_of(own("columns"), ["a"], {"question": "Q"}) == [3]  # no such columns: the task's own
    assert rewards_of(own("of_column"), ["a"], {"row": {"response": "gold"}}) == [4]


def test_a_value_that_is_no_reward_concerns_its_response_alone() -> None:
    absent, half, wrong = rewards_of(own("not_numbers"), ["a", "b", "c"])
    assert (absent, half) == ("none", 0.5)
    assert rewards_of(own("of_numpy"), ["a", "b", "c"]) == ["none", 1, 0.5]
    assert "returned 'x' as 'reward'; it must be a finite number" in str(wrong)
    wrong, half = rewards_of(own("not_a_number", batched=True), ["a", "b"])
    assert half == 0.5
    assert "returned nan" in str(wrong)


def test_a_term_that_does_not_apply_adds_nothing() -> None:
    terms = (own("undecided"), own("length", weight=0.5))
    parts = [TermReward(term)(["x", "yy"], ["", ""], ABOUT) for term in named_terms(terms)]
    first, second = map(summed, zip(*parts, strict=True))
    facts = {"format_reward": 1.0, "answer_reward": 1.0}
    assert first == {"reward": 0.5, "reward/length": 1.0, **facts}
    assert second == {"reward": 2.0, "reward/undecided": 1.0, "reward/length": 2.0, **facts}


@pytest.mark.slow
def test_the_pool_grades_groups_together_and_a_term_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_ray.rewards.isolation.pool.MAX_EXTENSIONS", 1000)  # on a busy machine
    rewards = {
        "together": (own("length"), own("legacy", name="same")),
        "alone": "forms_4711:legacy",
        "relative": "forms_4711:relative",
        "mute": "forms_4711:undecided",
        "overrun": (own("spins"), own("length", weight=-1)),
        "too long": (RewardTerm(reward="r1_zero"), own("length", weight=-0.5)),
        "broken": (RewardTerm(reward="r1_zero"), own("too_few", batched=True)),
    }
    item = PromptItem(0, "Q", (), "42", about=json.dumps({"question": "6 * 7?", "row": {"level": 3}}))
    grader = Grader(rewards, ScorerConfig(num_workers=1, timeout_s=1.0, ungradable_reward=-5.0))
    pairs = [("42", "42"), ("421", "42")]
    assert [r["reward"] for r in grader.grade("together", pairs, item) if isinstance(r, dict)] == [3, 3]
    assert [r["reward/same"] for r in grader.grade("together", pairs, item) if isinstance(r, dict)] == [1, 0]
    assert [r["reward"] for r in grader.grade("alone", pairs, item) if isinstance(r, dict)] == [1, 0]
    assert [r["reward"] for r in grader.grade("relative", pairs) if isinstance(r, dict)] == [0, 1]
    (silent,) = grader.grade("mute", [("x", "")])
    assert isinstance(silent, ScoringError)
    assert str(silent) == "no reward applies to it: each returned None"
    many = grader.grade("together", [("421", "42")] * 2000, item)
    assert [r["reward"] for r in many if isinstance(r, dict)] == [3] * 2000
    spun, other = grader.grade("overrun", [("spin", ""), ("ab", "")])
    assert (type(spun), str(spun)) == (Overrun, "longer than 1 s (scorer.timeout_s)")
    assert (spun.scores["reward"], spun.scores["reward/spins"], spun.scores["reward/length"]) == (-9, -5, 4)
    assert (other["reward"], other["reward/length"]) == (-1, 2)
    long = "</think> <answer> " + "1+" * 600 + "1 </answer>"
    (penalized,) = grader.grade("too long", [(long, "72")])
    assert isinstance(penalized, Ungradable)
    assert penalized.scores["reward"] == -0.5 * len(long)
    assert penalized.scores["format_reward"] == 1
    failed, _ = grader.grade("broken", [(long, "72"), ("", "72")])
    assert isinstance(failed, ScoringError)
    assert "returned 1 values for 2 responses" in str(failed)
    grader.close()


def test_a_module_that_trains_on_import_is_refused(tmp_path: Path) -> None:
    call = f"grpo_ray.train({QUICKSTART!r}, local=True)\n"
    (tmp_path / "looping_4711.py").write_text(f"import grpo_ray\ndef f(response): return 1.0\n{call}")
    with pytest.raises(RunError, match="trains on import"):  # or each grader would start the next run
        Grader({"": "looping_4711:f"}, ScorerConfig(num_workers=1)).start()


# ---- over a network ----


class Judge(BaseHTTPRequestHandler):
    """An endpoint that scores a text by its length, refuses without the key, and fails once at `flaky`.

    It also grades a question of chat completions.
    """

    seen: ClassVar[dict[str, int]] = {}
    barrier = Barrier(4, timeout=60)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_chat = self.path == "/v1/chat/completions"
        text = request["messages"][0]["content"] if is_chat else request["text"]
        self.seen[text] = self.seen.get(text, 0) + 1
        if text.startswith("together"):
            self.barrier.wait()  # answers only when four are here at the same time
        is_refused = self.headers["Authorization"] != "Bearer s3cret"
        failed = text.startswith("flaky") and self.seen[text] == 1
        self.send_response(401 if is_refused else 503 if failed else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        choice = {"message": {"content": f"{len(text) % 11}"}}
        self.wfile.write(json.dumps({"score": len(text), "choices": [choice]}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    Thread(target=server.serve_forever).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("FORMS_URL", address)
    monkeypatch.setenv("FORMS_KEY", "s3cret")
    yield address
    server.shutdown()
    server.server_close()


SECRETS = ("FORMS_URL", "FORMS_KEY")


@pytest.mark.slow
@pytest.mark.parametrize("function", ["judge", "async_judge"])
def test_a_judge_is_asked_at_the_same_time_and_again(url: str, function: str) -> None:
    judge = own(function, network=True, secrets=SECRETS, weight=0.5, name="judge", retries=1, concurrency=4)
    exact = RewardTerm(reward="exact_match")
    terms = {"": (exact, judge), "second": (own("undecided"), judge, exact)}
    grader = Grader(terms, ScorerConfig(num_workers=1))
    texts = [f"together {function} {i}" for i in range(4)]
    item = PromptItem(0, "Q", (), "", about=json.dumps({"question": "6 * 7?"}))
    results = grader.grade("", [(text, "") for text in texts], item)
    assert [r["reward/judge"] for r in results if isinstance(r, dict)] == [len(text) for text in texts]
    assert [r["reward"] for r in results if isinstance(r, dict)] == [len(text) / 2 for text in texts]
    assert all(isinstance(r, dict) and r["format_reward"] == 0 for r in results)  # exact_match's, the first
    (again,) = grader.grade("", [(f"flaky {function}", "")], item)
    assert isinstance(again, dict)
    assert Judge.seen[f"flaky {function}"] == 2
    (scores,) = grader.grade("second", [("x", "")], item)
    assert (scores["format_reward"], scores["reward"]) == (1, 0.5)  # the judge's, as the first does not apply
    grader.close()


def test_a_call_that_ends_its_program_costs_its_own_response_alone() -> None:
    reward = NetworkReward(own("leaves", network=True, retries=0, concurrency=2), num_slots=2)
    assert [str(each) for each in reward(["a", "b"], ["", ""], {})] == ["SystemExit(3)"] * 2
    reward = NetworkReward(own("in_its_own_loop", network=True, retries=0), num_slots=1)
    assert reward(["a"], [""], {})[0]["reward"] == 0.5


def test_a_call_that_hangs_keeps_its_thread_from_no_other() -> None:
    reward = NetworkReward(own("hangs", network=True, timeout_s=1, retries=0, concurrency=1), num_slots=1)
    hung, answered = reward(["hang", "answer"], ["", ""], {})
    assert "longer than 1 s" in str(hung)
    assert answered["reward"] == 6
    sys.modules["forms_4711"].hanging.set()


@pytest.mark.slow
def test_a_judge_that_refuses_or_hangs_is_an_error_with_its_reason(url: str) -> None:
    keyless = (own("judge", network=True, secrets=("FORMS_URL",), retries=0),)
    hanging = (own("sleeper", network=True, timeout_s=0.2, retries=1),)
    offline = (own("judge", secrets=SECRETS),)
    grader = Grader({"keyless": keyless, "hanging": hanging, "offline": offline}, ScorerConfig(num_workers=1))
    for task, reason in (
        ("keyless", "HTTPError: HTTP Error 401"),
        ("hanging", "TimeoutError: longer than 0.2 s (timeout_s of its term)"),
        ("offline", "URLError: <urlopen error [Errno 1] Operation not permitted>"),
    ):
        results = grader.grade(task, [("a", ""), ("b", "")])
        assert all(isinstance(each, ScoringError) and reason in str(each) for each in results), results
    grader.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "r1_zero", "network": True}, "network: r1_zero is built in"),
        ({"reward": "r1_zero", "batched": True}, "batched: r1_zero is built in"),
        ({"reward": "m:f", "timeout_s": 3}, "timeout_s applies only with `network: true`"),
        ({"reward": "m:f", "name": "a b"}, "'a b' is not valid; give letters"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardTerm(**fields)


# ---- names, and GDPO ----


def test_each_term_of_a_sum_has_a_name() -> None:
    terms = (RewardTerm(reward="format"), own("length"), own("length"), own("judge", name="length_2"))
    assert [term.name for term in named_terms(terms)] == ["format", "length", "length_3", "length_2"]
    assert named_terms("r1_zero")[0].name is None
    assert term_weights((own("judge", name="quality", weight=2),)) == {"quality": 2}
    assert term_weights((own("judge"),)) == {}


def test_gdpo_compares_each_term_by_its_name_as_trl_does() -> None:
    """TRL: the sum over the rewards of weight x (r - nanmean) / (nanstd + eps), where NaN counts as 0."""
    terms = {"a": np.float32([1, 0, 0, 1]), "b": np.float32([3, 5, np.nan, 7])}
    weights = {"a": 1.0, "b": 0.25}
    total = np.nansum([weights[n] * terms[n] for n in terms], axis=0).astype(np.float32)
    config = AlgorithmConfig(advantage="gdpo", advantage_eps=1e-4)
    found = advantages_of(total, np.ones(4, int), np.ones(4, bool), config, 8, None, None, terms, weights)
    expected = np.zeros(4)
    for name, values in terms.items():
        standardized = (values - np.nanmean(values)) / (np.nanstd(values, ddof=1) + 1e-4)
        expected += weights[name] * np.nan_to_num(standardized)
    assert torch.allclose(torch.tensor(found), torch.tensor(expected, dtype=torch.float32))


# ---- the rows of a file ----


def test_the_other_columns_travel_only_for_code_that_may_ask(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "answer": f"a{i}", "tests": [i], "level": None} for i in range(4)]
    path = write_rows(tmp_path / "data.jsonl", rows)
    other = write_rows(tmp_path / "other.jsonl", [{"question": "v", "answer": "w"}])
    sources = {"train_path": path, "validation_path": other}
    assert all(e.facts == "" for e in dataset_examples(FileTaskConfig(**sources), 0).train)
    sets = dataset_examples(FileTaskConfig(**sources, reward="forms_4711:unit_tests"), 0)
    assert sets.train[2].row == {"tests": [2], "level": None}
    assert sets.validation[0].row == {}
    episodes = {"episode": "games:play", "examples": path}
    assert may_ask(EpisodesTaskConfig(**episodes, validation_examples=other))
    assert not may_ask(EpisodesTaskConfig(**episodes | {"examples": "games:examples"}))
    tokenizer = Mock(return_value={"input_ids": [[1]]})
    tokenizer.apply_chat_template = lambda messages, **_: str(messages)
    item = Prompter(ChatTemplate("Be short."), tokenizer, None, True).item(0, sets.train[2])
    assert json.loads(item.about) == {
        "question": "q2",
        "row": {"tests": [2], "level": None},
        "fields": {"question": "q2", "answer": "a2"},
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "q2"}],
    }
    assert Prompter(TextTemplate("{question}"), tokenizer).item(0, sets.train[2]).about == ""


def test_terms_are_graded_logged_and_read_again(tmp_path: Path) -> None:
    brevity = RewardTerm(reward="brevity", arguments={"free": 0, "span": 4})
    scorer = make_scorer((brevity, RewardTerm(reward="format", weight=2)))
    item = replace(make_item(truth="42"), about='{"question": "6 * 7?"}')
    rollout = RolloutGroup(item, tuple(make_completion([1], text=text) for text in ("a", "abc")), "generator-0")
    verdict = scorer.score(rollout)
    values = {name: term.tolist() for name, term in verdict.terms.items()}
    assert values == {"brevity": [0.75, 0.25], "format": [0, 0]}
    group = ScoredGroup.of(rollout, replace(verdict, terms={**verdict.terms, "judge": np.float32([np.nan, 3])}))
    assert rollout_metrics([group])["reward/brevity/mean"] == 0.5
    assert rollout_metrics([group])["reward/judge/mean"] == 3  # it applied to one response
    other = replace(group, rollout=replace(rollout, item=make_item(1)), terms={})
    write_rollouts(tmp_path / "rollouts.parquet", 1, [group, other])
    first, second = read_groups(tmp_path / "rollouts.parquet")
    assert first.rollout.item.about == item.about
    assert second.rollout.item.about == ""
    assert second.terms == {}
    assert first.terms.keys() == group.terms.keys()
    assert all(np.array_equal(first.terms[n], group.terms[n], equal_nan=True) for n in group.terms)


# ---- a try before a run ----


def trials_of(truth: str, *rewards: Any) -> tuple[list[Any], list[str]]:
    about = json.dumps({"question": "6 * 7?", "row": {"level": 3}})
    item = PromptItem(0, "Q: 6 * 7?\nA:", (), truth, about=about)
    names = ["", *map(str, range(1, len(rewards)))]
    items = dict.fromkeys(names, (item, "data.jsonl, line 1"))
    return try_rewards(dict(zip(names, rewards, strict=True)), items, ScorerConfig(num_workers=1))


def test_a_built_in_reward_gets_the_truth_in_its_own_format() -> None:
    (trial,), notices = trials_of("42", "exact_match")
    assert [*trial.lines] == [
        "first prompt (data.jsonl, line 1), as the model sees it:",
        "  | Q: 6 * 7?",
        "  | A:",
        "its ground truth: '42'; its reward: 1 for '</think> <answer> 42 </answer>', 0 for an empty response",
    ]
    assert notices == []
    assert written((RewardTerm(reward="brevity"), RewardTerm(reward="r1_zero")), "7") == "7"
    assert written("question_only", "7") == r" \boxed{7}"
    _, (notice,) = trials_of("<answer>", "exact_match")
    refusal = "task.reward: exact_match does not accept the first example (data.jsonl, line 1)'s"
    assert notice.startswith(refusal)


@pytest.mark.slow
def test_ones_own_reward_gets_the_bare_truth_and_is_refused_if_it_fails() -> None:
    (trial, _), (notice,) = trials_of("42", "forms_4711:legacy", "forms_4711:half_broken")
    assert [*trial.lines][-1] == "its ground truth: '42'; its reward: 1 for '42', 0 for an empty response"
    place = "it fails on the first example (data.jsonl, line 1) with"
    assert notice.startswith(f"task.parts.1.task.reward: {place} an empty")
    message = r"task\.reward: it fails on the first example \(data\.jsonl, line 1\),"
    with pytest.raises(ValueError, match=message):
        trials_of("42", (own("too_few", batched=True),))


@pytest.mark.slow
def test_a_reward_is_tried_on_the_whole_example_although_the_model_is_on_a_hub(tmp_path: Path) -> None:
    """A prompt of plain text needs no tokenizer."""
    for name in ("train", "validation"):
        row = {"question": f"to {name}", "answer": "3", "level": 3}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    paths = f"train_path: {tmp_path}/train.jsonl, validation_path: {tmp_path}/validation.jsonl"
    task = f"{{kind: file, prompt: question_only, reward: 'forms_4711:by_name', {paths}}}"
    config = load_config("configs/quickstart.yaml", ["model={path: owner/name}", f"task={task}"])
    last = with_trial(config, check_files(config)).first_prompts[-1]
    prompt = template_of(config.task).render("to train")  # type: ignore[arg-type]
    assert f"its reward: {len('to train') + len(prompt) + 3} for '3'" in last


def test_the_command_grades_one_answer(tmp_path: Path, capsys: Capture) -> None:
    file = f"{tmp_path}/forms_4711.py"
    answer = ["--response", "</think> <answer> 4 </answer>", "--ground-truth", "4"]
    scores = printed(capsys, "reward", "exact_match", *answer)
    assert json.loads(scores) == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    Path(tmp_path, "a-b.py").touch()
    for reward, options, message in (
        (f"{file}:unit_tests", ["--response", "x", "--row", "[1]"], "--row: give a JSON object"),
        ("exact_match", [*answer, "--batched"], "grpo-ray: REWARD: batched"),
        ("exactmatch", answer, "'exactmatch' is not a reward; give FILE.py:FUNCTION"),
        (f"{tmp_path}/a-b.py:f", answer, "a-b.py: no module can have this name"),
        (f"{file}:batched", [*answer, "--batched", "--row", '{"tests": 1}'], "needs level; there is no such"),
    ):
        assert message in refused(capsys, "reward", reward, *options)


@pytest.mark.slow
def test_the_command_calls_a_function_of_a_file(tmp_path: Path, capsys: Capture) -> None:
    file, row = f"{tmp_path}/forms_4711.py", json.dumps({"tests": ["assert x == 42"]})
    for function, *options in (
        ("unit_tests", "--response", "42", "--row", row),
        ("by_answer", "--response", "7", "--ground-truth", "7"),
    ):
        assert json.loads(printed(capsys, "reward", f"{file}:{function}", *options))["reward"] == 1
    said = printed(capsys, "reward", f"{file}:half_broken", "--response", "", status=1)
    assert "no reward; in a run this response is not trained on: IndexError" in said


# ---- the examples with rewards train for two steps in one process ----


SHORT = (
    "algorithm={num_steps: 2, prompts_per_step: 2, samples_per_prompt: 2}",
    "model.tiny={hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 1, warmup: null}",
)


def trained(example: str, tmp_path: Path, *overrides: str) -> grpo_ray.Run:
    config = Path(__file__).parents[2] / "examples" / example / "config.yaml"
    return grpo_ray.train(config, *SHORT, f"run.output_dir={tmp_path}", *overrides, local=True)


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_own_reward(tmp_path: Path) -> None:
    assert own_reward.reward("12", parity=0) == 1
    assert own_reward.reward("13", parity=0) == own_reward.reward("x", parity=0) == 0
    run = grpo_ray.train(
        own_reward.CONFIG, *SHORT, f"run.output_dir={tmp_path}",
        reward=own_reward.reward, examples=own_reward.EXAMPLES, local=True,
    )  # fmt: skip
    assert run.is_finished


@pytest.mark.slow
@pytest.mark.usefixtures("untried")
def test_trl_reward(tmp_path: Path) -> None:
    assert trl_rewards.correctness([" 5", "15"], ["5", "5"]) == [2, 0]
    assert trl_rewards.only_digits([], ["5 ", "five", " "]) == [1, 0, None]
    metrics = trained("trl_reward", tmp_path).metrics()
    assert {"reward/correctness/mean", "reward/digits/mean"} <= {*metrics.column_names}


@pytest.mark.slow
def test_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("JUDGE_URL", f"{url}/v1")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    monkeypatch.setenv("JUDGE_API_KEY", "wrong")
    retries = "task.reward=[{reward: examples.judge.judge:reward, network: true, retries: 0, secrets: [%s]}]"
    secrets = retries % "JUDGE_API_KEY, JUDGE_URL, JUDGE_MODEL"
    with pytest.raises(RunError, match=r"it fails on the first example .* 401"):
        trained("judge", tmp_path, secrets)
    monkeypatch.setenv("JUDGE_API_KEY", "s3cret")
    run = trained("judge", tmp_path)
    assert all(0 <= reward <= 1 for reward in run.rollouts()["reward"].to_pylist())
    assert run.metrics()["reward/errors"].to_pylist() == [0, 0]
    assert "s3cret" not in (run.path / "config.yaml").read_text()
