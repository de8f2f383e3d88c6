package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The events of an aggregate are listed with and without the index, and without it a line says how to get
// it. Doctor has nothing against the indexes that migrate up makes.
func TestEvents(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.record(t, "1", "2", "1", "3")
	a := d.call(t, "events", "list", "--aggregate", "Thing/1")
	require.Equal(t, exitOK, a.code, a.err)
	require.Equal(t, 2, strings.Count(a.out, "Thing/1"))
	require.NotContains(t, a.out, "Thing/2")
	require.Contains(t, a.err, "outbox migrate up --aggregate-index makes it")

	require.Equal(t, exitOK, d.call(t, "migrate", "up", "--aggregate-index", "--unique-event-ids").code)
	d.ok(t, "migrate", "up", "--aggregate-index", "--unique-event-ids") // and says nothing
	a = d.call(t, "events", "list", "--aggregate", "Thing/1")
	require.Equal(t, exitOK, a.code, a.err)
	require.Empty(t, a.err)
	require.Equal(t, 2, strings.Count(a.out, "Thing/1"))
	for _, f := range d.findings(t) {
		require.NotContains(t, f.ID, "tables.index")
	}
	require.Equal(t, exitError, d.call(t, "migrate", "up", "--partition-rows", "100").code)

	require.Equal(t, 4, strings.Count(d.ok(t, "events", "list", "--type", "test.thing.happened.v1"), "Thing/"))
	require.Equal(t, 1, strings.Count(d.ok(t, "events", "list", "--limit", "1", "--before", "3"), "Thing/2"))
	require.Contains(t, d.ok(t, "events", "list", "--aggregate", "Thing/3", "--payload"), `"Key": "3"`)
	var doc struct{ Events []listedJSON }
	d.json(t, &doc, exitOK, "events", "list", "--aggregate", "Thing/3", "--payload")
	require.Len(t, doc.Events, 1)
	require.Equal(t, "Thing", doc.Events[0].AggregateType)
	require.Contains(t, string(doc.Events[0].Payload), `"3"`)
	require.Equal(t, []string{}, doc.Events[0].PendingFor)
	d.relay(t)()
	d.record(t, "4")
	d.json(t, &doc, exitOK, "events", "list")
	require.Len(t, doc.Events, 5)
	require.Equal(t, []string{"default"}, doc.Events[0].PendingFor)
	require.JSONEq(t, `{"events": []}`, d.ok(t, "events", "list", "--type", "test.thing.gone.v1", "--json"))
	require.Equal(t, exitUsage, d.call(t, "events", "list", "--aggregate", "/1").code)
	require.Equal(t, exitError, d.call(t, "events", "list", "--limit", "-1").code)
}
