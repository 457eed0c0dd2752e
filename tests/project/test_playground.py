"""The lecture's examples: numbers worked out by hand, formulas as slow loops, and the lecture's findings."""

import json
import math
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest
import torch
from matplotlib.image import imread
from torch import Tensor

from examples.course.__main__ import run as run_command
from examples.course.playground.model import SortingModel
from examples.course.playground.policy_gradient import compute_loss
from examples.course.playground.settings import Settings
from examples.course.playground.task import REWARD_FUNCTIONS, make_task


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_log_probs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=generator(seed)).log_softmax(dim=-1)


def test_the_model_equals_loops_over_positions() -> None:
    model = SortingModel(vocab_size=5, dim=4, length=3, embedding_std=0.5, generator=generator())
    prompts = torch.tensor([[1, 0, 2], [3, 2, 4]])
    for prompt, given in zip(prompts, model(prompts), strict=True):
        hidden = sum(model.embedding[token] @ model.encode[pos] for pos, token in enumerate(prompt))
        for pos in range(3):
            logits = model.embedding @ (hidden @ model.decode[pos])
            torch.testing.assert_close(given[pos], logits.log_softmax(dim=0))


@pytest.mark.parametrize("reward", REWARD_FUNCTIONS)
@pytest.mark.parametrize("numbers", [2, 3, 4])
def test_task_knows_every_reward_and_the_exact_expectation(reward: str, numbers: int) -> None:
    task, function = make_task(reward, numbers), REWARD_FUNCTIONS[reward]
    log_probs = random_log_probs(3, numbers, task.vocab_size)
    prompts = task.prompts.tolist()
    assert all(len(set(prompt)) == numbers and max(prompt) < task.vocab_size for prompt in prompts)
    expected = right = 0.0
    for prompt, of_prompt in zip(prompts, log_probs, strict=True):
        for response in product(range(task.vocab_size), repeat=numbers):
            probability = math.exp(sum(of_prompt[pos, token].item() for pos, token in enumerate(response)))
            expected += probability * function(prompt, response) / 3
            right += probability * (list(response) == sorted(prompt)) / 3
    assert task.expected_reward(log_probs) == pytest.approx(expected, rel=1e-4)
    assert task.share_right(log_probs) == pytest.approx(right, rel=1e-4)
    responses = torch.randint(task.vocab_size, (3, 7, numbers), generator=generator())
    given = [[function(p, r) for r in rs] for p, rs in zip(prompts, responses.tolist(), strict=True)]
    assert task.rewards_of(responses).tolist() == given


@pytest.mark.parametrize("loss", ["naive", "unclipped", "clipped"])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_loss_is_the_formula_written_out(loss: str, kl: float) -> None:
    policy, old, reference = (random_log_probs(2, 3, 4, seed=seed) for seed in (1, 2, 3))
    responses = torch.randint(4, (2, 5, 3), generator=generator())
    deltas = torch.randn(2, 5, generator=generator())
    given, clip_fraction = compute_loss(
        policy, old, reference, responses, deltas, Settings(loss=loss, kl=kl, clip=0.1)
    )
    token_losses, response_kls, num_clipped = [], [], 0
    for batch, response in product(range(2), range(5)):
        delta, k3 = deltas[batch, response].item(), 0.0
        for pos in range(3):
            token = responses[batch, response, pos]
            p, p_old, p_ref = (table[batch, pos, token].exp().item() for table in (policy, old, reference))
            ratio = p / p_old  # of probabilities
            clipped = min(max(ratio, 0.9), 1.1) * delta
            token_losses.append(
                {
                    "naive": -math.log(p) * delta,
                    "unclipped": -ratio * delta,
                    "clipped": -min(ratio * delta, clipped),
                }[loss]
            )
            num_clipped += loss == "clipped" and clipped < ratio * delta
            k3 += p_ref / p - math.log(p_ref / p) - 1
        response_kls.append(k3)
    assert given.item() == pytest.approx(fmean(token_losses) + kl * fmean(response_kls), rel=1e-4)
    assert clip_fraction == pytest.approx(num_clipped / 30)
    assert loss != "clipped" or 0 < num_clipped < 30


SHORT = ("--steps", "3", "--updates", "1", "--seeds", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "folder", "labels"),
    [
        ((), "sorting", ["centered, naive"]),
        (("--compare", "kl", "--numbers", "2"), "sorting-kl", ["kl 0.0", "kl 0.1", "kl 1.0"]),
    ],
)
def test_sorting_leaves_picture_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], folder: str,
    labels: list[str],
) -> None:  # fmt: skip
    assert run_command(["playground", "sorting", *SHORT, *arguments, "--output", str(tmp_path)]) == 0
    written = tmp_path / folder
    assert imread(written / "rewards.png").shape[:2] == (800, 1200)
    figures = json.loads((written / "figures.json").read_text())
    assert [row["label"] for row in figures["summary"]] == labels
    assert len(figures["runs"]) == 2 * len(labels)
    assert figures["runs"][0]["step"] == [0, 1, 2, 3]
    assert figures["summary"][0]["reward"] == pytest.approx(
        fmean(run["reward"][-1] for run in figures["runs"] if run["label"] == labels[0]), rel=1e-4
    )
    assert figures["settings"]["steps"] == 3
    out = capsys.readouterr().out
    assert f"written: {written / 'rewards.png'}, {written / 'figures.json'}" in out
    assert all(label in out for label in labels)
