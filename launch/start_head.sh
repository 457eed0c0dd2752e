#!/usr/bin/env bash
# Start a Ray head node on this machine, with token authentication.
#
#   launch/start_head.sh [--port PORT] [--dashboard-host HOST] [--dashboard-port PORT] [option of `ray start` ...]
#
# The dashboard listens on 127.0.0.1 unless --dashboard-host is given: with access and the token, anyone can run
# anything here. The token is RAY_AUTH_TOKEN, or in the file RAY_AUTH_TOKEN_PATH, by default
# ~/.ray/auth_token, which is created if it does not exist; all nodes and all users need the same token.
# Ray and its jobs get this shell's environment without variables that look like credentials.
set -euo pipefail

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit 0
fi
here=$(cd "$(dirname "$0")/.." && pwd)
bin=""
if [[ -x $here/.venv/bin/ray ]]; then bin=$here/.venv/bin/; fi

host=127.0.0.1
port=8265
gcs=6379
options=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --dashboard-host) host=${2:?start_head.sh: --dashboard-host takes an address}; shift 2 ;;
    --dashboard-host=*) host=${1#*=}; shift ;;
    --dashboard-port) port=${2:?start_head.sh: --dashboard-port takes a number}; shift 2 ;;
    --dashboard-port=*) port=${1#*=}; shift ;;
    --port) gcs=${2:?start_head.sh: --port takes a number}; shift 2 ;;
    --port=*) gcs=${1#*=}; shift ;;
    *) options+=("$1"); shift ;;
  esac
done

if [[ ${RAY_AUTH_MODE:-token} != token ]]; then
  echo "start_head.sh: RAY_AUTH_MODE is $RAY_AUTH_MODE; this script starts a head with a token only" >&2
  exit 2
fi
if [[ -z ${RAY_AUTH_TOKEN:-} ]]; then
  file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
  # The token goes to the file, not to the screen.
  if [[ ! -s $file && -n ${RAY_AUTH_TOKEN_PATH:-} ]]; then
    echo "start_head.sh: RAY_AUTH_TOKEN_PATH is $file, which holds no token" >&2
    exit 2
  fi
  if [[ ! -s $file ]]; then (umask 077; "${bin}ray" get-auth-token --generate >/dev/null); fi
  chmod go= "$file"  # Ray's own file is readable by everyone under a usual umask
fi
export RAY_AUTH_MODE=token

case $host in 0.0.0.0 | ::) submit=$(hostname) ;; *) submit=$host ;; esac
address=http://$submit:$port
say_how() {
  cat <<EOF
Join       launch/join.sh $(hostname):$gcs    (on another machine, with this token in its ~/.ray/auth_token)
Submit     RAY_ADDRESS=$address launch/ray_job.sh CONFIG
Dashboard  $address   (it asks for the token: ray get-auth-token)
           from elsewhere: ssh -L $port:127.0.0.1:$port $(hostname), then http://127.0.0.1:$port
Stop       ray stop    (ends every Ray of yours on this machine)
EOF
}

without=("${bin}python" -c 'import sys; from grpo_ray.config.secrets import run_without; run_without(*sys.argv[1:])')
# A free port for the agent that starts jobs, because the Ray of a local run may hold the usual one.
command=("${without[@]}" "${bin}ray" start --head
  "--port=$gcs" "--dashboard-host=$host" "--dashboard-port=$port" --disable-usage-stats
  --dashboard-agent-listen-port=0 ${options[@]+"${options[@]}"})
case " ${options[*]-} " in
  *" --block "*) say_how; exec "${command[@]}" ;;
  *) "${command[@]}" >/dev/null; say_how ;;
esac
