// Package migrations holds the tables of outbox as numbered SQL files.
//
// [github.com/outboxgo/outbox.Migrate] applies them. A project that has a
// migration tool of its own can hand [FS] to it instead: names are unqualified,
// so the tool's search_path chooses the schema, and the first line of each file
// is the annotation that goose asks for (a comment to tern and atlas).
//
// Services may be at work meanwhile. A file that does not get its locks within 100 ms
// fails with lock_not_available (55P03), so that writers do not wait behind it: apply it
// again. Another lock_timeout of the session stays. Only short changes of the catalogue
// lock outbox; while indexes of outbox_failed are built, the relay waits. Each file has to
// be one transaction.
//
// Whoever may create in the schema can have the role that applies the files run code of his
// own: revoke CREATE from PUBLIC before the first. The file 0010_least_privilege.sql does so where
// the role may, with a NOTICE, and fails if a table depends on code that others have made in the
// meantime. Functions look for names in pg_catalog and name all else with the schema: after ALTER
// SCHEMA … RENAME they have to be made again.
//
// outbox is a plain table then. To partition it by ranges of a million ids, run
// these as three transactions, in a file of your own (goose: NO TRANSACTION), each
// again where it does not get its lock within 50 ms:
//
//	SELECT outbox_prepare_partitions(1000000);
//	ALTER TABLE outbox VALIDATE CONSTRAINT outbox_before_partitions;
//	SELECT outbox_partition();
//
// From the first to the last of them, ids beyond the next ten million are refused.
// The relay, which needs the rights in docs/roles.md, makes and drops partitions.
package migrations

import "embed"

// FS holds the files 0001_….sql, 0002_….sql and so on, without gaps. A file
// never changes once it has been released.
//
//go:embed *.sql
var FS embed.FS
