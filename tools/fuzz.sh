#!/usr/bin/env bash
# Runs each fuzz target of this module with INPUTS=5000 inputs, or for TIME=5m each if TIME is set. When a time is over,
# go test may fail with "context deadline exceeded" though nothing was found (golang/go#75804): that is the end, unless it
# has written an input. What was found once is in testdata/fuzz and runs with every test. TARGETS=Batch picks those that
# match, and ARGS go to go test.
#
# A decoder of bytes that others have written, and its target:
#   records: CloudEvents, other producers, Debezium            FuzzDeliver, FuzzForeign
#   records: batches, compressed and as a stream               FuzzBatch, FuzzBatchStream, FuzzSnappy
#   records: dead letters, headers of replays                  FuzzDeadLetter, FuzzReplay
#   rows of outbox: columns, headers, traceparent, JSON        FuzzStoredEvent, FuzzJSONB
#   rows of event_delivery: the record of a parked event       FuzzParked
#   names in alerts: Slack, PagerDuty, mail                    FuzzAlert
#   names in the output of the command line                    FuzzTerminal
#   requests: trace ids; the page's queries, forms and JSON    FuzzTrace, FuzzRequest
#   files: archives, users of the page                         FuzzReadFile, FuzzUsers
#   search_path of roles; times of the command line            FuzzSearchPath, FuzzTimes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

much=${TIME:-${INPUTS:-5000}x}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
git grep -oE '^func Fuzz[A-Za-z0-9]+' -- '*_test.go' | sed 's/:func / /' | { grep -E -- "${TARGETS:-.}" || true; } | while read -r file target; do
  echo "== $target, $much"
  # shellcheck disable=SC2086 # several arguments
  if ! go test -run '^$' -fuzz "^$target\$" -fuzztime "$much" -fuzzminimizetime 2s ${ARGS:-} "./$(dirname "$file")" >"$log" 2>&1 </dev/null; then
    tail -n 60 "$log"
    if [ -z "${TIME:-}" ] || grep -q 'Failing input written' "$log" || ! grep -q 'context deadline exceeded' "$log"; then
      exit 1
    fi
    continue
  fi
  grep -E '^(fuzz: elapsed|ok)' "$log" | tail -n 2
done
