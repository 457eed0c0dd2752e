"""Presets of algorithms: their fields, what wins beside them, and the table of the documentation."""

import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from builders import make_completion, make_group, make_item, parts, same_groups
from episode_groups import make_episode, make_episode_group, play

from grpo_ray.config.algorithm import AlgorithmConfig, KLConfig
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.losses import LOSS_RECORDS, PRESETS, PresetName
from grpo_ray.episodes.segments import Segments
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import dump_config
from grpo_ray.run.training import _check_same_prompts
from grpo_ray.tools.evaluation.evaluation_plan import _serving
from grpo_ray.types import RolloutGroup, ScoredGroup

QUICKSTART = "configs/quickstart.yaml"


def flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}: {value}"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_fields_written_out(name: PresetName) -> None:
    preset = load_config(QUICKSTART, [f"algorithm.preset={name}"])
    changes = [f"algorithm.{field.replace(': ', '=')}" for field in flat(PRESETS[name].fields)]
    by_hand = load_config(QUICKSTART, changes).algorithm
    assert preset.algorithm.model_copy(update={"preset": None}) == by_hand
    assert by_hand != load_config(QUICKSTART).algorithm
    _serving(preset)  # a run with it can be evaluated


def test_what_is_given_beside_a_preset_wins() -> None:
    given = ["algorithm.preset=reinforce_pp", "algorithm.aggregation=constant", "algorithm.kl.coefficient=2"]
    algorithm = load_config(QUICKSTART, given).algorithm
    assert algorithm.aggregation == "constant"
    assert algorithm.kl == KLConfig(reference="initial", coefficient=2, placement="reward_to_go")
    assert (algorithm.advantage, algorithm.preset) == ("raw", "reinforce_pp")
    assert AlgorithmConfig(preset="dapo", loss="gspo").cliprange_high is None  # it is of another kind


def test_a_dump_is_loaded_and_its_preset_not_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["learner.learning_rate=1e-7", "generator.cpu_cores=[0, 1]", "run.name=null"]
    config = load_config(QUICKSTART, ["algorithm.preset=dapo", "algorithm.cliprange_high=0.3", *others])
    dump_config(config, tmp_path / "config.yaml")
    monkeypatch.setitem(PRESETS, "dapo", PRESETS["rloo"])  # as a later release may define it
    assert load_config(tmp_path / "config.yaml") == config
    changed = load_config(tmp_path / "config.yaml", ["algorithm.preset=dr_grpo"])
    refused = r"algorithm.preset: this run has 'dapo' and cannot be resumed with 'dr_grpo'"
    with pytest.raises(RunError, match=refused):
        _check_same_prompts(config, changed)


def test_names_of_presets_are_known_and_an_unknown_one_is_refused_with_them() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    assert not set(PRESETS) & set(LOSS_RECORDS)
    assert all(set(preset.fields) <= set(AlgorithmConfig.model_fields) for preset in PRESETS.values())
    names = r"algorithm.preset: .* is not valid; allowed: grpo, dr_grpo, dapo,"
    for value in ("dpo", "{x: 1}", "5"):
        with pytest.raises(ConfigError, match=names):
            load_config(QUICKSTART, [f"algorithm.preset={value}"])


def test_the_documentation_has_the_table() -> None:
    table = Path("docs/objectives.md").read_text().partition("### Presets")[2].partition("\n\nFields")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", table, re.M)
    assert {name: (re.findall(r"`(.+?)`", fields), source) for name, fields, source in rows} == {
        name: ([*flat(preset.fields)], preset.source) for name, preset in PRESETS.items()
    }


COMPLETIONS = (
    make_completion([5, 6, 7], [-0.5, -0.0, float("nan")], [3, 3, 4], "é…", "length"),
    make_completion([9], [-2.5], 4, "b"),
    make_completion([1, 2], [-1.0, -2.0], [2, 4]),
)
GROUP = make_group(make_item(7, num_cuts=2), COMPLETIONS, [1, 0, 0.5], [0.3, -0.1, 0.0])


def test_a_group_travels_as_three_arrays_and_arrives_as_it_was() -> None:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(GROUP.rollout, protocol=5, buffer_callback=buffers.append)
    assert [len(buffer.raw()) for buffer in buffers] == [6 * 4] * 3
    arrived = pickle.loads(data, buffers=buffers)
    assert type(arrived) is RolloutGroup
    assert same_groups([replace(GROUP, rollout=arrived)], [GROUP])
    first, second, _ = arrived.completions
    assert np.shares_memory(first.token_ids.base, second.token_ids.base)
    small = [make_group(make_item(), completions) for completions in ((), COMPLETIONS[:1])]
    assert same_groups([pickle.loads(pickle.dumps(group)) for group in small], small)
    # With its verdict it is a scored group.
    group = replace(GROUP, errors={1: "too slow"}, ungradable={2: "too deep"})
    assert same_groups([ScoredGroup.of(*parts(group))], [group])


def test_the_bytes_of_a_group_have_the_prompts_of_its_branches() -> None:
    """A second sequence of 1,000 prompt tokens costs what its tuple and its numbers take in Python."""
    prompt = tuple(range(1000, 2000))
    once, branched = Segments(), Segments()
    for segments in (once, branched):
        play(segments, (1, 2), [5, 6])
    play(branched, prompt, [7])
    one, other = (make_episode_group(0, [make_episode(segments)] * 2) for segments in (once, branched))
    of_prompt = sum(map(sys.getsizeof, prompt)) + sys.getsizeof(prompt) - sys.getsizeof(())
    assert other.num_bytes - one.num_bytes == 2 * (of_prompt + 4 * 4)  # a token's id, logprob, version and turn
