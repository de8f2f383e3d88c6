// Package migrations holds the tables of outbox as numbered SQL files.
//
// [github.com/outboxgo/outbox.Migrate] applies them. A project that has a
// migration tool of its own can pass [FS] to it instead: names are unqualified,
// so the tool's search_path chooses the schema, and the first line of each file
// is the annotation that goose asks for (a comment to tern and atlas).
//
// Each file has to be one transaction, and is about one subject. The files of the first
// release are the schema as it is: no table, index or function is defined twice. Later
// releases add files behind them.
//
// Services may be running meanwhile. A file that locks tables which may be in use fails with
// lock_not_available (55P03) if it does not get a lock within 100 ms, so that writers do not
// wait behind it: apply it again. A lock_timeout that the session has set stays.
//
// A role that may create in the schema can have its own code run by the role that applies the
// files. The first file revokes CREATE from PUBLIC if the role may do that, with a NOTICE. The
// file 0007_roles.sql fails if a table depends on code that another role has put into the schema.
// Functions look for names in pg_catalog only, and name everything else with the schema: after
// ALTER SCHEMA … RENAME they have to be created again. The function outbox_define, which the
// files use, inserts the name. It fails if another role has made a function named outbox_…, or if
// a sequence of outbox did not get its name.
//
// A file after those of the first release says with a line which older releases may run on the
// tables that it leaves: those that have the files up to a version.
//
//	-- outbox: compatible from 7
//
// Migrate of such a release logs a WARN then, so its processes can start during an upgrade and after
// a return to it. Without the line it returns ErrDatabaseAhead.
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
