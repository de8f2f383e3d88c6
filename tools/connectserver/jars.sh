#!/usr/bin/env bash
# Writes jars.txt, the list of the Java archives that Kafka Connect and Debezium need to
# run, each with its SHA-256, as pom.xml says. Run it for a new version, which pom.xml
# names, and change the versions in libraries.go as well. Run it from anywhere:
#
#   tools/connectserver/jars.sh
#
# This is the only step that needs Maven, which finds out what depends on what.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mvn --batch-mode --quiet --file pom.xml org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
  -DincludeScope=runtime -Dmdep.useRepositoryLayout=true -DoutputDirectory="$work/jars"
(cd "$work/jars" && find . -name '*.jar' | sed 's,^\./,,' | LC_ALL=C sort | xargs sha256sum) >"$work/jars.txt"
mv "$work/jars.txt" jars.txt
echo "jars.txt lists $(wc -l <jars.txt) archives"
