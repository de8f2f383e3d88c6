// Package interop tests that outbox and the official CloudEvents SDK for Go mean the same by a
// Kafka record: the SDK reads what a relay has sent, and the file
// internal/envelope/testdata/cloudevents_sdk.json holds what the SDK sends, for the tests of our
// decoder. Debezium reads outbox, in Kafka Connect, and events move from Debezium to a relay and back. The
// contracts with other languages hold: what psql and Python record arrives, and Python reads what a
// relay sends.
package interop
