// Package migrations holds the tables of outbox as numbered SQL files.
//
// [github.com/outboxgo/outbox.Migrate] applies them. A project that has a
// migration tool of its own can hand [FS] to it instead: names are unqualified,
// so the tool's search_path chooses the schema, and the first line of each file
// is the annotation that goose asks for (a comment to tern and atlas).
package migrations

import "embed"

// FS holds the files 0001_….sql, 0002_….sql and so on, without gaps. A file
// never changes once it has been released.
//
//go:embed *.sql
var FS embed.FS
