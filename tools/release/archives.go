package main

import (
	"archive/tar"
	"archive/zip"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// imageTarget is the target whose programs also become the root file system of the image.
const imageTarget = "linux/amd64"

// certificates are where the image gets what it trusts from. Dockerfile has the same file in the image.
const certificates = "/etc/ssl/certs/ca-certificates.crt"

// archiveFile is a file of an archive, with its name there.
type archiveFile struct{ name, disk string }

// writeArchives builds the commands of the root module for all targets, from the proxy as users do, and writes an
// archive for each, the root file system of the image, and the sums of all.
func (r *release) writeArchives(ctx context.Context, tool goTool, temp string) error {
	if err := os.MkdirAll(r.archives, 0o755); err != nil {
		return err
	}
	_, commands, err := r.packages(ctx, r.root())
	if err != nil {
		return err
	}
	for _, target := range r.targets {
		for _, command := range commands {
			if err := r.writeArchive(ctx, tool, temp, target, command); err != nil {
				return fmt.Errorf("%s for %s: %w", command, target, err)
			}
		}
	}
	return r.writeSums()
}

func (r *release) writeArchive(ctx context.Context, tool goTool, temp, target, command string) error {
	system, processor, _ := strings.Cut(target, "/")
	gopath, name := filepath.Join(temp, "gopath", system+"_"+processor), path.Base(command)
	// The go command installs programs for other systems only without GOBIN, in a folder below bin that is named
	// after them.
	tool.env = append(slices.Clone(tool.env), "GOBIN=", "GOPATH="+gopath, "GOOS="+system, "GOARCH="+processor, "CGO_ENABLED=0")
	if _, err := tool.run(ctx, temp, "install", "-ldflags=-s", command+"@"+r.version); err != nil {
		return err
	}
	program, err := findFile(gopath, name)
	if err != nil {
		return err
	}
	files := []archiveFile{{filepath.Base(program), program}, {"LICENSE", r.disk("LICENSE")}}
	base := filepath.Join(r.archives, strings.Join([]string{name, r.version, system, processor}, "_"))
	if system == "windows" {
		return writeZipArchive(base+".zip", files)
	}
	if target == imageTarget {
		root := []archiveFile{{name, program}, {strings.TrimPrefix(certificates, "/"), cmp.Or(os.Getenv("SSL_CERT_FILE"), certificates)}}
		if err := writeTar(base+"_rootfs.tar.gz", root); err != nil {
			return err
		}
	}
	return writeTar(base+".tar.gz", files)
}

// findFile returns the program below a folder, with or without .exe.
func findFile(dir, name string) (found string, err error) {
	err = filepath.WalkDir(filepath.Join(dir, "bin"), func(file string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() && strings.TrimSuffix(entry.Name(), ".exe") == name {
			found = file
		}
		return err
	})
	if err == nil && found == "" {
		err = fmt.Errorf("no %s below %s", name, dir)
	}
	return found, err
}

// mode returns the rights of a file in an archive: the same on each machine.
func mode(f archiveFile) fs.FileMode {
	if strings.HasPrefix(path.Base(f.name), "LICENSE") || strings.HasSuffix(f.name, ".crt") {
		return 0o644
	}
	return 0o755
}

func writeTar(name string, files []archiveFile) error {
	return create(name, func(out io.Writer) error {
		zipped := gzip.NewWriter(out)
		archive := tar.NewWriter(zipped)
		for _, f := range files {
			data, err := os.ReadFile(f.disk)
			if err != nil {
				return err
			}
			header := &tar.Header{Name: f.name, Size: int64(len(data)), Mode: int64(mode(f)), Format: tar.FormatPAX}
			if err := archive.WriteHeader(header); err != nil {
				return err
			}
			if _, err := archive.Write(data); err != nil {
				return err
			}
		}
		return errors.Join(archive.Close(), zipped.Close())
	})
}

func writeZipArchive(name string, files []archiveFile) error {
	return create(name, func(out io.Writer) error {
		archive := zip.NewWriter(out)
		for _, f := range files {
			data, err := os.ReadFile(f.disk)
			if err != nil {
				return err
			}
			to, err := archive.CreateHeader(&zip.FileHeader{Name: f.name, Method: zip.Deflate})
			if err != nil {
				return err
			}
			if _, err := to.Write(data); err != nil {
				return err
			}
		}
		return archive.Close()
	})
}

// writeSums writes SHA256SUMS of all files in the folder, as sha256sum --check reads it.
func (r *release) writeSums() error {
	entries, err := os.ReadDir(r.archives)
	if err != nil {
		return err
	}
	return create(filepath.Join(r.archives, "SHA256SUMS"), func(out io.Writer) error {
		for _, entry := range entries {
			data, err := os.ReadFile(filepath.Join(r.archives, entry.Name()))
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "%x  %s\n", sha256.Sum256(data), entry.Name())
			r.printf("wrote %s: %d KB\n", entry.Name(), (len(data)+1023)/1024)
		}
		return nil
	})
}

func create(name string, write func(io.Writer) error) error {
	out, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(write(out), out.Close())
}
