package outboxops

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// DebeziumCut names a relay, and the publication and slot of Debezium. The events move from one to the
// other.
type DebeziumCut struct {
	// Relay is the name of the relay. For a move from Debezium, it is a new relay, or a relay that was
	// moved to Debezium.
	Relay string
	// Publication is MigrateConfig.Publication.
	Publication string
	// Slot is the connector's replication slot.
	Slot string
}

func (c DebeziumCut) validate() error {
	return errors.Join(checkRelay(c.Relay), check.Identifier("Publication", c.Publication), check.Identifier("Slot", c.Slot))
}

const (
	sqlCutFromDebezium = `SELECT {schema}.outbox_cut_from_debezium($1::text, $2::text, $3::text, $4::text)::text`
	sqlCutToDebezium   = `SELECT {schema}.outbox_cut_to_debezium($1::text, $2::text, $3::text, $4::text, $5::text)`
	sqlBeginRelay      = `SELECT {schema}.outbox_begin_relay($1::text, $2::text, $3::text, $4::text)::text`
)

// FromDebezium moves the events from Debezium to the relay, from this moment on. The publication no longer
// has them. The relay sends them once [Cuts.BeginRelay] lets it begin. Debezium still sends the events that
// were recorded before. Do not start the relay's processes before the cut: they would begin with the first
// event.
//
// At the cut, no transaction that has recorded an event may be open. FromDebezium waits for such
// transactions until ctx ends, in steps of 100 ms with pauses. During a step, other transactions wait
// behind it. The error is [ErrCutRefused] if the relay has begun already, or the publication has no events
// or is not one of outbox: outbox.Migrate makes it one.
// It is also an error if the progress of the connector is unknown, because the slot does not exist or the
// role must not read it: see [Cuts.DebeziumProgress]. Nothing is cut then.
func (c *Cuts) FromDebezium(ctx context.Context, cut DebeziumCut, why AuditInfo) error {
	if err := errors.Join(cut.validate(), why.check()); err == nil {
		if _, err := c.DebeziumProgress(ctx, cut); err != nil {
			return err
		}
	}
	return c.cutDebezium(ctx, "cut from Debezium", cut, why, func(tx pgx.Tx) (bool, error) {
		_, err := tx.Exec(ctx, c.fromDebezium, cut.Publication, cut.Relay, why.Operator, why.Reason)
		return true, err
	})
}

// ToDebezium moves the events from the relay to Debezium, from this moment on. The relay has sent all
// events that were recorded before, and ends. Its processes stand by until they are stopped. Start the
// connector before the cut, so that its slot exists.
//
// At the cut, no transaction that has recorded an event may be open, and recording waits until the relay
// has sent the last events. ToDebezium waits for both until ctx ends, in steps of at most 400 ms with
// pauses. The error is [ErrCutRefused] if failed events wait to be sent, if the publication has the events
// already or is not one of outbox, or if there is no slot.
func (c *Cuts) ToDebezium(ctx context.Context, cut DebeziumCut, why AuditInfo) error {
	return c.cutDebezium(ctx, "cut to Debezium", cut, why, func(tx pgx.Tx) (done bool, err error) {
		err = tx.QueryRow(ctx, c.toDebezium, cut.Publication, cut.Slot, cut.Relay, why.Operator, why.Reason).Scan(&done)
		return done, err
	})
}

// errRelayBehind means that a relay has not sent all events while recording was blocked.
var errRelayBehind = errors.New("the relay is behind: it has not sent all events within 300 ms in which nobody recorded one")

// cutDebezium tries until no transaction or relay prevents the cut.
func (c *Cuts) cutDebezium(ctx context.Context, what string, cut DebeziumCut, why AuditInfo, try func(pgx.Tx) (bool, error)) error {
	err := errors.Join(cut.validate(), why.check())
	var blocked error // why the try before has failed
	for pause := 100 * time.Millisecond; err == nil; pause = min(2*pause, 5*time.Second) {
		done := false
		err = pgx.BeginTxFunc(ctx, c.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
			if _, err = tx.Exec(ctx, cutSettings); err == nil {
				done, err = try(tx)
			}
			return err
		})
		switch {
		case err == nil && done:
			return nil
		case ctx.Err() != nil && blocked != nil:
			err = fmt.Errorf("%w; until then: %w", context.Cause(ctx), blocked)
			continue
		case err == nil:
			blocked = errRelayBehind
		case pg.IsLocked(err) || pg.IsTransient(err):
			blocked, err = err, nil
		default:
			continue
		}
		if wait.Sleep(ctx, pause); ctx.Err() != nil {
			err = fmt.Errorf("%w; until then: %w", context.Cause(ctx), blocked)
		}
	}
	return fmt.Errorf("outbox: %s: %w", what, orNotMigrated(cutError(err)))
}

// DebeziumProgress describes the changes that Debezium still has to read in front of a cut.
type DebeziumProgress struct {
	// Active is set if the connector is connected to its slot.
	Active bool
	// Unconfirmed is the number of events that the connector has not sent, or has not confirmed to
	// PostgreSQL. It confirms events when Kafka Connect commits offsets.
	Unconfirmed int64
}

// IsDone reports whether the relay may begin: the connector has confirmed everything, and is stopped.
func (p DebeziumProgress) IsDone() bool { return !p.Active && p.Unconfirmed == 0 }

// A slot that is in use cannot be read, but a copy of it can. The copy is temporary: it belongs to the
// session, like a temporary table.
const (
	sqlCopySlot = `SELECT pg_catalog.pg_copy_logical_replication_slot($1::text::name, $2::text::name, true)::text`
	sqlDropSlot = `SELECT pg_catalog.pg_drop_replication_slot($1::text::name)::text`
	sqlIsActive = `SELECT active FROM pg_catalog.pg_replication_slots WHERE slot_name = $1`
)

// sqlUnconfirmed counts the inserts into outbox in the messages of pgoutput that a slot would send: I, and
// the oid of the table. Other tables of the publication, which go on after the cut, do not count.
const sqlUnconfirmed = `
SELECT count(*) FROM pg_catalog.pg_logical_slot_peek_binary_changes($1::text::name, NULL, NULL, 'proto_version', '1', 'publication_names', pg_catalog.quote_ident($2)) AS change
 WHERE get_byte(change.data, 0) = ascii('I')
   AND substr(change.data, 2, 4) = ANY (ARRAY(SELECT oidsend({outbox}::regclass::oid) UNION ALL SELECT oidsend(t.relid::oid) FROM pg_catalog.pg_partition_tree({outbox}::regclass) AS t))`

// DebeziumProgress returns the progress of the connector. PostgreSQL decodes the rest of the slot from a
// copy, as it would for the connector. The role needs the attribute REPLICATION, and a slot of
// max_replication_slots must be free.
func (c *Cuts) DebeziumProgress(ctx context.Context, cut DebeziumCut) (p DebeziumProgress, err error) {
	err = cut.validate()
	if err == nil {
		err = c.db.AcquireFunc(ctx, func(conn *pgxpool.Conn) (err error) {
			p, err = c.progressOn(ctx, conn.Conn(), cut)
			return err
		})
	}
	if err != nil {
		return p, fmt.Errorf("outbox: progress of Debezium: %w", err)
	}
	return p, nil
}

func (c *Cuts) progressOn(ctx context.Context, conn *pgx.Conn, cut DebeziumCut) (p DebeziumProgress, err error) {
	err = conn.QueryRow(ctx, sqlIsActive, cut.Slot).Scan(&p.Active)
	if errors.Is(err, pgx.ErrNoRows) {
		return p, fmt.Errorf("%w: there is no replication slot %q, and it cannot be known what it has sent", ErrCutRefused, cut.Slot)
	}
	if err != nil {
		return p, err
	}
	copied := "outbox_cut_" + strconv.FormatUint(rand.Uint64(), 36)
	if _, err := conn.Exec(ctx, sqlCopySlot, cut.Slot, copied); err != nil {
		return p, err
	}
	err = conn.QueryRow(ctx, c.unconfirmed, copied, cut.Publication).Scan(&p.Unconfirmed)
	if ctx.Err() != nil {
		return p, errors.Join(err, conn.Close(context.WithoutCancel(ctx))) // drops the copy
	}
	_, dropped := conn.Exec(ctx, sqlDropSlot, copied)
	return p, errors.Join(err, dropped)
}

// AwaitDebezium waits until the connector has confirmed everything and is stopped, or ctx ends, and calls
// progress at once and then each second; nil is not called. Stop the connector when nothing is unconfirmed:
// progress may do it.
func (c *Cuts) AwaitDebezium(ctx context.Context, cut DebeziumCut, progress func(DebeziumProgress)) error {
	for {
		p, err := c.DebeziumProgress(ctx, cut)
		if err != nil {
			return err
		}
		if progress != nil {
			progress(p)
		}
		if p.IsDone() {
			return nil
		}
		if wait.Sleep(ctx, time.Second); ctx.Err() != nil {
			return fmt.Errorf("outbox: await Debezium: %w", context.Cause(ctx))
		}
	}
}

// BeginRelay lets the relay of [Cuts.FromDebezium] begin. The error is [ErrCutRefused] while the connector
// has not confirmed everything, or is not stopped, and [ErrNoCut] if there is no cut.
func (c *Cuts) BeginRelay(ctx context.Context, cut DebeziumCut, why AuditInfo) error {
	p, err := c.DebeziumProgress(ctx, cut)
	switch {
	case err != nil:
		return err
	case p.Unconfirmed > 0:
		return fmt.Errorf("outbox: begin relay: %w: the connector has not confirmed %d events", ErrCutRefused, p.Unconfirmed)
	case p.Active:
		return fmt.Errorf("outbox: begin relay: %w: the connector is not stopped, slot %s is in use", ErrCutRefused, cut.Slot)
	}
	return c.call(ctx, "begin relay", c.beginRelay, why, cut.Slot, cut.Relay)
}
