// Package outboxops is for operators: it reads the tables of outbox and changes failures. The page of
// outboxadmin and the command outbox are built on it, and your own tools can be.
//
//   - [Failures] lists events that did not reach Kafka or a handler, and retries, resolves, edits or holds
//     them. Each action is kept in outbox_audit with the operator and the reason.
//   - [Deliveries] counts the deliveries of consumer groups.
//   - [Inspector] shows the state of relays, recorded events, open transactions and partitions. It changes
//     nothing.
//   - [Consumers] shows consumer groups, and pauses and resumes them.
//   - [Monitor] sends alerts when no relay and no worker runs that could.
//   - [Rewind] sets a consumer group back, after a restore or a failover.
//
// All except Rewind use only tables, so any process may use them, whether or not it runs a relay.
package outboxops

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

var (
	// ErrNotFound is returned by the methods of [Failures] and by [Inspector.Event] if the failure or event
	// does not exist, or no longer exists.
	ErrNotFound = errors.New("not found")
	// ErrStatus is returned by the methods of [Failures] if the status of the failure does not allow the
	// action. The methods of [Consumers] return it if the pause exists already, or does not exist.
	ErrStatus = errors.New("not possible in this status")
)

const (
	defaultLimit = 100
	maxLimit     = 1000
)

// checkDB checks where the tables are, and fills in the schema.
func checkDB(db *pgxpool.Pool, schema *string) error {
	*schema = cmp.Or(*schema, pg.DefaultSchema)
	err := check.Schema(*schema)
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", outbox.ErrNilArgument), err)
	}
	return err
}

// orNotMigrated adds to an error of PostgreSQL that the tables are missing, or belong to another release.
func orNotMigrated(err error) error {
	if pg.IsUndefined(err) {
		return fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	return err
}

// limitOf returns the number of rows of a page.
func limitOf(limit int) (int, error) {
	if err := errors.Join(check.NotNegative("Limit", limit), check.NotAbove("Limit", limit, maxLimit)); err != nil {
		return 0, err
	}
	if limit == 0 {
		return defaultLimit, nil
	}
	return limit, nil
}
