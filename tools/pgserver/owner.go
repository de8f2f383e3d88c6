package pgserver

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// owner is the user that runs the server: ours, unless that is root, whom
// PostgreSQL refuses.
type owner struct {
	name       string
	credential *syscall.Credential // nil: our own
}

// serverOwner returns our user, or for root the first of two unprivileged users that exists.
func serverOwner() (*owner, error) {
	if os.Geteuid() != 0 {
		return &owner{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, uidErr := strconv.ParseUint(u.Uid, 10, 32)
		gid, gidErr := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(uidErr, gidErr); err != nil {
			return nil, fmt.Errorf("read ids of user %s: %w", name, err)
		}
		return &owner{name, &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is no user postgres or nobody to run it")
}

// makeDir makes dir if it is missing and gives it to the owner if it is empty.
func (o *owner) makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look into directory: %w", err)
	}
	if len(entries) > 0 {
		return nil // the server itself checks whose data it is
	}
	return o.own(dir)
}

// writeFile writes a file that only the owner can read.
func (o *owner) writeFile(path, content string) error {
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return err
	}
	return o.own(path)
}

func (o *owner) own(path string) error {
	if o.credential == nil {
		return nil
	}
	if err := os.Chown(path, int(o.credential.Uid), int(o.credential.Gid)); err != nil {
		return fmt.Errorf("give to user %s: %w", o.name, err)
	}
	return nil
}

// mayEnter checks that the owner can get to the paths. The server's own error
// would not name the directory that is closed.
func (o *owner) mayEnter(paths ...string) error {
	if o.credential == nil {
		return nil
	}
	for _, path := range paths {
		path, err := filepath.Abs(path)
		if err != nil {
			return err
		}
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return fmt.Errorf("check path: %w", err)
		}
		for dir := path; ; dir = filepath.Dir(dir) {
			if err := o.mayEnterDir(dir); err != nil {
				return err
			}
			if dir == filepath.Dir(dir) {
				break
			}
		}
	}
	return nil
}

func (o *owner) mayEnterDir(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("check path: %w", err)
	}
	stat, need := info.Sys().(*syscall.Stat_t), os.FileMode(0o001)
	switch {
	case stat.Uid == o.credential.Uid:
		need = 0o100
	case stat.Gid == o.credential.Gid:
		need = 0o010
	}
	if info.Mode()&need == 0 {
		return fmt.Errorf("user %s runs the server and cannot enter %s; allow it (chmod o+x) or choose another directory", o.name, dir)
	}
	return nil
}

// environ is our environment with home as the place to write, without what
// would change how the programs behave.
func (o *owner) environ(home string) []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_")
	})
	return append(env, "HOME="+home, "TMPDIR="+home, "LC_ALL=C")
}
