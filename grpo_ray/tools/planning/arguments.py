"""The arguments of `grpo-ray plan`."""

import argparse

from grpo_ray.tools.arguments import above_zero, add_config, add_overrides, positive
from grpo_ray.tools.planning.known_shapes import KNOWN


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--gpus", type=positive, metavar="N", help="GPUs there are (default: as many as are used)"
    )
    devices.add_argument(
        "--gpu-memory", type=above_zero, metavar="GIB", default=80.0, help="of each (default: %(default)g)"
    )
    devices.add_argument(
        "--host-memory", type=above_zero, metavar="GIB", help="default: this machine's, for runs without a GPU"
    )
    model = parser.add_argument_group("model and lengths")
    model.add_argument(
        "--model-shape", choices=KNOWN, metavar="NAME", help=f"plan for this model instead: {', '.join(KNOWN)}"
    )
    model.add_argument(
        "--prompt-tokens",
        type=positive,
        metavar="N",
        help="longest prompt (default: what generator.max_model_len leaves)",
    )
    model.add_argument(
        "--response-tokens", type=above_zero, metavar="N", help="mean response (default: sampling.max_tokens)"
    )
    rates = parser.add_argument_group("rates, for the time of a step")
    rates.add_argument(
        "--from", dest="from_run", metavar="RUN", help="a run's folder: its medians, and its mean response"
    )
    rates.add_argument(
        "--sampled-tokens-per-s", type=above_zero, metavar="X", help="of one Generator while it samples"
    )
    rates.add_argument(
        "--trained-tokens-per-s",
        type=above_zero,
        metavar="X",
        help="response tokens, of the Learner while it trains",
    )
    add_overrides(parser, "learner.micro_batch_tokens=4096")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    from grpo_ray.tools.planning.make_plan import PlanOptions, plan

    fits = plan(
        PlanOptions(
            config=options.config,
            overrides=tuple(options.overrides),
            num_gpus=options.gpus,
            gpu_memory_gib=options.gpu_memory,
            host_memory_gib=options.host_memory,
            model_shape=options.model_shape,
            prompt_tokens=options.prompt_tokens,
            response_tokens=options.response_tokens,
            sampled_tokens_per_s=options.sampled_tokens_per_s,
            trained_tokens_per_s=options.trained_tokens_per_s,
            from_run=options.from_run,
        )
    )
    return 0 if fits else 1
