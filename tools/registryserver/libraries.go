package registryserver

import (
	"archive/tar"
	"compress/gzip"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"

	"github.com/outboxgo/outbox/tools/internal/maven"
	"github.com/outboxgo/outbox/tools/internal/place"
)

// Version is the version of Apicurio Registry that runs.
const Version = "3.3.3"

// archive has the path and the SHA-256 of that version, for maven.ParseList.
//
//go:embed archive.txt
var archive string

// libraries returns the directory with the program. It is downloaded into the cache if it is not there.
func libraries(ctx context.Context, progress io.Writer) (dir string, err error) {
	return place.Fetch(ctx, "apicurio-"+Version, progress, func(dir string) error {
		files, err := maven.ParseList(archive)
		if err != nil {
			return fmt.Errorf("read archive.txt: %w", err)
		}
		repository, err := maven.Repository()
		if err != nil {
			return err
		}
		fmt.Fprintf(progress, "downloading Apicurio Registry %s (about 160 MB, once)\n", Version)
		if err := maven.Download(ctx, repository, dir, "Apicurio Registry", files, progress); err != nil {
			return err
		}
		file := filepath.Join(dir, path.Base(files[0].Path))
		if err := untar(file, dir); err != nil {
			return fmt.Errorf("unpack Apicurio Registry: %w", err)
		}
		return os.Remove(file)
	})
}

func untar(file, dir string) (err error) {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	plain, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for archive := tar.NewReader(plain); ; {
		header, err := archive.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case header.Typeflag != tar.TypeReg:
			continue
		}
		if err := write(dir, header.Name, 0o644, archive); err != nil {
			return err
		}
	}
}
