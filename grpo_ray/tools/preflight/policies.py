"""The policies of a preflight: scripts that know the answer or nothing, random tokens, and a tiny model."""

import contextvars
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from grpo_ray.engines.sampling_batch import SamplingBatch, new_sequences
from grpo_ray.episodes.chat_template import token_bounds
from grpo_ray.episodes.segments import TrainedPath
from grpo_ray.episodes.tool_calls import Parsed, ToolParser
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.preflight.subject import Solve, Subject
from grpo_ray.types import Completion, SamplingSettings

NUM_WANDERERS = 6  # per example
MOST_WORDS = 200  # of the conversation, from which a wanderer draws
SENTINEL = "grpo-ray-call"
INVITATION = re.compile(r"\b(?:say|reply|answer|choose|type|write)\b([^.!?]*)", re.IGNORECASE)
FORMS = (
    "{}", "<answer>{}</answer>", "</think> <answer> {} </answer>", "<think>\n\n</think>\n\n<answer>{}</answer>",
    r"\boxed{{{}}}", "#### {}", "The answer is {}.", "Answer: {}",
)  # fmt: skip
"""The ways in which rewards read an answer."""


@dataclass(frozen=True)
class Asked:
    """One request for a reply."""

    example: Example
    messages: list[dict[str, Any]]  # of `session.chat`; otherwise the prompt's text as one message
    tools: list[dict[str, Any]]
    turn: int  # from 0


@dataclass(frozen=True)
class Said:
    """A scripted reply."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    is_cut: bool = False  # by the limit of tokens: no end token


Script = Callable[[Asked], Said]
ASKED = contextvars.ContextVar[Asked]("the request of the session that samples now")


def scripts_of(subject: Subject, seed: int) -> list[tuple[str, Script]]:
    """Return the scripts that play each example, by name; the two named `right` are the same."""
    right = [_solving(subject.solve)] if subject.solve else []
    right += [_saying(form, subject) for form in (None, *FORMS)]
    named = [("right", right[0]), ("right", right[0]), *((f"right {n}", s) for n, s in enumerate(right[1:], 2))]
    return [
        *named,
        ("right by tools", _calling_tools),
        ("empty", lambda asked: Said("")),
        ("echo", lambda asked: Said(asked.messages[-1].get("content") or "")),
        ("long", lambda asked: Said(f"The answer is {asked.example.ground_truth}. " * 100)),
        ("endless", lambda asked: Said("and so on " * 8, is_cut=True)),
        *((f"wanderer {n}", partial(_wander, seed=seed + n)) for n in range(NUM_WANDERERS)),
    ]


def _saying(form: str | None, subject: Subject) -> Script:
    def say(asked: Asked) -> Said:
        truth = asked.example.ground_truth
        return Said(subject.right(asked.example) if form is None else form.format(truth))

    return say


def _solving(solve: Solve) -> Script:
    def say(asked: Asked) -> Said:
        said = solve(asked.messages, asked.example)
        return Said(said) if isinstance(said, str) else Said("", tuple(said))

    return say


def _calling_tools(asked: Asked) -> Said:
    """Call each tool once, one per turn, and repeat what the last one answered."""
    if asked.turn < len(asked.tools):
        return _call(asked.tools[asked.turn], asked, random.Random(asked.turn))
    return Said((asked.messages[-1].get("content") or asked.example.ground_truth)[:200])


def _wander(asked: Asked, seed: int) -> Said:
    """Say or call something made of the words of the conversation."""
    rng = random.Random(f"{seed}/{asked.example.seed}/{asked.turn}")
    if asked.tools and rng.random() < 0.6:
        return _call(rng.choice(asked.tools), asked, rng)
    return Said(rng.choice(FORMS if rng.random() < 0.3 else ("{}",)).format(rng.choice(_words(asked))))


def _words(asked: Asked) -> list[str]:
    text = " ".join(str(message.get("content") or "") for message in asked.messages)
    words = re.findall(r"[A-Za-z]+|-?\d+", text)[-MOST_WORDS:]
    invited = re.findall(r"[A-Za-z]+|-?\d+", " ".join(INVITATION.findall(text)))
    more = invited * (1 + len(words) // max(1, len(invited)))  # about half of all
    return [*words, *more, *map(str, range(10)), "yes", "no", asked.example.ground_truth or "?"]


def _call(tool: Mapping[str, Any], asked: Asked, rng: random.Random) -> Said:
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    return Said(
        "", ((function["name"], {name: _value(kind, asked, rng) for name, kind in properties.items()}),)
    )


def _value(schema: Mapping[str, Any], asked: Asked, rng: random.Random) -> Any:
    """Return an argument of the schema's type, from what the conversation says."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    words, kind = _words(asked), schema.get("type", "string")
    if kind in ("integer", "number"):
        return rng.choice([int(word) for word in words if re.fullmatch(r"-?\d+", word)])
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("array", "object"):
        return [] if kind == "array" else {}
    formula = re.search(r"\d[\d\s.+*/()-]*\d", str(asked.messages[0].get("content")))
    return formula[0] if formula else rng.choice(words)


class Known:
    """The calls that scripts have made, by their tokens: no parser needs to find them."""

    def __init__(self, parser: ToolParser | None) -> None:
        self.calls: dict[tuple[int, ...], tuple[tuple[str, dict[str, Any]], ...]] = {}
        self._parser = parser

    def parse(
        self, token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Parsed:
        """Return a reply's calls, as a ToolParser does."""
        if (calls := self.calls.get(tuple(token_ids))) is not None:
            return "", "", list(calls)
        if self._parser is None:
            raise ValueError("no parser is configured")
        return self._parser(token_ids, prompt, tools)


class ScriptedSampler:
    """A sampler that says what a script says, in tokens."""

    def __init__(self, script: Script, subject: Subject, known: Known, reply_end: int) -> None:
        self._script, self._tokenizer, self._known, self._end = script, subject.tokenizer, known, reply_end

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        asked = ASKED.get()
        said = self._script(asked)
        text = call_text(self._tokenizer, asked, said.calls) if said.calls else said.text
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        is_cut = said.is_cut or len(ids) >= settings.max_tokens
        ids = ids[: settings.max_tokens] if is_cut else [*ids, self._end]
        if said.calls and not is_cut:
            self._known.calls[tuple(ids)] = said.calls
        return completion(self._tokenizer, ids or [self._end], is_cut)


def call_text(
    tokenizer: PreTrainedTokenizerBase, asked: Asked, calls: Sequence[tuple[str, dict[str, Any]]]
) -> str:
    """Return the text of calls as the model's chat template writes them."""
    listed = [
        {"id": f"call{n:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    reply = {"role": "assistant", "content": SENTINEL, "tool_calls": listed}
    try:
        shown: str = tokenizer.apply_chat_template(
            [*asked.messages, reply], tools=asked.tools or None, tokenize=False
        )
    except Exception:  # the template's own: it may refuse calls
        shown = ""
    _, found, behind = shown.rpartition(SENTINEL)
    written, end, _ = behind.partition(tokenizer.eos_token or "\0")
    if found and end and all(name in written for name, _ in calls):
        return written.strip("\n")
    whole = [f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls]
    return "\n".join(whole)


class RandomSampler:
    """A sampler of random tokens, and of an end after a random number of them, or none."""

    def __init__(self, subject: Subject, reply_end: int, seed: str) -> None:
        self._tokenizer, self._end, self._rng = subject.tokenizer, reply_end, random.Random(seed)
        self._size = token_bounds(subject.tokenizer)[0]
        self._special = set(subject.tokenizer.all_special_ids)

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        length = min(settings.max_tokens, self._rng.randint(1, 24))
        ids = [self._rng.randrange(self._size) for _ in range(length)]
        ids = [token for token in ids if token not in self._special]
        is_cut = self._rng.random() < 0.25 and bool(ids)
        return completion(self._tokenizer, ids if is_cut else [*ids, self._end], is_cut)


class TinyPolicy:
    """A transformer of one layer with random weights, over the whole vocabulary."""

    def __init__(self, subject: Subject, reply_end: int) -> None:
        self._tokenizer, self._end, self._subject = subject.tokenizer, reply_end, subject

    @cached_property
    def model(self) -> Any:
        torch.manual_seed(0)
        size, _ = token_bounds(self._tokenizer)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=size, num_key_value_heads=2, max_position_embeddings=2**16, **sizes)
        return Qwen2ForCausalLM(config).eval()

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        own = replace(settings, max_tokens=min(24, settings.max_tokens), end_token_ids=(self._end,))
        sequences = new_sequences(prompt_token_ids, own, settings.seed or 0)
        batch = SamplingBatch(self.model, self._tokenizer, sequences)
        while not batch.is_done:
            batch.step(0)
        return sequences[0].completion()

    @torch.inference_mode()
    def largest_difference(self, path: TrainedPath) -> float:
        """Return the largest difference between the sampled logprobs of a path and those recomputed on it."""
        ids = torch.tensor([[*path.prompt_token_ids, *path.response_token_ids.tolist()]])
        logprobs = self.model(input_ids=ids).logits[0].float().log_softmax(-1)
        rows = torch.arange(len(path.prompt_token_ids), ids.shape[1]) - 1
        recomputed = logprobs[rows, ids[0, rows + 1]].numpy()
        return float(np.abs(recomputed - path.logprobs)[path.mask].max(initial=0.0))


def completion(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], is_cut: bool) -> Completion:
    """Return a reply of these tokens, with logprobs of 0."""
    zeros = np.zeros(len(ids), np.int32)
    text = tokenizer.decode(list(ids), skip_special_tokens=True)
    reason = "length" if is_cut else "stop"
    return Completion(text, np.array(ids, np.int32), zeros.astype(np.float32), zeros, reason)
