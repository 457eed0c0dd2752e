#!/usr/bin/env bash
# Join this machine to a Ray cluster that launch/start_head.sh started.
#
#   launch/join.sh HEAD:PORT [option of `ray start` ...]
#
# HEAD:PORT is the head's address and its --port, 6379 by default. The token is the head's: RAY_AUTH_TOKEN, or
# in the file RAY_AUTH_TOKEN_PATH, by default ~/.ray/auth_token. The same grpo_ray must be installed here, and
# the folders of runs and of built models (GRPO_RAY_CACHE) must be shared. Ray gets this shell's environment
# without credentials. A second node on the same machine needs a --temp-dir of its own: nodes that share one
# overwrite each other's copy of the submitted folder.
set -euo pipefail

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0"
  exit $(( $# < 1 ? 2 : 0 ))
fi
here=$(cd "$(dirname "$0")/.." && pwd)
bin=""
if [[ -x $here/.venv/bin/ray ]]; then bin=$here/.venv/bin/; fi

if [[ -z ${RAY_AUTH_TOKEN:-} && ! -s ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} ]]; then
  echo "join.sh: no token; copy the head's to ~/.ray/auth_token, or set RAY_AUTH_TOKEN" >&2
  exit 2
fi
export RAY_AUTH_MODE=token
address=$1
shift
# Ray itself would try for minutes, without a word.
check='import sys; from grpo_ray.cluster.session import check_answers; check_answers(sys.argv[1])'
if ! why=$("${bin}python" -c "$check" "$address" 2>&1); then
  echo "join.sh: no head node answers at $address: ${why##*$'\n'}" >&2
  exit 2
fi
without=("${bin}python" -c 'import sys; from grpo_ray.config.secrets import run_without; run_without(*sys.argv[1:])')
command=("${without[@]}" "${bin}ray" start "--address=$address" --disable-usage-stats
  --dashboard-agent-listen-port=0 "$@")
case " $* " in
  *" --block "*) exec "${command[@]}" ;;
  *) "${command[@]}" >/dev/null 2>&1 || exec "${command[@]}"; echo "Joined     $address" ;;
esac
