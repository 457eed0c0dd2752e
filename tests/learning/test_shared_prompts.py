"""Packed rows give each sequence its own log-probabilities; gradients: test_algorithm_combinations.py."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import ENDS, TinyModel, changed, plain_logprobs
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    CohereConfig,
    DogeConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from grpo_ray.config import Config, SamplingConfig
from grpo_ray.learning.attention import NAME, BlockAttention, VarlenAttention, tree_obstacle
from grpo_ray.learning.families import NO_PARENT, SegmentTree
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.layout import Layout, choose_layout
from grpo_ray.learning.loading import _with_sdpa, cast_parameters, load_policy
from grpo_ray.learning.log_probs import ResponseLogProbs, model_inputs
from grpo_ray.learning.microbatch import on_tensors
from grpo_ray.learning.policy_model import PolicyModel, with_head_dtype
from grpo_ray.learning.sequences import TrainSequence

VOCAB = 280


def random_sequences(seed: int, shapes: Sequence[tuple[int, Sequence[int]]]) -> list[TrainSequence]:
    """Return groups of (prompt length, response lengths) with random tokens, logprobs and advantages."""
    rng = np.random.default_rng(seed)
    sequences = []
    for prompt_length, response_lengths in shapes:
        prompt = tuple(rng.integers(18, VOCAB, prompt_length).tolist())
        for length in response_lengths:
            logprobs = rng.normal(-5.6, 0.3, length).astype(np.float32)
            response = rng.integers(18, VOCAB, length).astype(np.int32)
            sequences.append(TrainSequence(prompt, response, logprobs, float(rng.normal())))
    random.Random(seed).shuffle(sequences)
    return sequences


# Ragged groups, a group of one, responses of one token, prompts of one token.
SHAPES = [(9, [3, 14, 1, 6]), (1, [5, 2]), (4, [1]), (9, [7, 7, 7]), (17, [2, 20])]


@pytest.fixture(params=["transformers", "grpo_ray"])
def policy(request: pytest.FixtureRequest, tiny_model: TinyModel) -> PolicyModel:
    if request.param == "grpo_ray":
        return load_policy(str(tiny_model(False, own=True)), implementation="grpo_ray")
    return load_policy(str(tiny_model()))


# ---- log-probabilities ----


@pytest.mark.parametrize(("temperature", "min_tokens"), [(1.0, 0), (0.7, 3)])
@pytest.mark.parametrize("is_packed", [True, False])
def test_logprobs_are_those_of_each_sequence_alone(
    policy: PolicyModel, is_packed: bool, temperature: float, min_tokens: int
) -> None:
    sampling = SamplingConfig(temperature=temperature, min_tokens=min_tokens)
    sequences = random_sequences(0, SHAPES)
    for is_chunked in (True, False):
        layout = Layout(ResponseLogProbs(sampling, ENDS, is_chunked), BlockAttention.of if is_packed else None)
        batch = layout.collate(sequences)
        with torch.no_grad():
            found, entropy = layout.log_probs(policy, batch)
        assert ((found != 0) == batch.response_mask).all()
        assert ((entropy > 0) == batch.response_mask).all()
        for row, s in zip(found, sequences, strict=True):
            given = s.prompt_token_ids, s.response_token_ids, temperature, min_tokens
            expected = plain_logprobs(policy, *given, ENDS)
            torch.testing.assert_close(row[: len(expected)], expected, atol=1e-5, rtol=0)


def loop_attention(tree: SegmentTree, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention one token and head at a time, from the tree alone."""
    group_size = queries.shape[1] // keys.shape[1]
    mixed = torch.empty_like(queries)
    for segment, (start, length) in enumerate(zip(tree.starts, tree.lengths, strict=True)):
        for token in range(start, start + length):
            seen = [i for i in tree.paths[segment] if i <= token]
            for head in range(queries.shape[1]):
                own_keys, own_values = keys[seen, head // group_size], values[seen, head // group_size]
                scores = own_keys @ queries[token, head] / queries.shape[2] ** 0.5
                mixed[token, head] = scores.softmax(0) @ own_values
    return mixed


def plain_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, key_ends: Tensor,
    longest_query: int, longest_path: int, scale: float | None,
) -> Tensor:  # fmt: skip
    """Stand in for FlashAttention's kernels: causal masks are aligned at the end of each segment."""
    mixed = []
    for segment in range(len(query_ends) - 1):
        q = queries[query_ends[segment] : query_ends[segment + 1]].transpose(0, 1)
        k, v = (x[key_ends[segment] : key_ends[segment + 1]].transpose(0, 1) for x in (keys, values))
        assert q.shape[1] <= longest_query
        assert k.shape[1] <= longest_path
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        mixed.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, allowed, scale=scale))
    return torch.cat(mixed, 1).transpose(0, 1)


@pytest.mark.parametrize("seed", range(6))
def test_attention_along_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 9))
    tree = SegmentTree(
        tuple(int(length) for length in rng.integers(1, 7, num)),
        tuple(int(rng.integers(-1, segment)) if segment else -1 for segment in range(num)),
    )
    torch.manual_seed(seed)
    queries, keys, values = (torch.randn(tree.num_tokens, heads, 8) for heads in (4, 2, 2))
    expected = loop_attention(tree, queries, keys, values)
    blocks, varlen = BlockAttention.of(tree), VarlenAttention.of(tree, plain_kernel)
    for attention in (blocks, on_tensors(torch.clone, blocks), varlen, on_tensors(torch.clone, varlen)):
        torch.testing.assert_close(attention(queries, keys, values), expected, atol=1e-5, rtol=1e-5)


def test_segments_much_shorter_than_a_blocks_longest_begin_another() -> None:
    """Else most of a block would be padding. Here they begin below 0.75 of 8, and of 5."""

    def blocks_of(lengths: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [tuple(block.queries.shape) for block in BlockAttention.of(SegmentTree(lengths, parents)).blocks]

    assert blocks_of((3, 7, 5, 8, 6), (NO_PARENT,) * 5) == [(3, 8), (1, 5), (1, 3)]
    assert blocks_of((2, 4, 8, 6), (NO_PARENT, 0, 0, 0)) == [(1, 2), (2, 8), (1, 4)]


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
SHARING = [
    Qwen2Config(**SIZES), Qwen3Config(**SIZES), LlamaConfig(**SIZES),
    MistralConfig(**SIZES, sliding_window=None),
    GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    CohereConfig(**SIZES, logit_scale=0.25),
    GPTNeoXConfig(**{**SIZES, "num_key_value_heads": None}),
    GraniteConfig(**SIZES, logits_scaling=4.0),
]  # fmt: skip
PADDED = [
    (MistralConfig(**SIZES, sliding_window=8), "sliding window"),
    (Gemma2Config(**SIZES), "sliding_attention"),
    (
        LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
        "dynamic",
    ),
]


def random_model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = _with_sdpa(AutoModelForCausalLM.from_config, config).eval()
    if tree_obstacle(model) is None:
        model.set_attn_implementation(NAME)
    for parameter in model.parameters():  # weights of the usual size would make attention nearly uniform
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_a_model_without_torchs_attention_has_its_own() -> None:
    def make(message: str, attn_implementation: str) -> str:
        if attn_implementation == "sdpa":
            raise ValueError(message)
        return attn_implementation

    assert _with_sdpa(make, "no scaled_dot_product_attention yet") == "eager"
    with pytest.raises(ValueError, match="no such model"):
        _with_sdpa(make, "no such model")


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [*((architecture, None) for architecture in SHARING), *PADDED],
    ids=lambda case: getattr(case, "model_type", case or "shares"),
)
def test_architectures_share_prompts_or_have_a_reason(
    architecture: PreTrainedConfig, reason: str | None, tiny_config: Config
) -> None:
    """The chosen layout's log-probabilities are the model's own."""
    config = changed(tiny_config, sampling={"min_tokens": 0, "temperature": 1.0})
    model, sequences = random_model(architecture), random_sequences(3, SHAPES[:3])
    layout, notes = choose_layout(model, config, ENDS)
    with torch.no_grad():
        found, _ = layout.log_probs(model, layout.collate(sequences))
        for row, s in zip(found, sequences, strict=True):
            tokens = torch.tensor([*s.prompt_token_ids, *s.response_token_ids.tolist()])[None]
            logits = model(input_ids=tokens, use_cache=False).logits[0, len(s.prompt_token_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(-1, tokens[0, len(s.prompt_token_ids) :, None])[:, 0]
            torch.testing.assert_close(row[: len(expected)], expected, atol=2e-5, rtol=0)
    assert layout.shares_prompts == (reason is None)
    if reason is not None:
        assert reason in notes["prompts_not_shared"]
        return
    assert notes == {}
    is_scaled = architecture.model_type in ("cohere", "granite")  # its logits
    assert layout.log_probs.is_chunked == (not is_scaled)


def test_an_attention_that_ignores_the_tree_is_noticed(tiny_config: Config, policy: Any) -> None:
    """A model with its own code may take the arguments and forget them."""
    forward = policy.base_model

    def forgetful(*args: Any, tree: object = None, attention_mask: object = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    layout, notes = choose_layout(_Wrapped(policy, forgetful), tiny_config, ENDS)  # type: ignore[arg-type]
    assert not layout.shares_prompts
    assert "would differ there by" in notes["prompts_not_shared"]


def test_capped_scores_are_computed_as_by_the_model(tmp_path: Path) -> None:
    random_model(Gemma2Config(**SIZES, attn_logit_softcapping=0.5)).save_pretrained(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    models, tokens = (load_policy(str(tmp_path)), own), torch.arange(3, 23)[None]
    loaded, eager = (model(tokens, use_cache=False).logits for model in models)
    torch.testing.assert_close(loaded, eager)


CAPPED = Gemma2Config(
    **SIZES, final_logit_softcapping=30.0, attn_logit_softcapping=None, tie_word_embeddings=False,
    layer_types=["full_attention"] * 2, use_sliding_window=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "is_chunked"),
    [
        (CAPPED, False),
        (Gemma2Config(**{**CAPPED.to_dict(), "final_logit_softcapping": None}), True),
        (CohereConfig(**SIZES, logit_scale=1.001), False),
        (CohereConfig(**SIZES, logit_scale=1.0), True),
    ],
    ids=["cap", "no cap", "scale", "scale of 1"],
)
def test_a_cap_or_scale_of_small_logits_is_read_from_the_configuration(
    architecture: PreTrainedConfig, is_chunked: bool, tiny_config: Config
) -> None:
    """Logits of 0.1 are far below the cap, so that no comparison of log-probabilities finds it."""
    model = random_model(architecture)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.02)
    layout, _ = choose_layout(model, tiny_config, ENDS)
    assert layout.log_probs.is_chunked == is_chunked


@pytest.mark.parametrize(
    "architecture", [DogeConfig(**SIZES, keep_window_size=4), BertConfig(**SIZES)], ids=["Doge", "Bert"]
)
def test_a_model_later_tokens_change_is_refused(architecture: PreTrainedConfig, tiny_config: Config) -> None:
    """A new Doge keeps keys of equal scores, and which ones depends on the row's length; Bert has no mask."""
    model = random_model(architecture)
    for name, parameter in model.named_parameters():
        if name.endswith("self_attn.A"):
            torch.nn.init.zeros_(parameter)
    message = r"model.path: (Doge|Bert)\w+ cannot be trained in padded rows: its log-prob"
    with pytest.raises(ValueError, match=message):
        choose_layout(model, tiny_config, ENDS)


def test_a_model_that_sees_the_next_token_is_refused(tiny_config: Config, policy: Any) -> None:
    """Its own log-probabilities of a whole sequence are the same in every layout, and no sampler has them."""

    def base_model(*args: Any, tree: object = None, attention_mask: object = None, **kwargs: Any) -> Any:
        hidden = policy.base_model(*args, **kwargs).last_hidden_state
        return SimpleNamespace(last_hidden_state=hidden + hidden.roll(-1, dims=1))

    class Peeking(_Wrapped):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(logits=policy.lm_head(base_model(*args, **kwargs).last_hidden_state))

    with pytest.raises(ValueError, match="Peeking cannot be trained in padded rows: its log-probabilities"):
        choose_layout(Peeking(policy, base_model), tiny_config, ENDS)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_a_policy_that_has_become_sure_of_itself_can_be_resumed(scale: float, tiny_config: Config) -> None:
    """Training makes logits larger, and bfloat16 rounds them in proportion; found by a run of two hours."""
    model = random_model(LlamaConfig(**SIZES)).to(torch.bfloat16)
    head = model.get_output_embeddings().weight
    logits = model(input_ids=torch.arange(2, 20)[None], use_cache=False).logits
    with torch.no_grad():
        head.mul_(scale / logits.abs().max())
    config = changed(tiny_config, model={"dtype": "bfloat16"}, sampling={"min_tokens": 0, "temperature": 1.0})
    layout, notes = choose_layout(model, config, ENDS)
    assert (layout.shares_prompts, notes) == (True, {})


@pytest.mark.parametrize(("option", "value"), [("softcap", 50.0), ("s_aux", torch.zeros(4)), ("softcap", None)])
def test_an_option_of_attention_that_a_tree_would_ignore(
    option: str, value: object, tiny_config: Config, tiny_model: TinyModel
) -> None:
    policy: Any = load_policy(str(tiny_model()))
    forward = policy.base_model

    def with_option(*args: Any, **kwargs: Any) -> Any:
        options = {option: value} if "tree" in kwargs else {}  # which transformers hands on to attention
        return forward(*args, **kwargs, **options)

    layout, notes = choose_layout(_Wrapped(policy, with_option), tiny_config, ENDS)  # type: ignore[arg-type]
    assert layout.shares_prompts == (value is None)
    if value is not None:
        assert f"ValueError: attention over a tree has no {option}" in notes["prompts_not_shared"]


# ---- the output layer in float32 ----


@pytest.mark.parametrize("share_prompts", ["auto", "never"])
@pytest.mark.parametrize("is_plain", [False, True])
def test_a_float32_head_in_bfloat16(
    policy: PolicyModel, is_plain: bool, share_prompts: str, tiny_config: Config
) -> None:
    """Logprobs are those of float32 products over the model's own hidden states, computed in either way."""
    model = {"dtype": "bfloat16", "head_dtype": "float32"}
    learner, sampling = {"share_prompts": share_prompts}, {"min_tokens": 0}
    config = changed(tiny_config, model=model, learner=learner, sampling=sampling)
    with_head_dtype(policy, "float32")  # a merged policy has it already
    cast_parameters(with_head_dtype(policy, "float32").parameters(), torch.bfloat16)
    layout, _ = choose_layout(policy, config, ENDS)
    assert layout.log_probs.is_chunked
    assert layout.shares_prompts == (share_prompts == "auto")
    layout.log_probs.is_chunked = not is_plain
    batch = layout.collate(random_sequences(0, SHAPES))
    found, _ = layout.log_probs(policy, batch)
    hidden = policy.base_model(**model_inputs(batch)).last_hidden_state.flatten(0, 1)[batch.sources]
    assert hidden.dtype == torch.bfloat16
    logits = hidden.double() @ policy.get_output_embeddings().weight.double().T
    expected = logits.log_softmax(-1).gather(-1, batch.labels[:, None])[:, 0]
    torch.testing.assert_close(found[batch.response_mask].double(), expected, atol=1e-5, rtol=0)
    found.sum().backward()
    gradient = policy.get_output_embeddings().weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16


def test_rounded_logits_or_no_linear_output_have_no_float32_head(policy: Any, tiny_config: Config) -> None:
    cast_parameters(with_head_dtype(policy, "float32").parameters(), torch.bfloat16)

    class Rounding(_Wrapped):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return SimpleNamespace(logits=self._policy(*args, **kwargs).logits.bfloat16())

    with pytest.raises(ValueError, match=r"model.head_dtype: Rounding computes logits in torch.bfloat16"):
        choose_layout(Rounding(policy, policy.base_model), tiny_config, ENDS)  # type: ignore[arg-type]
    policy.lm_head = torch.nn.Sequential(policy.lm_head)
    with pytest.raises(ValueError, match=r"model.head_dtype: the output layer of \w+ is a Sequential"):
        with_head_dtype(policy, "float32")


class _Wrapped:
    """A policy with another `base_model`."""

    def __init__(self, policy: Any, base_model: Callable[..., Any]) -> None:
        self._policy, self.base_model = policy, base_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._policy(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def test_the_reason_is_told_once(tiny_config: Config) -> None:
    model = random_model(MistralConfig(**SIZES, sliding_window=8))
    passes = ForwardBackward(tiny_config, ENDS, torch.device("cpu"))
    assert passes.take_layout_notes() == {}
    passes.backward(model, random_sequences(4, SHAPES[:2]))
    assert passes.take_layout_notes() == {"prompts_not_shared": "its attention has a sliding window"}
    assert passes.take_layout_notes() == {}
