#!/usr/bin/env bash
# Submit a training run to a Ray cluster and follow its output.
#
#   launch/ray_job.sh CONFIG [section.key=value ...]
#
# RAY_ADDRESS names the cluster's dashboard, http://127.0.0.1:8265 by default (what `ray start --head` on
# this machine serves). On a cluster with token authentication set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or
# RAY_AUTH_TOKEN_PATH unless the token is in ~/.ray/auth_token; a token file there turns the mode on by itself.
# The job runs with GRPO_RAY_PYTHON, a Python on the cluster that has grpo_ray installed: by default this
# folder's .venv when the cluster is this machine, and `python` elsewhere.
# Ctrl-C stops following; the job goes on. The last lines say how to follow again and how to stop it.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,12s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi
config=$1
shift
cd "$(dirname "$0")/.."
if [[ ! -f $config ]]; then
  echo "ray_job.sh: no file $config (paths are from $PWD)" >&2
  exit 2
fi

bin=""
if [[ -x .venv/bin/ray ]]; then bin=.venv/bin/; fi
"${bin}grpo-ray" check "$config" "$@"  # a typing error costs seconds here, not a place in the queue

export RAY_ADDRESS=${RAY_ADDRESS:-http://127.0.0.1:8265}
if [[ -z ${RAY_AUTH_MODE:-} && ( -n ${RAY_AUTH_TOKEN:-} || -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ) ]]; then
  export RAY_AUTH_MODE=token
fi

python=python
if [[ $RAY_ADDRESS =~ ^http://(127\.0\.0\.1|localhost|\[::1\])[:/] && -x .venv/bin/python ]]; then
  python=$PWD/.venv/bin/python
fi

# The job runs in a copy of this folder; its results belong in this one, so the folder is named in full.
overrides=("run.output_dir=$PWD/runs" "$@")
# Everything that is not excluded is uploaded: without this, gigabytes of environment.
runtime_env='{"excludes": ["/.venv/", "/.git/", "/runs/", "/.mypy_cache/", "/.ruff_cache/", "/.pytest_cache/", "/.hypothesis/", "__pycache__/"]}'

exec "${bin}ray" job submit --working-dir . --runtime-env-json "$runtime_env" -- \
  "${GRPO_RAY_PYTHON:-$python}" -m grpo_ray.cli train "$config" "${overrides[@]}"
