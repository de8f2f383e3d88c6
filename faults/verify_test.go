package faults

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/verify"
)

// history is what was committed and what arrived, in a file for outbox verify --history. The file is kept if the test
// fails.
type history struct {
	path  string
	file  *os.File
	w     *bufio.Writer
	lines *json.Encoder
}

func newHistory(t *testing.T) *history {
	t.Helper()
	dir, err := os.MkdirTemp("", "outbox-faults-")
	require.NoError(t, err)
	h := &history{path: filepath.Join(dir, "history.jsonl")}
	h.file, err = os.Create(h.path)
	require.NoError(t, err)
	h.w = bufio.NewWriter(h.file)
	h.lines = json.NewEncoder(h.w)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the history is kept: outbox verify --history %s", h.path)
			return
		}
		os.RemoveAll(dir)
	})
	return h
}

// add adds what was committed, and what arrived at some places. An event that did not arrive has no version, and needs
// none. state is that of an event that need not arrive. keyOf is the key in whose order an event must be.
func (h *history) add(t *testing.T, committed map[string]struct{}, arrived []oracle.Event, places []oracle.Place, state func(id string) string, keyOf func(oracle.Event) string) {
	t.Helper()
	events := map[string]oracle.Event{}
	for i, e := range arrived {
		events[e.ID] = e
		require.NoError(t, h.lines.Encode(verify.Line{Record: &verify.RecordLine{ID: e.ID, Topic: places[i].Topic, Partition: places[i].Partition, Offset: places[i].Offset}}))
	}
	for id := range committed {
		e := events[id]
		require.NoError(t, h.lines.Encode(verify.Line{Event: &verify.EventLine{ID: id, Position: e.Version, Key: keyOf(e), State: state(id)}}))
	}
}

// classify judges the history as outbox verify --history does.
func (h *history) classify(t *testing.T) verify.Report {
	t.Helper()
	require.NoError(t, h.w.Flush())
	require.NoError(t, h.file.Close())
	report, err := verify.RunHistory(t.Context(), h.path, verify.Config{Findings: 20})
	require.NoError(t, err)
	for _, f := range report.Findings {
		if f.Kind != verify.Repeated {
			t.Logf("%s: event %s of key %q, %s/%d/%d: %s", f.Kind, f.EventID, f.Key, f.Topic, f.Partition, f.Offset, f.Why)
		}
	}
	return report
}

// requireVerified requires that outbox verify finds nothing in the database and in Kafka, but for repeats.
func (s *site) requireVerified(t *testing.T) {
	t.Helper()
	opts := append([]kgo.Opt{kgo.SeedBrokers(s.brokers...)}, s.as...)
	report, err := verify.Run(t.Context(), s.db, opts, verify.Config{Relay: "default", Findings: 20})
	require.NoError(t, err)
	for _, f := range report.Findings {
		if f.Kind != verify.Repeated {
			t.Errorf("outbox verify: %s: event %s (%d) of key %q, %s/%d/%d: %s", f.Kind, f.EventID, f.OutboxID, f.Key, f.Topic, f.Partition, f.Offset, f.Why)
		}
	}
	t.Logf("outbox verify: %d events, %d records, found %v", report.Events, report.Records, report.Found)
}
