"""`train --local`: a whole run in one process, without Ray and vLLM."""

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from small_run import QUICKSTART, SMALL

from grpo_ray.cluster.local import LocalClient, check_local
from grpo_ray.config.loading import load_config
from grpo_ray.errors import ActorDied, RunError
from grpo_ray.run.training import warnings_in

CHECK = """
import sys
from grpo_ray.tools.cli import main
status = main(["check", *sys.argv[1:]])
sys.exit(status or ", ".join(sorted({"torch", "ray", "vllm", "sympy"} & sys.modules.keys())) or None)
"""


@pytest.mark.slow
def test_a_check_does_not_wait_for_torch() -> None:
    checked = subprocess.run([sys.executable, "-c", CHECK, QUICKSTART], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize(
    "override",
    [
        "generator.engine=vllm",
        "generator.num_gpus=1",
        "learner.num_gpus=1",
        "learner.num_ranks=2",
        "learner.cpu_cores=[0]",
        "generator.cpu_cores=[0]",
        "weight_sync.transport=collective",
    ],
)
def test_what_one_process_cannot_do_is_refused_by_name(override: str) -> None:
    config = load_config(QUICKSTART, [*SMALL, override])
    with pytest.raises(RunError, match=f"add {override.split('=')[0]}=[^ ]*, or omit --local"):
        check_local(config)
    check_local(load_config(QUICKSTART, SMALL))


def test_warnings_of_actors_go_to_the_runs_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "local.log"
    with warnings_in(log):
        logging.warning("group 0: not graded")
    logging.warning("later")
    assert log.read_text() == "group 0: not graded\n"


class Worker:
    """An actor with a method of each kind."""

    def __init__(self) -> None:
        self.began, self.may_end, self.order = threading.Event(), threading.Event(), list[str]()

    def held(self) -> None:
        self.began.set()
        self.may_end.wait()
        self.order.append("held")

    def next(self) -> None:
        self.order.append("next")

    def work_done(self) -> int:  # in a concurrency group of its own
        return len(self.order)

    async def asynchronous(self, value: Any) -> Any:
        return value

    async def never(self) -> None:
        await asyncio.Event().wait()


async def test_synchronous_calls_run_one_at_a_time_beside_asynchronous_ones() -> None:
    client = LocalClient("worker", Worker)
    held, after = client.held(), client.next()
    while not client.actor.began.is_set():
        await asyncio.sleep(0.001)
    assert await client.asynchronous(1) == 1
    assert await client.work_done() == 0  # `next` waits for `held`, this does not
    client.actor.may_end.set()
    await held
    await after
    assert client.actor.order == ["held", "next"]


async def test_a_reference_arrives_as_its_value_but_not_in_a_box() -> None:
    client = LocalClient("worker", Worker)
    reference = client.asynchronous(7)
    assert await client.asynchronous(reference) == 7
    assert await client.asynchronous((reference, 8)) == (reference, 8)


async def test_the_death_of_an_actor_ends_its_open_calls_and_refuses_later_ones() -> None:
    client = LocalClient("worker", Worker)
    never = client.never()
    await asyncio.sleep(0)
    client.die("killed")
    for answer in (never, client.asynchronous(1)):
        with pytest.raises(ActorDied, match="worker died: killed"):
            await answer
