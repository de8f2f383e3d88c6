package faults

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A run is right if nothing is wrong and everything has happened.
func TestGroupResult(t *testing.T) {
	t.Parallel()
	right := func() groupResult {
		v := groupResult{Incidents: map[string]int{}, CommitsLost: 1, Rewound: 1, Conflicts: 1, RepeatsSkipped: 1, Parked: 1}
		for _, p := range incidentKinds() {
			v.Incidents[p.kind] = 1
		}
		return v
	}
	require.NoError(t, right().Err())
	require.NoError(t, right().missing())
	for kind := range right().Incidents {
		v := right()
		delete(v.Incidents, kind)
		require.ErrorContains(t, v.missing(), kind)
	}
	for _, effect := range []func(*groupResult) *int{
		func(v *groupResult) *int { return &v.CommitsLost },
		func(v *groupResult) *int { return &v.Rewound },
		func(v *groupResult) *int { return &v.Conflicts },
		func(v *groupResult) *int { return &v.RepeatsSkipped },
		func(v *groupResult) *int { return &v.Parked },
	} {
		v := right()
		*effect(&v) = 0
		require.Error(t, v.missing())
	}
	for _, count := range []func(*groupResult) *int{
		func(v *groupResult) *int { return &v.WrongCounts },
		func(v *groupResult) *int { return &v.WrongNotes },
		func(v *groupResult) *int { return &v.Unseen },
		func(v *groupResult) *int { return &v.Disorder },
		func(v *groupResult) *int { return &v.Overtaken },
		func(v *groupResult) *int { return &v.Open },
		func(v *groupResult) *int { return &v.WrongDead },
		func(v *groupResult) *int { return &v.FailedTries },
		func(v *groupResult) *int { return &v.Lag },
		func(v *groupResult) *int { return &v.LateStops },
	} {
		v := right()
		*count(&v) = 1
		require.Error(t, v.Err())
	}
}

// compare sets the counts of the result, when all consumers have finished.
func (g *group) compare(t *testing.T, v *groupResult) {
	t.Helper()
	v.Seconds = time.Since(g.start).Seconds()
	v.Kills, v.Stops, v.Freezes, v.LongestStop = g.kills, g.stops, g.freezes, g.longestStop.Milliseconds()
	v.Records, v.Events = g.shop.records, g.shop.events
	v.CommitsLost, v.Rewound = g.lost, g.rewound
	require.NoError(t, g.db.QueryRow(g.ctx, `SELECT count(*) FROM event_handled`).Scan(&v.Handled))
	v.Dead = len(g.shop.dead)
	v.WrongNotes = max(v.Handled-(g.shop.actions-v.Dead), g.shop.actions-v.Dead-v.Handled)
	v.WrongCounts = g.wrongCounts(t)
	v.Lag = g.lag(t)
	v.Parked, v.Open = g.parked(t)
	v.Overtaken = g.overtaken(t)
	v.DeadLetters, v.WrongDead = g.wrongDead(t)
	d := g.readDiaries(t)
	v.RepeatsSkipped, v.RepeatsSeen, v.Rebalances = d.skipped, d.repeats, d.given
	v.Disorder, v.FailedTries, v.LateStops, v.Conflicts = d.disorder, d.failed, d.late, d.conflicts
	for number, ends := range append(g.gone, g.ends(t, g.spec.Topic)) {
		for partition, end := range ends {
			v.Unseen += int(end) - len(d.seen[place{number, partition}])
		}
	}
}

// wrongCounts returns how many counts of products are not what they must be.
func (g *group) wrongCounts(t *testing.T) (wrong int) {
	t.Helper()
	rows, err := g.db.Query(g.ctx, `SELECT product_id, sales_count, view_count, like_count FROM product_statistic`)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[statistic])
	require.NoError(t, err)
	require.Len(t, all, len(g.shop.want))
	for _, is := range all {
		want := *g.shop.want[is.Product]
		for _, pair := range [][2]int{{is.Sales, want.Sales}, {is.Views, want.Views}, {is.Likes, want.Likes}} {
			if pair[0] != pair[1] {
				wrong++
				t.Logf("wrong: %+v, and not %+v", is, want)
			}
		}
	}
	return wrong
}

// lag returns how many records the committed offsets do not cover.
func (g *group) lag(t *testing.T) (lag int) {
	t.Helper()
	request := kmsg.NewPtrOffsetFetchRequest()
	request.Group = g.spec.Group
	topic := kmsg.NewOffsetFetchRequestTopic()
	topic.Topic = g.spec.Topic
	ends := g.ends(t, g.spec.Topic)
	for partition := range ends {
		topic.Partitions = append(topic.Partitions, partition)
	}
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(g.ctx, g.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.ErrorCode))
	require.Len(t, response.Topics, 1)
	require.Len(t, response.Topics[0].Partitions, len(ends))
	for _, p := range response.Topics[0].Partitions {
		require.NoError(t, kerr.ErrorForCode(p.ErrorCode))
		lag += int(ends[p.Partition] - max(p.Offset, 0))
	}
	return lag
}

func (g *group) ends(t *testing.T, topic string) map[int32]int64 {
	t.Helper()
	ends, err := oracle.Ends(g.ctx, g.spec.Brokers, topic)
	require.NoError(t, err)
	return ends
}

// place is a partition of one of the topics that had the same name.
type place struct {
	topic     int
	partition int32
}

// diaries are what all members have written down.
type diaries struct {
	seen      map[place]map[int64]int // how often, by offset
	repeats   int                     // of what was seen
	disorder  int
	skipped   int
	conflicts int
	failed    int
	given     int
	late      int
}

func (g *group) readDiaries(t *testing.T) *diaries {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(g.diaries, "*"))
	require.NoError(t, err)
	d := &diaries{seen: map[place]map[int64]int{}}
	for _, name := range names {
		d.read(t, name)
	}
	return d
}

// read reads the diary of a member. As long as the group stays together, the
// offsets of a partition rise one by one.
func (d *diaries) read(t *testing.T, name string) {
	t.Helper()
	file, err := os.Open(name)
	require.NoError(t, err)
	defer file.Close()
	last := map[place]int64{} // since the member was last given partitions
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		what, rest, _ := strings.Cut(lines.Text(), " ")
		switch what {
		case "given":
			d.given++
			clear(last)
		case "skipped":
			d.skipped++
		case "conflict":
			d.conflicts++
		case "failed":
			d.failed++
			t.Logf("%s: %s", filepath.Base(name), lines.Text())
		case "saw":
			var at place
			var offset int64
			_, err := fmt.Sscan(rest, &at.topic, &at.partition, &offset)
			require.NoError(t, err)
			if before, ok := last[at]; ok && offset != before+1 {
				d.disorder++
				t.Logf("%s: saw %d of %v behind %d", filepath.Base(name), offset, at, before)
			}
			last[at] = offset
			d.see(at, offset)
		case "stopped":
			ms, err := strconv.Atoi(rest)
			require.NoError(t, err)
			if time.Duration(ms)*time.Millisecond > maxStop {
				d.late++
				t.Logf("%s: stopped in %d ms", filepath.Base(name), ms)
			}
		default:
			require.Fail(t, "not a line of a diary", "%s: %s", name, lines.Text())
		}
	}
	require.NoError(t, lines.Err())
}

func (d *diaries) see(at place, offset int64) {
	if d.seen[at] == nil {
		d.seen[at] = map[int64]int{}
	}
	if d.seen[at][offset]++; d.seen[at][offset] > 1 {
		d.repeats++
	}
}
