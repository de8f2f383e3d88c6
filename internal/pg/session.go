package pg

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/perpool"
)

// sqlReadCommitted is for the rest of its transaction, if it is the first statement. Under a stricter level statements
// fail because others have changed what they lock, and make transactions of the host fail. A SELECT with set_config
// would take its snapshot before.
const sqlReadCommitted = `SET transaction_isolation = 'read committed'`

// strict are the pools whose sessions begin transactions under another level than READ COMMITTED.
var (
	strict    perpool.Registry[*atomic.Bool]
	anyStrict atomic.Bool
)

func strictness(db *pgxpool.Pool) *atomic.Bool {
	return strict.Get(db, "", func(func() *pgxpool.Pool) *atomic.Bool { return new(atomic.Bool) })
}

// isStrict reports whether statements on a pool have to choose their level. Connections and transactions have theirs.
func isStrict(db BatchSender) bool {
	pool, is := db.(*pgxpool.Pool)
	return is && anyStrict.Load() && strictness(pool).Load()
}

// makeStrict records that transactions on a pool begin under a strict level.
func makeStrict(db BatchSender) {
	if pool, is := db.(*pgxpool.Pool); is {
		anyStrict.Store(true)
		strictness(pool).Store(true)
	}
}

// send runs the statements of a batch in one transaction, under READ COMMITTED where they are sent on a pool.
// SET costs some time. So it is sent where the level of the sessions is known to be another, or if rare is set.
func send(ctx context.Context, db BatchSender, rare bool, statements *pgx.Batch) error {
	_, pooled := db.(*pgxpool.Pool)
	if pooled && (rare || isStrict(db)) {
		var batch pgx.Batch
		batch.Queue(sqlReadCommitted)
		batch.QueuedQueries = append(batch.QueuedQueries, statements.QueuedQueries...)
		statements = &batch
	}
	err := db.SendBatch(ctx, statements).Close()
	const serializationFailure = "40001"
	if hasCode(err, serializationFailure) {
		makeStrict(db)
	}
	return err
}

// utf8 is what PostgreSQL calls the encoding. In a session with the encoding sqlASCII it converts nothing.
const utf8, sqlASCII = "UTF8", "SQL_ASCII"

const sqlSession = `
SELECT current_database()::text, current_user::text, current_setting('server_encoding'), current_setting('client_encoding'),
       current_setting('default_transaction_isolation') <> 'read committed'`

// CheckSessions returns [ErrEncoding] where the database or its sessions have another encoding than UTF8. PostgreSQL
// would convert texts, or refuse those that the other encoding does not have. CheckSessions also learns the level of
// isolation of the sessions, for [Query].
func CheckSessions(ctx context.Context, db BatchSender) error {
	var database, role, server, client string
	var level bool
	err := QueryRow(ctx, db, sqlSession).Scan(&database, &role, &server, &client, &level)
	switch {
	case err != nil:
		return fmt.Errorf("read the settings of a session: %w", err)
	case server != utf8:
		return fmt.Errorf("%w: database %s has the encoding %s; "+
			"create one with ENCODING 'UTF8' TEMPLATE template0, and restore a dump there", ErrEncoding, database, server)
	case client != utf8 && client != sqlASCII:
		return fmt.Errorf("%w: sessions of role %s in database %s have client_encoding %s; "+
			"reset it for the role and the database, or add client_encoding=UTF8 to the address", ErrEncoding, role, database, client)
	case level:
		makeStrict(db)
	}
	return nil
}
