package tables

// AuditActions are the actions in outbox_audit: on failures and keys, on consumer groups, on events that are sent or
// handled again, on archives and their partitions, and on what is moved between Kafka, workers and Debezium.
var AuditActions = []string{"retry", "edit", "resolve", "hold", "release", "pause", "resume", "rewind", "replay", "forget", "forget-action", "cancel", "expire",
	"to-kafka", "to-postgres", "finish-cut", "cancel-cut", "from-debezium", "begin-relay", "to-debezium", "start-group", "stop-archive", "read"}
