// Package interop tests that outbox and the official CloudEvents SDK for Go mean
// the same by a Kafka record: the SDK reads what a relay has sent, and the file
// testdata/cloudevents_sdk.json of the root holds what the SDK sends, for the
// tests of our decoder. It also has Debezium read outbox, in Kafka Connect, and a relay take over from
// it and hand back.
package interop
