// Package faults tests outbox where servers and processes die, freeze, or tell
// the wrong time, and where the network between them fails. It starts and kills
// PostgreSQL servers, a PgBouncer, relays and consumers of its own. Kafka is the one of the
// other tests where nothing is done to it; brokers that die, refuse, say nothing,
// or keep shorter sessions than others allow are the test's own, and some of them
// are fake. Partitions that accept nothing, operators who leave transactions open, and very large
// transactions must delay no healthy event meanwhile.
// A cluster of three real brokers, of which one or two die, freeze or restart,
// shows how long a relay takes to recover, beside a plain producer.
package faults
