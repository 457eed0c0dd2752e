"""The summary of a simulation, as text."""

from collections.abc import Iterator
from statistics import fmean, quantiles

from grpo_ray.tools.simulation.simulate import Simulated
from grpo_ray.tools.top.bottleneck import bottleneck
from grpo_ray.watch.activity import ALL, GENERATOR
from grpo_ray.watch.metrics_catalog import STAGE
from grpo_ray.watch.run_log import Metrics

FIRST_STEPS = 2  # they fill the pipeline
MAX_LAGS = 12  # lines of the lag's distribution


def print_simulated(simulated: Simulated) -> None:
    for line in lines_of(simulated):
        print(line)


def lines_of(simulated: Simulated) -> Iterator[str]:
    """Yield the lines of the summary."""
    config, steps, faults = simulated.config, simulated.steps, simulated.faults
    rows = steps[FIRST_STEPS:] or steps
    seconds = [row["timing/step_s"] for row in rows]
    tenths = quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 9
    groups = config.algorithm.num_steps * config.algorithm.prompts_per_step
    yield (
        f"{config.generator.num_generators:,} Generators, {config.algorithm.num_steps:,} steps of "
        f"{config.algorithm.prompts_per_step:,} groups of {config.algorithm.samples_per_prompt}, max_lag "
        f"{config.weight_sync.max_lag}"
    )
    yield f"virtual time    {simulated.virtual_s:,.0f} s; it took {simulated.cpu_s:,.1f} s of CPU time"
    yield (
        f"step            mean {fmean(seconds):.2f} s, median {tenths[4]:.2f}, 10% {tenths[0]:.2f}, "
        f"90% {tenths[8]:.2f}, longest {max(seconds):.2f}"
    )
    yield f"Generators      sample {_share(rows, 'utilization/generators'):.0%} of the time; {_idle(rows)}"
    yield (
        f"Learner         trains {_share(rows, 'utilization/learner'):.0%} of the time; waits for groups "
        f"{sum(row['timing/wait_for_batch_s'] for row in rows) / sum(seconds):.0%}"
    )
    shares = list(simulated.account.lag_shares().items())
    listed = ", ".join(f"{lag}: {share:.1%}" for lag, share in shares[:MAX_LAGS])
    yield f"lag of tokens   {listed}" + (f", and up to {shares[-1][0]}" if shares[MAX_LAGS:] else "")
    yield f"bottleneck      {bottleneck(rows)}"
    yield (
        f"faults          {faults.num_stale} groups too old, {faults.num_lost} prompts lost, "
        f"{faults.num_repeated} repeated"
    )
    last = steps[-1]
    yield (
        f"recovery        {last['recovery/restarts']:.0f} restarts, {last['recovery/restores']:.0f} restores, "
        f"{sum(row['rollout/retried_groups'] for row in steps):.0f} groups sampled again"
    )
    yield f"memory          {_memory(simulated)}"
    yield f"CPU time        {1000 * simulated.cpu_s / groups:.2f} ms per group, simulated actors included"


def _share(rows: list[Metrics], name: str) -> float:
    """Return a share of the whole time from those of the steps, some of which are much longer than others."""
    known = [row for row in rows if name in row]
    whole = sum(row["timing/step_s"] for row in known)
    return sum(row[name] * row["timing/step_s"] for row in known) / whole if whole else 0.0


def _idle(rows: list[Metrics]) -> str:
    """Return the shares of the Generators' other stages, the largest first."""
    spent: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.items():
            match = STAGE.fullmatch(name)
            if match and (match["actor"] == ALL or match["actor"].startswith(GENERATOR)):
                spent[match["stage"]] = spent.get(match["stage"], 0.0) + seconds
    whole = sum(spent.values()) or 1.0
    others = sorted(((s, stage) for stage, s in spent.items() if stage != "generate" and s > 0), reverse=True)
    return ", ".join(f"{stage.replace('_', ' ')} {s / whole:.0%}" for s, stage in others[:3]) or "nothing else"


def _memory(simulated: Simulated) -> str:
    """Return the resident memory of the process, halfway and at the end."""
    memory = simulated.watch.memory_bytes
    last = max(memory)
    half = max(1, last // 2)
    before, after = memory.get(half, memory[last]), memory[last]
    return (
        f"{before / 2**20:,.0f} MiB at step {half}, {after / 2**20:,.0f} at step {last} "
        f"({after / before - 1:+.1%}); peak {simulated.peak_bytes / 2**20:,.0f}"
    )
