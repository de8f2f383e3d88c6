package sqltx

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"time"
)

// bridge is the one [sql.DB] of the process. It has no connections of its own: its connector takes the one in
// the context of BeginTx. To make another one for each transaction would take twice as long as all the rest.
//
// A [sql.DB] has a goroutine, so it is closed when it was not used for a moment.
var bridge struct {
	sync.Mutex
	db    *sql.DB // nil while it has no user
	users int
	used  bool // since the last look of closeUnused
}

// unusedAfter is the shortest time until an unused bridge is closed.
const unusedAfter = 50 * time.Millisecond

// acquire returns the bridge, which the caller gives back.
func acquire() *sql.DB {
	bridge.Lock()
	defer bridge.Unlock()
	if bridge.db == nil {
		bridge.db = sql.OpenDB(connector{})
		bridge.db.SetMaxIdleConns(-1) // each connection belongs to one transaction
		time.AfterFunc(unusedAfter, closeUnused)
	}
	bridge.users, bridge.used = bridge.users+1, true
	return bridge.db
}

func release() {
	bridge.Lock()
	defer bridge.Unlock()
	bridge.users--
}

// closeUnused closes the bridge if it was not used since the last check. Otherwise it checks again
// later.
func closeUnused() {
	bridge.Lock()
	defer bridge.Unlock()
	if bridge.users > 0 || bridge.used {
		bridge.used = false
		time.AfterFunc(unusedAfter, closeUnused)
		return
	}
	_ = bridge.db.Close() // it has no connections
	bridge.db = nil
}

// connector takes the connection from the context.
type connector struct{}

type connKey struct{}

var errNoTransaction = errors.New("no transaction runs")

// Connect implements [driver.Connector].
func (connector) Connect(ctx context.Context) (driver.Conn, error) {
	if c, ok := ctx.Value(connKey{}).(*conn); ok {
		return c, nil
	}
	return nil, errNoTransaction
}

// Driver implements [driver.Connector].
func (c connector) Driver() driver.Driver { return c }

// Open implements [driver.Driver].
func (connector) Open(string) (driver.Conn, error) { return nil, errNoTransaction }
