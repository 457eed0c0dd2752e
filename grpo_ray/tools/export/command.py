"""`grpo-ray export RUN --merged FOLDER`: a checkpoint as a whole model in Hugging Face format."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from grpo_ray.config.loading import load_config
from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.records.checkpoint import LAST, CheckpointStore
from grpo_ray.records.durable import sync, sync_tree
from grpo_ray.records.run_files import RunDirectory
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command, Option
from grpo_ray.tools.trust import RunRewardCode, TrustRemoteCode


@dataclass(frozen=True)
class ExportOptions:
    run: Annotated[str, Argument("RUN", "the run's directory")]
    merged: Annotated[str, Option("FOLDER", "a new folder for the whole model")]
    checkpoint: Annotated[
        str, Option("CHECKPOINT", "last, best or a checkpoint's name (default: %(default)s)")
    ] = LAST
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False


def _export(options: ExportOptions) -> int:
    with shown_plainly():
        folder = export_merged(options)
    print_visible(f"{folder}  (a model in Hugging Face format: from_pretrained and vLLM load it)")
    return 0


def export_merged(options: ExportOptions) -> Path:
    """Write the model to a folder that appears whole or not at all; return it.

    It is in `model.dtype`, the weights that Generators sampled from.

    Raises:
        RunError: there is no such run or checkpoint, it has links, or the folder exists already.
        ValueError: the checkpoint, the base or the adapter cannot be used.
        OSError: it could not be written.
    """
    from grpo_ray.learning.model_files import check_local_model, load_tokenizer
    from grpo_ray.learning.training_state import os_errors
    from grpo_ray.run.signals import sigterm_interrupts
    from grpo_ray.tools.export.merge import checkpoint_policy

    run, folder = RunDirectory(options.run), Path(options.merged).expanduser()
    run.check_is_run("to export")
    if folder.exists() or folder.is_symlink():
        raise RunError(f"--merged: {folder} already exists; give a new folder, or move it away")
    store = CheckpointStore(run)
    checkpoint = store.choose(options.checkpoint, "--checkpoint").path
    for line in store.skipped:
        print_visible(f"! {line}")
    for path in checkpoint.rglob("*"):
        if path.is_symlink():  # no run writes one, and the model would hold the file that it leads to
            raise RunError(f"{path} is a link; put the file itself in its place")
    config = load_config(run.config_path).changed(model={"trust_remote_code": options.trust_remote_code})
    if config.model.adapter is None:
        check_local_model(str(checkpoint), "--checkpoint")  # a simulation's is none
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"unfinished-{folder.name}-"
    with sigterm_interrupts(), tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as beside:
        unfinished = Path(beside, folder.name)
        if config.model.adapter is None:
            try:
                shutil.copytree(checkpoint, unfinished, ignore=shutil.ignore_patterns("training"))
            except shutil.Error as error:  # of several files, such as a full disk's, or pruned by the run
                raise RunError(f"{checkpoint} could not be copied: {error.args[0][0][-1]}") from error
        else:
            merged, base = checkpoint_policy(config, checkpoint, options.run_reward_code)
            tokenizer = load_tokenizer(base, options.trust_remote_code)
            with os_errors():
                merged.save_pretrained(unfinished)
                tokenizer.save_pretrained(unfinished)
        sync_tree(unfinished)
        unfinished.rename(folder)
    sync(folder.parent)
    return folder


EXPORT = Command(
    "export", ExportOptions, _export, "write a checkpoint as a whole model",
    "Write a whole model in Hugging Face format: a checkpoint's adapter merged into its base, or the weights "
    "of a run without an adapter; see docs/lora.md.",
)  # fmt: skip
