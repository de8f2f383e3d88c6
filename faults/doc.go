// Package faults tests outbox where servers and processes die, freeze, or tell
// the wrong time. It starts and kills PostgreSQL servers and relays of its own;
// Kafka is the one of the other tests.
package faults
