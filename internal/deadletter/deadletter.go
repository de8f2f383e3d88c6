// Package deadletter holds what the package outbox, which writes dead letters, and the
// package outboxdlq, which reads them and sends them back, must agree on.
package deadletter

import "fmt"

// Prefix begins the name of every header that a record gets in a dead-letter topic.
const Prefix = "dlq_"

// Origin names a record by its position in Kafka: topic-partition-offset.
func Origin(topic string, partition int32, offset int64) string {
	return fmt.Sprintf("%s-%d-%d", topic, partition, offset)
}
