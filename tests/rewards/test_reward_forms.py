"""The ways in which a reward function of the user's is called: by name, batched, as in TRL, over a network."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from builders import make_completion, make_item, make_scorer, write_rows
from small_run import QUICKSTART

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.loading import load_config
from grpo_ray.config.reward import RewardTerm, ScorerConfig, named_terms, term_weights
from grpo_ray.config.task import EpisodesTaskConfig, FileTaskConfig
from grpo_ray.errors import RunError
from grpo_ray.objectives import advantages_of
from grpo_ray.records.rollout_log import read_groups, write_rollouts
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
from grpo_ray.tools.cli import main
from grpo_ray.types import PromptItem, RolloutGroup, ScoredGroup
from grpo_ray.watch.batch_metrics import rollout_metrics

ABOUT = {
    "prompt": "Q: 6 * 7? A:",
    "question": "6 * 7?",
    "row": {"level": 3, "tests": ["assert x == 42"]},
    "fields": {"question": "6 * 7?", "answer": "six times seven #### 42"},
}

MODULE = '''
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
    (tmp_path / "forms_4711.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def own(function: str, /, **fields: Any) -> RewardTerm:
    return RewardTerm(reward=f"forms_4711:{function}", **fields)


def rewards_of(term: RewardTerm, responses: Sequence[str], about: Any = ABOUT) -> list[float | str]:
    results = TermReward(term)(responses, ["42"] * len(responses), about)
    return [str(each) if isinstance(each, Exception) else each.get("reward", "none") for each in results]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("legacy", [1, 0]),
        ("by_place", [1, 0]),
        ("leaves", ["SystemExit: 3"] * 2),
        ("by_name", [6 + 12 + 3] * 2),
        ("any_order", [0, 0]),
        ("unit_tests", [1, 0]),  # the column `tests`, not the truth
        ("shadowed", [1, 1]),  # the answer's own column is the truth, so a second parameter stays the truth
        ("optional", [1, 1]),
        ("everything", [3 + 6] * 2),  # level, tests, question, answer, prompt, row
        ("relative", [0, 1]),
    ],
)
def test_a_function_gets_what_it_asks_for(name: str, expected: list[float]) -> None:
    assert rewards_of(own(name), ["42", "6 * 7"]) == expected


def test_a_parameter_that_gets_the_truth_by_its_place_alone_is_named() -> None:
    assert UserFunction.of(own("unit_tests")).truth_as(["level"]) == "tests"
    assert UserFunction.of(own("unit_tests")).truth_as(["tests"]) is None
    assert [UserFunction.of(own(name)).truth_as([]) for name in ("legacy", "shadowed", "batched")] == [None] * 3


def test_arguments_of_the_term_come_before_columns() -> None:
    assert rewards_of(own("unit_tests", arguments={"tests": "x"}), ["x"]) == [1]
    assert rewards_of(own("optional", arguments={"hint": "a"}), ["x"]) == [0]


def test_a_row_without_the_column_is_an_error_of_that_answer() -> None:
    (error,) = rewards_of(own("batched", batched=True), ["x"], {"row": {"other": 1}})
    assert error == "it asks for 'level', which this row lacks (its columns: other)"


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
        (own("legacy", arguments={"margin": 1}), [], "has no argument 'margin'"),
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
    first, second = rewards_of(own("too_few", batched=True), ["a", "b"])
    assert first == second
    assert "too_few (forms_4711.py:24) returned 1 values for 2 responses; return a list of 2" in str(first)


def test_functions_of_trl_work_as_they_are() -> None:
    assert rewards_of(own("length"), ["a", "abc"]) == [1, 3]
    assert rewards_of(own("boxed"), [r"\boxed{42}", "42"]) == [1, 0]
    chat = {**ABOUT, "messages": [{"role": "user", "content": "6 * 7?"}]}
    answers = ["<think>a</think><answer>42</answer>", "42"]
    assert rewards_of(own("format_reward_func"), answers, chat) == [1, 0]
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
def test_the_pool_grades_groups_together_and_others_one_by_one() -> None:
    rewards = {
        "together": (own("length"), own("legacy", name="same")),
        "alone": "forms_4711:legacy",
        "relative": "forms_4711:relative",
        "mute": "forms_4711:undecided",
    }
    item = PromptItem(0, "Q", (), "42", about=json.dumps({"question": "6 * 7?", "row": {"level": 3}}))
    grader = Grader(rewards, ScorerConfig(num_workers=1))
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
    grader.close()


@pytest.mark.slow
def test_a_term_that_cannot_judge_an_answer_leaves_the_others_what_they_say() -> None:
    rewards = {
        "overrun": (own("spins"), own("length", weight=-1)),
        "too long": (RewardTerm(reward="r1_zero"), own("length", weight=-0.5)),
        "broken": (RewardTerm(reward="r1_zero"), own("too_few", batched=True)),
    }
    grader = Grader(rewards, ScorerConfig(num_workers=2, timeout_s=1.0, ungradable_reward=-5.0))
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
    grader = Grader({"": "looping_4711:f"}, ScorerConfig(num_workers=1))
    with pytest.raises(RunError, match="trains on import"):  # or each grader would start the next run
        grader.start()


# ---- over a network ----


class Judge(BaseHTTPRequestHandler):
    """An endpoint that scores a text by its length, refuses without the key, and fails once at `flaky`."""

    seen: ClassVar[dict[str, int]] = {}
    barrier = Barrier(4, timeout=60)

    def do_POST(self) -> None:
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"]
        self.seen[text] = self.seen.get(text, 0) + 1
        if text.startswith("together"):
            self.barrier.wait()  # answers only when four are here at the same time
        is_refused = self.headers["Authorization"] != "Bearer s3cret"
        failed = text.startswith("flaky") and self.seen[text] == 1
        self.send_response(401 if is_refused else 503 if failed else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"score": len(text)}).encode())

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

    class Tokenizer:
        chat_template = "any"

        def __call__(self, texts: list[str], **_: Any) -> Any:
            return {"input_ids": [[1]]}

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return str(messages)

    item = Prompter(ChatTemplate("Be short."), Tokenizer(), None, True).item(0, sets.train[2])  # type: ignore[arg-type]
    assert json.loads(item.about) == {
        "question": "q2",
        "row": {"tests": [2], "level": None},
        "fields": {"question": "q2", "answer": "a2"},
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "q2"}],
    }
    assert Prompter(TextTemplate("{question}"), Tokenizer()).item(0, sets.train[2]).about == ""  # type: ignore[arg-type]


def test_terms_are_graded_logged_and_read_again(tmp_path: Path) -> None:
    reward = (
        RewardTerm(reward="brevity", arguments={"free": 0, "span": 4}),
        RewardTerm(reward="format", weight=2),
    )
    scorer = make_scorer(reward)
    item = replace(make_item(truth="42"), about='{"question": "6 * 7?"}')
    rollout = RolloutGroup(item, tuple(make_completion([1], text=text) for text in ("a", "abc")), "generator-0")
    verdict = scorer.score(rollout)
    assert {name: term.tolist() for name, term in verdict.terms.items()} == {
        "brevity": [0.75, 0.25],
        "format": [0, 0],
    }
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
    item = PromptItem(
        0, "Q: 6 * 7?\nA:", (), truth, about=json.dumps({"question": "6 * 7?", "row": {"level": 3}})
    )
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
    assert notice.startswith(
        "task.reward: exact_match does not accept the first example (data.jsonl, line 1)'s own"
    )


@pytest.mark.slow
def test_ones_own_reward_gets_the_bare_truth_and_is_refused_if_it_fails() -> None:
    (trial, _), (notice,) = trials_of("42", "forms_4711:legacy", "forms_4711:half_broken")
    assert [*trial.lines][-1] == "its ground truth: '42'; its reward: 1 for '42', 0 for an empty response"
    place = "it fails on the first example (data.jsonl, line 1) with"
    assert notice.startswith(f"task.parts.1.task.reward: {place} an empty")
    with pytest.raises(
        ValueError, match=r"task\.reward: it fails on the first example \(data\.jsonl, line 1\), with"
    ):
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


def test_the_command_grades_one_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{tmp_path}/forms_4711.py"
    answer = ["--response", "</think> <answer> 4 </answer>", "--ground-truth", "4"]
    assert main(["reward", "exact_match", *answer]) == 0
    assert json.loads(capsys.readouterr().out) == {"reward": 1, "format_reward": 1, "answer_reward": 1}
    assert main(["reward", f"{file}:unit_tests", "--response", "x", "--row", "[1]"]) == 2
    assert "--row: give a JSON object" in capsys.readouterr().err
    assert main(["reward", "exact_match", *answer, "--batched"]) == 2
    assert capsys.readouterr().err.startswith("grpo-ray: REWARD: batched")
    assert main(["reward", "exactmatch", "--response", "x"]) == 2
    assert "'exactmatch' is not a reward; give FILE.py:FUNCTION" in capsys.readouterr().err
    Path(tmp_path, "a-b.py").touch()
    assert main(["reward", f"{tmp_path}/a-b.py:f", "--response", "x"]) == 2
    assert "a-b.py: no module can have this name" in capsys.readouterr().err
    assert main(["reward", f"{file}:batched", "--batched", "--response", "x", "--row", '{"tests": 1}']) == 2
    assert "needs level; there is no such column, only tests" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_calls_a_function_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, row = f"{tmp_path}/forms_4711.py", json.dumps({"tests": ["assert x == 42"]})
    assert main(["reward", f"{file}:unit_tests", "--response", "42", "--row", row]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 1
    assert main(["reward", f"{file}:by_answer", "--response", "7", "--ground-truth", "7"]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 1
    assert main(["reward", f"{file}:half_broken", "--response", ""]) == 1
    assert "no reward; in a run this response is not trained on: IndexError" in capsys.readouterr().out
