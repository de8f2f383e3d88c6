#!/usr/bin/env bash
# Walks a fault run through the model of the lease, for `make spec-traces`:
#
#   tools/spec_traces.sh [MISTAKE ...]
#
# Relays of a build with the tag outbox_trace write what they do, while a test kills, freezes, cuts off and stops them for
# two minutes (SECONDS_TRACED=120). TLC must find an order of all steps that spec/traces/LeaseTrace.tla allows. Then the same is done
# for each mistake in spec/traces/mistakes, or for those that are named alone: a patch of the code, which must apply, and
# whose run TLC must reject at the step that the patch names. SEED repeats the disturbances of a run. What was written is
# kept in bin/traces.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/tlc.sh"
root=$(dirname "$bin")

# disturb NAME SECONDS [FLAG ...] makes a run, and keeps what it has written in bin/traces/NAME.
disturb() {
  local traces=$bin/traces/$1 seconds=$2
  shift 2
  rm -rf "$traces"
  mkdir -p "$traces"
  (cd "$root/faults" && OUTBOX_TRACE=$traces go test -tags outbox_trace -count=1 -timeout 30m -run '^TestTraces$' . -v ${SEED:+-faults.seed="$SEED"} \
    -faults.traced="${seconds}s" "$@") >"$traces/log" 2>&1 || {
    cat "$traces/log"
    echo "the run has failed" >&2
    exit 1
  }
  grep -h -e seed -e 'arrived' "$traces/log"
}

# walk NAME lets TLC walk a run. It sets verdict to walked, rejected or the error of TLC.
walk() {
  local code=0
  rm -rf "$work/states"
  cp traces/LeaseTrace.* "$work"
  python3 "$root/tools/spec_traces.py" module "$bin/traces/$1" >"$work/LeaseTraceData.tla"
  (cd "$work" && tlc LeaseTrace.tla LeaseTrace.cfg) >"$bin/traces/$1/tlc" 2>&1 || code=$?
  verdict=$(sed -n -e 's/^"walked to the end"$/walked/p' -e 's/^Error: Invariant \(.*\) is violated.*/violates \1/p' "$bin/traces/$1/tlc" | head -1)
  states=$(sed -n 's/^\([0-9]*\) states generated, \([0-9]*\) distinct.*/\2/p' "$bin/traces/$1/tlc" | tail -1)
  [ -n "$verdict" ] || [ "$code" != 0 ] || verdict=rejected
  : "${verdict:=TLC fails (exit $code), see bin/traces/$1/tlc}"
}

rejected() { python3 "$root/tools/spec_traces.py" rejected "$bin/traces/$1" "${@:2}" <"$bin/traces/$1/tlc"; }

failed=0
if [ $# = 0 ]; then
  began=$SECONDS
  disturb run "${SECONDS_TRACED:-120}"
  walk run
  case $verdict in
    walked) echo "ok    the model allows the run: $states states, $((SECONDS - began)) s" ;;
    *)
      failed=1
      echo "WRONG the model does not allow the run: $verdict, see bin/traces/run"
      rejected run || true
      ;;
  esac
fi
[ $# -gt 0 ] || set -- $(basename -s .patch traces/mistakes/*.patch)
for name in "$@"; do
  began=$SECONDS
  patch=$PWD/traces/mistakes/$name.patch
  head() { sed -n "s/^$1: //p" "$patch"; }
  rm -rf "$work/code"
  mkdir "$work/code"
  git -C "$root" apply --numstat "$patch" | while read -r _ _ file; do
    mkdir -p "$work/code/$(dirname "$file")"
    cp "$root/$file" "$work/code/$file"
    echo "$file"
  done >"$work/files"
  if ! (cd "$work/code" && git apply "$patch"); then
    failed=1
    echo "WRONG $name: the patch does not apply"
    continue
  fi
  sed "s|.*|\"$root/&\": \"$work/code/&\"|" "$work/files" | paste -sd, | sed 's/.*/{"Replace": {&}}/' >"$work/overlay.json"
  disturb "$name" 20 -overlay="$work/overlay.json" -faults.story="$(head disturb)" -faults.refused="$(head refuse)"
  walk "$name"
  if [ "$verdict" = walked ] || [[ $verdict == TLC* ]]; then
    failed=1
    echo "WRONG $name: $(sed -n 1p "$patch") The model should not allow the run: $verdict"
  elif ! told=$(rejected "$name" "$(head 'stops at')"); then
    failed=1
    echo "WRONG $name: rejected for another reason:"
    echo "$told"
  else
    echo "ok    $name: $(sed -n 1p "$patch") The model does not allow the run: $verdict, $states states, $((SECONDS - began)) s"
    sed 's/^/        /' <<<"$told"
  fi
done
exit $failed
