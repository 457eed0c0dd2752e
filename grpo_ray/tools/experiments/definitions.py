"""The bundled experiments, which bundled.yaml defines."""

from pathlib import Path

import yaml

from grpo_ray.tools.experiments.experiment import Experiment

FILE = Path(__file__).parent / "bundled.yaml"
EXPERIMENTS = {
    name: Experiment(name, **fields)
    for name, fields in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
}
