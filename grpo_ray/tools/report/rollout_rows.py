"""Sampled rollouts as the web page shows them: shortened texts and tokens, with logprobs and log-ratios."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_ray.config import Config
from grpo_ray.config.loading import load_config, read_config
from grpo_ray.errors import RunError
from grpo_ray.learning.model_files import is_local, load_tokenizer
from grpo_ray.records.adapter_files import is_adapter, saved_config
from grpo_ray.records.checkpoint import LAST, CheckpointStore
from grpo_ray.records.readable_rollouts import shortened
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.tools.report.episode_rows import (
    MAX_EPISODE_TOKENS,
    by_sequence,
    is_episode,
    joined,
    shown_episode,
)
from grpo_ray.tools.report.log_ratios import log_ratios
from grpo_ray.tools.report.rollout_sample import RolloutSample, Row
from grpo_ray.tools.report.token_texts import TokenTexts
from grpo_ray.tools.trust import IGNORED, is_ignored, with_trust

MAX_TOKENS = 400  # of a response

SMALL_WEIGHTS_BYTES = 500_000_000  # up to this size log-ratios take seconds, and are computed by default
NO_RATIOS = "none"
PLAIN = (
    "step", "group_id", "sample", "task", "reward", "format_reward", "answer_reward", "advantage",
    "num_tokens", "error", "ungradable", "finish_reason", "min_version", "max_version", "generator", "use",
)  # fmt: skip


@dataclass(frozen=True)
class ShownRollouts:
    """The rows for the page, and notices about them."""

    rows: list[Row]
    checkpoint: str | None  # the one that the log-ratios compare with
    notices: list[str]


def show_rollouts(
    run: RunDirectory, sample: RolloutSample, log_ratio: str | None, trust_remote_code: bool = False
) -> ShownRollouts:
    """Add the tokens' texts to the sample, and their log-ratios to a checkpoint's policy.

    Args:
        log_ratio: `last`, `best`, a checkpoint's name, or `none`; None: the last one, if its weights are small
            and it can be loaded.
        trust_remote_code: run the Python code of the checkpoint's model; the run's own setting is not believed.

    Raises:
        RunError: there is no such checkpoint.
        ValueError: the checkpoint or the run's configuration cannot be loaded.
    """
    if not sample.rows:
        return ShownRollouts([], None, [])
    checkpoint, ratios = None, None
    model = read_config(run.config_path).get("model")
    notices = [IGNORED] if is_ignored(model, trust_remote_code) else []
    if log_ratio != NO_RATIOS:
        try:
            checkpoint = _find_checkpoint(run, log_ratio)
            config = with_trust(load_config(run.config_path), trust_remote_code)
            ratios = _ratios(config, checkpoint, sample.rows)
        except (RunError, ValueError) as error:
            if log_ratio is not None:
                raise
            checkpoint = None
            notices.append(f"no log-ratios: {error}")
    texts = _token_texts(run, model, trust_remote_code, notices)
    rows = [
        _shown(row, texts, ratios[place] if ratios is not None else None)
        for place, row in enumerate(sample.rows)
    ]
    return ShownRollouts(rows, checkpoint.name if checkpoint is not None else None, notices)


def _find_checkpoint(run: RunDirectory, log_ratio: str | None) -> Path:
    """Return the folder of the checkpoint to compare with."""
    folder = CheckpointStore(run).choose(log_ratio or LAST, "--log-ratio", (NO_RATIOS,)).model_path
    folders = [folder, Path(saved_config(folder)[0])] if is_adapter(folder) else [folder]
    num_bytes = sum(file.stat().st_size for each in folders for file in each.glob("*.safetensors"))
    if log_ratio is None and num_bytes > SMALL_WEIGHTS_BYTES:
        raise RunError(f"weights of {num_bytes / 1e9:.1f} GB take a while; request them with --log-ratio last")
    return folder


def _ratios(config: Config, checkpoint: Path, rows: list[Row]) -> list[np.ndarray]:
    """Return the log-ratios of each row's first tokens; those of context are NaN."""
    parts = [by_sequence(row) if is_episode(row) else [_beginning(row)] for row in rows]
    found = iter(log_ratios(config, checkpoint, [part for row in parts for part in row], MAX_EPISODE_TOKENS))
    return [joined([next(found) for _ in row]) for row in parts]


def _beginning(row: Row) -> Row:
    return {**row, **{name: row[name][:MAX_TOKENS] for name in ("token_ids", "logprobs")}}


def _token_texts(
    run: RunDirectory, model: Any, trust_remote_code: bool, notices: list[str]
) -> TokenTexts | None:
    """Load the newest checkpoint's tokenizer, or that of the model which the run started from."""
    folders = [str(checkpoint.model_path) for checkpoint in reversed(CheckpointStore(run).all())]
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
    shown = {name: row.get(name) for name in PLAIN}
    shown |= {name: shortened(row[name] or "") for name in ("prompt", "response", "ground_truth")}
    if is_episode(row):
        shown["episode"] = shown_episode(row, texts)
    if texts is not None:
        shown |= {
            "tokens": texts.of(token_ids),
            "logprobs": [_number(value) for value in row["logprobs"][:most]],
            "ratios": [_number(value) for value in ratios[:most]] if ratios is not None else None,
            "spans": [[span["version"], span["start"]] for span in row["versions"]],
        }
    return shown


def _number(value: float | None) -> float | None:
    return round(float(value), 3) if value is not None and np.isfinite(value) else None
