#!/usr/bin/env bash
# Clones the repository and runs each command of the README.md files of the examples, as it is written there.
#
#   tools/readme.sh [-only EXAMPLE]… [-without PROGRAM]… [-limit SECONDS]
#
# A command that serves runs in the background: it has to be up after 20 s, or for the curl lines behind it. Each line of
# the output has an outcome, the seconds and the exit status of a command. A command whose program this machine lacks
# counts as failed, unless -without names the program. Exits with 1 if a command has failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

only=() without=() limit=300 serving=20
while [ $# -gt 0 ]; do
  case $1 in
    -only) only+=("$2") ;;
    -without) without+=("$2") ;;
    -limit) limit=$2 ;;
    *) echo "usage: tools/readme.sh [-only EXAMPLE]… [-without PROGRAM]… [-limit SECONDS]" >&2; exit 2 ;;
  esac
  shift 2
done

clone=$(mktemp -d) server='' redis=''
stop() { # ends a group of processes: as Ctrl-C does, and after 20 s for good
  [ -n "$1" ] || return 0
  kill -INT -- "-$1" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 -- "-$1" 2>/dev/null || break; sleep 0.2; done
  kill -KILL -- "-$1" 2>/dev/null || true
}
trap 'stop "$server"; stop "$redis"; rm -rf "$clone"' EXIT
git clone -q . "$clone"
log=$clone.log
export CURL_HOME=$clone.curl # so that curl fails with the status of an error
mkdir -p "$CURL_HOME"; echo fail-with-body > "$CURL_HOME/.curlrc"
trap 'stop "$server"; stop "$redis"; rm -rf "$clone" "$CURL_HOME" "$log"' EXIT

failed=0
report() { # OUTCOME SECONDS STATUS COMMAND
  printf '%-8s %5ss  exit %-4s %s\n' "$@"
  if [ "$1" = failed ] || [ "$1" = lacks ]; then failed=$((failed + 1)); fi
}
show() { tail -n 15 "$log" | sed 's/^/         | /'; }
open() { (exec 3<> "/dev/tcp/$1/$2") 2>/dev/null; }

# lacking prints the programs that a command needs and this machine lacks.
lacking() {
  local needs=(make go)
  case $1 in
    *REDIS_URL=*) open 127.0.0.1 6379 || needs+=(redis-server) ;;
    prometheus*) needs=(prometheus) ;;
    curl*) needs=(curl) ;;
  esac
  for program in "${needs[@]}"; do command -v "$program" > /dev/null || echo "$program"; done
}

is_server() { [[ $1 == *-listen=* || $1 == make\ observability* || $1 == prometheus* ]]; }

run() { # FOLDER COMMAND
  local began=$SECONDS status=0
  (cd "$1" && timeout -k 20 "$limit" bash -c "$2") > "$log" 2>&1 < /dev/null || status=$?
  local outcome=ok
  [ "$status" = 0 ] || outcome=failed
  report "$outcome" $((SECONDS - began)) "$status" "$2"
  [ "$status" = 0 ] || show
}

serve() { # FOLDER COMMAND: begins
  (cd "$1" && exec setsid bash -c "$2") > "$log" 2>&1 < /dev/null &
  server=$!
}

run_server() { # FOLDER COMMAND
  local began=$SECONDS status=0
  serve "$@"
  for _ in $(seq "$limit"); do # make builds first
    sleep 1
    kill -0 "$server" 2>/dev/null || break
    if [[ $2 == prometheus* ]] || open 127.0.0.1 8080; then sleep "$serving"; break; fi
  done
  if kill -0 "$server" 2>/dev/null && { [[ $2 == prometheus* ]] || open 127.0.0.1 8080; }; then
    stop "$server"
    report served $((SECONDS - began)) - "$2"
  else
    stop "$server"
    wait "$server" 2>/dev/null || status=$?
    report failed $((SECONDS - began)) "$status" "$2"
    show
  fi
  server=''
}

run_curl() { # FOLDER COMMAND SERVER
  if [ -z "$server" ]; then
    serve "$1" "$3"
    for _ in $(seq "$limit"); do
      sleep 1
      if open 127.0.0.1 8080; then break; fi
      kill -0 "$server" 2>/dev/null || break
    done
    cp "$log" "$log.server" 2>/dev/null || true
    log=$clone.curl.log
  fi
  run "$1" "$2"
}

# commands prints the lines of the blocks that begin with a command.
commands() {
  awk '/^```/ { inside = !inside; first = 1; next }
    inside && first { first = 0; yes = /^(make|go|cd|curl|prometheus|docker|outbox|[A-Z_]+=[^ ]+ make) / }
    inside && yes && NF { print }' "$1"
}

for readme in "$clone"/examples/*/README.md; do
  folder=$(dirname "$readme") name=$(basename "$(dirname "$readme")") last=''
  if [ ${#only[@]} -gt 0 ] && [[ " ${only[*]} " != *" $name "* ]]; then continue; fi
  echo "== $name"
  while IFS= read -r line <&3; do
    command=$(sed -E 's/ +#.*$//' <<< "$line")
    place=$clone
    case $line in *'in this folder'*) place=$folder ;; esac
    if [[ $command != curl* ]]; then stop "$server"; server='' log=$clone.log; fi
    if is_server "$command" && [[ $command == make* ]]; then last=$command; fi
    missing=$(lacking "$command")
    if [ -n "$missing" ]; then
      outcome=lacks
      for program in $missing; do
        if [[ " ${without[*]-} " == *" $program "* ]]; then outcome=without; else outcome=lacks; break; fi
      done
      report "$outcome" 0 - "$command   (needs $(echo $missing))"
      continue
    fi
    if [[ $command == REDIS_URL=* ]] && ! open 127.0.0.1 6379; then
      setsid redis-server --save '' --dir "$clone" > /dev/null 2>&1 & redis=$!
      for _ in $(seq 50); do if open 127.0.0.1 6379; then break; fi; sleep 0.1; done
    fi
    case $command in
      curl*) run_curl "$place" "$command" "$last" ;;
      *) if is_server "$command"; then run_server "$place" "$command"; else run "$place" "$command"; fi ;;
    esac
  done 3< <(commands "$readme")
  stop "$server"; server='' log=$clone.log
done
echo "$failed failed"
[ "$failed" = 0 ]
