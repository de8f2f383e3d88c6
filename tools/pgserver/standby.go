package pgserver

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// copyPrimary fills the empty data directory of a standby. It copies files
// because pg_basebackup is not among the embedded programs; a server that was
// shut down has left in them all that a standby needs to begin.
func (s *Server) copyPrimary(ctx context.Context) error {
	err := s.cfg.Primary.restart(ctx, func() error {
		return os.CopyFS(s.cfg.DataDir, os.DirFS(s.cfg.Primary.cfg.DataDir))
	})
	if err != nil {
		return err
	}
	err = filepath.WalkDir(s.cfg.DataDir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSymlink != 0 {
			return err
		}
		return s.owner.own(path)
	})
	if err != nil {
		return err
	}
	// Its presence is what makes a server a standby; promotion removes it.
	if err := s.owner.writeFile(filepath.Join(s.cfg.DataDir, "standby.signal"), ""); err != nil {
		return fmt.Errorf("make it a standby: %w", err)
	}
	return nil
}
