#!/usr/bin/env bash
# Writes jars/VERSION.txt, the list of the Java archives that Apache Kafka VERSION needs
# to run, each with its SHA-256. With the list, kafkaserver can run that version; Version
# in libraries.go is the default. Run it from anywhere:
#
#   tools/kafkaserver/jars.sh 4.1.0
#   LOG4J=2.25.5 tools/kafkaserver/jars.sh 4.4.0
#
# This is the only step that needs Maven, which finds out what depends on what.
# LOG4J is the version of log4j that the release of Kafka contains, SCALA that of Scala.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
version=${1:?usage: jars.sh VERSION}
log4j=${LOG4J:-2.24.3}
scala=${SCALA:-2.13}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

dependency() {
  echo "    <dependency><groupId>$1</groupId><artifactId>$2</artifactId><version>$3</version></dependency>"
}

cat >"$work/pom.xml" <<POM
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>outbox.tools</groupId>
  <artifactId>kafka-server-libraries</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
$(dependency org.apache.kafka "kafka_$scala" "$version")
$(dependency org.apache.kafka kafka-server "$version")
$(dependency org.apache.logging.log4j log4j-slf4j-impl "$log4j")
$(dependency org.apache.logging.log4j log4j-core "$log4j")
  </dependencies>
</project>
POM

mvn --batch-mode --quiet --file "$work/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies \
  -DincludeScope=runtime -Dmdep.useRepositoryLayout=true -DoutputDirectory="$work/jars"
(cd "$work/jars" && find . -name '*.jar' | sed 's,^\./,,' | LC_ALL=C sort | xargs sha256sum) >"$work/jars.txt"
mv "$work/jars.txt" "jars/$version.txt"
echo "jars/$version.txt lists $(wc -l <"jars/$version.txt") archives"
