package outboxarchive_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
)

// newFolder returns an archive in a folder of the test's own.
func newFolder(t testing.TB) (*outboxarchive.Folder, *outboxarchive.Files) {
	t.Helper()
	return folderAt(t, t.TempDir())
}

func folderAt(t testing.TB, path string) (*outboxarchive.Folder, *outboxarchive.Files) {
	t.Helper()
	folder, err := outboxarchive.OpenFolder(path)
	require.NoError(t, err)
	files, err := outboxarchive.NewFiles(folder, outboxarchive.FilesConfig{})
	require.NoError(t, err)
	return folder, files
}

// Files keep each event of outbox column by column, and its record byte by byte.
func TestFiles(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	folder, files := newFolder(t)
	f.mixed(t, newRand(t), 60)
	recorded := f.recorded(t)
	f.archiveAll(t, files.Archive)
	archived := events(t, folder, outboxarchive.Filter{})
	requireRecorded(t, recorded, archived)
	requireSent(t, f, archived)
}

// A line can hold JSON with the largest depth that a payload may have.
func TestFilesDeep(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	folder, files := newFolder(t)
	rows := make([]outbox.ArchivedEvent, 3)
	for i, depth := range []int{9_999, 10_000, 10_001} {
		rows[i] = f.numbered(newRand(t), i+1, utc("2026-03-01T00:00:00Z"))
		rows[i].JSON, rows[i].Payload = true, []byte(strings.Repeat("[", depth)+strings.Repeat("]", depth))
	}
	require.NoError(t, files.Archive(background, nil, rows))
	require.Equal(t, rows, events(t, folder, outboxarchive.Filter{}))
}

// A file has events of one month and at most MaxBytes. Names sort by month and describe the content.
func TestFileNames(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	store := memory{}
	files, err := outboxarchive.NewFiles(store, outboxarchive.FilesConfig{MaxBytes: 1})
	require.NoError(t, err)
	rows := []outbox.ArchivedEvent{f.numbered(rng, 12, utc("2026-03-01T00:00:00Z")), f.numbered(rng, 10, utc("2026-02-28T23:59:59.5Z")), f.numbered(rng, 11, utc("2026-03-01T01:00:00+02:00"))}
	require.NoError(t, files.Archive(background, nil, rows))
	require.NoError(t, files.Archive(background, nil, rows), "again")
	require.Equal(t, []string{
		"outbox-2026-02-0000000000000000010-0000000000000000010-20260228T235959Z-20260301T000000Z-",
		"outbox-2026-02-0000000000000000011-0000000000000000011-20260228T230000Z-20260228T230000Z-",
		"outbox-2026-03-0000000000000000012-0000000000000000012-20260301T000000Z-20260301T000000Z-",
	}, store.names(16+len(outboxarchive.Suffix)))
	store["other.txt"], store["."+"hidden"+outboxarchive.Suffix] = &fstest.MapFile{}, &fstest.MapFile{}
	require.Equal(t, []outbox.ArchivedEvent{rows[1], inUTC(rows[2]), rows[0]}, events(t, outboxarchive.FromFS(fstest.MapFS(store)), outboxarchive.Filter{}))
	got := events(t, outboxarchive.FromFS(fstest.MapFS(store)), outboxarchive.Filter{Since: utc("2026-02-28T23:59:59.5Z"), Until: utc("2026-03-01T00:00:00Z")})
	require.Equal(t, []outbox.ArchivedEvent{rows[1]}, got)
}

func inUTC(e outbox.ArchivedEvent) outbox.ArchivedEvent {
	e.CreatedAt, e.OccurredAt = e.CreatedAt.UTC(), e.OccurredAt.UTC()
	return e
}

// memory is a store of a user.
type memory fstest.MapFS

func (m memory) Put(_ context.Context, name string, content []byte) error {
	m[name] = &fstest.MapFile{Data: content}
	return nil
}

// names returns the names without their last characters, as many as without.
func (m memory) names(without int) (names []string) {
	for name := range m {
		names = append(names, name[:len(name)-without])
	}
	slices.Sort(names)
	return names
}

// If a store fails, the events remain in outbox, and the next run archives them.
func TestStoreFails(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.mixed(t, newRand(t), 20)
	recorded := f.recorded(t)
	var calls atomic.Int64
	store := storeFunc(func(context.Context, string, []byte) error { calls.Add(1); return errors.New("the store is full") })
	files, err := outboxarchive.NewFiles(store, outboxarchive.FilesConfig{})
	require.NoError(t, err)
	err = files.Archive(background, nil, recorded)
	require.ErrorContains(t, err, "the store is full")
	require.ErrorContains(t, err, "outbox-")
	relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), f.quick(files.Archive))
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return calls.Load() > 3 }, testenv.Patience, time.Millisecond)
	stop()
	require.Equal(t, recorded, f.recorded(t))
	folder, working := newFolder(t)
	f.archiveAll(t, working.Archive)
	requireRecorded(t, recorded, events(t, folder, outboxarchive.Filter{}))
}

type storeFunc func(context.Context, string, []byte) error

func (f storeFunc) Put(ctx context.Context, name string, content []byte) error {
	return f(ctx, name, content)
}

// A relay that is killed while it archives leaves files with events that are still in outbox. No event is
// lost, and readers of the files get each event once.
func TestFilesKilled(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	path := t.TempDir()
	folder, files := folderAt(t, path)
	f.mixed(t, rng, 4000) // several batches of retention
	recorded := f.recorded(t)
	for range 3 {
		left := f.count(t, "outbox")
		kill := f.startChild(t, path)
		require.Eventually(t, func() bool { return f.count(t, "outbox") < left-rng.IntN(50) || f.count(t, "outbox") == 0 }, testenv.Patience, time.Millisecond)
		kill()
		found := map[string]bool{}
		for _, e := range slices.Concat(events(t, folder, outboxarchive.Filter{}), f.recorded(t)) {
			found[e.EventID] = true
		}
		require.Len(t, found, len(recorded), "every event is in a file or in outbox")
	}
	f.archiveAll(t, files.Archive)
	requireRecorded(t, recorded, events(t, folder, outboxarchive.Filter{}))
}

// The transaction of a batch fails after its file is stored. Its events are archived again, in files with
// other bounds, and are read once.
func TestFilesOverlap(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	folder, files := newFolder(t)
	f.mixed(t, newRand(t), 50)
	recorded := f.recorded(t)
	var n atomic.Int64
	f.archiveAll(t, func(ctx context.Context, tx pgx.Tx, rows []outbox.ArchivedEvent) error {
		if err := files.Archive(ctx, tx, rows); err != nil {
			return err
		}
		switch n.Add(1) {
		case 1, 4, 9: // of eight files in each transaction that commits
			return errors.New("it is not committed")
		}
		return nil
	})
	require.NoError(t, files.Archive(background, nil, recorded[10:30]))
	requireRecorded(t, recorded, events(t, folder, outboxarchive.Filter{}))
}

// Unfinished files of a process that was killed are removed when they are old, and are never read.
func TestFolderSweeps(t *testing.T) {
	t.Parallel()
	f, path := newFixture(t), t.TempDir()
	folder, files := folderAt(t, path)
	old, young := filepath.Join(path, ".outbox-tmp-1"), filepath.Join(path, ".outbox-tmp-2")
	require.NoError(t, os.WriteFile(old, []byte("x"), 0o600))
	require.NoError(t, os.WriteFile(young, []byte("x"), 0o600))
	require.NoError(t, os.Chtimes(old, time.Time{}, time.Now().Add(-2*time.Hour)))
	e := f.numbered(newRand(t), 1, utc("2026-03-01T00:00:00Z"))
	require.NoError(t, files.Archive(background, nil, []outbox.ArchivedEvent{e}))
	require.NoFileExists(t, old)
	require.FileExists(t, young)
	require.Equal(t, []outbox.ArchivedEvent{e}, events(t, folder, outboxarchive.Filter{}))

	ended, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, files.Archive(ended, nil, []outbox.ArchivedEvent{e}), context.Canceled)
	require.Error(t, folder.Put(background, "../x", nil))
	require.NoError(t, os.RemoveAll(path))
	require.Error(t, files.Archive(background, nil, []outbox.ArchivedEvent{e}))
	_, err := outboxarchive.OpenFolder(path)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = outboxarchive.NewFiles(nil, outboxarchive.FilesConfig{MaxBytes: -1})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	require.ErrorContains(t, err, "MaxBytes")
	e.Source = "\xff"
	_, files = newFolder(t)
	require.ErrorContains(t, files.Archive(background, nil, []outbox.ArchivedEvent{e}), "column source")
}

// change changes the text of a file.
func change(with func(string) string) func(*testing.T, []byte) []byte {
	return func(t *testing.T, content []byte) []byte {
		decoder, err := zstd.NewReader(bytes.NewReader(content))
		require.NoError(t, err)
		defer decoder.Close()
		text, err := io.ReadAll(decoder)
		require.NoError(t, err)
		return compress(t, with(string(text)))
	}
}

func compress(t *testing.T, text string) []byte {
	encoder, err := zstd.NewWriter(nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, encoder.Close()) }()
	return encoder.EncodeAll([]byte(text), nil)
}

func replace(old, with string) func(*testing.T, []byte) []byte {
	return change(func(text string) string { return strings.Replace(text, old, with, 1) })
}

var hostileTests = []struct {
	name   string
	change func(*testing.T, []byte) []byte
	says   string
	line   int // line of the error
	left   int // readable events, of ten in the file
}{
	{"truncated", func(_ *testing.T, b []byte) []byte { return b[:len(b)-10] }, "unexpected EOF", 1, 0},
	{"empty", func(*testing.T, []byte) []byte { return nil }, "unexpected EOF", 1, 0},
	{"no zstd", func(*testing.T, []byte) []byte { return []byte("nonsense nonsense") }, "magic number", 1, 0},
	{"a bit is wrong", func(_ *testing.T, b []byte) []byte { b = slices.Clone(b); b[len(b)-1] ^= 1; return b }, "CRC", 1, 0},
	{"without its last line", change(func(text string) string {
		return text[:strings.LastIndex(strings.TrimSuffix(text, "\n"), "\n")+1]
	}), "it has 9 of 10 events", 11, 9},
	{"cut in a line", change(func(text string) string { return text[:len(text)-20] }), "it has 9 of 10 events", 11, 9},
	{"another version", replace(`"version":1`, `"version":2`), "version 2", 1, 0},
	{"another format", replace(`"outbox-archive"`, `"x"`), "does not begin with", 1, 0},
	{"no header", change(func(text string) string { return text[strings.Index(text, "\n")+1:] }), "does not begin with", 1, 0},
	{"a line of nonsense", replace(`{"id":3,`, `{"id":3;`), "invalid character", 4, 9},
	{"an event without an id", replace(`"id":3,"event_id"`, `"id":3,"event"`), "it is no event", 4, 9},
	{"an event in the wrong place", replace(`"id":5,`, `"id":1,`), "below the one before", 6, 9},
	{"a line without an end", func(t *testing.T, _ []byte) []byte { return compress(t, strings.Repeat("a", 161<<20)) }, "longer than", 1, 0},
	{"a window of a gigabyte", func(*testing.T, []byte) []byte {
		return []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa0, 0x01, 0x00, 0x00}
	}, "window size exceeded", 1, 0},
}

// A damaged file is reported by name and line. Its readable events and other files are still read.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	var rows []outbox.ArchivedEvent
	for i := range 20 {
		rows = append(rows, f.numbered(rng, i+1, utc("2026-03-01T00:00:00Z")))
	}
	for _, tt := range hostileTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			store := memory{}
			files, err := outboxarchive.NewFiles(store, outboxarchive.FilesConfig{})
			require.NoError(t, err)
			require.NoError(t, files.Archive(background, nil, rows[:10]))
			name := store.names(0)[0]
			store[name].Data = tt.change(t, store[name].Data)
			require.NoError(t, files.Archive(background, nil, rows[10:]))
			var errs []error
			n := 0
			for e, err := range outboxarchive.FromFS(fstest.MapFS(store)).Events(background, outboxarchive.Filter{}) {
				if err != nil {
					errs = append(errs, err)
					continue
				}
				n++
				require.Equal(t, rows[e.OutboxID-1], inUTC(e))
			}
			require.Len(t, errs, 1)
			require.ErrorContains(t, errs[0], tt.says)
			var bad *outboxarchive.ReadError
			require.ErrorAs(t, errs[0], &bad)
			require.Equal(t, name, bad.File)
			require.Equal(t, tt.line, bad.Line)
			require.Equal(t, tt.left+10, n)
		})
	}
}

// When the reader stops, no more events are read, and files are closed.
func TestStopReading(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	folder, files := newFolder(t)
	require.NoError(t, files.Archive(background, nil, []outbox.ArchivedEvent{f.numbered(rng, 1, utc("2026-03-01T00:00:00Z")), f.numbered(rng, 2, utc("2026-03-01T00:00:00Z"))}))
	for _, err := range folder.Events(background, outboxarchive.Filter{}) {
		require.NoError(t, err)
		break
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	for _, err := range folder.Events(ctx, outboxarchive.Filter{}) {
		require.ErrorIs(t, err, context.Canceled)
	}
}

// Any bytes are either read or rejected, without a panic.
func FuzzReadFile(f *testing.F) {
	f.Add([]byte(`{"format":"outbox-archive","version":1,"events":1}` + "\n" +
		`{"id":1,"event_id":"e","event_type":"t","created_at":"2026-03-01T00:00:00Z","payload_base64":"","json":false}` + "\n"))
	encoder, err := zstd.NewWriter(nil)
	require.NoError(f, err)
	f.Cleanup(func() { _ = encoder.Close() })
	f.Fuzz(func(t *testing.T, text []byte) {
		for _, content := range [][]byte{text, encoder.EncodeAll(text, nil)} {
			n := 0
			source := outboxarchive.FromFS(fstest.MapFS{"x" + outboxarchive.Suffix: {Data: content}})
			for _, err := range source.Events(background, outboxarchive.Filter{}) {
				if n++; err != nil {
					var bad *outboxarchive.ReadError
					require.ErrorAs(t, err, &bad)
				}
			}
			require.LessOrEqual(t, n, bytes.Count(text, []byte("\n"))+2)
		}
	})
}
