// Package faults tests outbox where servers and processes die, freeze, or tell
// the wrong time, and where the network between them fails. It starts and kills
// PostgreSQL servers, relays and consumers of its own. Kafka is the one of the
// other tests, except in TestFaults, which kills that too, and TestKilledConsumers,
// which needs sessions shorter than a broker allows.
package faults
