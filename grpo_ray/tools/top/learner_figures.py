"""The Learner's use of its device in one line, from the metrics of recent steps."""

from collections.abc import Mapping, Sequence
from statistics import fmean

Row = Mapping[str, float | None]
FIGURES = (
    ("perf/mfu", fmean, "{:.1%} MFU"),
    ("perf/tokens_per_s_per_device", fmean, "{:,.0f} tokens/s per device"),
    ("memory/learner_device_peak_bytes", lambda peaks: max(peaks) / 2**30, "up to {:.1f} GiB"),
    ("perf/prompt_frac", fmean, "{:.0%} of the computed tokens are prompts"),
    ("perf/padding_frac", fmean, "{:.0%} are padding"),
)


def learner_figures(rows: Sequence[Row]) -> str:
    """Return the line, with the figures that the steps have; empty if there are none."""
    texts = []
    for name, combined, form in FIGURES:
        if known := [value for row in rows if (value := row.get(name)) is not None]:
            texts.append(form.format(combined(known)))
    return f"Learner: {', '.join(texts)}" if texts else ""
