#!/usr/bin/env bash
# Runs each fuzz target of this module for its part of SECONDS_IN_ALL, by default 60. What
# was found once is in testdata/fuzz and runs with every test.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

targets=$(git grep -oE '^func Fuzz[A-Za-z0-9]+' -- '*_test.go' | sed 's/:func / /')
each=$((${SECONDS_IN_ALL:-60} / $(wc -l <<<"$targets")))
while read -r file target; do
  echo "== $target, $each s"
  go test -run '^$' -fuzz "^$target\$" -fuzztime "${each}s" "./$(dirname "$file")"
done <<<"$targets"
