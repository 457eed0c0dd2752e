"""Preflight: what it finds in the zoo and in small games, what it shows, and how it ends."""

import asyncio
import ctypes
import gc
import json
import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch
from commands import Capture, refused
from small_run import QUICKSTART

from examples.zoo.__main__ import broken, good
from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.episodes.chat_template import ChatTemplate
from grpo_ray.episodes.renderer_template import make_template
from grpo_ray.episodes.segments import TrainedPath
from grpo_ray.episodes.session import Reply
from grpo_ray.episodes.tool_calls import Parsed
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.cli import main
from grpo_ray.tools.preflight.checks import Plays, play_findings, template_findings
from grpo_ray.tools.preflight.command import PreflightOptions
from grpo_ray.tools.preflight.plays import Finding, Kind, Play, Played, Turn, WatchedSession
from grpo_ray.tools.preflight.policies import ASKED, Asked, Said, ScriptedSampler, no_calls, scripts_of
from grpo_ray.tools.preflight.preflight import as_text, runs_of
from grpo_ray.tools.preflight.preflight import preflight as run
from grpo_ray.tools.preflight.subject import Subject, load_subject
from grpo_ray.tools.preflight.watch import Watch, shift_clocks
from grpo_ray.types import SamplingSettings

ROOT = Path(__file__).parents[2]
ZOO = {  # the fault that each broken environment, reward or template must show
    "retokenised": "retokenised", "rewritten_call": "history_edited", "stripped_thoughts": "history_edited",
    "whole_solution": "constant_reward", "still_alive": "cut_off_is_best", "whole_log": "growing_prompt",
    "no_header": "no_generation_prompt", "other_end": "end_of_turn",
    # written by somebody who had not seen the checks:
    "bank_transfers": "shared_state", "blackjack": "different_starts", "cafe_orders": "constant_reward",
    "fading_bonus": "reads_clock", "passages": "satisfied_by_prompt", "smallest_factor": "time_out_hidden",
    "spot_checked_sort": "not_deterministic", "times_table": "left_behind", "translation": "raises",
    "word_riddle": "blocking_call",
}  # fmt: skip
examples = [{"question": "half of a pair: \ud83d"}]
GAME = PreflightOptions("grpo_ray.episodes.guess_number:episode")
QUICK = ("fading_bonus", "spot_checked_sort")  # two others are in the tests of the command and the fixture


def names(findings: list[Finding]) -> list[str]:
    return [each.name for each in findings]


@pytest.mark.parametrize(
    "animal", [pytest.param(n, marks=pytest.mark.slow if n in QUICK else pytest.mark.campaign) for n in ZOO]
)
def test_an_animal_shows_its_fault_with_a_place_and_a_cure(animal: str) -> None:
    found = run(PreflightOptions(**{**broken("known"), **broken("unseen")}[animal]))  # type: ignore[arg-type]
    assert ZOO[animal] in names(found.faults)
    fault = found.faults[names(found.faults).index(ZOO[animal])]
    assert fault.cure
    assert fault.where or animal == "times_table"  # a process that is left behind has no line


@pytest.mark.campaign
def test_no_good_environment_raises_an_alarm(tmp_path: Path) -> None:
    animals = good(tmp_path)
    assert len(animals) == 30
    options = {name: PreflightOptions(**arguments) for name, arguments in animals.items()}  # type: ignore[arg-type]
    assert {name: names(run(each).faults) for name, each in options.items()} == {name: [] for name in animals}


def test_each_animal_is_short_and_says_where_it_comes_from() -> None:
    files = [path for half in ("known", "unseen") for path in (ROOT / "examples/zoo" / half).iterdir()]
    animals = {path.stem: path.read_text() for path in files if path.is_file() and "__init__" not in path.name}
    assert set(animals) == set(ZOO)
    for name, text in animals.items():
        assert len(text.splitlines()) <= 40, name
        assert "Fault: " in text, name
        assert "From: " in text, name


@pytest.mark.slow
def test_the_command_shows_tokens_and_findings_writes_json_and_a_page_and_ends_with_1_for_a_fault(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, result = tmp_path / "page.html", tmp_path / "found.json"
    target = [str(ROOT / "examples/zoo/known/rewritten_call.py") + ":episode", "--num-examples", "1"]
    assert main(["preflight", *target, "--html", str(page), "--json", str(result)]) == 1
    printed = capfd.readouterr().out
    assert "turn 0, trained" in printed
    assert "<|endoftext|>]" in printed
    assert "branch 1" in printed
    assert "FAULT history_edited: example 0, policy 'right by tools', turn 1" in printed
    found = json.loads(result.read_text())
    assert not found["passed"]
    assert found["findings"][0]["place"] == "rewritten_call.py:23"
    assert "branch 1" in page.read_text()
    assert "<script" not in page.read_text()
    page.unlink()
    assert main(["preflight", *target, "--allow", "history_edited", "--json", "-", "--html", str(page)]) == 0
    assert json.loads(capfd.readouterr().out)["passed"]
    assert "branch 1" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:episode"], "there is no module 'no_such_module'"),
        (["nowhere.py:episode"], "nowhere.py: there is no such file"),
        ([f"{__name__}:names"], f"examples[0] of {__name__}: its question holds half of a surrogate pair"),
        (["nowhere.py"], "nowhere.py: give its function too, as in nowhere.py:FUNCTION"),
        (["nowhere.py:episode", "a.b=1"], "a.b=1: a function has no configuration to change"),
        (["grpo_ray.tasks.reasoning_gym:verified"], "has no `examples`"),
        (["grpo_ray.episodes.calculator:episode", "--allow", "hang"], "fault; did you mean hangs?"),
    ],
)
def test_what_cannot_be_played_is_refused(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refused(capsys, "preflight", *arguments)


@pytest.mark.slow
def test_a_process_that_an_episode_leaves_does_not_hide_its_crash(tmp_path: Path) -> None:
    (tmp_path / "left").mkdir()
    (tmp_path / "crashing.py").write_text(
        "import os, pathlib, time\nexamples = [{'question': 'What?'}]\nasync def episode(session, example):\n"
        "    if (pid := os.fork()) == 0:\n        time.sleep(1000)\n"
        f"    pathlib.Path({str(tmp_path / 'left')!r}, str(pid)).touch()\n    os._exit(3)\n"
    )
    try:
        (fault,) = run(PreflightOptions(f"{tmp_path / 'crashing.py'}:episode")).faults
    finally:
        for left in (tmp_path / "left").iterdir():
            os.kill(int(left.name), signal.SIGKILL)
    assert (fault.name, fault.text[-1]) == ("crashes", "3")


@pytest.mark.slow
def test_garbage_from_before_a_play_is_not_its_crash(tmp_path: Path) -> None:
    """The ends of process groups wait for their threads, which a forked process does not have: a SIGSEGV."""
    (tmp_path / "collecting.py").write_text(
        "import gc\nexamples = [{'question': 'What?'}]\n"
        "def reward(response, **_):\n    gc.collect()\n    return float('5' in response)\n"
    )

    def leave_process_groups() -> None:
        dist: Any = torch.distributed
        store, cycle = dist.HashStore(), {}

        def meet(rank: int) -> None:
            cycle[rank] = dist.ProcessGroupGloo(store, rank, 2)
            cycle[rank].allreduce([torch.ones(1)]).wait()

        with ThreadPoolExecutor(2) as threads:
            [*threads.map(meet, range(2))]
        cycle[2] = cycle

    gc.disable()
    try:
        leave_process_groups()
        found = run(PreflightOptions(f"{tmp_path / 'collecting.py'}:reward"))
    finally:
        gc.enable()
        gc.collect()
    assert "crashes" not in names(found.faults)


@pytest.mark.slow
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_crash_is_said_with_its_signal_and_line(tmp_path: Path, is_replaced: bool) -> None:
    """Also if something has taken the place of pytest's handler, as Ray does."""
    (tmp_path / "fragile.py").write_text(
        "import ctypes\nexamples = [{'question': 'What?'}]\nasync def episode(session, example):\n"
        "    return len(ctypes.string_at(0))\n"
    )
    libc, handler = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.sigaction(signal.SIGSEGV, None, handler)
    if is_replaced:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    try:
        (fault,) = run(PreflightOptions(f"{tmp_path / 'fragile.py'}:episode")).faults
    finally:
        libc.sigaction(signal.SIGSEGV, handler, None)
    assert (fault.name, fault.place) == ("crashes", "fragile.py:4"), fault.text
    assert re.fullmatch(r"SIGSEGV ended the process .*, in .*/ctypes/__init__\.py:\d+", fault.text)


@pytest.mark.slow
def test_the_fixture_fails_a_test_for_a_fault(preflight: Any) -> None:
    preflight("grpo_ray.episodes.calculator:episode", num_examples=1)
    with pytest.raises(pytest.fail.Exception, match=r"constant_reward: example 0[\s\S]*cure: "):
        preflight("examples.zoo.known.whole_solution:reward", num_examples=1)


@pytest.mark.slow
def test_a_chat_template_is_judged_if_prompts_are_made_by_it() -> None:
    template, short = str(ROOT / "examples/zoo/known/no_header.jinja"), "episodes.max_tokens=1"
    chosen = PreflightOptions(QUICKSTART, ("task.prompt=chat",), template, num_examples=1)
    r1_zero, chat = (run(replace(chosen, overrides=(f"task.prompt={p}", short))) for p in ("r1_zero", "chat"))
    assert names(r1_zero.faults) == []
    assert (names(chat.faults), chat.num_episodes) == (["no_generation_prompt"], 0)  # nothing is played
    assert run(replace(chosen, allow=("no_generation_prompt",))).num_episodes


# ---- what a session makes impossible ----


@pytest.fixture(scope="module")
def game() -> Subject:
    return load_subject(GAME)


def test_faults_of_other_trainers_that_a_session_cannot_have(game: Subject) -> None:
    """Only what was sampled is trained, each token once, with its end token, and without any padding.

    No header of a prompt (codescout#60), no observation (Search-R1#21), no shared beginning twice
    (prime-rl#2975), no end of turn left out (trl#5988), no sampled token left out as padding (agentcore#122).
    """
    template = ChatTemplate(game.tokenizer, game.end_token_ids)
    sample = ScriptedSampler(dict(scripts_of(game, 0, with_random=True))["random"], game, no_calls).sample
    settings = SamplingSettings(1, 1.0, 1.0, 0, 64, (), game.end_token_ids, 0)
    session = WatchedSession(Example("", ""), Watch([], []), sample, settings, template, EpisodesConfig())

    async def play() -> list[tuple[int, ...]]:
        start: list[dict[str, Any]] = [{"role": "user", "content": "Say something."}]
        replies = [await session.chat(start) for _ in range(2)]  # two branches from one beginning
        more = [*start, replies[1].message, {"role": "user", "content": "An observation."}]
        return [each.token_ids for each in (*replies, await session.chat(more))]

    sampled = asyncio.run(play())
    paths = session.segments.sequences()
    trained = {int(n): tuple(path.response_token_ids[path.turns == n].tolist()) for path in paths
               for n in set(path.turns[path.mask])}  # fmt: skip
    assert trained == dict(enumerate(sampled))
    assert sum(int(path.mask.sum()) for path in paths) == sum(map(len, sampled))


def test_a_tool_parser_that_misses_a_call_of_the_chat_template_is_noted() -> None:
    subject = load_subject(PreflightOptions(str(ROOT / "configs/calculator.yaml")))
    _, own = make_template(subject.settings, subject.tokenizer, subject.end_token_ids)
    assert own is not None

    def refusing(*_: Any) -> Parsed:
        raise ValueError("no JSON")

    ASKED.set(Asked(Example("", ""), [{"role": "user", "content": "What is 2 * 3?"}], [], 0, True, ""))
    said = Said(calls=(("calculator", {"expression": "2 * 3"}),))
    settings = SamplingSettings(1, 1.0, 1.0, 0, 64, (), subject.end_token_ids, 0)
    for parser, is_read in ((own, True), (lambda *_: ("", "", []), False), (refusing, False)):
        sampler = ScriptedSampler(lambda _: said, subject, parser)
        asyncio.run(sampler.sample((0,), settings))
        assert (sampler.unread == "") is is_read


def test_tools_without_a_parser_are_the_fault_that_they_would_be_in_the_run() -> None:
    found = run(PreflightOptions(str(ROOT / "configs/calculator.yaml"), ("episodes.tool_parser=null",)))
    assert "set a tool_parser" in next(each.text for each in found.faults if each.name == "raises")


# ---- the checks one by one ----


def played(policy: str, reward: float | None, **changes: Any) -> Played:
    empty: dict[str, Any] = {"turn_rewards": None, "error": "", "paths": [], "caught": []}
    return Played(0, policy, reward=reward, **{"status": "finished", "turns": [turn()], **empty, **changes})


def turn(prompt: tuple[int, ...] = (65, 66), reply: tuple[int, ...] = (67,)) -> Turn:
    asked = Asked(Example("", ""), [], [], 0, is_chat=False, place="mine.py:3")
    return Turn(asked, prompt, Reply("x", (), "stop", reply, len(prompt)))


def plays_of(*episodes: Played, **others: Play) -> Plays:
    by_key = {(each.example, n): each for n, each in enumerate(episodes)}
    return dict.fromkeys(get_args(Kind), Play(by_key)) | others


RIGHT, EMPTY = (played("right", 1.0), played("right", 1.0)), played("empty", 0.0)
OTHER = Play({(0, 0): played("right", 0.5)})
UNREAD = replace(plays_of(*RIGHT, EMPTY)["first"], unread="<f>")
SLOW = played("random", None, status="truncated_time", error="10 s")


@pytest.mark.parametrize(
    ("plays", "expected"),
    [
        (plays_of(*RIGHT, EMPTY), []),
        (plays_of(*RIGHT, played("empty", 1.0)), ["constant_reward"]),
        (plays_of(*RIGHT, EMPTY, played("echo", 1.0), played("wanderer 0", 0.0)), ["satisfied_by_prompt"]),
        (plays_of(*RIGHT, EMPTY, played("endless", 1.0, status="truncated_turns")), ["cut_off_is_best"]),
        (plays_of(*RIGHT, played("random", None, status="environment_error", error="Error: no")), ["raises"]),
        (plays_of(*RIGHT, played("empty", 0.0, turns=[turn((65, 67))])), ["different_starts"]),
        (plays_of(*RIGHT, EMPTY, again=OTHER), ["not_deterministic"]),
        (plays_of(*RIGHT, SLOW, again=Play({(0, 2): played("random", 0.5)})), ["slow"]),
        (plays_of(*RIGHT, EMPTY, backwards=OTHER), ["shared_state"]),
        (plays_of(*RIGHT, EMPTY, backwards=replace(OTHER, drawn=[("random", "")])), ["not_deterministic"]),
        (plays_of(*RIGHT, EMPTY, shifted=OTHER), ["reads_clock"]),
        (plays_of(RIGHT[0], played("right", 0.0), EMPTY), ["shared_state"]),
        (plays_of(*RIGHT, EMPTY, shifted=Play(failure=Finding("hangs", "it hangs"))), ["hangs"]),
        (plays_of(*RIGHT, EMPTY, first=UNREAD), ["calls_unread"]),
        (plays_of(*RIGHT, played("empty", 0.0, caught=[("TimeoutError", "mine.py:4")])), ["time_out_hidden"]),
    ],
)  # fmt: skip
def test_what_a_play_shows(plays: Plays, expected: list[str], game: Subject) -> None:
    assert names([*play_findings(plays, is_reward=True, tokenizer=game.tokenizer)]) == expected


def test_an_environment_that_no_policy_can_solve_is_noted_and_not_refused(game: Subject) -> None:
    plays = plays_of(played("right", 0.0), played("right", 0.0), played("empty", 0.0))
    (note,) = play_findings(plays, is_reward=False, tokenizer=game.tokenizer)
    assert (note.name, note.is_note) == ("no_reward_seen", True)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("", ""), []),
        (("{% if add_generation_prompt %}{{ '>\\n' }}{% endif %}", ""), ["no_generation_prompt"]),
        (("{{ eos_token }}", "{{ '<|im_end|>' }}"), ["end_of_turn"]),
        (("{{ eos_token }}", "{{ '\\n' + eos_token }}"), ["end_of_turn"]),
        (("{{ message.content", "{{ '' if message.role == 'system' else message.content"), ["message_dropped"]),
    ],
)  # fmt: skip
def test_faults_of_a_chat_template(change: tuple[str, str], expected: list[str]) -> None:
    subject = load_subject(GAME)
    subject.tokenizer.chat_template = subject.tokenizer.chat_template.replace(*change)
    assert names([*template_findings(subject)]) == expected


def test_the_conversation_shows_which_tokens_are_trained(game: Subject) -> None:
    end = game.end_token_ids[0]
    ids = game.tokenizer("Hi", add_special_tokens=False)["input_ids"]
    turns = np.array([*([0] * len(ids)), 0, -1, 1])
    response = np.array([*ids, end, *game.tokenizer("?")["input_ids"], *game.tokenizer("!")["input_ids"]])
    zeros = np.zeros(len(turns))
    path = TrainedPath(tuple(ids), response, turns >= 0, zeros, zeros, turns)
    runs = runs_of(played("right", 1.0, paths=[path]), game.tokenizer, game.end_token_ids)
    assert [(run.turn, "".join(run.tokens), run.ends_turn) for run in runs] == [
        (None, "Hi", False), (0, "Hi<|endoftext|>", True), (None, "?", False), (1, "!", False),
    ]  # fmt: skip
    lines = [*map(str, as_text(runs))]
    assert lines[1].endswith("[H|i|<|endoftext|>]")
    assert lines[3].endswith("[!]  (cut off: no end token)")


def test_calls_that_block_clocks_and_exceptions_are_noted_with_their_lines(tmp_path: Path) -> None:
    source = (
        "import datetime, time, random\n"
        "def work():\n"
        "    time.sleep(0)\n"
        "    random.random()\n"
        "    return time.time()\n"
        "def today():\n"
        "    return datetime.datetime.today()\n"
        "def fails():\n"
        "    try:\n"
        "        [][0]\n"
        "    except IndexError:\n"
        "        return 0.0\n"
    )
    module = ModuleType("mine")
    module.__file__ = str(tmp_path / "mine.py")
    Path(module.__file__).write_text(source)
    exec(compile(source, module.__file__, "exec"), vars(module))
    watch = Watch([str(tmp_path)], [module])
    with watch.noting("calls"):
        module.work()
        time.sleep(0)  # not the user's
    assert watch.blocking == {("time.sleep", "mine.py:3"): 1}
    assert watch.drawn == [("random", "mine.py:4"), ("time.time", "mine.py:5")]
    caught: list[tuple[str, str]] = []
    watch.caught.set(caught)
    with watch.noting("exceptions"):
        module.fails()
    assert caught == [("IndexError: list index out of range", "mine.py:10")]
    real = time.time()
    shift_clocks([module])
    assert module.work() - real > 900
    assert (module.today() - datetime.now()).total_seconds() > 900
    assert time.time() - real < 900
    assert module.random is random
