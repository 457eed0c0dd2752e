"""The tokenizer of a tiny model, learned from the task's own text; without torch, so that `check` is quick."""

import json
import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from grpo_ray.config import Config
from grpo_ray.config.task import MixtureTaskConfig
from grpo_ray.learning.plain_chat import give_plain_chat
from grpo_ray.tasks.examples import Pairs
from grpo_ray.tasks.kinds import tokenizer_pairs
from grpo_ray.tasks.prompts import TextTemplate, template_of

END_TOKEN = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Learn a byte-level BPE of at most `vocab_size` tokens from `texts`; bytes and the end token are 257.

    transformers builds a Qwen2Tokenizer for any Qwen2 config, whatever was saved with it. The merges are
    therefore learned through that class's own backend, so that AutoTokenizer and vLLM agree on every string.
    With a Llama config both build the saved class, which is the same.
    """
    learner = Qwen2Tokenizer()
    # The time is quadratic in the length of a word.
    texts = (re.sub(r"\S{200}", r"\g<0> ", text) for text in texts)
    trained = learner.train_new_from_iterator(texts, vocab_size, show_progress=False)
    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    return Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, eos_token=END_TOKEN, pad_token=END_TOKEN, unk_token=END_TOKEN
    )


def tiny_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Learn the tokenizer of the configured tiny model from the task's own text."""
    assert config.model.tiny is not None
    pairs = rendered(config, tokenizer_pairs(config.task, config.run.seed))
    tokenizer = train_tokenizer((prompt + response for prompt, response in pairs), config.model.tiny.vocab_size)
    if config.episode_tasks:
        give_plain_chat(tokenizer)
    return tokenizer


def rendered(config: Config, pairs: Pairs) -> Pairs:
    template = prompt_template(config)
    return [(template.render(question), response) for question, response in pairs]


def prompt_template(config: Config) -> TextTemplate:
    assert not isinstance(config.task, MixtureTaskConfig)  # a mixture has no pairs
    template = template_of(config.task)
    if not isinstance(template, TextTemplate):
        raise ValueError("task.prompt: a tiny model has no chat template; choose another prompt")
    return template
