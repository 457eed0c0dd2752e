"""The sampler of vLLM's Model Runner V2, which runs on GPUs alone, against the Learner's distribution.

    TRITON_INTERPRET=1 PYTHONPATH=.:profiling:TRITON python profiling/gpu_page/v2_sampler.py

Its Triton kernels run in Triton's interpreter, on a CPU; TRITON is a folder with the package triton, which
vLLM's CPU wheel does not need. tests/engines/test_vllm_texts.py makes it (in `make campaign`).
"""

import json
import sys
from types import ModuleType

import torch
import triton
import triton.language
import vllm  # noqa: F401  # before its module of Triton is replaced: it would find no GPU, and turn Triton off

found = ModuleType("vllm.triton_utils")
found.__dict__.update(triton=triton, tl=triton.language, HAS_TRITON=True)
sys.modules["vllm.triton_utils"] = found

from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample  # noqa: E402
from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias  # noqa: E402
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs  # noqa: E402

from grpo_ray.objectives import chunked_log_probs  # noqa: E402

VOCAB, WIDTH, PROMPT, MIN_TOKENS, TEMPERATURE, DRAWS = 384, 16, 5, 4, 0.7, 4000
ENDS = (2, 17)


def log_prob_difference() -> float:
    """Return the largest difference of a response's log-probabilities, with min_tokens and a temperature."""
    torch.manual_seed(0)
    length = 2 * MIN_TOKENS
    hidden, weight = torch.randn(length, WIDTH), torch.randn(VOCAB, WIDTH)
    logits, places = hidden @ weight.T, torch.arange(length)
    request = torch.zeros(length, dtype=torch.int32)  # all rows are of the first request
    none, nothing = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    apply_logit_bias(
        logits, request, PROMPT - 1 + places, none, nothing, none, nothing, nothing.float(),
        torch.tensor([PROMPT + MIN_TOKENS]), torch.tensor([len(ENDS)], dtype=torch.int32), none.bool(),
        torch.tensor([ENDS], dtype=torch.int32),
    )  # fmt: skip
    apply_temperature(logits, request, torch.tensor([TEMPERATURE]))
    # Labels that could be drawn: an end token where it may come.
    labels = torch.where(places < MIN_TOKENS, 100 + places, ENDS[0])
    sampled = compute_token_logprobs(logits, labels[:, None])[:, 0]
    learned, _ = chunked_log_probs(hidden, weight, labels, TEMPERATURE, ENDS, places < MIN_TOKENS)
    return float((sampled - learned).abs().max())


def chi_square() -> tuple[float, int]:
    """Return Pearson's statistic of draws from one distribution, and its degrees of freedom.

    Tokens that are expected fewer than 5 times count as one.
    """
    torch.manual_seed(1)
    row = 2 * torch.randn(VOCAB)
    expected = DRAWS * (row / TEMPERATURE).softmax(-1)
    request = torch.zeros(DRAWS, dtype=torch.int32)
    drawn = gumbel_sample(
        row.repeat(DRAWS, 1), request, torch.tensor([TEMPERATURE]), torch.tensor([7]), torch.arange(DRAWS),
        apply_temperature=True, is_drafting=False,
    )  # fmt: skip
    counts = torch.bincount(drawn.long(), minlength=VOCAB).float()
    frequent = expected >= 5
    observed = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    return float(((observed - wanted).square() / wanted).sum()), int(frequent.sum())


if __name__ == "__main__":
    statistic, freedom = chi_square()
    figures = {"logprob_max": log_prob_difference(), "chi_square": statistic, "degrees_of_freedom": freedom}
    print(json.dumps(figures))
