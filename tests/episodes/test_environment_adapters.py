"""Episodes made of other packages' environments, played by scripts; each test needs only its own package."""

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from episode_players import HELLO, Policy, play, said, session_of, tokenizer_of

from grpo_ray.config.episodes import EpisodesConfig
from grpo_ray.config.loading import load_config
from grpo_ray.episodes.adapters.gymnasium import gymnasium_episode
from grpo_ray.episodes.adapters.rehearsal import rehearse
from grpo_ray.episodes.adapters.trl import describe_tools, trl_episode
from grpo_ray.episodes.openai_server import ChatServer
from grpo_ray.episodes.outcome import Status
from grpo_ray.episodes.runner import EpisodeFn, EpisodeRunner, load_episode
from grpo_ray.tasks.examples import Example
from grpo_ray.types import Episode

pytestmark = pytest.mark.slow
MOVES = ["left", "down", "right", "up"]
WAY = ["down", "down", "right", "down", "right", "right"]  # over the lake's 4 x 4 fields, past its holes


def played(
    episode: EpisodeFn, reply: Policy, example: Example = HELLO, limits: EpisodesConfig | None = None
) -> tuple[Episode, list[str]]:
    """Play one episode; return its result and what it trains on, as text."""
    result = play(episode, session_of("qwen2.5", reply, limits, parser="transformers")[0], example)
    decode, ids = tokenizer_of("qwen2.5").decode, result.token_ids
    return result, [decode([*s.prompt_token_ids, *ids[s.start : s.end]]) for s in result.sequences]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# Gymnasium


def lake(is_slippery: bool = False, **changes: Any) -> EpisodeFn:
    gymnasium = pytest.importorskip("gymnasium")
    return gymnasium_episode(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=is_slippery, max_episode_steps=8),
        show=lambda field: f"field {field}",
        read_action=lambda text: MOVES.index(text) if text in MOVES else None,
        **changes,
    )


def test_the_way_over_the_lake_is_worth_one() -> None:
    result, (text,) = played(lake(), said(*WAY), Example("Cross the lake.", ""))
    assert (result.status, result.reward) == (Status.FINISHED, 1.0), result.error
    assert result.turn_rewards == (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    assert "user\nCross the lake.\nfield 0<" in text
    assert [int(part.split("<")[0]) for part in text.split("field ")[1:]] == [0, 4, 8, 9, 13, 14]


def test_a_hole_or_the_environments_own_limit_ends_the_episode() -> None:
    for moves in (["down", "right"], ["up"] * 8):
        result, _ = played(lake(), said(*moves))
        assert (result.status, result.turn_rewards) == (Status.FINISHED, (0.0,) * len(moves))


def test_a_group_begins_alike_and_slips_alike() -> None:
    episode = lake(is_slippery=True)

    def fields(seed: int) -> str:
        _, (text,) = played(episode, lambda prompt: "right", Example("", "", seed=seed))
        return text

    assert fields(3) == fields(3)
    assert len({fields(seed) for seed in range(5)}) > 1


def test_a_reply_without_an_action_is_answered_or_ends_the_episode() -> None:
    lenient = lake(malformed="Say a direction.", malformed_reward=-0.5)
    asked, (text,) = played(lenient, said(*WAY[:3], "jump", *WAY[3:]))
    assert asked.reward == 0.5
    assert asked.turn_rewards == (0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 1.0)
    assert asked.metrics == {"num_malformed": 1.0}
    assert "jump<|im_end|>\n<|im_start|>user\nSay a direction." in text
    ended, _ = played(lake(malformed_reward=-1), said(*WAY[:3], "jump"))
    assert (ended.status, ended.reward, len(ended.turn_rewards or ())) == (Status.FINISHED, -1.0, 4)


class Steps:
    """An environment of endless steps, each worth 1, as Gymnasium has them."""

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.is_closed, self.threads = fails, False, set[str]()

    def reset(self, seed: int) -> tuple[int, dict[str, Any]]:
        return seed, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise OSError("the robot is stuck")
        return action, 1.0, False, False, {}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_limit_keeps_the_rewards_and_every_end_closes_the_environment(in_thread: bool) -> None:
    failed = Steps(fails=True), Status.ENVIRONMENT_ERROR, None
    for made, status, reward in ((Steps(), Status.TRUNCATED_TURNS, 3.0), failed):
        episode = gymnasium_episode(lambda made=made: made, str, int, in_thread=in_thread)  # type: ignore[misc]
        result, _ = played(episode, lambda prompt: "1", limits=EpisodesConfig(max_turns=3, max_tokens=5000))
        assert (result.status, result.reward) == (status, reward), result.error
        assert made.is_closed
        assert (threading.current_thread().name in made.threads) is not in_thread


# TRL


class Vault:
    """A door with a code, as TRL's GRPOTrainer takes it."""

    def reset(self, ground_truth: str) -> str | None:
        self.code, self.is_open = ground_truth, False
        return " It is green."

    def open_door(self, code: str) -> str:
        """
        Open the door.

        Args:
            code: Its code.
        """
        if code != self.code:
            raise ValueError("wrong code")
        self.is_open = True
        return "open"

    @classmethod
    async def listen(cls) -> None:
        """Listen at the door."""

    @staticmethod
    def knock(times: int = 1) -> list[dict[str, str]]:
        """
        Knock.

        Args:
            times: Number of knocks.
        """
        return [{"type": "text", "text": "knock " * times}]

    def get_reward(self) -> float:
        return float(self.is_open)


def test_the_methods_of_a_class_are_its_tools() -> None:
    listen, knock, opens = sorted(describe_tools(Vault), key=lambda tool: tool["function"]["name"] != "listen")
    assert [tool["function"]["name"] for tool in (listen, knock, opens)] == ["listen", "knock", "open_door"]
    parameters = opens["function"]["parameters"]
    assert parameters["properties"] == {"code": {"type": "string", "description": "Its code."}}
    assert parameters["required"] == ["code"]
    assert knock["function"]["parameters"].get("required", []) == []

    tries = said(
        call("open_door", '{"code": "1"}') + call("fly", "{}"), call("listen", "{}"),
        call("knock", '{"times": 2}'), call("open_door", '{"lock": "1"}'),
        call("open_door", '{"code": "7"}'), "It is open.",
    )  # fmt: skip
    result, (text,) = played(trl_episode(Vault), tries, Example("Open the door.", "7"))
    assert (result.status, result.reward) == (Status.FINISHED, 1.0), result.error
    assert result.metrics == {"num_calls": 6.0, "num_failed": 3.0}
    answers = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:]]
    assert answers[:2] == ["{'error': 'wrong code'}", "{'error': 'Tool fly not found.'}"]
    assert answers[2:4] == ["None", "knock knock "]  # TRL shows a tool's None so
    assert "unexpected keyword argument 'lock'" in answers[4]
    assert answers[5] == "open"
    assert "user\nOpen the door. It is green.<" in text


def test_a_limit_leaves_an_environment_class_its_reward() -> None:
    tries = said(call("open_door", '{"code": "7"}'), call("listen", "{}"))
    limits = EpisodesConfig(max_turns=2, max_tokens=5000)
    result, _ = played(trl_episode(Vault), tries, Example("", "7"), limits)
    assert (result.status, result.reward) == (Status.TRUNCATED_TURNS, 1.0)
    judged = trl_episode(Vault, reward=lambda vault: 0.25, columns=lambda example: {"ground_truth": "x"})
    assert played(judged, said("no"))[0].reward == 0.25


def test_a_class_that_cannot_be_an_environment_is_refused() -> None:
    class Undocumented(Vault):
        def kick(self, strength: int) -> str:
            return "ouch"

    class Endless:
        def reset(self) -> None: ...

    undocumented = r"Undocumented\.kick cannot be offered as a tool.*docstring"
    for kind, message in (
        (Undocumented, undocumented), (Endless, "no method get_reward"), (int, "no method reset"),
        (lambda: Vault(), "takes a class"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            trl_episode(kind)  # type: ignore[arg-type]


# verifiers


@pytest.fixture
def numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("verifiers.v1")
    from grpo_ray.episodes.adapters.verifiers import VerifiersEpisodes

    return VerifiersEpisodes({"taskset": {"id": "verifiers_numbers"}}, num_train=5, num_validation=2)


def test_a_verifiers_environment_continues_its_tokens(numbers: Any) -> None:
    found = numbers.examples(0)
    assert [example.question for example in found.train] == ["Guess my number."] * 5
    assert [example.ground_truth for example in found.validation] == ["0", "1"]
    assert [example.ground_truth for example in found.train] == ["2", "3", "4", "5", "6"]
    result, (text,) = played(numbers.episode, said("1", "5", "3"), found.train[0])
    assert (result.status, result.reward) == (Status.FINISHED, 1.0), result.error
    assert result.metrics == {"is_right": 1.0, "num_replies": 3.0}
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGuess my number.<")
    assert "assistant\n1<|im_end|>\n<|im_start|>user\nhigher<" in text
    assert text.endswith("user\nlower<|im_end|>\n<|im_start|>assistant\n3<|im_end|>")


def test_verifiers_scores_an_episode_at_a_limit(numbers: Any) -> None:
    for limits, status in (
        (EpisodesConfig(max_turns=2, max_tokens=5000), Status.TRUNCATED_TURNS),
        (EpisodesConfig(max_tokens=120), Status.TRUNCATED_TOKENS),
    ):
        result, _ = played(numbers.episode, lambda prompt: "1", numbers.examples(0).train[0], limits)
        assert (result.status, result.reward) == (status, 0.0)
        assert result.metrics["is_right"] == 0.0, "scored, and not only given the limit's reward"
        assert result.metrics["num_replies"] == result.num_turns


def test_a_verifiers_environment_writes_to_the_temporary_folder_only_and_its_error_is_the_episodes(
    numbers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confined worker may not write in the home, where verifiers keeps its folders otherwise."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result, _ = played(numbers.episode, said("dog"), numbers.examples(0).train[0])
    assert (result.status, result.reward) == (Status.ENVIRONMENT_ERROR, None)
    assert "invalid literal for int() with base 10: 'dog'" in result.error
    assert (tmp_path / "runtimes" / "subprocess").is_dir()


async def test_every_concurrent_verifiers_episode_has_its_own_session(numbers: Any) -> None:
    sessions = [session_of("qwen2.5", said(str(number)))[0] for number in range(3, 8)]
    async with contextlib.aclosing(ChatServer()) as server:
        await server.start()
        runner = EpisodeRunner(numbers.episode, server=server)
        results = await asyncio.gather(*map(runner.run, sessions, numbers.examples(0).train))
    assert [(result.reward, result.num_turns) for result in results] == [(1.0, 1)] * 5


def test_a_verifiers_tool_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verifiers serves the tool from a process."""
    pytest.importorskip("verifiers.v1")
    from grpo_ray.episodes.adapters.verifiers import VerifiersEpisodes

    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    treasure = VerifiersEpisodes({"taskset": {"id": "verifiers_treasure"}}, num_validation=1)
    tries = said(call("map_look", '{"place": "a tree"}') + call("map_dig", "{}"), "a chest")
    result, (text,) = played(treasure.episode, tries, treasure.examples(0).train[0])
    assert result.reward == 1.0, result.error
    assert "<tool_response>\nbehind a tree is a chest\n</tool_response>" in text
    assert "<tool_response>\nerror: there is no tool map_dig\n</tool_response>" in text
    with pytest.raises(ValueError, match="has 2 tasks; ask for fewer than 2 to validate with"):
        VerifiersEpisodes({"taskset": {"id": "verifiers_treasure"}}, num_validation=2).examples(0)


# Warm-up pairs


def test_a_rehearsal_gives_each_turn_as_a_tiny_model_sees_it() -> None:
    tries = [call("open_door", '{"code": "7"}').replace("\n", ""), "It is open."]
    pairs = rehearse(trl_episode(Vault), [Example("Open.", "7")], said(*tries, *tries), 5, num_played=4)
    opening = "Open. It is green.\n>\n"
    first, second = (opening, tries[0]), (f"{opening}{tries[0]}<|endoftext|>open\n>\n", tries[1])
    assert pairs == [first, second, first, second, first]


def test_a_rehearsal_that_fails_says_so() -> None:
    episode = gymnasium_episode(lambda: Steps(fails=True), str, int)
    with pytest.raises(RuntimeError, match="the robot is stuck"):
        rehearse(episode, [Example("", "")], lambda transcript: "1", 5)

    async def stopped(session: object, example: Example) -> float:
        raise KeyboardInterrupt  # as a signal does, wherever the process is

    with pytest.raises(KeyboardInterrupt):
        rehearse(stopped, [Example("", "")], lambda transcript: "1", 5)


# The page


@pytest.mark.parametrize(
    ("name", "package", "replies"),
    [
        ("frozen_lake", "gymnasium", {*MOVES}),
        ("colors", "openai", {"red", "green", "blue", "white", call("look", "{}").replace("\n", "")}),
        ("play_numbers", "verifiers.v1", set("1234567")),
    ],
)
def test_the_pages_modules_play_their_own_warmup(
    environments_page: Callable[[str], Any], name: str, package: str, replies: set[str]
) -> None:
    pytest.importorskip(package)
    module = environments_page(name)
    pairs = module.warmup(0, 30)
    assert len(pairs) == 30
    assert {reply for _, reply in pairs} == replies
    found = module.examples(0)
    assert min(len(found.train), len(found.validation)) > 20
    assert load_episode(f"{name}:episode").__name__ == "episode"
    assert {*load_config("frozen_lake.yaml").episode_tasks} == {""}


def test_the_pages_vault_opens(environments_page: Callable[[str], Any]) -> None:
    tries = said(call("open_door", '{"code": "7"}'), "done")
    result, _ = played(environments_page("vault").episode, tries, Example("Open.", "7"))
    assert result.reward == 1.0, result.error


def test_the_pages_client_plays_on_a_server(environments_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are those of an OpenEnv server, with which the page's client was tried by hand."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        number = num_guesses = 0
        async for message in socket:
            asked = message.json()
            if asked["type"] == "reset":
                number, num_guesses = asked["data"]["seed"], 0
                data: dict[str, Any] = {"observation": {"text": "Guess."}, "reward": None, "done": False}
            elif asked["data"]["text"].isdigit():
                num_guesses += 1
                is_right = asked["data"]["text"] == str(number)
                is_over = is_right or num_guesses == 3
                data = {"observation": {"text": "no"}, "reward": float(is_right), "done": is_over}
            else:
                error = {"message": "no number", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
                continue
            await socket.send_json({"type": "observation", "data": data})
        return socket

    module = environments_page("numbers_server")

    async def episode(session: Any, example: Example) -> Any:
        app = web.Application()
        app.router.add_get("/ws", serve)
        async with TestServer(app) as server:
            monkeypatch.setattr(module, "URL", str(server.make_url("/ws")).replace("http", "ws"))
            return await module.episode(session, example)

    won, _ = played(episode, said("1", "4"), Example("", "", seed=4))
    assert (won.reward, won.turn_rewards) == (1.0, (0.0, 1.0)), won.error
    lost, _ = played(episode, said("1", "2", "3"), Example("", "", seed=4))
    assert lost.turn_rewards == (0.0, 0.0, 0.0)
    failed, _ = played(episode, said("dog"), Example("", "", seed=4))
    assert failed.status == Status.ENVIRONMENT_ERROR
    assert "no number" in failed.error
