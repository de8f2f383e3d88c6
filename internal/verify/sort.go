package verify

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
)

const (
	// runBytes is the memory of a [sorter] for items that are not in a file yet.
	runBytes = 32 << 20
	// fanIn is the number of files of one level that become one file of the next level. So no merge reads more than
	// fanIn files of a level at once.
	fanIn = 64
	// fileBuffer is the memory of each file that is written or read.
	fileBuffer = 64 << 10
)

// sorter sorts any number of items in little memory. It sorts as many items as its memory has room for and writes them
// to a file, a run. Then it merges the runs. One goroutine uses it.
type sorter struct {
	dir, name string
	limit     int // items in memory
	fanIn     int // files of a level
	items     []item
	levels    [][]string // the files of each level
	files     int        // that were created
	added     int64      // items
	tick      func() error
}

// newSorter returns a sorter that writes files to dir. It calls tick now and then while it merges; an error of tick
// ends the merge.
func newSorter(dir, name string, bytes int, tick func() error) *sorter {
	limit := max(bytes/itemSize, 1)
	return &sorter{dir: dir, name: name, limit: limit, fanIn: fanIn, items: make([]item, 0, limit), tick: tick}
}

func (s *sorter) add(it *item) error {
	if len(s.items) == s.limit {
		if err := s.spill(); err != nil {
			return err
		}
	}
	s.items = append(s.items, *it)
	s.added++
	return nil
}

// compare is the order of a sort.
func compare(a, b *item) int {
	return cmp.Or(cmp.Compare(binary.BigEndian.Uint64(a[:]), binary.BigEndian.Uint64(b[:])), bytes.Compare(a[8:], b[8:]))
}

// spill writes the items in memory to a file.
func (s *sorter) spill() error {
	slices.SortFunc(s.items, func(a, b item) int { return compare(&a, &b) })
	file, err := s.write(func(w *bufio.Writer) error {
		for i := range s.items {
			if _, err := w.Write(s.items[i][:]); err != nil {
				return err
			}
		}
		return nil
	})
	s.items = s.items[:0]
	if err != nil {
		return err
	}
	return s.push(0, file)
}

// write creates a file.
func (s *sorter) write(content func(*bufio.Writer) error) (name string, err error) {
	s.files++
	name = filepath.Join(s.dir, fmt.Sprintf("%s-%d", s.name, s.files))
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", fmt.Errorf("sort: %w", err)
	}
	w := bufio.NewWriterSize(f, fileBuffer)
	if err := errors.Join(content(w), w.Flush(), f.Close()); err != nil {
		return "", fmt.Errorf("sort: %w", err)
	}
	return name, nil
}

// push adds a file to a level. A full level becomes one file of the next level.
func (s *sorter) push(level int, file string) error {
	if level == len(s.levels) {
		s.levels = append(s.levels, nil)
	}
	s.levels[level] = append(s.levels[level], file)
	if len(s.levels[level]) < s.fanIn {
		return nil
	}
	merged, err := s.write(func(w *bufio.Writer) error {
		return mergeFiles(s.levels[level], s.tick, func(it *item) error {
			_, err := w.Write(it[:])
			return err
		})
	})
	if err != nil {
		return err
	}
	s.levels[level] = nil
	return s.push(level+1, merged)
}

// each passes all items to yield in their order and removes the files.
func (s *sorter) each(yield func(*item) error) error {
	if len(s.levels) == 0 {
		slices.SortFunc(s.items, func(a, b item) int { return compare(&a, &b) })
		for i := range s.items {
			if err := yield(&s.items[i]); err != nil {
				return err
			}
		}
		return nil
	}
	if err := s.spill(); err != nil {
		return err
	}
	return mergeFiles(slices.Concat(s.levels...), s.tick, yield)
}

// run is a file that is being read.
type run struct {
	file *os.File
	r    *bufio.Reader
	next item
}

// tickEvery is the number of items between two calls of tick.
const tickEvery = 1 << 16

// mergeFiles passes the items of sorted files to yield in their order and removes the files.
func mergeFiles(names []string, tick func() error, yield func(*item) error) (err error) {
	var heap []*run
	defer func() {
		for _, r := range heap {
			err = errors.Join(err, r.close())
		}
	}()
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return fmt.Errorf("merge: %w", err)
		}
		r := &run{file: f, r: bufio.NewReaderSize(f, fileBuffer)}
		heap = append(heap, r)
		if more, err := r.advance(); err != nil || !more {
			return cmp.Or(err, fmt.Errorf("merge: %s is empty", name))
		}
		siftUp(heap)
	}
	for n := 1; len(heap) > 0; n++ {
		if err := yield(&heap[0].next); err != nil {
			return err
		}
		if n%tickEvery == 0 {
			if err := tick(); err != nil {
				return err
			}
		}
		more, err := heap[0].advance()
		if err != nil {
			return err
		}
		if !more {
			done, last := heap[0], len(heap)-1
			heap[0] = heap[last]
			heap = heap[:last]
			if err := done.close(); err != nil {
				return err
			}
		}
		siftDown(heap)
	}
	return nil
}

// advance reads the next item. It returns false at the end of the file.
func (r *run) advance() (more bool, err error) {
	_, err = io.ReadFull(r.r, r.next[:])
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("merge: %w", err)
	}
	return true, nil
}

func (r *run) close() error { return errors.Join(r.file.Close(), os.Remove(r.file.Name())) }

// siftUp moves the last run of a heap to its place.
func siftUp(heap []*run) {
	for i := len(heap) - 1; i > 0; {
		parent := (i - 1) / 2
		if compare(&heap[i].next, &heap[parent].next) >= 0 {
			return
		}
		heap[i], heap[parent] = heap[parent], heap[i]
		i = parent
	}
}

// siftDown moves the first run of a heap to its place.
func siftDown(heap []*run) {
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(heap); child++ {
			if compare(&heap[child].next, &heap[least].next) < 0 {
				least = child
			}
		}
		if least == i {
			return
		}
		heap[i], heap[least] = heap[least], heap[i]
		i = least
	}
}
