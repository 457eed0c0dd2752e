"""DAPO's soft overlong punishment at and between its corners."""

import pytest
import torch

from grpo_ray.algorithms import overlong_penalties


def test_overlong_penalties_by_hand():
    lengths = torch.tensor([0, 1, 12, 13, 14, 16, 17])  # a buffer of 4 before 16: free up to 12
    penalties = overlong_penalties(lengths, max_tokens=16, buffer_tokens=4, penalty=0.5)
    expected = torch.tensor([0.0, 0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert torch.equal(penalties, expected)
    assert not penalties.signbit()[:3].any()  # 0, not -0
    assert penalties.dtype == torch.float32


def test_a_buffer_of_all_tokens_punishes_from_the_first():
    penalties = overlong_penalties(torch.tensor([0, 1, 8]), max_tokens=8, buffer_tokens=8, penalty=1.0)
    assert penalties.tolist() == [0.0, -0.125, -1.0]


def test_no_buffer_is_no_punishment_at_any_length():
    penalties = overlong_penalties(torch.tensor([1, 8, 9]), max_tokens=8, buffer_tokens=0, penalty=1.0)
    assert penalties.tolist() == [0.0, 0.0, 0.0]
    assert penalties.dtype == torch.float32


def test_longer_never_costs_less():
    penalties = overlong_penalties(torch.arange(40), max_tokens=30, buffer_tokens=7, penalty=2.0)
    assert (penalties.diff() <= 0).all()
    assert penalties.min().item() == -2.0
    assert penalties.max().item() == 0.0


@pytest.mark.parametrize(
    ("buffer_tokens", "penalty", "name"),
    [(-1, 1.0, "buffer_tokens"), (9, 1.0, "buffer_tokens"), (4, -1.0, "penalty"), (4, float("nan"), "penalty")],
)
def test_bad_arguments_are_refused(buffer_tokens, penalty, name):
    with pytest.raises(ValueError, match=name):
        overlong_penalties(torch.tensor([1]), 8, buffer_tokens, penalty)
