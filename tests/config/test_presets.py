"""Presets of algorithms: their fields, what wins beside them, and the table of the documentation."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_ray.config.algorithm import AlgorithmConfig, KLConfig
from grpo_ray.config.loading import ConfigError, load_config
from grpo_ray.config.losses import LOSS_RECORDS
from grpo_ray.config.presets import PRESETS, PresetName
from grpo_ray.errors import RunError
from grpo_ray.records.run_files import dump_config
from grpo_ray.run.training import _check_same_prompts
from grpo_ray.tools.evaluation.evaluation_plan import _serving

QUICKSTART = "configs/quickstart.yaml"
PAGE = Path(__file__).parents[2] / "docs/objectives.md"


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
    algorithm = load_config(
        QUICKSTART,
        ["algorithm.preset=reinforce_pp", "algorithm.aggregation=constant", "algorithm.kl.coefficient=2"],
    ).algorithm
    assert algorithm.aggregation == "constant"
    assert algorithm.kl == KLConfig(reference="initial", coefficient=2, placement="reward_to_go")
    assert (algorithm.advantage, algorithm.preset) == ("raw", "reinforce_pp")


def test_a_preset_is_expanded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(QUICKSTART, ["algorithm.preset=dapo", "algorithm.cliprange_high=0.3"])
    dump_config(config, tmp_path / "config.yaml")
    monkeypatch.setitem(PRESETS, "dapo", PRESETS["rloo"])  # as a later release may define it
    assert load_config(tmp_path / "config.yaml") == config
    changed = load_config(tmp_path / "config.yaml", ["algorithm.preset=dr_grpo"])
    with pytest.raises(
        RunError, match=r"algorithm.preset: this run has 'dapo' and cannot be resumed with 'dr_grpo'"
    ):
        _check_same_prompts(config, changed)


def test_an_unknown_preset_is_refused_with_the_names() -> None:
    for value in ("dpo", "{x: 1}", "5"):
        with pytest.raises(
            ConfigError, match=r"algorithm.preset: .* is not valid; allowed: grpo, dr_grpo, dapo,"
        ):
            load_config(QUICKSTART, [f"algorithm.preset={value}"])


def test_names_of_presets() -> None:
    assert set(PRESETS) == set(get_args(PresetName))
    assert not set(PRESETS) & set(LOSS_RECORDS)
    assert all(set(preset.fields) <= set(AlgorithmConfig.model_fields) for preset in PRESETS.values())


def test_the_documentation_has_the_table() -> None:
    table = PAGE.read_text().partition("### Presets")[2].partition("\n\nFields")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", table, re.M)
    assert {name: (re.findall(r"`(.+?)`", fields), source) for name, fields, source in rows} == {
        name: ([*flat(preset.fields)], preset.source) for name, preset in PRESETS.items()
    }
