#!/usr/bin/env bash
# Submit a training run to a Ray cluster and follow its output.
#
#   launch/ray_job.sh CONFIG [section.key=value ...]
#   launch/ray_job.sh resume RUN_DIR [section.key=value ...]     go on from a run's last checkpoint
#
# A job with run.name=NAME run.if_exists=resume starts the run, and goes on with it when it is submitted again.
# RAY_ADDRESS names the cluster's dashboard, http://127.0.0.1:8265 by default: what launch/start_head.sh starts.
# The token is RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH, by default ~/.ray/auth_token. To a cluster on
# another machine nothing is submitted without one, unless RAY_AUTH_MODE=disabled says so.
# The job runs with GRPO_RAY_PYTHON, a Python on the cluster that has grpo_ray installed: by default this
# folder's .venv when the cluster is this machine, and `python` elsewhere. Of this shell's environment it gets
# nothing: a gated model takes a token that is on the cluster (`hf auth login` there).
# Ctrl-C stops following; the job goes on. The last lines say how to follow again and how to stop it.
set -euo pipefail

fail() { echo "ray_job.sh: $1" >&2; exit 2; }

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,16s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi
cd "$(dirname "$0")/.."
bin=""
if [[ -x .venv/bin/ray ]]; then bin=.venv/bin/; fi

# Ray hands the command to a shell on the cluster, and does not quote for it.
for word in "$@"; do
  if [[ $word == *[[:space:]\'\"\\\$\`\;\&\|\<\>\(\)\*\?\!\~]* ]]; then
    fail "the cluster's shell would not leave this as it is: $word; set the value in the YAML file"
  fi
done

if [[ $1 == resume ]]; then
  if [[ $# -lt 2 ]]; then fail "resume takes a run's folder: launch/ray_job.sh resume runs/NAME"; fi
  if [[ ! -f $2/config.yaml ]]; then fail "no run in $2: it has no config.yaml (paths are from $PWD)"; fi
  run=$(cd "$2" && pwd)
  shift 2
  command=(resume "$run" "$@")
else
  if [[ ! -f $1 ]]; then fail "no file $1 (paths are from $PWD)"; fi
  "${bin}grpo-ray" check "$@"  # a typing error costs seconds here, not a place in the queue
  config=$1
  shift
  # The job runs in a copy of this folder; its results belong in this one, so the folder is named in full.
  command=(train "$config" "run.output_dir=$PWD/runs" "$@")
fi

address=${RAY_ADDRESS:-http://127.0.0.1:8265}
python=python
is_here=false
if [[ $address =~ ^http://(127\.0\.0\.1|localhost|\[::1\])([:/]|$) ]]; then
  is_here=true
  if [[ -x .venv/bin/python ]]; then python=$PWD/.venv/bin/python; fi
fi

has_token=false
if [[ -n ${RAY_AUTH_TOKEN:-} || -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then has_token=true; fi
if [[ -z ${RAY_AUTH_MODE:-} && $has_token == true ]]; then export RAY_AUTH_MODE=token; fi
if [[ $is_here == false && ${RAY_AUTH_MODE:-} != disabled && $has_token == false ]]; then
  fail "no token for $address; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's, or \
RAY_AUTH_MODE=disabled if it has none and everybody who can reach it may run anything on it"
fi

# Everything that is not excluded is uploaded, for everybody with the token to read: without this, gigabytes of
# environment, and keys.
runtime_env='{"excludes": ["/.venv/", "/.git/", "/runs/", "/.mypy_cache/", "/.ruff_cache/", "/.pytest_cache/", "/.hypothesis/", "__pycache__/", ".env*", "*.pem", "*.key"]}'

# The address is given, because RAY_API_SERVER_ADDRESS would go before the one that was looked at above.
exec "${bin}ray" job submit --address "$address" --working-dir . --runtime-env-json "$runtime_env" -- \
  "${GRPO_RAY_PYTHON:-$python}" -m grpo_ray.cli "${command[@]}"
