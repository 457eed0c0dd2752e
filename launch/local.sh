#!/usr/bin/env bash
# Train on this machine alone, in a local Ray that is started for the run and ends with it.
#
#   launch/local.sh CONFIG [section.key=value ...]
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,4s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi
unset RAY_ADDRESS  # otherwise the run would go to that cluster
here=$(cd "$(dirname "$0")/.." && pwd)
program=grpo-ray
if [[ -x $here/.venv/bin/grpo-ray ]]; then program=$here/.venv/bin/grpo-ray; fi
exec "$program" train "$@"
