"""Log-ratios of tokens: how much likelier they are under a checkpoint's policy than when they were sampled."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_ray.config import Config
from grpo_ray.learning.forward_backward import ForwardBackward
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import check_local_model, end_token_ids, load_tokenizer
from grpo_ray.learning.output_layer import with_head_dtype
from grpo_ray.learning.sequences import TrainSequence, places_in_turns
from grpo_ray.records.adapter_files import is_adapter
from grpo_ray.tools.export.merge import base_folder, merged_policy
from grpo_ray.types import CONTEXT


def log_ratios(
    config: Config, model_path: Path, rows: Sequence[dict[str, Any]], max_tokens: int
) -> list[np.ndarray]:
    """Return `log pi_checkpoint - log pi_behaviour`, in nats, of each row's first tokens: `[response_tokens]`.

    Those of an episode's context are NaN.

    Both are at the sampling temperature, like all that the Learner compares. For tokens that the checkpoint
    itself sampled, the ratio is the numerical difference between the engines.

    Args:
        config: the run's configuration.
        model_path: the checkpoint, in Hugging Face format or PEFT's.
        rows: rollouts, with `prompt_token_ids`, `token_ids` and `logprobs`; of an episode's sequence also the
            turn of each token, `turns`.
        max_tokens: number of response tokens to compute; later tokens do not influence them.

    Raises:
        ValueError: the checkpoint cannot be loaded.
    """
    path, model_config = str(model_path), config.model
    if is_adapter(model_path):
        path = base_folder(config)
        model = merged_policy(path, model_config, model_path)
    else:
        check_local_model(path)
        model = load_policy(path, model_config.trust_remote_code, model_config.implementation)
    with_head_dtype(model, model_config.head_dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ends = end_token_ids(path, load_tokenizer(path, model_config.trust_remote_code))
    sequences = [_sequence(row, max_tokens) for row in rows]
    sampled = [sequence for sequence in sequences if sequence.num_sampled]
    found = iter(ForwardBackward(config, ends, device).with_proximal(model.to(device), sampled))
    return [_ratios(next(found) if sequence.num_sampled else sequence) for sequence in sequences]


def _ratios(sequence: TrainSequence) -> np.ndarray:
    ratios = np.full(len(sequence.response_token_ids), np.nan, np.float32)
    if sequence.proximal_logprobs is not None:
        where = slice(None) if sequence.mask is None else sequence.mask
        ratios[where] = sequence.proximal_logprobs - sequence.behaviour_logprobs
    return ratios


def _sequence(row: dict[str, Any], max_tokens: int) -> TrainSequence:
    logprobs = np.array(row["logprobs"][:max_tokens], dtype=np.float32)  # nan for None
    mask = places = None
    if row.get("turns") is not None:  # null in plain rows of a file with episodes
        turns = np.array(row["turns"][:max_tokens], dtype=np.int32)
        mask = turns != CONTEXT
        logprobs, places = logprobs[mask], places_in_turns(turns, mask)
    return TrainSequence(
        prompt_token_ids=tuple(row["prompt_token_ids"]),
        response_token_ids=np.array(row["token_ids"][:max_tokens], dtype=np.int32),
        behaviour_logprobs=logprobs,
        advantage=0.0,
        mask=mask,
        turn_places=places,
    )
