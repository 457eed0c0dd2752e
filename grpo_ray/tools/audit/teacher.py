"""The audit of a teacher's logprobs: one for each sampled token if there is a teacher, and none otherwise."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from grpo_ray.tools.audit.episodes import is_episode
from grpo_ray.types import CONTEXT


def audit_teacher(row: dict[str, Any], has_teacher: bool) -> Iterator[str]:
    """Yield the problems of one completion of a step."""
    logprobs = row.get("teacher_logprobs")
    if not has_teacher:
        if logprobs is not None:
            yield "has a teacher's logprobs, and there is no teacher"
        return
    if logprobs is None or len(logprobs) != len(row["token_ids"]):
        yield "its teacher's logprobs do not cover its tokens"
        return
    values = np.array(logprobs, np.float64)
    is_context = np.zeros(len(values), bool)
    for span in row["turns"] if is_episode(row) else ():
        is_context[span["start"] : span["end"]] = span["turn"] == CONTEXT
    for place in np.flatnonzero(~np.isfinite(values) | (values > 1e-3))[:1]:
        yield f"token {place} has the teacher's logprob {values[place]}"
    for place in np.flatnonzero(is_context & (values != 0.0))[:1]:
        yield f"token {place} is context, but has a teacher's logprob"


def teacher_kl(rows: list[dict[str, Any]]) -> float | None:
    """Return the mean of log(sampler / teacher) over the sampled tokens of the rows; None without any."""
    gaps = []
    for row in rows:
        gap = np.array(row["logprobs"], np.float64) - np.array(row["teacher_logprobs"], np.float64)
        for span in row["versions"]:
            if span["version"] != CONTEXT:
                gaps.append(gap[span["start"] : span["end"]])
    values = np.concatenate(gaps or [np.empty(0)])
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None
