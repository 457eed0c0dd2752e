"""The command `grpo-ray export`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.errors import shown_plainly
from grpo_ray.telemetry.checkpoint import LAST
from grpo_ray.telemetry.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command, Option
from grpo_ray.tools.trust import TrustRemoteCode


@dataclass(frozen=True)
class ExportOptions:
    run: Annotated[str, Argument("RUN", "the run's directory")]
    merged: Annotated[str, Option("FOLDER", "a new folder for the model with the adapter merged into it")]
    checkpoint: Annotated[
        str, Option("CHECKPOINT", "last, best or a checkpoint's name (default: %(default)s)")
    ] = LAST
    trust_remote_code: TrustRemoteCode = False


def _export(options: ExportOptions) -> int:
    from grpo_ray.tools.export.export import export_merged

    with shown_plainly():
        folder = export_merged(options)
    print_visible(f"{folder}  (a model in Hugging Face format: from_pretrained and vLLM load it)")
    return 0


EXPORT = Command(
    "export", ExportOptions, _export, "write a checkpoint as a whole model",
    "Write a whole model in Hugging Face format: a checkpoint's adapter merged into its base, or the weights "
    "of a run without an adapter; see docs/lora.md.",
)  # fmt: skip
