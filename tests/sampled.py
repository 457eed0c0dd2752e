"""Parametrized tests of which `make test` runs some cases, and `make campaign` the others.

Each case of a table takes seconds. Those that are kept go through the code of all; what the others add is a
combination.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import pytest

KEPT: dict[str, tuple[str, ...]] = {
    "test_audit.py::test_a_clean_run_of_any_schedule_is_clean": (
        "('buffer.replay.frac=0.25', 'buffer.replay.max_age=3', 'algorithm.dynamic_sampling_tries=2')",
        "('algorithm.oversample_frac=0.5', 'algorithm.dynamic_sampling_tries=1')",
        "('algorithm.overlong_buffer_tokens=3', 'algorithm.advantage=leave_one_out')",
    ),
    "test_broken_rewards.py::test_a_later_batch_without_a_grade_ends_the_run_with_a_checkpoint_to_resume": (
        "plain",
    ),
    "test_broken_rewards.py::test_a_reward_that_always_fails_ends_the_run_at_its_first_validation": ("hangs",),
    "test_broken_rewards.py::test_a_reward_that_sometimes_fails_is_said_once_in_the_first_step": ("raises",),
    "test_controller.py::test_a_stall_is_explained_and_ended": ("scorer", "learner"),
    "test_distillation_runs.py::test_a_teacher_that_dies_is_replaced_and_looks_up_again": ("2",),
    "test_distillation_runs.py::test_combinations": ("overrides2",),
    "test_environment_training.py::test_the_pages_environments_are_trained": (
        "frozen_lake-gymnasium-overrides0",
    ),
    "test_flat_memory.py::test_memory_does_not_grow_with_the_steps": ("everything",),
    "test_episode_combinations.py::test_episodes_train_with": (
        "kl",
        "collective",
        "curriculum",
        "reinforce_plus_plus",
    ),
    "test_episode_failures.py::test_an_example_that_ends_its_worker_is_set_aside_and_costs_no_other_group": (
        "many workers",
    ),
    "test_episode_failures.py::test_a_prompt_that_ends_its_generator_is_set_aside_and_costs_no_other_group": (
        "1",
    ),
    "test_episode_failures.py::test_a_turn_that_ends_its_generator_is_set_aside_and_costs_no_other_group": (
        "2",
    ),
    "test_episode_of_one_turn.py::test_the_run_is_the_same": ("auto",),
    "test_episode_runs.py::test_a_synchronous_run_that_is_killed_and_resumed_equals_one_that_was_not": ("3",),
    "test_episode_runs.py::test_no_token_beyond_the_lag_is_trained": ("mask",),
    "test_engines_vllm.py::test_a_float32_head_over_bfloat16_before_and_after_a_sync": ("True",),
    "test_signals.py::test_a_driver_ends_in_time_although_a_write_hangs": ("deadline",),
    "test_out_of_memory.py::test_step_is_the_same_with_smaller_micro_batches": (
        "auto-24-algorithm0-float32",
        "never-60-algorithm1-bfloat16",
    ),
    "test_planning.py::test_a_micro_batch_takes_what_is_planned": (
        "float32-False-320-268435456-options0",
        "float32-True-8192-4194304-options5",
        "bfloat16-False-8192-4194304-options10",
    ),
    "test_planning_ranks.py::test_a_rank_holds_what_is_planned": ("fake-2-512",),
    "test_ranks.py::test_adapters_and_dtypes": (
        "full-bfloat16-float32",
        "dora-bfloat16-model",
        "4 bits-float32-model",
    ),
    "test_ranks.py::test_every_setting_gives_the_gradients_of_one_rank": ("2",),
    "test_ranks.py::test_two_ranks_give_the_gradient_of_one_on_episodes": ("branches on both ranks",),
    "test_ranks.py::test_resuming_with_as_many_ranks_is_exact_and_with_others_is_close": ("float32",),
    "test_report_page_browser.py::test_every_text_has_enough_contrast_and_nothing_is_wider_than_the_window": (
        "size0-light",
        "size3-dark",
    ),
    "test_report_page_browser.py::test_ranks_have_curves_and_a_table": ("size0-light",),
    "test_schedules.py::test_a_synchronous_run_that_is_interrupted_is_the_same_run": ("dynamic",),
    "test_schedules.py::test_every_schedule_trains_each_prompt_once_on_recent_tokens": (
        "colocated-False",
        "replay-advantage-False",
        "oversampled-async-True",
        "everything-True",
    ),
    "test_schedules.py::test_kills_lose_nothing_in_asynchronous_schedules": ("everything",),
    "test_signals.py::test_a_first_signal_interrupts_the_main_thread": ("1", "2"),
    "test_strangers.py::test_a_stranger_with_a_ranks_connections_is_noticed_by_all_that_it_has_one_to": (
        "3-1-0",
    ),
    "test_strangers.py::test_ranks_whose_store_is_overwritten_fail_and_those_after_them_meet": ("True",),
}


def leave_the_others_to_the_campaign(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark each case of the tests above that is not kept.

    Args:
        items: all that was collected, before any is deselected.

    Raises:
        pytest.UsageError: a file that was collected as a whole lacks a test or a case above. If it was renamed,
            it would be left to the campaign without a word.
    """
    cases: dict[str, set[str]] = defaultdict(set)
    for item in items:
        name, case = _name_and_case(item)
        cases[name].add(case)
        if case not in KEPT.get(name, (case,)):
            item.add_marker(pytest.mark.campaign)
    if problem := _missing(cases, _files_collected_whole(config, items)):
        items[0].session.shouldfail = problem  # pytest-xdist shows this of a worker, and loses the error
        raise pytest.UsageError(problem)


def _name_and_case(item: pytest.Item) -> tuple[str, str]:
    test, _, case = item.nodeid.removesuffix("]").partition("[")
    return test.rpartition("/")[2], case


def _files_collected_whole(config: pytest.Config, items: Sequence[pytest.Item]) -> set[str]:
    if config.getoption("lf", False):  # --last-failed collects those alone
        return set()
    folder = config.invocation_params.dir
    in_part = {(folder / arg.partition("::")[0]).resolve() for arg in config.args if "::" in arg}
    return {path.name for path in {item.path for item in items} if path.resolve() not in in_part}


def _missing(cases: Mapping[str, Collection[str]], files: Collection[str]) -> str | None:
    """Return what is wrong with the part of the table that is about these files."""
    for name, kept in KEPT.items():
        if name.partition("::")[0] not in files:
            continue
        if name not in cases:
            return f"tests/sampled.py keeps cases of {name}, and there is no such test"
        for case in kept:
            if case not in cases[name]:
                found = ", ".join(sorted(cases[name]))
                return f"tests/sampled.py keeps {name}[{case}], and the test has no such case; it has: {found}"
    return None
