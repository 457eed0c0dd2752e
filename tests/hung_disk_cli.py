"""A driver with local actors on a disk that hangs from the line of step 3 on."""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from local_runs import Recorder, make_config

from grpo_ray.cluster.local import LocalActors
from grpo_ray.core.controller import Controller
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.run.preparation import check_files, prepare
from grpo_ray.run.restores import train_through_restores
from grpo_ray.run.signals import Interrupted, run_until_signal, signals_answered
from grpo_ray.watch.run_state import reported

write = os.write


def hang(folder: Path, descriptor: int, data: bytes) -> int:
    """Stand in for `os.write` on a file system that no longer answers."""
    if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)) and b'"step": 3,' in data:
        print("hangs", flush=True)
        time.sleep(1000)
    return write(descriptor, data)


class Printer(Recorder):
    def warning(self, text: str) -> None:
        print(text, flush=True)


def main(folder: Path, overrides: Sequence[str]) -> int:
    os.write = partial(hang, folder)
    config, run = make_config(*overrides), RunDirectory(folder)
    prepared = prepare(config, check_files(config))
    run.create(config)

    def drive(controller: Controller) -> None:
        run_until_signal(controller, config.run.on_preemption_s, run, ends_process=True)

    try:
        with signals_answered(run), reported(run, config.algorithm.num_steps, Printer()) as reporter:
            train_through_restores(config, prepared, run, reporter, LocalActors, drive)
    except Interrupted as interrupted:
        print(interrupted, flush=True)
        return 130
    except KeyboardInterrupt:
        print("interrupted in a restore", flush=True)
        return 130
    return 0
