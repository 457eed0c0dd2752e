"""The command `grpo-ray audit`."""

from dataclasses import dataclass
from typing import Annotated

from grpo_ray.errors import RunError, shown_plainly
from grpo_ray.records.visible_text import print_visible
from grpo_ray.tools.arguments import Argument, Command
from grpo_ray.tools.trust import RunRewardCode, TrustRemoteCode, stay_offline


@dataclass(frozen=True)
class AuditOptions:
    run: Annotated[str, Argument("RUN", "the run's directory")]
    trust_remote_code: TrustRemoteCode = False
    run_reward_code: RunRewardCode = False


def _audit(options: AuditOptions) -> int:
    stay_offline()
    from grpo_ray.records.run_files import RunDirectory
    from grpo_ray.tools.audit.audit import audit

    run = RunDirectory(options.run)
    if not run.config_path.exists():
        raise RunError(f"{options.run}: no run to audit (it has no config.yaml)")
    with shown_plainly():
        report = audit(run, options.trust_remote_code, options.run_reward_code)
    print_visible(str(report))
    return 0 if report.is_clean else 1


AUDIT = Command(
    "audit", AuditOptions, _audit, "check a run's own records",
    "Check a run's own records: each prompt trained once, no token older than allowed, every reward correct.",
    group="Look",
)  # fmt: skip
