"""Models and tokenizers with defects: each is refused before training starts, or shown to work."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyModel, change_weights, changed, edit_json
from tokenizers.processors import TemplateProcessing

from grpo_ray.config import Config
from grpo_ray.config.model import TinyModelConfig
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer, max_positions
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.run.tiny_model import build_model
from grpo_ray.tasks.demonstrations import plain_demonstration
from grpo_ray.tasks.examples import Example
from grpo_ray.tasks.prompts import ChatTemplate, Prompter, TextTemplate, tokenized

WEIGHTS = "model.safetensors"
OfFolder = Callable[..., Config]


@pytest.fixture
def folder(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A copy of a valid model, to damage."""
    return Path(shutil.copytree(tiny_model(tied=False), tmp_path / "model"))


@pytest.fixture
def of_folder(tiny_config: Config, folder: Path) -> OfFolder:
    return partial(changed, changed(tiny_config, model={"path": str(folder), "tiny": None}))


def refusal(function: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the callers look at the message
        function(*arguments)
    return str(caught.value)


def test_damaged_weights_and_missing_shards_are_named(folder: Path, of_folder: OfFolder) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    for damaged in (whole[:-100], b"", b"x" * 1000):
        (folder / WEIGHTS).write_bytes(damaged)
        message = refusal(check_files, of_folder())
        assert f"model.path: {folder / WEIGHTS} is damaged or missing (" in message
        assert "copy or download the model again" in message
    (folder / WEIGHTS).unlink()
    (folder / "consolidated.safetensors").write_bytes(whole)  # which transformers does not read
    assert f"{folder / WEIGHTS} is damaged or missing (" in refusal(check_files, of_folder())
    (folder / WEIGHTS).write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": WEIGHTS, "x": "model-2.safetensors"}}))
    assert f"{folder / 'model-2.safetensors'} is damaged or missing" in refusal(check_files, of_folder())
    for text in ("[]", "{broken", '{"weight_map": 5}', '{"weight_map": {"x": 5}}'):
        index.write_text(text)
        assert f"model.path: {index} is not an index" in refusal(check_files, of_folder())


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "{broken", "config.json of {folder!r} cannot be used: "),
        ("config.json", "{}", "config.json of {folder!r} cannot be used: Unrecognized model"),
        ("config.json", '{"model_type": "nonsense"}', "config.json of {folder!r} cannot be used: "),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}', "cannot be used: integer"),
        ("tokenizer.json", "{broken", "the tokenizer of {folder!r} cannot be loaded (JSONDecodeError: "),
        ("tokenizer.json", "{}", "the tokenizer of {folder!r} cannot be loaded (KeyError: 'added_tokens')"),
        ("tokenizer_config.json", "{broken", "the tokenizer of {folder!r} cannot be loaded (JSONDecode"),
        ("tokenizer.json", None, "its tokenizer turns the prompt of the question 'Sort "),
        ("generation_config.json", "{broken", "generation_config.json' is not a valid JSON file. Correct it"),
        ("generation_config.json", "[]", "generation_config.json of {folder!r} cannot be used: 'list' object"),
        ("generation_config.json", '{"eos_token_id": [2, null]}', "of {folder!r} cannot be used: 'NoneType'"),
        ("generation_config.json", '{"eos_token_id": "2"}', "of {folder!r} cannot be used: 'str' object"),
    ],
)
def test_damaged_json_is_named(
    folder: Path, of_folder: OfFolder, file: str, text: str | None, message: str
) -> None:
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    problem = refusal(check_files, of_folder())
    assert problem.startswith("model.path: ")
    assert message.replace("{folder!r}", repr(str(folder))) in problem


def test_weights_that_are_not_finite_are_refused(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    bad_values = torch.tensor([torch.nan, torch.inf, 1])
    change_weights(folder, lambda tensors: tensors[name].view(-1)[:3].copy_(bad_values))
    bad = f"model.path: 2 of 2,048 values of {name!r} in {str(folder)!r} are NaN or infinite"
    assert f"{bad}; use a checkpoint from before the model broke" in refusal(load_policy, str(folder))
    change_weights(folder, lambda tensors: tensors["model.norm.weight"][1].fill_(-torch.inf))
    assert f"{bad}, and some in 1 of its other tensors; use" in refusal(load_policy, str(folder))


def test_weights_that_are_missing_or_of_another_shape_are_refused_rather_than_made_up(folder: Path) -> None:
    missing, cut = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    change_weights(folder, lambda tensors: tensors.pop(missing))
    message = refusal(load_policy, str(folder))
    assert f"model.path: {str(folder)!r} lacks tensors, or their shapes do not match" in message
    assert f"config.json: {missing}; copy or save the model again" in message
    change_weights(folder, lambda tensors: tensors.update({cut: tensors[cut][:200].clone()}))
    assert f"shapes do not match its config.json: {cut}, {missing}; copy" in refusal(load_policy, str(folder))


def test_without_end_token_or_stop_string_a_response_would_never_end(folder: Path, of_folder: OfFolder) -> None:
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "generation_config.json", eos_token_id=None)
    assert load_tokenizer(str(folder)).eos_token_id is None
    message = refusal(check_files, of_folder(sampling={"stop": ()}))
    assert f"sampling.stop: neither the tokenizer of {str(folder)!r} nor its generation_config" in message
    assert "give sampling.stop, or set eos_token in tokenizer_config.json" in message
    config = of_folder(sampling={"stop": ("5",)})
    assert prepare(config, check_files(config)).model.end_token_ids == ()
    edit_json(folder / "generation_config.json", eos_token_id=7)  # either place is enough
    config = of_folder(sampling={"stop": ()})
    assert prepare(config, check_files(config)).model.end_token_ids == (7,)


def test_a_stop_string_that_texts_leave_out_is_refused(folder: Path, of_folder: OfFolder) -> None:
    edit_json(folder / "tokenizer_config.json", extra_special_tokens=["5"])
    message = refusal(check_files, of_folder(sampling={"stop": ("=", "<5>")}))
    unseen = "sampling.stop: '<5>' would end nothing, as the special token '5' is not in the text"
    assert message.startswith(unseen)
    (number,) = load_tokenizer(str(folder))("5")["input_ids"]
    assert f"add {number} to eos_token_id in generation_config.json of {str(folder)!r}" in message
    edit_json(folder / "generation_config.json", eos_token_id=number)
    check_files(of_folder(sampling={"stop": ("=", "<5>")}))


def test_end_tokens_or_tokenizer_beyond_the_vocabulary_are_refused(folder: Path, of_folder: OfFolder) -> None:
    end_tokens = folder / "generation_config.json"
    written = end_tokens.read_bytes()
    edit_json(end_tokens, eos_token_id=[0, 300])
    message = refusal(check_files, of_folder())
    assert "has the end tokens [300], but the model's vocab_size is 300; correct eos_token_id" in message
    end_tokens.write_bytes(written)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens([f"<extra{i}>" for i in range(301 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    message = refusal(check_files, of_folder())
    assert f"the tokenizer of {str(folder)!r} has 301 tokens, but the model's vocab_size is 300" in message
    assert "resize the model with model.resize_token_embeddings(301)" in message


def test_a_padded_vocabulary_is_allowed_and_its_tokens_lack_text(folder: Path, of_folder: OfFolder) -> None:
    tokenizer = load_tokenizer(str(folder))
    shape = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=1000
    )
    build_model(shape, tokenizer, seed=0).save_pretrained(folder)
    config = of_folder()
    assert prepare(config, check_files(config)).model.end_token_ids == (tokenizer.eos_token_id,)
    known = tokenizer("Sort 5")["input_ids"]
    assert tokenizer.decode([*known, 999]) == tokenizer.decode(known) == "Sort 5"


def test_a_generation_config_that_transformers_would_not_save(folder: Path, tmp_path: Path) -> None:
    written = {"temperature": 0.6, "do_sample": False, "eos_token_id": [2, 0]}
    (folder / "generation_config.json").write_text(json.dumps(written))
    load_policy(str(folder)).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_heads_and_positions(folder: Path, of_folder: OfFolder) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 1e4}
    rope["original_max_position_embeddings"] = 32
    edit_json(folder / "config.json", head_dim=8, rope_parameters=rope)
    assert max_positions(str(folder)) == 32
    assert "heads is 8" in refusal(check_files, of_folder(generator={"engine": "vllm", "num_gpus": 0}))


def test_a_tokenizer_that_begins_texts_with_a_token(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<b> $A", special_tokens=[("<b>", 5)])
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(5)
    plain = tokenizer("1 + 2 = 3 +", add_special_tokens=False)["input_ids"]
    for limit, kept in ((None, plain), (4, plain[-3:])):
        asked = Prompter(TextTemplate("{question} +"), tokenizer, limit).item(0, Example("1 + 2 = 3", ""))
        assert asked.prompt_token_ids == (5, *kept)
    assert plain_demonstration(tokenizer, "1 + 2 = 3 +", "4").prompt_token_ids == (5, *plain)
    assert tokenized(ChatTemplate(), tokenizer, ["1 + 2 = 3 +"]) == [plain]
