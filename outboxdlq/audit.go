package outboxdlq

import (
	"context"
	"fmt"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

const (
	maxReason = 9_000 // outbox_audit takes 10,000 characters, and the topic is added
	maxGroup  = 255
	// maxAudited bounds the rows in outbox_audit of one run. Who writes dead letters chooses the groups in them.
	maxAudited = 100
)

const sqlAuditReplay = `SELECT {schema}.outbox_audit_replay($1::text, $2::text, $3::text, $4::text)`

// audit writes who sends dead letters back, and why, before the first one of a topic and a group. Further groups than
// maxAudited share a row without a group.
func (r *run) audit(ctx context.Context, resends []resend) error {
	if r.cfg.DB == nil {
		return nil
	}
	for _, s := range resends {
		to := addressee{s.Group, s.OriginalTopic}
		if s.err != nil || r.audited[to] {
			continue
		}
		if len(r.audited) >= maxAudited || check.Text(s.Group, maxGroup) != nil {
			to.group = ""
		}
		if r.audited[to] {
			continue
		}
		a := r.cfg.Audit
		_, err := pg.Exec(ctx, r.cfg.DB, pg.InSchema(sqlAuditReplay, r.cfg.Schema), to.topic, to.group, a.Operator, a.Reason+" (dead letters of "+r.cfg.Topic+")")
		if err != nil {
			return fmt.Errorf("add row to outbox_audit: %w", notMigrated(err))
		}
		r.audited[to] = true
	}
	return nil
}

// notMigrated adds to an error of PostgreSQL that the tables are missing, or belong to another release.
func notMigrated(err error) error {
	if pg.IsUndefined(err) {
		return fmt.Errorf("%w: %w", outbox.ErrNotMigrated, err)
	}
	return err
}
