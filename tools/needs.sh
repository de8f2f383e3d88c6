#!/usr/bin/env bash
# Checks that this machine has the programs that a command of this project needs.
#
#   tools/needs.sh demo|kafka|short|test|test-all|test-versions|test-pgbouncer|faults|bench-peers|screenshots|site|spec|spec-traces|ci
#
# The table below is the only list of them. The check takes less than a second
# and needs nothing but bash, because it runs before Go compiles or downloads
# anything. As root on Debian or Ubuntu it installs the missing packages;
# elsewhere it names them all, with the command that installs them, and exits
# with code 1. It runs with bash 3.2, which macOS has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Columns: program, group, packages of apt, dnf and brew (a comma between two, "-"
# if there is none), purpose. have_PROGRAM checks what is more than a command.
table() {
  cat <<'TABLE'
go            base     -                     -                         go              to build everything
certificates  base     ca-certificates       ca-certificates           ca-certificates to trust the servers of downloads
git           git      git                   git                       git             to list the files of a module
gcc           race     gcc,libc6-dev         gcc,glibc-devel           gcc             the race detector links C
java          kafka    default-jre-headless  java-21-openjdk-headless  temurin         to run Apache Kafka
pg_dump       dump     postgresql-client     postgresql                libpq           to copy a database
psql          dump     postgresql-client     postgresql                libpq           to restore the copy
pgbouncer     bouncer  pgbouncer             pgbouncer                 pgbouncer       to test through it
prometheus    metrics  prometheus            /usr/bin/prometheus       prometheus      to scrape an example and a relay
promtool      metrics  prometheus            /usr/bin/promtool         prometheus      to test the alerts
redis-server  cache    redis-server          redis                     redis           to cache pages in an example
psycopg       python   python3-psycopg       python3-psycopg3          -               of Python (pip install psycopg), to record events from there
confluent     python   python3-confluent-kafka python3-confluent-kafka -               of Python (pip install confluent-kafka), to read records from there
pip           pip      python3-pip           python3-pip           python          to download the checker of the models, the generator of the site, and Java 21 and a client for the schema registry
chromium      browser  chromium              chromium                  google-chrome   to test the operators' page
TABLE
}

# groups prints the groups of the table that a command needs.
groups() {
  case $1 in
    demo) echo base ;;
    kafka) echo base kafka ;;
    short) echo base git race ;;
    faults) echo base race kafka bouncer ;;
    bench-peers) echo base kafka ;; # Java for Kafka Connect, even if Kafka runs elsewhere
    test-versions) echo base race kafka dump bouncer metrics ;; # the module faults is among what it tests
    test-pgbouncer) echo base kafka bouncer metrics cache ;;
    screenshots) echo base browser ;;
    site) echo base pip ;;
    spec) echo kafka pip ;;
    spec-traces) echo base git kafka pip ;;
    test) echo base git kafka dump bouncer metrics cache ;;
    test-all | ci) echo base git race kafka dump bouncer metrics cache python pip browser ;;
    *) return 1 ;;
  esac
}

# number prints the first number of its input, for example the major version.
number() { sed -n '/[0-9]/{s/^[^0-9]*\([0-9][0-9]*\).*/\1/p;q;}'; }

# A Go since 1.21 downloads the version that go.mod asks for, unless GOTOOLCHAIN forbids it.
have_go() {
  local least found
  least=$(sed -n 's/^go \([0-9]*\.[0-9]*\).*/\1/p' ../go.mod)
  purpose="version $least or later, from https://go.dev/dl, $purpose"
  found=$(GOTOOLCHAIN=local go version 2>/dev/null | sed -n 's/.* go1\.\([0-9]*\).*/\1/p') || true
  [ -n "$found" ] || return 1
  [ "$found" -ge "${least#1.}" ] && return
  [ "$found" -ge 21 ] && [ "$(cd / && go env GOTOOLCHAIN)" != local ]
}

have_certificates() {
  local file
  [ "$(uname)" != Linux ] && return # the system has a store of its own
  for file in "${SSL_CERT_FILE:-}" /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt \
    /etc/ssl/ca-bundle.pem /etc/pki/tls/cacert.pem /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem /etc/ssl/cert.pem; do
    [ -s "$file" ] && return
  done
  return 1
}

# The headers of C belong to a package that a compiler only recommends.
have_gcc() {
  [ "$(uname)" = Darwin ] && return # the race detector needs no C there
  ${CC:-gcc} -E - <<<'#include <stdlib.h>' >/dev/null 2>&1
}

# Some tests start brokers of their own. Apart from these, a container or a given
# broker will do.
have_java() {
  local version
  case $command in
    kafka | test-pgbouncer)
      case ${KAFKA:-} in fake | docker | none) return ;; esac
      [ -n "${OUTBOX_KAFKA_BROKERS:-}" ] || have_docker && return
      ;;
  esac
  version=$("${JAVA_HOME:+$JAVA_HOME/bin/}java" -version 2>&1 | grep -m 1 version | number) || true
  purpose="version 17 or later, $purpose"
  [ "${version:-0}" -ge 17 ]
}

have_docker() {
  local socket host=${DOCKER_HOST:-}
  case $host in tcp:* | ssh:* | http*) return ;; esac
  for socket in "${host#unix://}" /var/run/docker.sock "${HOME:-}/.docker/run/docker.sock" "/run/user/$(id -u)/docker.sock"; do
    [ -S "$socket" ] && return
  done
  return 1
}

# The tests dump PostgreSQL 14; pg_dump reads servers that are older than itself.
have_pg_dump() {
  purpose="version 14 or later, $purpose"
  [ "$(pg_dump --version 2>/dev/null | number)" -ge 14 ] 2>/dev/null
}

# Debian puts it where only root's PATH looks; the tests know that.
have_pgbouncer() { PATH=$PATH:/usr/sbin command -v pgbouncer >/dev/null; }

# A Python that comes first in PATH may not be the one that packages are for. The tests look at both.
have_psycopg() { imports psycopg; }
have_confluent() { imports confluent_kafka; }
imports() { python3 -c "import $1" 2>/dev/null || /usr/bin/python3 -c "import $1" 2>/dev/null; }

have_pip() { python3 -m pip --version >/dev/null 2>&1; }

# These are the places where the tests look, too.
have_chromium() {
  local name
  for name in headless_shell headless-shell chromium chromium-browser google-chrome google-chrome-stable google-chrome-beta \
    google-chrome-unstable /usr/local/bin/chrome /snap/bin/chromium chrome "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"; do
    command -v "$name" >/dev/null && return
  done
  return 1
}

# check sets missing (a line for each program) and packages (what installs them).
check() {
  local program group apt dnf brew purpose package
  missing="" packages="" by_hand=""
  while read -r program group apt dnf brew purpose; do
    [[ " $wanted " == *" $group "* ]] || continue
    if declare -F "have_$program" >/dev/null; then
      "have_$program" && continue
    else
      command -v "$program" >/dev/null && continue
    fi
    missing+=$(printf '  %-13s %s' "$program" "$purpose")$'\n'
    case $manager in apt-get) package=$apt ;; dnf) package=$dnf ;; brew) package=$brew ;; *) continue ;; esac
    if [ "$package" = - ]; then
      by_hand=yes
      continue
    fi
    for package in ${package//,/ }; do
      [[ " $packages " == *" $package "* ]] || packages+=" $package"
    done
  done < <(table)
  packages=${packages# }
  # Ubuntu has Chromium under another name.
  if [ "$manager" = apt-get ] && grep -qs '^ID=ubuntu' /etc/os-release; then
    packages=${packages/%chromium/chromium-browser}
  fi
}

# report names everything that is missing, and how to install it.
report() {
  printf '%s needs programs that are missing here:\n%s' "$label" "$missing"
  if [ -n "$packages" ]; then
    case $manager in
      apt-get) printf 'Install them with:\n  sudo apt-get update && sudo apt-get install -y --no-install-recommends %s\n' "$packages" ;;
      dnf) printf 'Install them with:\n  sudo dnf install -y %s\n' "$packages" ;;
      brew)
        printf 'Install them with:\n  brew install %s' "$packages"
        [[ $packages != *libpq* ]] || printf ' && brew link --force libpq' # it is not in PATH otherwise
        echo
        ;;
    esac
  fi
  if [ "$command" = test ] || [ "$command" = test-all ] || [ "$command" = ci ]; then
    echo "Without them, make test ARGS=-short runs the tests that need only Go, git and gcc."
  fi
}

install() {
  printf '%s needs programs that are missing here:\n%sinstalling %s\n' "$label" "$missing" "$packages"
  apt-get -q update
  # shellcheck disable=SC2086 # one word for each package
  DEBIAN_FRONTEND=noninteractive apt-get -q -o Dpkg::Use-Pty=0 install -y --no-install-recommends $packages
}

command=${1:-}
wanted=$(groups "$command") || {
  sed -n '2,4p' "${BASH_SOURCE[0]##*/}" >&2
  exit 2
}
label="make $command" manager=""
case $command in short) label="make test ARGS=-short" ;; kafka) label="a real Kafka" ;; ci) label=".ci/run" ;; esac
for manager in apt-get dnf brew ""; do
  if [ -n "$manager" ] && command -v "$manager" >/dev/null; then break; fi
done

check
if [ -n "$missing" ] && [ -n "$packages" ] && [ -z "$by_hand" ] && [ "$manager" = apt-get ] && [ "$(id -u)" = 0 ]; then
  install
  check
fi
if [ -n "$missing" ]; then
  report >&2
  exit 1
fi
