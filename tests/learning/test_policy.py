"""Tokenizer, tiny model, warm-up, and facts read from a model's folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TinyModel, changed, write_rows
from huggingface_hub import ModelInfo
from transformers import AutoTokenizer, GenerationConfig, Qwen2Config
from transformers import PreTrainedTokenizerBase as Tokenizer

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config
from grpo_ray.config.model import Implementation, TinyModelConfig, WarmupConfig
from grpo_ray.config.task import FileTaskConfig, SortingTaskConfig
from grpo_ray.learning import model_files
from grpo_ray.learning.loading import skeleton
from grpo_ray.learning.model_files import at_commit, check_local_model, end_token_ids, is_local, load_tokenizer
from grpo_ray.learning.tiny_tokenizer import END_TOKEN, tiny_tokenizer, train_tokenizer
from grpo_ray.learning.transformer_lm import TransformerLM
from grpo_ray.run.preparation import check_files
from grpo_ray.run.tiny_model import build_model, cache_folder, tiny_digest, tiny_model_folder
from grpo_ray.tasks import kinds as warmups
from grpo_ray.tasks.demonstrations import plain_demonstration
from grpo_ray.tasks.sorting import warmup_pairs

IMPLEMENTATIONS: tuple[Implementation, ...] = ("transformers", "grpo_ray")
SHAPE = TinyModelConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=300
)
STRINGS = [
    "Sort 51280", " leading and trailing ", "two  spaces, three   spaces", "0123456789 3.14 -7,000",
    "</answer>", "</think> <answer> 01258 </answer>", "tabs\tand\nnew lines\r\n\n", "don't 'quote' \"this\" .",
    "naïve café Größe", "日本語 русский عربى", "😀👩‍👩‍👧", "\\frac{1}{2} $x^2$ {question}", END_TOKEN, "",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = [prompt + response for prompt, response in warmup_pairs(SortingTaskConfig(), 0, 300)]
    return train_tokenizer(texts, vocab_size=300)


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def reloaded(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """The tokenizer as loaded by AutoTokenizer, saved with a Qwen2 model and with a Llama."""
    folder = tmp_path_factory.mktemp("reloaded")
    build_model(SHAPE, tokenizer, 0, request.param).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_long_word_is_learned_in_pieces() -> None:
    """Its time would grow with the square of its length: 60,000 letters took 5 s."""
    vocab = train_tokenizer(["x" * 30_000, "a y"] * 2, vocab_size=300).get_vocab()
    assert "y" in vocab
    assert 100 <= max(len(token) for token in vocab if set(token) == {"x"}) <= 200


@pytest.mark.parametrize("text", STRINGS)
def test_reloaded_tokenizer_agrees_on_round_trips(tokenizer: Tokenizer, reloaded: Tokenizer, text: str) -> None:
    ids = ids_of(tokenizer, text)
    assert ids_of(reloaded, text) == ids
    assert tokenizer.decode(ids) == reloaded.decode(ids) == text


def test_tokenizer_learns_from_its_text_and_keeps_its_size(tokenizer: Tokenizer) -> None:
    assert 257 < len(tokenizer) <= 300
    assert len(ids_of(tokenizer, "</answer>")) < len("</answer>")  # merges were learned
    assert tokenizer.eos_token == tokenizer.pad_token == END_TOKEN
    assert ids_of(tokenizer, END_TOKEN) == [tokenizer.eos_token_id]
    ended = [*ids_of(tokenizer, "a b"), tokenizer.eos_token_id]
    assert tokenizer.decode(ended, skip_special_tokens=True) == "a b"


@pytest.mark.parametrize(("implementation", "tied"), [("transformers", True), ("grpo_ray", False)])
def test_model_has_configured_shape(tokenizer: Tokenizer, tied: bool, implementation: Implementation) -> None:
    shape = SHAPE.model_copy(update={"tie_embeddings": tied, "num_layers": 2, "num_heads": 4})
    model = build_model(shape, tokenizer, 0, implementation)
    assert isinstance(model, TransformerLM) == (implementation == "grpo_ray")
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.embed_tokens.weight"] == [300, 32]
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == [32, 32]
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == [8, 32]
    assert shapes["model.layers.1.mlp.down_proj.weight"] == [32, 64]
    assert ("lm_head.weight" in shapes) != tied
    assert model.config.max_position_embeddings == 512
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_prompt_and_response_are_encoded_apart(tokenizer: Tokenizer) -> None:
    """Even if the tokenizer would merge across the border."""
    prompt, response = plain_demonstration(tokenizer, "Sort 5", "1280")
    assert list(prompt) == ids_of(tokenizer, "Sort 5")
    assert list(response) == [*ids_of(tokenizer, "1280"), tokenizer.eos_token_id]


@pytest.fixture
def warmed(tiny_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration of a model that takes a second to build, with an empty cache."""
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "cache"))
    shape = SHAPE.model_copy(update={"warmup": WarmupConfig(num_steps=2, batch_size=2, num_threads=1)})
    return tiny_config.changed(model={"tiny": shape})


@pytest.mark.parametrize(("implementation", "kind"), [("transformers", "qwen2"), ("grpo_ray", "llama")])
def test_tiny_model_is_built_once_and_elsewhere_with_the_same_bits(
    implementation: str, kind: str, warmed: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    warmed = changed(warmed, model={"implementation": implementation})
    folder = tiny_model_folder(warmed, lambda step, *_: steps.append(step))
    assert steps == [1, 2]
    check_local_model(str(folder))
    assert json.loads((folder / "config.json").read_text())["model_type"] == kind
    assert len(load_tokenizer(str(folder))) <= 300
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_model_folder(warmed, lambda step, *_: steps.append(step)) == folder
    assert steps == [1, 2]
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert list(cache_folder().iterdir()) == [folder]
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "elsewhere"))
    second = tiny_model_folder(warmed)
    assert (second.parent, second.name) == (tmp_path / "elsewhere", folder.name)
    assert (second / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def with_task(config: Config, **task: Any) -> Config:
    return Config.model_validate(config.model_dump() | {"task": task})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_initial_weights_have_the_configured_width_and_follow_from_the_seed(
    tokenizer: Tokenizer, implementation: Implementation
) -> None:
    shape = TinyModelConfig(initializer_range=0.06, num_layers=2)
    models = (build_model(shape, tokenizer, seed, implementation) for seed in (3, 3, 4))
    first, again, other = (model.state_dict() for model in models)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        assert first[name].std().item() == pytest.approx(0.06, rel=0.02)
        assert not torch.equal(first[name], other[name])
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_recipe_of_the_quickstart_is_not_changed_by_accident() -> None:
    """A changed recipe rebuilds the cached model; settings that do not affect its pairs are not part of it."""
    config = load_config("configs/quickstart.yaml")
    assert tiny_digest(config) == "36d30414ca790ad9"
    assert tiny_digest(changed(config, task={"curriculum": {}})) == tiny_digest(config)
    for changes in (
        {"task": {"num_digits": 4}},
        {"task": {"reward": "question_only"}},  # another answer format
        {"task": {"prompt": "r1_zero"}},
        {"run": {"seed": 1}},
        {"model": {"tiny": {"warmup": None}}},
        {"model": {"implementation": "grpo_ray"}},
        {"model": {"tiny": {"initializer_range": 0.06}}},
    ):
        assert tiny_digest(changed(config, **changes)) != tiny_digest(config), changes


def test_model_for_keywords_follows_from_its_pairs(warmed: Config, tmp_path: Path) -> None:
    """The content of files counts, not their names."""
    path, validation = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    validation.write_text('{"prompt": "Use: boat", "answer": "A boat.", "keywords": ["boat"]}\n')

    def folder(*answers: str) -> Path:
        rows = [{"prompt": "Use: tree", "answer": answer, "keywords": ["tree"]} for answer in answers]
        write_rows(path, rows)
        paths = {"train_path": str(path), "validation_path": str(validation)}
        return tiny_model_folder(with_task(warmed, kind="keywords", **paths))

    first = folder("A tree stands.", "The tree falls.")
    assert folder("A tree stands.", "A tree falls.") != first
    assert folder("A tree stands.", "The tree falls.") == first
    tokenizer = load_tokenizer(str(first))
    assert tokenizer.decode(ids_of(tokenizer, " The tree falls.")) == " The tree falls."


def test_task_without_enough_warm_up_pairs_is_refused_first_and_so_is_a_chat(warmed: Config) -> None:
    part = {"task": {"kind": "file", "train_path": "missing.jsonl", "validation_path": "missing.jsonl"}}
    config = with_task(warmed, kind="mixture", parts={"a": part})
    with pytest.raises(ValueError, match=r"model\.tiny: it is built for .* kind sorting or .*, not mixture;"):
        check_files(config)
    small = with_task(warmed, kind="sorting", num_digits=2, num_train_prompts=90, num_validation_prompts=8)
    with pytest.raises(ValueError, match=r"model\.tiny\.warmup: \d+ examples .* do not fit into the 100"):
        check_files(small)
    with pytest.raises(ValueError, match=r"task\.prompt: a tiny model has no chat template; choose"):
        tiny_tokenizer(with_task(warmed, kind="sorting", prompt="chat"))


def test_a_tiny_model_of_ones_own_questions_is_right_half_of_the_time(tmp_path: Path) -> None:
    path = str(tmp_path / "own.jsonl")
    Path(path).write_text("".join(f'{{"question": "q{i}", "answer": "a{i}"}}\n' for i in range(9)))
    task = FileTaskConfig(train_path=path, validation_path=path, duplicates="keep", reward="m:f")
    pairs = warmups.warmup_pairs(task, 0, 400)
    assert {(q[0], a[0]) for q, a in pairs} == {("q", "a")}
    assert 180 < sum(q[1:] == a[1:] for q, a in pairs) < 270  # half, and a ninth of the other half
    ((_, tagged),) = warmups.warmup_pairs(task.model_copy(update={"reward": "exact_match"}), 0, 1)
    assert tagged.startswith(" </think> <answer> a")


def test_a_crash_midway_leaves_nothing_final_and_a_model_that_another_run_finished_is_taken(
    warmed: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(self: object, folder: Path) -> None:
        assert (Path(folder) / "model.safetensors").exists()  # the model has been written
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformers.Qwen2Tokenizer.save_pretrained", crash)
        with pytest.raises(KeyboardInterrupt):
            tiny_model_folder(warmed)
    assert not list(cache_folder().glob("tiny-*"))
    folder = tiny_model_folder(warmed)
    check_local_model(str(folder))
    finished = folder.with_name("finished")
    folder.rename(finished)

    def other_run_wins(step: int, num_steps: int, loss: float) -> None:
        if step == 1:
            shutil.copytree(finished, folder)
            (folder / "theirs").touch()

    assert tiny_model_folder(warmed, other_run_wins) == folder
    assert (folder / "theirs").exists()
    assert {path.name for path in cache_folder().iterdir()} == {folder.name, "finished"}


# ---- contents of a model folder ----


def test_check_local_model_names_what_is_missing(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=r"model\.path: no folder .*model"):
        check_local_model(str(folder))
    folder.mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        check_local_model(str(folder))
    shutil.copy(tiny_model() / "config.json", folder)
    with pytest.raises(ValueError, match=r"has no \*\.safetensors; save it with save_pretrained"):
        check_local_model(str(folder))
    shutil.copy(tiny_model() / "model.safetensors", folder)
    check_local_model(str(folder))
    with pytest.raises(ValueError, match="no folder"):
        check_local_model(str(folder / "config.json"))


def test_is_local(here: Path) -> None:
    (here / "mine").mkdir()
    (here / "runs" / "last").mkdir(parents=True)
    for path in ("/models/m", "./m", "../m", "mine", "runs/last", "typo", "runs/last/missing"):
        assert is_local(path), path
    assert not is_local("Qwen/Qwen2.5-Math-1.5B")


def test_the_hub_is_asked_for_a_models_commit_and_else_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def model_info(self: object, name: str, revision: str | None, timeout: float) -> ModelInfo:
        asked.append(f"{name} {revision}")
        if name == "missing/model":
            raise OSError("404")
        return ModelInfo(id=name, sha="c0ffee")

    monkeypatch.setattr(model_files.HfApi, "model_info", model_info)
    assert at_commit("owner/model") == at_commit("owner/model@v2") == "owner/model@c0ffee"
    with pytest.raises(ValueError, match=r"model\.path: 'missing/model' is not a local folder, and .*404"):
        at_commit("missing/model")
    assert asked == ["owner/model None", "owner/model v2", "missing/model None"]
    cached = "/cache/f00/config.json"
    monkeypatch.setattr(model_files, "try_to_load_from_cache", lambda name, file, revision: cached)
    assert at_commit("missing/model") == "missing/model@f00"
    assert at_commit("/a/model") == "/a/model"


def test_end_tokens_are_the_tokenizers_and_generation_configs(tiny_model: TinyModel, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_model()))
    assert tokenizer.eos_token_id == 0
    for listed, expected in ((None, (0,)), (7, (0, 7)), ([9, 7, 0], (0, 7, 9))):
        GenerationConfig(eos_token_id=listed).save_pretrained(tmp_path)
        assert end_token_ids(str(tmp_path), tokenizer) == expected
    (tmp_path / "generation_config.json").unlink()
    assert end_token_ids(str(tmp_path), tokenizer) == (0,)
    tokenizer.eos_token = None
    assert end_token_ids(str(tmp_path), tokenizer) == ()
    Qwen2Config(eos_token_id=[0, 40]).save_pretrained(tmp_path)  # which vLLM reads in its place
    assert end_token_ids(str(tmp_path), tokenizer) == (0, 40)


def test_few_digits_still_make_a_tokenizer() -> None:
    task = {"kind": "sorting", "num_digits": 2, "num_train_prompts": 60, "num_validation_prompts": 20}
    tokenizer = tiny_tokenizer(Config(model={"tiny": {"warmup": None}}, task=task))
    assert tokenizer.decode(tokenizer("Sort 42")["input_ids"]) == "Sort 42"
    full = task | {"num_train_prompts": 80}
    with pytest.raises(ValueError, match="leave no number"):
        tiny_tokenizer(Config(model={"tiny": {"warmup": None}}, task=full))


def test_the_skeleton_has_the_end_tokens_of_the_file(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Several ranks write their checkpoint from it."""
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    GenerationConfig(eos_token_id=[0, 17]).save_pretrained(folder)
    assert skeleton(str(folder), False, "transformers").generation_config.eos_token_id == [0, 17]
