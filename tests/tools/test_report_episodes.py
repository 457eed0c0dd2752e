"""Episodes on a run's web page: the data of turns and branches, and the page in a browser."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import DESKTOP, NEEDS_CHROMIUM, PHONE, Browser, browser
from builders import TinyModel, changed, plain_logprobs
from episode_groups import branched_episode, make_episode, make_episode_group, play, spoken_episode
from report_runs import HOSTILE, NEAR_DEFAULT, add_checkpoint, make_run
from test_report_page_browser import choose, field

from grpo_ray.episodes.segments import Segments
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import end_token_ids, load_tokenizer
from grpo_ray.records.rollout_log import read_rollouts, write_rollouts
from grpo_ray.tools.report.rollout_rows import MAX_EPISODE_TOKENS, shown_episode
from grpo_ray.tools.report.run_data import run_data
from grpo_ray.tools.report.write_report import ReportOptions, report
from grpo_ray.types import CONTEXT, Episode, ScoredGroup

__all__ = ["browser"]


def row_of(path: Path, *episodes: Episode) -> dict[str, Any]:
    """Return the last episode as a row of a file."""
    write_rollouts(path / "rollouts.parquet", 1, [make_episode_group(0, episodes)])
    return read_rollouts(path / "rollouts.parquet")[-1]


def test_branches_are_found_in_the_tokens(tmp_path: Path) -> None:
    shown = shown_episode(row_of(tmp_path, branched_episode((0, 1, 1), reward=1.0)), None)
    first, second = shown["sequences"]
    assert (first["parent"], first["num_shared"], first["turn"]) == (None, 0, None)
    assert (second["parent"], second["num_shared"], second["turn"]) == (0, 4, 0)
    assert [second[name] for name in ("start", "end", "num_prompt_tokens")] == [6, 7, 1]
    assert shown["turns"] == [[0, 0], [-1, 2], [1, 4], [2, 6]]
    assert (shown["status"], shown["reward"], shown["num_tokens"]) == ("finished", 1.0, 7)
    # A turn that is shared in part does not count.
    segments = Segments()
    play(segments, [1], [2, 3, 4])
    play(segments, [1, 2, 9], [5])  # without the end of the reply
    play(segments, [8], [6])  # another conversation
    shown = shown_episode(row_of(tmp_path, make_episode(segments)), None)
    assert [(s["parent"], s["num_shared"], s["turn"]) for s in shown["sequences"]] == [
        (None, 0, None), (0, 2, None), (None, 0, None),
    ]  # fmt: skip


@pytest.mark.slow
def test_rows_of_episodes_have_texts_and_log_ratios(tmp_path: Path, tiny_model: TinyModel) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    episode = spoken_episode(np.random.default_rng(0), lambda text: tokenizer(text)["input_ids"])
    masked = replace(episode, versions=np.where(episode.turns == 0, CONTEXT, episode.versions))  # too old
    group = make_episode_group(0, [episode, make_episode(Segments(), None, status="truncated_time"), masked])
    ends = end_token_ids(str(tiny_model()), tokenizer)
    run = make_run(tmp_path / "run", changed(NEAR_DEFAULT, sampling={"min_tokens": 2}), 1, [[group]])
    add_checkpoint(run, 1, tiny_model())
    first, nothing, old = run_data(run, "run")["rollouts"]
    assert np.array_equal(np.isnan(np.array(old["ratios"], np.float64)), masked.versions == CONTEXT)
    assert "".join(first["tokens"]) == tokenizer.decode(episode.token_ids)
    prompt = first["episode"]["sequences"][0]["prompt"]
    assert prompt == tokenizer.decode(episode.sequences[0].prompt_token_ids)
    assert first["episode"]["turn_advantages"] is not None
    assert (nothing["episode"]["sequences"], nothing["tokens"]) == ([], [])
    model = load_policy(str(tiny_model()))
    for sequence in episode.sequences:
        own = slice(sequence.start, sequence.end)
        args = model, sequence.prompt_token_ids, episode.token_ids[own], 1.0
        # The first two tokens of every turn, not only of the sequence, could not be the end.
        free, limited = (plain_logprobs(*args, n, ends).detach().numpy() for n in (0, 1000))
        turns = episode.turns[own].tolist()
        is_early = np.array([n < 2 or turns[n - 2] != turn for n, turn in enumerate(turns)])
        expected = (np.where(is_early, limited, free) - episode.logprobs[own])[episode.mask[own]]
        found = np.array(first["ratios"], np.float64)[own]
        np.testing.assert_allclose(found[episode.mask[own]], expected, atol=2e-3)
        assert np.isnan(found[~episode.mask[own]]).all()


@pytest.mark.slow
def test_long_episodes_are_cut(tmp_path: Path, tiny_model: TinyModel) -> None:
    segments = Segments()
    play(segments, [1], [5] * (MAX_EPISODE_TOKENS - 10))
    play(segments, [1, 2], [6] * 20)
    play(segments, [1, 3], [7])
    run = make_run(tmp_path / "run", NEAR_DEFAULT, 1, [[make_episode_group(0, [make_episode(segments)] * 2)]])
    add_checkpoint(run, 1, tiny_model())
    row = run_data(run, "run", "last")["rollouts"][0]
    assert len(row["tokens"]) == len(row["logprobs"]) == len(row["ratios"]) == MAX_EPISODE_TOKENS
    assert row["episode"]["num_tokens"] == MAX_EPISODE_TOKENS + 11


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Path:
    """Write the page of a run of two steps with four episodes each."""
    model = tiny_model()
    tokenizer = load_tokenizer(str(model))

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[no-any-return]

    def group(step: int) -> ScoredGroup:
        rng = np.random.default_rng(step)
        episodes = [spoken_episode(rng, encode, step) for _ in range(4)]
        error = f"Traceback (most recent call last):\nRuntimeError: {HOSTILE[1]}"
        episodes[1] = make_episode(Segments(), None, status="environment_error", error=error)
        segments = Segments()
        play(segments, encode(f"{HOSTILE[0]}\n>\n"), encode(HOSTILE[2]), step)
        episodes[2] = make_episode(segments, 0.5, status="truncated_turns", error="1 turn", turn_rewards=[0.5])
        return make_episode_group(step, episodes, discount=0.9)

    folder = tmp_path_factory.mktemp("runs") / "run"
    run = make_run(folder, NEAR_DEFAULT, 2, [[group(step)] for step in range(2)])
    add_checkpoint(run, 2, model)
    return report(ReportOptions((str(run.path),)))


def pages(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.slow(NEEDS_CHROMIUM(test))


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    """Return the page with its first row open."""
    browser.look(DESKTOP)
    browser.open(page)
    browser.run("document.querySelector('.rollouts .open').click()")
    return browser


@pages
def test_turns_calls_and_branches_are_shown_on_any_screen(opened: Browser, page: Path) -> None:
    assert opened.errors() == []
    assert opened.requests() == [page.as_uri()]
    names = opened.texts(".turn-name", kind="innerText")
    firsts = [name.split("\n")[0] for name in names]
    assert firsts[:2] == ["turn 0", "context"]
    assert sorted(name for name in firsts if name != "context") == ["turn 0", "turn 1", "turn 2", "turn 3"]
    assert any('calls calculator(expression: "' in name for name in names)
    assert all("advantage" in name for name in names if name.startswith("turn"))
    assert opened.texts(".sequence h5", kind="innerText")[0] == "Conversation"
    (branch, *_) = opened.texts(".sequence.branch h5", kind="innerText")
    assert branch.startswith("Branch 1: leaves the conversation after turn 0 (")
    assert "finished" in opened.texts(".episode-facts", kind="innerText")[0]
    for size in (DESKTOP, PHONE):
        opened.look(size)
        opened.settle()
        assert opened.run("document.documentElement.scrollWidth") <= size[0]


@pages
def test_tool_calls_are_found_in_linear_time(opened: Browser) -> None:
    for text, found in (
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ["add(a: 1)"]),
        (
            "<tool_call> a <tool_call> b </tool_call></tool_call><tool_call></tool_call>",
            ["a <tool_call> b", ""],
        ),
        ("</tool_call> a <tool_call> b", []),
        ("<tool_call>" + "\n" * 100_000 + "x", []),  # weeks, if every line break is tried as a start and an end
        ("<tool_call>" * 100_000, []),
    ):
        assert opened.run(f"calls({json.dumps(text)})") == found, text[:100]


@pages
def test_context_has_no_colour_and_arrow_keys_walk_through_the_whole_episode(opened: Browser) -> None:
    colored = "getComputedStyle(mark).backgroundColor !== 'rgba(0, 0, 0, 0)'"
    for coloring in ("ratio", "logprob", "advantage"):
        choose(opened, "Colour tokens by", coloring)
        num_colored = [
            opened.run(f"[...document.querySelectorAll('{kind} .token')].filter(mark => {colored}).length")
            for kind in (".context", ".turn")
        ]
        assert num_colored[0] == 0
        assert num_colored[1] > 10
    assert opened.errors() == []
    opened.run("document.querySelector('.episode').focus()")
    opened.press("End")
    (last,) = opened.texts(".episode + .readout", kind="innerText")
    assert "logprob" in last
    places = opened.run("document.querySelectorAll('.episode .turn .token').length")
    assert last.startswith(f"token {places} ")
    walked = opened.run(f"""[...Array({places})].map(() => {{
      const line = document.querySelector('.episode + .readout').innerText;
      document.querySelector('.episode').dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowLeft'}}));
      return line; }})""")
    assert len(set(walked)) == places
    assert any("context, not sampled" in line for line in walked)


@pages
def test_ends_are_outcomes_to_choose_from(opened: Browser) -> None:
    options = opened.run(f"{field('Outcome')}.innerText")
    assert options.split("\n") == ["all outcomes", "environment error", "finished", "truncated turns"]
    assert len(opened.texts(".rollouts th", kind="innerText")) == 8
    for place in range(1, 4):
        opened.run(f"document.querySelectorAll('.rollouts .open')[{place}].click()")
    assert opened.run("window.hacked") is None
    assert opened.run("document.querySelectorAll('#rollouts img, #rollouts script').length") == 0
    assert any("RuntimeError: <img src=x" in text for text in opened.texts("pre.notice", kind="innerText"))
    assert opened.errors() == []
