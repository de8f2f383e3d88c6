package maven_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/maven"
)

// repository serves files. answer, if there is one, may answer instead.
type repository struct {
	files  map[string]string
	answer func(w http.ResponseWriter, r *http.Request, count int) bool

	mu     sync.Mutex
	ranges map[string][]string // the header Range of each request, by path
}

func (s *repository) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.ranges[r.URL.Path] = append(s.ranges[r.URL.Path], r.Header.Get("Range"))
	count := len(s.ranges[r.URL.Path])
	s.mu.Unlock()
	if s.answer != nil && s.answer(w, r, count) {
		return
	}
	content, ok := s.files[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	http.ServeContent(w, r, "", time.Time{}, strings.NewReader(content))
}

// download serves the files and downloads them, each with the checksum of its content.
func (s *repository) download(t *testing.T) (dir string, err error) {
	t.Helper()
	s.ranges = map[string][]string{}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	var list bytes.Buffer
	for name, content := range s.files {
		fmt.Fprintf(&list, "%x  %s\n", sha256.Sum256([]byte(content)), strings.TrimPrefix(name, "/"))
	}
	files, err := maven.ParseList(list.String())
	require.NoError(t, err)
	dir = t.TempDir()
	return dir, maven.Download(t.Context(), server.URL, dir, "files", files, io.Discard)
}

func requireFile(t *testing.T, path, content string) {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, content, string(b))
}

func TestDownload(t *testing.T) {
	s := &repository{files: map[string]string{}}
	for i := range 20 {
		s.files[fmt.Sprintf("/group/artifact/%[1]d/artifact-%[1]d.jar", i)] = strings.Repeat("x", i*1000)
	}
	dir, err := s.download(t)
	require.NoError(t, err)
	for name, content := range s.files {
		requireFile(t, filepath.Join(dir, filepath.Base(name)), content)
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, len(s.files))
}

// A download that breaks off goes on where it stopped.
func TestBrokenDownloadIsResumed(t *testing.T) {
	content := strings.Repeat("0123456789", 5000)
	s := &repository{files: map[string]string{"/a.jar": content}}
	s.answer = func(w http.ResponseWriter, _ *http.Request, count int) bool {
		if count > 1 {
			return false
		}
		w.Header().Set("Content-Length", fmt.Sprint(len(content)))
		_, _ = io.WriteString(w, content[:20000])
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
	dir, err := s.download(t)
	require.NoError(t, err)
	requireFile(t, filepath.Join(dir, "a.jar"), content)
	require.Equal(t, []string{"", "bytes=20000-"}, s.ranges["/a.jar"])
}

// What a server sends by mistake is thrown away, and asked for again.
func TestWrongContentIsDownloadedAgain(t *testing.T) {
	for _, times := range []int{1, 5} {
		s := &repository{files: map[string]string{"/a.jar": "right"}}
		s.answer = func(w http.ResponseWriter, _ *http.Request, count int) bool {
			if count > times {
				return false
			}
			_, _ = io.WriteString(w, "wrong")
			return true
		}
		dir, err := s.download(t)
		if times == 5 {
			require.ErrorContains(t, err, "download a.jar: its SHA-256 is")
			require.NoFileExists(t, filepath.Join(dir, "a.jar"))
			continue
		}
		require.NoError(t, err)
		requireFile(t, filepath.Join(dir, "a.jar"), "right")
	}
}

// An answer that another attempt would only repeat is final; an outage is not.
func TestAnswers(t *testing.T) {
	for code, requests := range map[int]int{404: 1, 403: 1, 503: 2, 429: 2} {
		s := &repository{files: map[string]string{"/a.jar": "content"}}
		s.answer = func(w http.ResponseWriter, _ *http.Request, count int) bool {
			if count == 1 {
				w.WriteHeader(code)
			}
			return count == 1
		}
		_, err := s.download(t)
		require.Len(t, s.ranges["/a.jar"], requests, code)
		if requests == 1 {
			require.ErrorContains(t, err, fmt.Sprintf("download a.jar: %d ", code))
		} else {
			require.NoError(t, err)
		}
	}
}

func TestParseList(t *testing.T) {
	for _, text := range []string{"abc  a.jar", strings.Repeat("0", 64), strings.Repeat("0", 64) + " a b"} {
		_, err := maven.ParseList(text)
		require.ErrorContains(t, err, "want a SHA-256 and a path")
	}
}
