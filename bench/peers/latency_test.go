package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/stretchr/testify/require"
)

// lapOf returns a lap of 100 transactions a second for a second, whose events arrive late.
func lapOf(late time.Duration) *laps.Lap {
	l := laps.New(0, 100, 0, time.Second)
	for n := range l.Total() {
		l.Committed[n] = time.Duration(n) * time.Second / 100
		l.Arrive(n, l.Committed[n]+late)
	}
	return l
}

func TestBehind(t *testing.T) {
	slow := lapOf(0)
	for n := range slow.Total() {
		slow.Committed[n] *= 2
	}
	for _, test := range []struct {
		name string
		laps []*laps.Lap
		want string
	}{
		{"events that arrive at once", []*laps.Lap{lapOf(0), lapOf(10 * time.Millisecond)}, ""},
		{"half of the laps are late", []*laps.Lap{lapOf(0), lapOf(0), lapOf(time.Second)}, ""},
		{"events that arrive ever later", []*laps.Lap{lapOf(time.Second), lapOf(time.Second)}, "fell behind: relayed 50 of 100 transactions/s"},
		{"writers that are late", []*laps.Lap{slow}, "fell behind: committed 51 of 100 transactions/s"},
	} {
		t.Run(test.name, func(t *testing.T) { require.Equal(t, test.want, behind(100, test.laps)) })
	}
}

// A peer that fell behind is reported, and compared with nothing.
func TestReportLeavesOutWhoFellBehind(t *testing.T) {
	b := &bench{report: &report.Report{}}
	all := []*racer{{peer: peer{name: ours}}, {peer: peer{name: "debezium"}}, {peer: peer{name: "watermill"}}}
	runs := map[string][]*laps.Lap{ours: {lapOf(time.Millisecond)}, "debezium": {lapOf(4 * time.Millisecond)}}
	b.reportLatency(100, all, runs, map[string]string{"watermill": "fell behind"})

	d := &document{Rates: []int{100}, Results: b.report.Results(), Peers: []described{{Name: ours}, {Name: "debezium"}, {Name: "watermill"}}}
	r, ok := d.find("latency/100/outbox-p50", "latency/100/debezium-p50")
	require.True(t, ok)
	require.InDelta(t, 0.25, r.Ratio, 1e-9)
	require.True(t, *r.Met)
	r, ok = d.find("latency/100/watermill", "")
	require.True(t, ok)
	require.Equal(t, "fell behind", r.Failed)
	_, ok = d.find("latency/100/outbox-p50", "latency/100/watermill-p50")
	require.False(t, ok)
	require.Contains(t, d.latencyTable(), "| 100 | watermill | fell behind |")
	for name, plot := range d.plots() {
		requireXML(t, name, plot)
	}
	require.Len(t, d.plots(), 2, "nothing was drained")
}

func requireXML(t *testing.T, name, text string) {
	t.Helper()
	for tokens := xml.NewDecoder(bytes.NewBufferString(text)); ; {
		_, err := tokens.Token()
		if errors.Is(err, io.EOF) {
			return
		}
		require.NoError(t, err, name)
	}
}
