package pgserver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
)

// retryEvery is the pause between two tries to connect.
const retryEvery = 25 * time.Millisecond

// answers returns nil if the server on our port answers and is ours. It may be
// a stranger's: then ours is about to end because the port is taken.
func (s *Server) answers(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var dir string
	if err := conn.QueryRow(ctx, "SELECT current_setting('data_directory')").Scan(&dir); err != nil {
		return err
	}
	theirs, err := os.Stat(dir)
	if err != nil {
		return err
	}
	ours, err := os.Stat(s.cfg.DataDir)
	if err != nil {
		return err
	}
	if !os.SameFile(ours, theirs) {
		return fmt.Errorf("the port belongs to the server of %s", filepath.Dir(dir))
	}
	return nil
}

// Ping connects to the server at url, asks for its version and returns it, as
// in "18.3".
func Ping(ctx context.Context, url string) (version string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", fmt.Errorf("postgres: connect: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	// Debian adds its own version after a space.
	err = conn.QueryRow(ctx, "SELECT split_part(current_setting('server_version'), ' ', 1)").Scan(&version)
	if err != nil {
		return "", fmt.Errorf("postgres: ask for the version: %w", err)
	}
	return version, nil
}
