"""Texts of whole responses against those that vLLM makes token by token, to the byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_process import output_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.vllm

END = 0


def byte_level() -> Any:
    """Make a tokenizer of single bytes, so that most responses hold broken characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<end>": END, **{c: i for i, c in enumerate(alphabet, 1)}}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def sentence_pieces() -> Any:
    """Make a tokenizer as of Llama 2: words that begin with their space, and bytes for everything else."""
    pieces = ["<end>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁the", "b", "é", "▁"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


TOKENIZERS = {"byte level": byte_level(), "sentence pieces": sentence_pieces()}
IDS = {name: st.integers(0, len(tokenizer) - 1) for name, tokenizer in TOKENIZERS.items()}


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[int], list[int]]:
    """Draw a tokenizer, a prompt, and a response of words, random tokens and end tokens."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    words = st.text(max_size=8).map(lambda text: ids_of(name, text))
    parts = draw(st.lists(words | st.lists(IDS[name], max_size=4) | st.just([END]), min_size=1, max_size=6))
    response = [token for part in parts for token in part] or [END]
    return name, draw(st.lists(IDS[name], min_size=1, max_size=6)), response


def ids_of(name: str, text: str) -> list[int]:
    if name == "sentence pieces":
        return [1 + byte for byte in text.encode()]
    alphabet = {byte: token for token, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)}
    return [alphabet[c] for piece, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(text) for c in piece]


@pytest.fixture(scope="module")
def vllm_texts() -> Any:
    """The module, which imports vLLM."""
    pytest.importorskip("vllm")
    from grpo_ray.engines import vllm_texts

    return vllm_texts


@pytest.fixture
def detokenizer(vllm_texts: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's detokenizers; what a test corrects is undone after it."""
    theirs = vllm_texts.detokenizer
    monkeypatch.setattr(theirs, "from_new_request", theirs.from_new_request)
    return theirs


@settings(max_examples=300)
@given(case=texts())
def test_texts_are_vllms_to_the_byte(vllm_texts: Any, case: tuple[str, list[int], list[int]]) -> None:
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    name, prompt, response = case
    params = SamplingParams(detokenize=False)
    is_cut = TOKENIZERS[name].decode(prompt, skip_special_tokens=True).endswith("\ufffd")
    context = [] if is_cut else prompt  # from a prompt cut within a character vLLM would repeat all of it
    request: Any = SimpleNamespace(request_id="", prompt_token_ids=context, sampling_params=params)
    one_by_one = FastIncrementalDetokenizer(TOKENIZERS[name], request)
    for token in response:
        one_by_one.update([token], stop_terminated=False)
    assert vllm_texts.decode(TOKENIZERS[name], prompt, response, params) == one_by_one.output_text


def test_after_a_prompt_cut_within_a_character_the_text_and_stop_strings_are_the_responses(
    vllm_texts: Any, detokenizer: Any
) -> None:
    from vllm import SamplingParams

    ids, tokenizer = ids_of("byte level", "</a> Name a fish: 🐠 is one </a>"), TOKENIZERS["byte level"]
    cut = ids.index(ids_of("byte level", "🐠")[-1])  # before the last byte
    expected = tokenizer.decode(ids[cut:])
    assert expected == "\ufffd is one </a>"
    params = SamplingParams(detokenize=False)
    assert vllm_texts.decode(tokenizer, ids[:cut], ids[cut:], params) == expected
    vllm_texts.correct_stop_strings()
    params = SamplingParams(stop=["</a>"])
    request: Any = SimpleNamespace(request_id="", prompt_token_ids=ids[:cut], sampling_params=params)
    made = detokenizer.from_new_request(tokenizer, request)
    assert [made.update([token], False) for token in ids[cut:]] == [None] * (len(ids) - cut - 1) + ["</a>"]


def test_logprobs_come_without_texts(vllm_texts: Any) -> None:
    from vllm import SamplingParams

    request: Any = SimpleNamespace(sampling_params=SamplingParams(logprobs=0, flat_logprobs=True))
    make = lambda: vllm_texts.processor.from_new_request(TOKENIZERS["byte level"], request)  # noqa: E731
    try:
        vllm_texts.omit_texts_of_logprobs()
        assert make().tokenizer is None
    finally:
        vllm_texts.processor.from_new_request = classmethod(vllm_texts.original)
    assert make().tokenizer is not None


def test_a_slow_tokenizer_has_texts(vllm_texts: Any) -> None:
    from transformers import ByT5Tokenizer
    from vllm import SamplingParams

    tokenizer = ByT5Tokenizer()
    response = tokenizer("né", add_special_tokens=False)["input_ids"]
    assert vllm_texts.decode(tokenizer, response, response, SamplingParams(detokenize=False)) == "né"


async def test_a_response_that_vllm_aborted_and_an_error_without_text_are_errors() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine.exceptions import EngineGenerateError

    from grpo_ray.engines.vllm_engine import _completion, only_output

    with pytest.raises(RuntimeError, match="vLLM ended a response with `abort`"):
        _completion(SimpleNamespace(finish_reason="abort"))

    async def fail() -> Any:
        raise EngineGenerateError from ZeroDivisionError("their own")
        yield

    with pytest.raises(RuntimeError, match=r"^vLLM: ZeroDivisionError\('their own'\)$"):
        await only_output(fail())


@pytest.mark.parametrize("min_tokens", range(3, 8))
def test_a_stop_string_ends_a_response_of_min_tokens_in_both_engines(
    min_tokens: int, vllm_texts: Any, detokenizer: Any
) -> None:
    """The stop string is complete with the fifth token; one before `min_tokens` ends nothing."""
    from grpo_ray.engines.sampling_batch import Sequence
    from grpo_ray.engines.vllm_engine import _sampling_params
    from grpo_ray.types import SamplingSettings

    ids = ids_of("byte level", "5</a> and more")
    own = SamplingSettings(1, 1.0, 1.0, min_tokens, len(ids), ("</a>",), (END,))
    request = SimpleNamespace(request_id="", prompt_token_ids=[1], sampling_params=_sampling_params(own))
    vllm_texts.correct_stop_strings()
    theirs = detokenizer.from_new_request(TOKENIZERS["byte level"], request)
    ours = Sequence((1,), own, torch.zeros(len(ids)))
    ends = next((n for n, token in enumerate(ids, 1) if theirs.update([token], False)), len(ids))
    while not ours.finish_reason:
        ours.append(ids[len(ours.token_ids)], 0.0, 0, TOKENIZERS["byte level"])
    assert len(ours.token_ids) == ends == (5 if min_tokens <= 5 else len(ids))
    assert ours.text == theirs.output_text


ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
def test_the_sampler_of_gpus_draws_from_the_learners_distribution(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, "triton==3.6.0"], check=True, capture_output=True)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "profiling", tmp_path)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    output = output_of(sys.executable, "profiling/gpu_page/v2_sampler.py", cwd=ROOT, env=environment)
    found = json.loads(output.splitlines()[-1])
    assert found["logprob_max"] < 1e-5
    freedom = found["degrees_of_freedom"]
    assert freedom > 50
    assert found["chi_square"] < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations above its mean
