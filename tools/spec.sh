#!/usr/bin/env bash
# Checks the models in spec/ with TLC, or those whose configurations are named:
#
#   tools/spec.sh [NAME.cfg ...]
#
# A configuration whose first line is "\* expect INVARIANT" has a seeded mistake: it must violate that invariant. Its
# constants, but for Mistakes, must be those of a configuration without mistakes. Its counterexample is printed in words
# (spec_words.py). All others must hold.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/tlc.sh"

# constants CFG prints a configuration without its first line, what it checks, and its mistakes.
constants() { sed -e 1d -e '/^INVARIANT/d' -e '/Mistakes =/d' "$1"; }

# has_right_one CFG reports whether a configuration without mistakes has the same constants, and checks the same thing.
has_right_one() {
  local right checks
  checks=$(sed -n '1s/^\\\* expect //p' "$1")
  [ "$checks" != "a temporal property" ] || checks=PROPERTY
  for right in "${1%%[-.]*}"*.cfg; do
    if grep -q 'Mistakes = {}$' "$right" && grep -qw "$checks" "$right" && [ "$(constants "$right")" = "$(constants "$1")" ]; then
      return 0
    fi
  done
  return 1
}

[ $# -gt 0 ] || set -- *.cfg
failed=0
for cfg in "$@"; do
  expect=$(sed -n '1s/^\\\* expect //p' "$cfg")
  began=$SECONDS code=0
  tlc "${cfg%%[-.]*}.tla" "$cfg" >"$work/out" 2>&1 || code=$?
  states=$(sed -n 's/^\([0-9]*\) states generated, \([0-9]*\) distinct.*/\2/p' "$work/out" | tail -1)
  found=$(sed -n -e 's/^Error: Invariant \(.*\) is violated.*/\1/p' -e 's/^Error: Temporal properties were violated.*/a temporal property/p' "$work/out" | head -1)
  case $code:$found in
    0:) result=holds ;;
    12:* | 13:*) result="violates $found" ;;
    *) result="fails (exit $code)" ;;
  esac
  verdict=ok words=
  if [ "$result" != "${expect:+violates }${expect:-holds}" ]; then
    verdict=WRONG failed=1
    cp "$work/out" "$bin/spec-${cfg%.cfg}.out"
    result+=", see bin/spec-${cfg%.cfg}.out"
  elif [ -n "$expect" ] && ! has_right_one "$cfg"; then
    verdict=WRONG failed=1
    result+=", but no configuration without mistakes has its constants"
  elif [ -n "$expect" ] && ! words=$(python3 ../tools/spec_words.py "${cfg%%[-.]*}.tla" "$cfg" <"$work/out"); then
    verdict=WRONG failed=1
    result+=", but its counterexample has no words"
  fi
  printf '%-5s %-32s %7s states %4d s  %s\n' "$verdict" "${cfg%.cfg}" "${states:-?}" $((SECONDS - began)) "$result"
  [ -z "$words" ] || echo "$words"
  rm -rf "$work/states"
done
exit $failed
