package pg

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Connect makes a connection as a pool does, but outside of the pool. Change may change its configuration, and may be
// nil. The caller closes the connection with [Disconnect].
func Connect(ctx context.Context, db *pgxpool.Pool, change func(*pgx.ConnConfig)) (conn *pgx.Conn, err error) {
	cfg := db.Config()
	if change != nil {
		change(cfg.ConnConfig)
	}
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, fmt.Errorf("connect: BeforeConnect of the pool: %w", err)
		}
	}
	if conn, err = pgx.ConnectConfig(ctx, cfg.ConnConfig); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if cfg.AfterConnect != nil {
		if err := cfg.AfterConnect(ctx, conn); err != nil {
			Disconnect(conn)
			return nil, fmt.Errorf("connect: AfterConnect of the pool: %w", err)
		}
	}
	return conn, nil
}

const (
	sqlBackend = `SELECT pg_catalog.pg_backend_pid()`
	sqlSafe    = `SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)`
)

// SafeSession is an AfterConnect of a pool. It keeps the session from finding functions and operators that another
// role has made in a schema of its search_path. Behind a pooler it does nothing, because other clients would get the
// session.
func SafeSession(ctx context.Context, conn *pgx.Conn) error {
	var backend uint32
	if err := conn.QueryRow(ctx, sqlBackend).Scan(&backend); err != nil {
		return fmt.Errorf("ask for the process of the session: %w", err)
	}
	if backend != conn.PgConn().PID() {
		return nil
	}
	if _, err := conn.Exec(ctx, sqlSafe); err != nil {
		return fmt.Errorf("set search_path: %w", err)
	}
	return nil
}

// Disconnect closes a connection of [Connect].
func Disconnect(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // it may be broken, and nothing is sent any more
}

// Beside calls f with a connection of a pool if it has one left. Otherwise it makes a connection for f outside of the
// pool, so that who has a connection of the pool never waits for another one.
func Beside(ctx context.Context, db *pgxpool.Pool, f func(*pgx.Conn) error) error {
	const patience = 100 * time.Millisecond
	if stat := db.Stat(); stat.AcquiredConns() < stat.MaxConns() {
		short, cancel := context.WithTimeout(ctx, patience)
		pooled, err := db.Acquire(short)
		cancel()
		if err == nil {
			defer pooled.Release()
			return f(pooled.Conn())
		}
	}
	conn, err := Connect(ctx, db, nil)
	if err != nil {
		return err
	}
	defer Disconnect(conn)
	return f(conn)
}

// Address returns where a pool connects, as attributes of a log line: hosts and database, no user and no password.
func Address(db *pgxpool.Pool) []any {
	c := db.Config().ConnConfig
	hosts := []string{net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port)))}
	for _, f := range c.Fallbacks {
		if host := net.JoinHostPort(f.Host, strconv.Itoa(int(f.Port))); !slices.Contains(hosts, host) {
			hosts = append(hosts, host)
		}
	}
	return []any{"host", strings.Join(hosts, ","), "database", c.Database}
}
