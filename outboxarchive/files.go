package outboxarchive

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
)

// Store keeps finished files. A [Folder] is a Store; you can write one for an object store.
type Store interface {
	// Put stores a file under a name, completely or not at all. It returns nil only when the file would
	// survive a crash. A file of the same name has the same content, so Put may replace or keep it. Names
	// have no slash.
	Put(ctx context.Context, name string, content []byte) error
}

// Files writes events as lines of JSON into files that are compressed with zstd. A file has events of one
// month of the time of recording, in UTC, in the order of their ids. Its first line describes the events.
// Its name has the month, the first and the last id with 19 digits each, the first and the last time, and a
// digest of the content:
//
//	outbox-2026-11-FIRST-LAST-20261103T101112Z-20261103T111213Z-0123456789abcdef.ndjson.zst
//
// Files is safe for concurrent use.
type Files struct {
	store Store
	cfg   FilesConfig
}

// FilesConfig tunes [Files]. The zero value is ready for production.
type FilesConfig struct {
	// MaxBytes bounds a file, in bytes before compression; a single event may be larger. Zero means 64 MiB.
	MaxBytes int
}

const defaultMaxBytes = 64 << 20

// NewFiles returns an archive that writes to a store. It does no I/O.
func NewFiles(store Store, cfg FilesConfig) (*Files, error) {
	err := check.NotNegative("MaxBytes", cfg.MaxBytes)
	if check.IsNil(store) {
		err = errors.Join(fmt.Errorf("store %w", outbox.ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: archive files config: %w", err)
	}
	cfg.MaxBytes = cmp.Or(cfg.MaxBytes, defaultMaxBytes)
	return &Files{store, cfg}, nil
}

// Archive stores rows of outbox in files, one or more for each month, before the transaction removes the
// rows. Set it as RetentionConfig.Archive. If the transaction is not committed, the rows are in files and
// also remain in outbox, and a later call archives them again. Readers of the files still get each event
// once.
func (f *Files) Archive(ctx context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
	sorted := slices.SortedStableFunc(slices.Values(rows), byPlace)
	for _, month := range monthsOf(sorted) {
		var w fileWriter
		for i := range sorted {
			if monthOf(sorted[i].CreatedAt) != month {
				continue
			}
			line, err := appendEvent(nil, &sorted[i])
			if err != nil {
				return fmt.Errorf("outbox: archive row %d of outbox: %w", sorted[i].OutboxID, err)
			}
			if w.head.Events > 0 && len(w.lines)+len(line) > f.cfg.MaxBytes {
				if err := f.put(ctx, &w); err != nil {
					return err
				}
				w = fileWriter{}
			}
			w.add(&sorted[i], line)
		}
		if err := f.put(ctx, &w); err != nil {
			return err
		}
	}
	return nil
}

func byPlace(a, b outbox.ArchivedEvent) int {
	return cmp.Or(cmp.Compare(a.OutboxID, b.OutboxID), cmp.Compare(a.EventID, b.EventID))
}

// put stores the file that w has written.
func (f *Files) put(ctx context.Context, w *fileWriter) error {
	name, content, err := w.finish()
	if err == nil {
		err = f.store.Put(ctx, name, content)
	}
	if err != nil {
		return fmt.Errorf("outbox: archive file %s: %w", name, err)
	}
	return nil
}

// fileWriter makes one file.
type fileWriter struct {
	head  header
	lines []byte
}

func (w *fileWriter) add(e *outbox.ArchivedEvent, line []byte) {
	created := e.CreatedAt.UTC()
	if w.head.Events == 0 {
		w.head = header{Format: format, Version: version, Month: created.Format(monthForm), FirstID: e.OutboxID, From: created, To: created}
	}
	w.head.Events++
	w.head.LastID = e.OutboxID
	if created.Before(w.head.From) {
		w.head.From = created
	}
	if created.After(w.head.To) {
		w.head.To = created
	}
	w.lines = append(w.lines, line...)
}

// finish returns the name and the content of the file.
func (w *fileWriter) finish() (name string, content []byte, err error) {
	first, err := w.head.line()
	if err != nil {
		return "", nil, err
	}
	text := slices.Concat(first, w.lines)
	sum := sha256.Sum256(text)
	name = w.head.fileName(hex.EncodeToString(sum[:8]))
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(windowSize), zstd.WithEncoderCRC(true))
	if err != nil {
		return name, nil, err
	}
	content = encoder.EncodeAll(text, nil)
	return name, content, encoder.Close()
}

// windowSize is the memory that a reader needs for each open file.
const windowSize = 1 << 20

// Suffix ends the name of a file of an archive.
const Suffix = ".ndjson.zst"

const (
	prefix    = "outbox-"
	monthForm = "2006-01"
	timeForm  = "20060102T150405Z"
)

// fileName returns the name of the file. Times have no fractions of seconds, so the last time is rounded
// up.
func (h *header) fileName(digest string) string {
	until := h.To.Truncate(time.Second)
	if until.Before(h.To) {
		until = until.Add(time.Second)
	}
	return fmt.Sprintf("%s%s-%019d-%019d-%s-%s-%s%s", prefix, h.Month, h.FirstID, h.LastID, h.From.Format(timeForm), until.Format(timeForm), digest, Suffix)
}
