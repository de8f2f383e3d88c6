// Package faults tests outbox where servers crash. It starts and kills
// PostgreSQL servers of its own; Kafka is the one of the other tests.
package faults
