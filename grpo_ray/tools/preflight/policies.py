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
from grpo_ray.episodes.adapters.rehearsal import scripted_completion
from grpo_ray.episodes.chat_template import token_bounds
from grpo_ray.episodes.segments import TrainedPath
from grpo_ray.episodes.tool_calls import Parsed, ToolParser
from grpo_ray.tasks.examples import Example
from grpo_ray.tools.preflight.subject import Solve, Subject
from grpo_ray.types import Completion, SamplingSettings

NUM_WANDERERS, NUM_RANDOM = 6, 6  # scripts of these kinds
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
    """An episode's request for a reply."""

    example: Example
    messages: list[dict[str, Any]]  # of `session.chat`; otherwise the prompt's text as one message
    tools: list[dict[str, Any]]
    turn: int  # from 0
    is_chat: bool
    place: str  # file:line of the user's code that asked


@dataclass(frozen=True)
class Said:
    text: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    token_ids: tuple[int, ...] = ()  # instead of a text
    is_cut: bool = False  # by the limit of tokens: no end token


Script = Callable[[Asked], Said]
ASKED = contextvars.ContextVar[Asked]("the request of the session that samples now")


def scripts_of(subject: Subject, seed: int, with_random: bool) -> list[tuple[str, Script]]:
    """Return the scripts that play each example, by name; the two named `right` are the same."""
    right: list[Script] = [partial(_solve, subject.solve)] if subject.solve else []
    right.append(lambda asked: Said(subject.right(asked.example)))
    right += [partial(_say_truth, form) for form in FORMS]
    num_random = NUM_RANDOM if with_random else 0
    return [
        ("right", right[0]),
        *((f"right {n}" if n > 1 else "right", script) for n, script in enumerate(right, 1)),
        ("right by tools", _call_tools),
        ("empty", lambda asked: Said()),
        ("echo", lambda asked: Said(asked.messages[-1]["content"])),
        ("long", lambda asked: Said(f"The answer is {asked.example.ground_truth}. " * 100)),
        ("endless", lambda asked: Said("and so on " * 8, is_cut=True)),
        *((f"wanderer {n}", partial(_wander, seed=seed + n)) for n in range(NUM_WANDERERS)),
        *(("random", partial(_say_anything, subject, f"{seed}/{n}")) for n in range(num_random)),
    ]


def _say_truth(form: str, asked: Asked) -> Said:
    return Said(form.format(asked.example.ground_truth))


def _solve(solve: Solve, asked: Asked) -> Said:
    said = solve(asked.messages, asked.example)
    return Said(said) if isinstance(said, str) else Said(calls=tuple(said))


def _say_anything(subject: Subject, seed: str, asked: Asked) -> Said:
    """Say random tokens, with an end after a random number of them, or none."""
    rng = random.Random(f"{seed}/{asked.example.seed}/{asked.turn}")
    size, special = token_bounds(subject.tokenizer)[0], subject.tokenizer.all_special_ids
    drawn = [rng.randrange(size) for _ in range(rng.randint(1, 24))]
    ids = tuple(token for token in drawn if token not in special)
    return Said(token_ids=ids, is_cut=rng.random() < 0.25)


def _call_tools(asked: Asked) -> Said:
    """Call each tool once, one per turn, and repeat what the last one answered."""
    if asked.turn < len(asked.tools):
        return _call(asked.tools[asked.turn], asked, random.Random(asked.turn))
    return Said((asked.messages[-1]["content"] or asked.example.ground_truth)[:200])


def _wander(asked: Asked, seed: int) -> Said:
    """Say or call something made of the words of the conversation."""
    rng = random.Random(f"{seed}/{asked.example.seed}/{asked.turn}")
    if asked.tools and rng.random() < 0.6:
        return _call(rng.choice(asked.tools), asked, rng)
    return Said(rng.choice(FORMS if rng.random() < 0.3 else ("{}",)).format(rng.choice(_words(asked))))


def _words(asked: Asked) -> list[str]:
    text = " ".join(message["content"] for message in asked.messages)
    words = re.findall(r"[A-Za-z]+|-?\d+", text)[-MOST_WORDS:]
    invited = re.findall(r"[A-Za-z]+|-?\d+", " ".join(INVITATION.findall(text)))
    more = invited * (1 + len(words) // max(1, len(invited)))  # about half of all
    return [*words, *more, *map(str, range(10)), "yes", "no", asked.example.ground_truth or "?"]


def _call(tool: Mapping[str, Any], asked: Asked, rng: random.Random) -> Said:
    function = tool["function"]
    properties = function.get("parameters", {}).get("properties", {})
    arguments = {name: _value(kind, asked, rng) for name, kind in properties.items()}
    return Said(calls=((function["name"], arguments),))


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
    formula = re.search(r"\d[\d\s.+*/()-]*\d", asked.messages[0]["content"])
    return formula[0] if formula else rng.choice(words)


class ScriptedSampler:
    """A sampler that says what a script says, in tokens; it knows the calls in them without a parser."""

    def __init__(self, script: Script, subject: Subject, parser: ToolParser) -> None:
        self._script, self._subject, self._parser = script, subject, parser
        self._calls: dict[tuple[int, ...], list[tuple[str, Any]]] = {}  # by a reply's tokens
        self.unread = ""  # a call in the form of the chat template, which the parser does not find

    async def sample(self, prompt_token_ids: tuple[int, ...], settings: SamplingSettings) -> Completion:
        asked, tokenizer, end = ASKED.get(), self._subject.tokenizer, self._subject.reply_end
        said = self._script(asked)
        written = call_text(tokenizer, asked, said.calls) if said.calls else ""
        as_json = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in said.calls]
        text = written or "\n".join(f"<tool_call>{call}</tool_call>" for call in as_json) or said.text
        ids = said.token_ids or tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        is_cut = bool(ids) and (said.is_cut or len(ids) >= settings.max_tokens)
        ids = ids[: settings.max_tokens] if is_cut else (*ids, end)
        if said.calls and not is_cut:
            self._calls[ids] = [*said.calls]
            if written and not self.unread and not self._reads(ids, prompt_token_ids, asked):
                self.unread = written
        shown = tokenizer.decode(list(ids), skip_special_tokens=True)
        return scripted_completion(shown, ids, "length" if is_cut else "stop")

    def _reads(self, ids: tuple[int, ...], prompt: tuple[int, ...], asked: Asked) -> bool:
        """Return whether the parser finds the calls and the names of their arguments, if there is a parser."""
        try:
            found = self._calls[ids] if self._parser is no_calls else self._parser(ids, prompt, asked.tools)[2]
            return [(n, {*(a or ())}) for n, a in found] == [(n, {*a}) for n, a in self._calls[ids]]
        except (ValueError, TypeError):
            return False

    def parse(
        self, token_ids: Sequence[int], prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Parsed:
        """Return a reply's calls, as a ToolParser does."""
        if (calls := self._calls.get(tuple(token_ids))) is not None:
            return "", "", calls
        return self._parser(token_ids, prompt, tools)


def call_text(
    tokenizer: PreTrainedTokenizerBase, asked: Asked, calls: Sequence[tuple[str, dict[str, Any]]]
) -> str:
    """Return the text of calls as the model's chat template writes them; empty if it writes none."""
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
    return written.strip("\n") if found and end and all(name in written for name, _ in calls) else ""


def no_calls(*_: Any) -> Parsed:
    """Find no call, as the ToolParser of a model that makes none."""
    return "", "", []


class TinyPolicy:
    """A transformer of one layer with random weights, over the whole vocabulary."""

    def __init__(self, subject: Subject, parser: ToolParser) -> None:
        self._tokenizer, self._end, self.parse = subject.tokenizer, subject.reply_end, parser

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
