"""Sampled rollouts as the web page shows them: shortened texts, tokens, log-ratios, and turns of episodes."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config, read_config
from grpo_ray.errors import RunError
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.model_files import end_token_ids, is_local, load_tokenizer
from grpo_ray.learning.policy_model import with_head_dtype
from grpo_ray.learning.sequences import TrainSequence, places_in_turns
from grpo_ray.records.adapter_files import folder_of_model, is_adapter, saved_config
from grpo_ray.records.checkpoint import LAST, CheckpointStore
from grpo_ray.records.episode_columns import is_episode
from grpo_ray.records.readable_rollouts import shortened
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.export.merge import checkpoint_policy
from grpo_ray.tools.report.rollout_sample import FACTS, TEXTS, Row
from grpo_ray.tools.trust import IGNORED, is_ignored
from grpo_ray.types import CONTEXT

LONGEST_CHARACTER = 4  # bytes in UTF-8, and so tokens that one character may span
NOT_TEXT = "\N{REPLACEMENT CHARACTER}"
SPACE = "▁"  # SentencePiece's mark for a token's leading space, which decode() drops
MAX_EPISODE_TOKENS = 1000
MAX_PROMPT_TOKENS = 400  # of each sequence, its last ones
EPISODE_FIELDS = (
    "status", "num_turns", "num_branches", "num_context_tokens", "seconds", "turn_rewards", "turn_advantages",
)  # fmt: skip
MAX_TOKENS = 400  # of a response
SMALL_WEIGHTS_BYTES = 500_000_000  # up to this size log-ratios take seconds, and are computed by default
NO_RATIOS = "none"


class TokenTexts:
    """The texts of tokens, by one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._of_one = lru_cache(maxsize=100_000)(self._decode_one)

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """Return one text per token; of the tokens that one character spans, all but the first are empty."""
        texts: list[str] = []
        while len(texts) < len(token_ids):
            texts += self._next_character(token_ids[len(texts) :][:LONGEST_CHARACTER])
        return texts

    def _next_character(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of the first token, or of as many tokens as make a whole character."""
        first = self._of_one(token_ids[0])
        if NOT_TEXT in first:
            for number in range(2, len(token_ids) + 1):
                text = self._decode(token_ids[:number])
                if NOT_TEXT not in text:
                    return [text, *[""] * (number - 1)]
        return [first]

    def _decode_one(self, token_id: int) -> str:
        text = self._decode([token_id])
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        return f" {text}" if piece and piece.startswith(SPACE) and not text.startswith(" ") else text

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def shown_episode(row: Row, texts: TokenTexts | None) -> Row:
    """Return what the page shows of an episode beside its tokens.

    The prompt of a branch shares its first `num_shared` tokens with the path of an earlier sequence, `parent`.
    `turn` is the last turn that they hold whole, and the branch's text and number of tokens are those after it.
    """
    sequences = []
    for number, sequence in enumerate(row["sequences"]):
        parent = _parent(row, number)
        rest = sequence["prompt_token_ids"][parent.end_of_turn :]
        cut = "… " if len(rest) > MAX_PROMPT_TOKENS else ""
        sequences.append({
            "start": sequence["start"], "end": sequence["end"], "parent": parent.sequence,
            "num_shared": parent.num_shared, "turn": parent.turn, "num_prompt_tokens": len(rest),
            "prompt": None if texts is None else cut + "".join(texts.of(rest[-MAX_PROMPT_TOKENS:])),
        })  # fmt: skip
    return {
        **{name: row[name] for name in EPISODE_FIELDS},
        "reward": row["episode_reward"],
        "metrics": dict(row["metrics"]),
        "error": shortened(row["episode_error"] or ""),
        "turns": [[span["turn"], span["start"]] for span in row["turns"]],
        "sequences": sequences,
        "num_tokens": len(row["token_ids"]),
    }


class _Parent(NamedTuple):
    """The earlier sequence that shares most tokens with a prompt."""

    sequence: int | None = None
    num_shared: int = 0
    turn: int | None = None  # the last one that is shared whole
    end_of_turn: int = 0  # number of the prompt's tokens up to it


def _parent(row: Row, number: int) -> _Parent:
    prompt = row["sequences"][number]["prompt_token_ids"]
    best = _Parent()
    for earlier, other in enumerate(row["sequences"][:number]):
        path = [*other["prompt_token_ids"], *row["token_ids"][other["start"] : other["end"]]]
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, path, strict=False))
        num_shared = len(list(shared))
        if num_shared > best.num_shared:
            best = _Parent(earlier, num_shared, *_last_turn(row, other, num_shared))
    return best


def _last_turn(row: Row, sequence: Row, num_shared: int) -> tuple[int | None, int]:
    """Return the last whole turn among the first tokens of a sequence's path, and its end there."""
    before = len(sequence["prompt_token_ids"]) - sequence["start"]
    whole = [
        (int(span["turn"]), int(span["end"]) + before)
        for span in row["turns"]
        if span["turn"] != CONTEXT and span["start"] >= sequence["start"] and span["end"] + before <= num_shared
    ]
    return whole[-1] if whole else (None, 0)


def show_rollouts(
    run: RunDirectory, sampled: Sequence[Row], log_ratio: str | None, trust_remote_code: bool = False,
    run_reward_code: bool = False,
) -> tuple[list[Row], str | None, list[str]]:  # fmt: skip
    """Add the tokens' texts to the sample, and their log-ratios to a checkpoint's policy.

    The result is the rows for the page, the name of the checkpoint, and notices about the rows.

    Args:
        log_ratio: `last`, `best`, a checkpoint's name, or `none`; None: the last one, if its weights are small
            and it can be loaded.
        trust_remote_code: run the Python code of the checkpoint's model; the run's own setting is not believed.
        run_reward_code: as of `base_folder`.

    Raises:
        RunError: there is no such checkpoint, or its base takes code that is not to be run.
        ValueError: the checkpoint or the run's configuration cannot be loaded.
    """
    if not sampled:
        return [], None, []
    checkpoint: Path | None = None
    ratios: Sequence[np.ndarray | None] = [None] * len(sampled)
    model = read_config(run.config_path).get("model")
    notices = [IGNORED] if is_ignored(model, trust_remote_code) else []
    if log_ratio != NO_RATIOS:
        try:
            checkpoint = _find_checkpoint(run, log_ratio, notices)
            config = load_config(run.config_path).changed(model={"trust_remote_code": trust_remote_code})
            ratios = log_ratios(config, checkpoint, sampled, run_reward_code)
        except (RuntimeError, ValueError, OSError) as error:  # RuntimeError: also torch's lack of memory
            if log_ratio is not None:
                raise
            checkpoint = None
            notices.append(f"no log-ratios: {error}")
    texts = _token_texts(run, model, trust_remote_code, notices)
    rows = [_shown(row, texts, of_row) for row, of_row in zip(sampled, ratios, strict=True)]
    return rows, checkpoint.name if checkpoint is not None else None, notices


def _find_checkpoint(run: RunDirectory, log_ratio: str | None, notices: list[str]) -> Path:
    """Return the folder of the checkpoint to compare with; notices name those that are passed over."""
    store = CheckpointStore(run)
    folder = store.choose(log_ratio or LAST, "--log-ratio", (NO_RATIOS,)).path
    notices += store.skipped
    folders = [folder, folder_of_model(saved_config(folder)[0])] if is_adapter(folder) else [folder]
    files = (file for each in folders if each is not None for file in each.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    if log_ratio is None and num_bytes > SMALL_WEIGHTS_BYTES:
        raise RunError(f"weights of {num_bytes / 1e9:.1f} GB take a while; request them with --log-ratio last")
    return folder


def _token_texts(
    run: RunDirectory, model: Any, trust_remote_code: bool, notices: list[str]
) -> TokenTexts | None:
    """Load the newest checkpoint's tokenizer, or that of the model which the run started from."""
    checkpoints = CheckpointStore(run).all(reads_files=False)
    folders = [str(checkpoint.path) for checkpoint in reversed(checkpoints)]
    path = model.get("path") if isinstance(model, dict) else None
    if isinstance(path, str) and is_local(path):
        folders.append(path)
    for folder in folders:
        try:
            return TokenTexts(load_tokenizer(folder, trust_remote_code))
        except ValueError as error:
            notices.append(f"{error}")
    notices.append("responses are not split into tokens: no tokenizer of the run can be loaded")
    return None


def _shown(row: Row, texts: TokenTexts | None, ratios: np.ndarray | None) -> Row:
    most = MAX_EPISODE_TOKENS if is_episode(row) else MAX_TOKENS
    token_ids = row["token_ids"][:most]
    shown = {name: row.get(name) for name in ("step", *FACTS)}
    shown |= {name: shortened(row[name] or "") for name in TEXTS}
    if is_episode(row):
        shown["episode"] = shown_episode(row, texts)
    if texts is not None:
        shown |= {
            "tokens": texts.of(token_ids),
            "logprobs": [_number(value) for value in row["logprobs"][:most]],
            "ratios": [_number(value) for value in ratios] if ratios is not None else None,
            "spans": [[span["version"], span["start"]] for span in row["versions"]],
        }
    return shown


def _number(value: float | None) -> float | None:
    return round(float(value), 3) if value is not None and np.isfinite(value) else None


def log_ratios(
    config: Config, model_path: Path, rows: Sequence[Row], run_reward_code: bool = False
) -> list[np.ndarray]:
    """Return `log pi_checkpoint - log pi_behaviour`, in nats, of each row's tokens that are shown.

    Those of an episode's context are NaN. Both policies are at the sampling temperature, like all that the
    Learner compares. For tokens that the checkpoint itself sampled, the ratio is the numerical difference
    between the engines.

    Args:
        config: the run's configuration.
        model_path: the checkpoint, in Hugging Face format or PEFT's.
        rows: of responses, with `prompt_token_ids`, `token_ids` and `logprobs`, or of episodes.
        run_reward_code: as of `base_folder`.

    Raises:
        ValueError: the checkpoint cannot be loaded.
    """
    model, path = checkpoint_policy(config, model_path, run_reward_code)
    with_head_dtype(model, config.model.head_dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trust = config.model.trust_remote_code
    ends = end_token_ids(path, load_tokenizer(path, trust), trust)
    parts = [_sequences(row) for row in rows]
    sampled = [sequence for of_row in parts for sequence in of_row if sequence.num_sampled]
    found = iter(ForwardBackward(config, ends, device).with_proximal(model.to(device), sampled))
    ratios = [[_ratios_of(next(found) if part.num_sampled else part) for part in of_row] for of_row in parts]
    return [np.concatenate([np.empty(0, np.float32), *of_row]) for of_row in ratios]


def _ratios_of(sequence: TrainSequence) -> np.ndarray:
    ratios = np.full(len(sequence.response_token_ids), np.nan, np.float32)
    if sequence.proximal_logprobs is not None:
        where = slice(None) if sequence.mask is None else sequence.mask
        ratios[where] = sequence.proximal_logprobs - sequence.behaviour_logprobs
    return ratios


def _sequences(row: Row) -> list[TrainSequence]:
    """Return the shown tokens: a response's, or those of each sequence of an episode."""
    most = MAX_EPISODE_TOKENS if is_episode(row) else MAX_TOKENS
    ids = np.array(row["token_ids"][:most], np.int32)
    logprobs = np.array(row["logprobs"][:most], np.float32)  # nan for None
    if not is_episode(row):
        return [TrainSequence(tuple(row["prompt_token_ids"]), ids, logprobs, advantage=0.0)]
    turns, versions = (
        np.array([span[name] for span in row[f"{name}s"] for _ in range(span["start"], span["end"])], np.int32)
        for name in ("turn", "version")
    )
    is_sampled = versions[:most] != CONTEXT  # a token that was too old to be trained has only a turn
    sequences = []
    for sequence in row["sequences"]:
        own = slice(sequence["start"], min(sequence["end"], most))
        if own.start < most:
            prompt, mask = tuple(sequence["prompt_token_ids"]), is_sampled[own]
            places = places_in_turns(turns[own], mask)
            part = TrainSequence(prompt, ids[own], logprobs[own][mask], 0.0, mask=mask, turn_places=places)
            sequences.append(part)
    return sequences
