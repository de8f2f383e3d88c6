package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Every command fails if it cannot write its output, also one that would exit with 3. Only relay is not among them: it
// writes to standard error alone.
func TestFullDevice(t *testing.T) {
	t.Parallel()
	d := newCutShop(t)
	end := d.worker(t)
	require.Eventually(t, func() bool { return strings.Contains(d.ok(t, "cut", "status"), "active") }, testenv.Patience, 10*time.Millisecond)
	end()
	stop := d.consumer(t)
	d.record(t, "a")
	sent, err := d.rec.KafkaRecord(background, happened{Key: "sent", At: time.Now()})
	require.NoError(t, err)
	sent.Topic = d.topic
	client, err := kgo.NewClient(testenv.KafkaOpts(d.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, sent).FirstErr())
	d.effects(t, "sent") // so there is an offset to commit
	stop()
	var rewind answer
	assert.Eventually(t, func() bool {
		rewind = d.call(t, "consumer", "rewind", "--group", "stats", "--to", "1h")
		return rewind.code == exitOK
	}, testenv.Patience, 100*time.Millisecond, "the consumer has left its group")
	require.Equal(t, exitOK, rewind.code, rewind.err)
	testenv.CreateTopic(t, d.brokers, d.topic+".dlq", 1)
	d.fail(t, outbox.StatusDead, "a", "b", "c", "d", "e")
	history := filepath.Join(t.TempDir(), "history.jsonl")
	require.NoError(t, os.WriteFile(history, []byte(`{"event":{"id":"a","position":1,"key":"k","topic":"t"}}`), 0o600))
	why := " --reason x --operator kim"
	calls := []struct{ name, args, help string }{
		{"", "", "the overview"},
		{"help", "flags", ""},
		{"help", "cut", ""},
		{"status", "", ""},
		{"status", "--json", ""},
		{"doctor", "", ""},
		{"tail", "--limit 1", ""},
		{"events list", "", ""},
		{"events show", "1", ""},
		{"events delayed", "", ""},
		{"events cancel", "00000000-0000-4000-8000-000000000000" + why, ""},
		{"events move", "--once", ""},
		{"verify", "--history " + history, ""},
		{"topics", "", ""},
		{"failures list", "", ""},
		{"failures show", "event-1", ""},
		{"failures count", "", ""},
		{"failures retry", "--all", ""},
		{"failures resolve", "--key a --yes" + why, ""},
		{"failures edit", "event-2 --payload -" + why, ""},
		{"failures hold", "event-3" + why, ""},
		{"failures release", "event-3" + why, ""},
		{"consumers", "", ""},
		{"consumer pause", "--group stats" + why, ""},
		{"consumer resume", "--group stats" + why, ""},
		{"consumer rewind", "--group stats --to 1h", ""},
		{"cut status", "", ""},
		{"cut to-kafka", "--group none --relay r", ""},
		{"cut to-postgres", "--group stats --relay r", ""},
		{"cut from-debezium", "--help", "a move needs a replication slot"},
		{"cut to-debezium", "--help", "a move needs a replication slot"},
		{"dlq list", d.topic + ".dlq", ""},
		{"dlq replay", d.topic + ".dlq", ""},
		{"dlq edit", "--help", "an edit needs a dead letter"},
		{"replay", "", ""},
		{"archive create", "", ""},
		{"archive status", "", ""},
		{"archive expire", "", ""},
		{"group start", "new --from archive --incomplete", ""},
		{"contract export", "--help", "a run needs the go command"},
		{"contract check", "--help", "a run needs the go command"},
		{"contract diff", contractFixture + " " + contractFixture, ""},
		{"audit", "", ""},
		{"migrate up", "", ""},
		{"migrate status", "", ""},
		{"migrate print", "", ""},
		{"completion", "bash", ""},
		{"version", "", ""},
		{"version", "--json", ""},
		{"cut cancel", "--relay r" + why, ""},
		{"cut finish", "--relay r" + why, ""},
	}
	tried := map[string]bool{relayCommand.name: true, serveCommand.name: true}
	for _, c := range calls {
		tried[c.name] = true
		if strings.HasPrefix(c.name, "cut c") || strings.HasPrefix(c.name, "cut fin") {
			d.ok(t, "cut", "to-kafka", "--group", "stats", "--relay", "r", "--yes", "--no-wait", "--reason", "x")
		}
		if c.name == cutFinishCommand.name {
			defer d.worker(t)() // the cut waits for it
		}
		d.stdin = `{"key": 2}`
		d.requireFull(t, strings.Fields(c.name+" "+c.args)...)
	}
	for _, c := range commands() {
		require.True(t, tried[c.name], "no call of %s", c.name)
	}
}

// requireFull calls a command whose output is a full device.
func (d *commandFixture) requireFull(t *testing.T, args ...string) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	require.NoError(t, err)
	defer full.Close()
	d.change = func(e *env) { e.stdout = full }
	defer func() { d.change = nil }()
	ended := make(chan answer, 1)
	go func() { ended <- d.call(t, args...) }()
	if len(args) > 0 && args[0] == tailCommand.name { // it shows events that are recorded after its start
		require.Eventually(t, func() bool {
			d.record(t, "b")
			return len(ended) > 0
		}, testenv.Patience, 100*time.Millisecond, "tail goes on")
	}
	a := <-ended
	if a.code != exitError || !strings.Contains(a.err, "outbox: write to standard output: ") || !strings.Contains(a.err, "no space left on device") {
		t.Errorf("outbox %s: exit %d: %s", strings.Join(args, " "), a.code, a.err)
	}
}
