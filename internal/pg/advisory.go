package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// sqlAdvisoryHolder finds the session that has the advisory lock on the hash of the text $1.
const sqlAdvisoryHolder = `
SELECT coalesce(l.pid, 0), coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start
  FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND (l.classid::bigint << 32) | l.objid::bigint = hashtextextended($1::text, 0::bigint)
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
 LIMIT 1`

// AdvisoryHolder describes the session that has the advisory lock on the hash of a text, for an error. It works also
// when ctx has just ended.
func AdvisoryHolder(ctx context.Context, db BatchSender, text string) string {
	const patience = time.Second
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	var h Holder
	err := QueryRow(ctx, db, sqlAdvisoryHolder, text).Scan(h.Fields()...)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "a session that has let go"
	case err != nil:
		return fmt.Sprintf("a session that is not known (%v)", err)
	}
	return fmt.Sprintf("%v, %s", h, cmp.Or(h.State, "state not visible"))
}
