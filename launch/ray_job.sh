#!/usr/bin/env bash
# Submit a training run to a Ray cluster and follow its output: `grpo-ray submit` from this folder.
#
#   launch/ray_job.sh CONFIG [section.key=value ...] [option of grpo-ray submit ...]
#   launch/ray_job.sh resume RUN_DIR [section.key=value ...]     resume a run from its last checkpoint
#   launch/ray_job.sh follow JOB
#   launch/ray_job.sh stop JOB                                   the run ends with a checkpoint
#
# A job with run.name=NAME run.if_exists=resume starts the run, and resumes it when it is submitted again.
# RAY_ADDRESS names the cluster's dashboard, by default http://127.0.0.1:8265, that of launch/start_head.sh.
# The token is RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH, by default ~/.ray/auth_token. Without a token,
# a job is submitted to another machine only with RAY_AUTH_MODE=disabled.
# The job runs with GRPO_RAY_PYTHON, a Python on the cluster that has grpo_ray installed: by default the current
# one if the cluster is this machine, and `python` elsewhere. From this shell's environment it gets a few settings
# and the variables named by `--env NAME`; a gated model needs a token on the cluster (`hf auth login`).
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
