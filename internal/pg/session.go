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

// sessions is what is known about the sessions of a pool.
type sessions struct {
	text   bool        // they return values as text
	strict atomic.Bool // they begin transactions under another level than READ COMMITTED
}

var pools perpool.Registry[*sessions]

func sessionsOf(db *pgxpool.Pool) *sessions {
	return pools.Get(db, "", func(func() *pgxpool.Pool) *sessions {
		mode := db.Config().ConnConfig.DefaultQueryExecMode
		return &sessions{text: mode == pgx.QueryExecModeExec || mode == pgx.QueryExecModeSimpleProtocol}
	})
}

// makeStrict records that transactions on a pool begin under a strict level.
func makeStrict(db BatchSender) {
	if pool, is := db.(*pgxpool.Pool); is {
		sessionsOf(pool).strict.Store(true)
	}
}

// send runs the statements of a batch in one transaction: on a pool under READ COMMITTED, on a connection or a
// transaction under its level. Values are in the formats that pgx reads. SET costs some time. So it is sent where the
// level of the sessions is known to be another, or if rare is set.
func send(ctx context.Context, db BatchSender, rare bool, statements *pgx.Batch) error {
	text := true
	var first []*pgx.QueuedQuery
	if pool, is := db.(*pgxpool.Pool); is {
		known := sessionsOf(pool)
		text = known.text
		if rare || known.strict.Load() {
			first = append(first, &pgx.QueuedQuery{SQL: sqlReadCommitted})
		}
	}
	if text {
		first = append(first, &pgx.QueuedQuery{SQL: TextSettings})
	}
	statements.QueuedQueries = append(first, statements.QueuedQueries...)
	err := db.SendBatch(ctx, statements).Close()
	const serializationFailure, invalidState = "40001", "25000" // functions of outbox raise the second one under another level
	if hasCode(err, serializationFailure, invalidState) {
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
