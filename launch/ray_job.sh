#!/usr/bin/env bash
# Submit a training run to a Ray cluster and follow its output: `grpo-ray submit` from this folder.
#
#   launch/ray_job.sh CONFIG [section.key=value ...] [option of grpo-ray submit ...]
#   launch/ray_job.sh resume RUN_DIR [section.key=value ...]     go on from a run's last checkpoint
#   launch/ray_job.sh follow JOB
#   launch/ray_job.sh stop JOB                                   the run ends with a checkpoint
#
# A job with run.name=NAME run.if_exists=resume starts the run, and goes on with it when it is submitted again.
# RAY_ADDRESS names the cluster's dashboard, http://127.0.0.1:8265 by default: what launch/start_head.sh starts.
# The token is RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH, by default ~/.ray/auth_token. To a cluster on
# another machine nothing is submitted without one, unless RAY_AUTH_MODE=disabled says so.
# The job runs with GRPO_RAY_PYTHON, a Python on the cluster that has grpo_ray installed: by default the one
# here when the cluster is this machine, and `python` elsewhere. Of this shell's environment it gets a few
# settings and what `--env NAME` names; a gated model takes a token that is on the cluster (`hf auth login`).
# Ctrl-C stops following; the job keeps running. The first lines say how to follow again and how to stop it.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,17s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi
cd "$(dirname "$0")/.."
submit=(grpo-ray submit)
if [[ -x .venv/bin/grpo-ray ]]; then submit=(.venv/bin/grpo-ray submit); fi

case $1 in
  resume | follow | stop) exec "${submit[@]}" "--$1" "${@:2}" ;;
  *) exec "${submit[@]}" "$@" ;;
esac
