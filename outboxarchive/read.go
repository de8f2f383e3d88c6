package outboxarchive

import (
	"bufio"
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/outboxgo/outbox"
)

// FromFS returns the events of the archive files in a file system, including subfolders. Other files are
// ignored.
func FromFS(files fs.FS) Source { return fileSource{files} }

type fileSource struct{ files fs.FS }

// Events implements [Source].
func (s fileSource) Events(ctx context.Context, filter Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	if err := filter.validate(); err != nil {
		return nothing(err)
	}
	return func(yield func(outbox.ArchivedEvent, error) bool) {
		m := &merge{files: s.files, filter: filter.matcher()}
		defer m.close()
		if err := m.find(); err != nil {
			yield(outbox.ArchivedEvent{}, fmt.Errorf("outbox: list files of the archive: %w", err))
			return
		}
		m.run(ctx, yield)
	}
}

// merge reads files in the order of ids, even if the ranges of ids in the files overlap. Ranges overlap
// because each run of retention begins with the first row, and finds rows that earlier runs had to leave.
type merge struct {
	files   fs.FS
	filter  matcher
	waiting []foundFile // sorted by their first id
	open    openFiles   // by their next event
	last    place       // place of the event before
}

// foundFile is a file that is not open yet.
type foundFile struct {
	name  string
	first int64
}

// find lists the files that may have events for the filter, judged by their names. A file whose name cannot
// be parsed may have any events.
func (m *merge) find() error {
	err := fs.WalkDir(m.files, ".", func(name string, entry fs.DirEntry, err error) error {
		base := path.Base(name)
		if err != nil || entry.IsDir() || !strings.HasSuffix(base, Suffix) || strings.HasPrefix(base, ".") {
			return err
		}
		head, ok := parseName(base)
		if ok && (head.LastID <= m.filter.After || head.To.Before(m.filter.Since) || !m.filter.Until.IsZero() && !head.From.Before(m.filter.Until)) {
			return nil
		}
		m.waiting = append(m.waiting, foundFile{name, head.FirstID})
		return nil
	})
	slices.SortFunc(m.waiting, func(a, b foundFile) int {
		return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.name, b.name))
	})
	return err
}

// parseName is the inverse of fileName. If ok is false, the file may begin with any id.
func parseName(name string) (head header, ok bool) {
	parts := strings.Split(strings.TrimSuffix(strings.TrimPrefix(name, prefix), Suffix), "-")
	if len(parts) != 7 {
		return header{}, false
	}
	first, ferr := parseID(parts[2])
	last, lerr := parseID(parts[3])
	from, terr := time.Parse(timeForm, parts[4])
	to, uerr := time.Parse(timeForm, parts[5])
	if errors.Join(ferr, lerr, terr, uerr) != nil {
		return header{}, false
	}
	return header{FirstID: first, LastID: last, From: from, To: to}, true
}

func parseID(text string) (id int64, err error) {
	if len(text) != 19 {
		return 0, outbox.ErrMalformed
	}
	err = json.Unmarshal([]byte(cmp.Or(strings.TrimLeft(text, "0"), "0")), &id)
	return id, err
}

// run yields the events, and an error for each that cannot be read.
func (m *merge) run(ctx context.Context, yield func(outbox.ArchivedEvent, error) bool) {
	for {
		for len(m.waiting) > 0 && (len(m.open) == 0 || m.waiting[0].first <= m.open[0].next.OutboxID) {
			f := openFile(m.files, m.waiting[0].name)
			m.waiting = m.waiting[1:]
			if !m.advance(f, yield) {
				return
			}
		}
		if len(m.open) == 0 {
			return
		}
		if err := context.Cause(ctx); err != nil {
			yield(outbox.ArchivedEvent{}, err)
			return
		}
		f := m.open[0]
		e := f.next
		here := place{e.OutboxID, e.EventID}
		if here != m.last && m.filter.matches(&e) && !yield(e, nil) {
			return
		}
		m.last = here
		heap.Pop(&m.open)
		if !m.advance(f, yield) {
			return
		}
	}
}

// advance reads the next event of a file. At the end of the file it closes the file. It returns false if
// yield does.
func (m *merge) advance(f *file, yield func(outbox.ArchivedEvent, error) bool) bool {
	for {
		ok, err := f.read()
		if ok {
			heap.Push(&m.open, f)
			return true
		}
		if err == nil {
			f.close()
			return true
		}
		if !yield(outbox.ArchivedEvent{}, err) {
			f.close()
			return false
		}
	}
}

func (m *merge) close() {
	for _, f := range m.open {
		f.close()
	}
}

// openFiles is a heap of open files, ordered by their next event.
type openFiles []*file

func (o openFiles) Len() int           { return len(o) }
func (o openFiles) Less(i, j int) bool { return byPlace(o[i].next, o[j].next) < 0 }
func (o openFiles) Swap(i, j int)      { o[i], o[j] = o[j], o[i] }

// Push implements heap.Interface.
func (o *openFiles) Push(f any) { *o = append(*o, f.(*file)) }

// Pop implements heap.Interface.
func (o *openFiles) Pop() any {
	f := (*o)[len(*o)-1]
	*o = (*o)[:len(*o)-1]
	return f
}

// file is an open file.
type file struct {
	name   string
	close  func()
	lines  *bufio.Reader
	head   header
	number int  // of the line
	events int  // read
	ended  bool // nothing more can be read
	err    error
	next   outbox.ArchivedEvent
}

// maxLine bounds a line: the largest payload in base64, and its envelope.
const maxLine = 160 << 20

func openFile(files fs.FS, name string) *file {
	f := &file{name: name, close: func() {}}
	raw, err := files.Open(name)
	if err != nil {
		f.err = err
		return f
	}
	// A file of other origin must not need more memory than the files that this package writes.
	decoder, err := zstd.NewReader(raw, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(8*windowSize))
	if err != nil {
		f.err = errors.Join(err, raw.Close())
		return f
	}
	f.close = func() {
		decoder.Close()
		_ = raw.Close() // it was only read
	}
	f.lines = bufio.NewReaderSize(decoder, 64<<10)
	return f
}

// read reads the next event. At the end of the file ok is false and err is nil. After an error, more events
// may follow.
func (f *file) read() (ok bool, err error) {
	if f.ended {
		return false, nil
	}
	if f.err != nil {
		return false, f.end(0, f.err)
	}
	if f.number == 0 {
		if err := f.readHeader(); err != nil {
			return false, f.end(f.number, err)
		}
	}
	text, err := f.readLine()
	switch {
	case errors.Is(err, io.EOF) && len(text) == 0 && f.events == f.head.Events:
		f.ended = true
		return false, nil
	case errors.Is(err, io.EOF):
		return false, f.end(f.number, fmt.Errorf("%w: it has %d of %d events", io.ErrUnexpectedEOF, f.events, f.head.Events))
	case err != nil:
		return false, f.end(f.number, err)
	}
	last := f.next
	f.next, err = parseEvent(text)
	f.events++
	if err == nil && f.events > 1 && byPlace(f.next, last) < 0 {
		err = fmt.Errorf("its id %d is below the one before, %d", f.next.OutboxID, last.OutboxID)
		f.next = last
	}
	if err != nil {
		f.next.OutboxID = last.OutboxID
		return false, &ReadError{File: f.name, Line: f.number, Err: err}
	}
	return true, nil
}

// end returns an error after which nothing more of the file can be read.
func (f *file) end(number int, err error) error {
	f.ended = true
	return &ReadError{File: f.name, Line: number, Err: err}
}

func (f *file) readHeader() error {
	text, err := f.readLine()
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, &f.head); err != nil || f.head.Format != format {
		return fmt.Errorf("it does not begin with a line of the format %s: %w", format, cmp.Or(err, outbox.ErrMalformed))
	}
	if f.head.Version != version {
		return fmt.Errorf("it has version %d of the format, this release reads %d", f.head.Version, version)
	}
	return nil
}

// readLine reads a line and returns it without its line break. At the end of the file it returns the
// remaining bytes, and io.EOF.
func (f *file) readLine() ([]byte, error) {
	f.number++
	var text []byte
	for {
		part, err := f.lines.ReadSlice('\n')
		if len(text)+len(part) > maxLine {
			return nil, fmt.Errorf("%w: it is longer than %d bytes", outbox.ErrTooLarge, maxLine)
		}
		text = append(text, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return bytes.TrimSuffix(text, []byte("\n")), err
		}
	}
}
