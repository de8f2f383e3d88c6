package tables

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
)

// StatusMissed is the status of events that an action has missed, because members without the action have read them. A
// row of consumer_gap is about them.
const StatusMissed = "missed"

// SQLWaiting counts the deliveries that are not done, by group, action, stream and status, of the group $2 or of all
// for "". The status is that of a failure, see [SQLStaleDeliveries], or dead. It looks at up to $14 of each of
// [DeliveryKinds], those first that were made first, and at up to $15 that are with a process. The parameters between
// are those of a [DeliveryFilter]. It is to be run under pg.PlannerSettings.
const SQLWaiting = waitingIn + DeliveryWhere + waitingBy

// SQLWaitingOfGroup is SQLWaiting for a group, which its processes run again and again. Of what is with a process it
// counts only leases that have not expired for long: while an old transaction is open, an index keeps the entries of
// all deliveries that were with a process since.
const SQLWaitingOfGroup = waitingIn + ` AND d.consumer_group = $2::text AND d.locked_until > now() - interval '10 minutes'` + DeliveryWhere + waitingBy

const waitingIn = DeliveryKinds + `
SELECT r.consumer_group, r.action, r.stream, s.status, count(*),
       sum(count(*) FILTER (WHERE r.status <> 'PROCESSING'))
           OVER (PARTITION BY r.consumer_group, r.action, r.stream, CASE s.status WHEN 'failed' THEN 'waiting' ELSE s.status END)::bigint >= $14
       OR s.status IN ('waiting', 'failed') AND sum(count(*) FILTER (WHERE r.status = 'PROCESSING')) OVER ()::bigint >= $15,
       min(r.recorded_at)
  FROM (SELECT d.* FROM chosen AS k
         CROSS JOIN LATERAL (SELECT ` + waitingColumns + ` FROM {schema}.event_delivery AS d` + OfDeliveryKind + DeliveryWhere + ByDeliveryKind + ` LIMIT $14) AS d
         UNION ALL
       (SELECT ` + waitingColumns + ` FROM {schema}.event_delivery AS d
         WHERE d.status = 'PROCESSING'`

const waitingBy = ` ORDER BY d.consumer_group, d.locked_until LIMIT $15)) AS r
 CROSS JOIN LATERAL (SELECT CASE WHEN r.status = 'DEAD' THEN 'dead' WHEN r.status = 'PARKED' THEN 'parked'
                                 WHEN r.last_error_code IS NULL THEN 'waiting' ELSE 'failed' END) AS s (status)
 GROUP BY r.consumer_group, r.action, r.stream, s.status
 ORDER BY r.consumer_group, r.action, r.stream, s.status`

const waitingColumns = `d.consumer_group, d.action, d.stream, d.status, d.last_error_code, d.recorded_at`

// SQLMissed counts the events that actions have missed, of the group $1 or of all for "", by group, action and topic:
// the offsets from the first one that an action lacks to the position that the group has saved last. It looks at up to
// $2 rows.
const SQLMissed = `
SELECT g.consumer_group, g.action, g.topic, 'missed', least(sum(greatest(s.position - g.from_offset, 0)), 1000000000)::bigint,
       sum(greatest(s.position - g.from_offset, 0)) > 1000000000::numeric OR sum(sum(g.gaps)) OVER ()::bigint >= $2, min(g.opened_at)
  FROM (SELECT consumer_group, topic, topic_id, partition, action, min(from_offset) AS from_offset, min(opened_at) AS opened_at, count(*) AS gaps
          FROM (SELECT * FROM {schema}.consumer_gap WHERE $1::text = '' OR consumer_group = $1 ORDER BY consumer_group LIMIT $2) AS l
         GROUP BY consumer_group, topic, topic_id, partition, action) AS g
  LEFT JOIN {schema}.consumer_start AS s
    ON s.consumer_group = g.consumer_group AND s.topic = g.topic AND s.topic_id = g.topic_id AND s.partition = g.partition
 GROUP BY g.consumer_group, g.action, g.topic
 ORDER BY g.consumer_group, g.action, g.topic`

// MaxGaps is how many rows of consumer_gap are looked at.
const MaxGaps = 100_000

// SQLMembers reads the processes of the group $1 or of all for "", up to $2.
const SQLMembers = `
SELECT m.consumer_group, m.member, m.from_kafka, m.started_at, m.renewed_at, ` + LiveMember + `, m.works,
       ARRAY(SELECT t FROM pg_catalog.unnest(m.reasons) AS t WHERE t IS NOT NULL), ARRAY(SELECT t FROM pg_catalog.unnest(m.routes) AS t WHERE t IS NOT NULL),
       m.skipped, m.state, m.kafka_at, clock_timestamp()
  FROM {schema}.event_member AS m
 WHERE $1::text = '' OR m.consumer_group = $1
 ORDER BY m.consumer_group, m.from_kafka, m.member LIMIT $2`

// MaxMembers is how many processes are looked at.
const MaxMembers = 10_000

// Skipped is how many events of types without a handler a member has skipped since it began, by type.
type Skipped map[string]int64

// UnmarshalJSON makes what is not that an empty map: the role of a group may write any JSON.
func (s *Skipped) UnmarshalJSON(text []byte) error {
	read := map[string]int64{}
	if json.Unmarshal(text, &read) != nil || read == nil {
		read = map[string]int64{}
	}
	*s = read
	return nil
}

// Member is a process of a consumer group.
type Member struct {
	Group, Name string
	FromKafka   bool // it is a consumer, otherwise a worker
	StartedAt   time.Time
	RenewedAt   time.Time // when it renewed its row last, by the clock of the database
	Live        bool      // it has renewed the row within three intervals
	Works       bool      // and Reasons: what it said of itself then
	Reasons     []string
	Routes      []string
	Skipped     Skipped
	State       outage.State // breakers and outages, as it said then, with times of the database
	KafkaAt     time.Time    // when Kafka last answered it, by the clock of the database; zero if it did not
	Now         time.Time    // the time of the database
}

// Handles returns the event types and the actions of a member, sorted.
func (m Member) Handles() (types, actions []string) {
	for _, r := range m.Routes {
		eventType, rest, _ := strings.Cut(r, "\n")
		_, action, _ := strings.Cut(rest, "\n")
		types, actions = append(types, eventType), append(actions, action)
	}
	slices.Sort(types)
	slices.Sort(actions)
	return slices.Compact(types), slices.Compact(actions)
}

// What returns what the process is.
func (m Member) What() string {
	if m.FromKafka {
		return "consumer"
	}
	return "worker"
}

// Said returns what a live member has said of itself.
func (m Member) Said() outage.State {
	s := m.State
	s.Works, s.Reasons = m.Works, m.Reasons
	return s
}

// waitsLong is how long events wait before it is worth a sentence.
const waitsLong = 5 * time.Minute

// WaitReasons describes what a group still has to handle and what does not go by itself, or has waited for long: what
// has failed, what is dead, and what actions have missed.
func WaitReasons(counts []EventCount, now time.Time) (reasons []string) {
	for _, c := range counts {
		if text := c.WaitText(now); text != "" {
			reasons = append(reasons, text)
		}
	}
	return reasons
}

// WaitText describes what waits, or returns "" if nothing is wrong with it.
func (c EventCount) WaitText(now time.Time) string {
	about := c.about()
	since := c.Oldest.UTC().Format(time.RFC3339)
	switch c.Status {
	case "dead":
		return fmt.Sprintf("%s: %s dead, the oldest recorded at %s", about, c.eventsAre(), since)
	case "failed":
		return fmt.Sprintf("%s: %s failed and tried again, the oldest recorded at %s", about, c.eventsAre(), since)
	case StatusMissed:
		return fmt.Sprintf("%s: events are missed since %s, because members without the action have read them", about, since)
	}
	if c.Events == 0 || now.Sub(c.Oldest) < waitsLong {
		return ""
	}
	return fmt.Sprintf("%s: %s %s, the oldest recorded at %s", about, c.eventsAre(), c.Status, since)
}

// about names the action and the topic.
func (c EventCount) about() string {
	var parts []string
	if c.Action != "" {
		parts = append(parts, "action "+c.Action)
	}
	if c.Topic != "" {
		parts = append(parts, "topic "+c.Topic)
	}
	if len(parts) == 0 {
		return "all actions"
	}
	return strings.Join(parts, ", ")
}

func (c EventCount) eventsAre() string {
	switch {
	case c.More:
		return fmt.Sprintf("%d or more events are", c.Events)
	case c.Events == 1:
		return "1 event is"
	}
	return fmt.Sprintf("%d events are", c.Events)
}

// Left is a group that a cut to PostgreSQL has left behind: it reads in Kafka, where no relay sends.
type Left struct{ Group, Relay string }

// SQLLeftBehind reads up to $2 groups that have begun to read in Kafka, each with a relay that has ended by a cut: the
// group $1, or all for "". It reads none if there is another relay, which may be between two leaders.
const SQLLeftBehind = `
SELECT DISTINCT c.consumer_group, l.name FROM {schema}.consumer_start AS c CROSS JOIN {schema}.outbox_lease AS l
 WHERE l.holder = 'outbox cut' AND l.expires_at = 'infinity'
   AND NOT EXISTS (SELECT FROM {schema}.outbox_cursor AS o JOIN {schema}.outbox_lease AS h ON h.name = o.relay
                    WHERE NOT starts_with(o.relay::text, 'worker:') AND h.holder NOT IN ('outbox cut', 'outbox debezium'))
   AND NOT EXISTS (SELECT FROM {schema}.event_subscription AS s WHERE s.consumer_group = c.consumer_group AND s.state <> 'starting')
   AND ($1::text = '' OR c.consumer_group = $1)
 ORDER BY c.consumer_group, l.name LIMIT $2`

// maxLeftBehind is how many of these are looked at.
const maxLeftBehind = 20

// Begun is a group that has begun, until its rows are deleted: also while none of its processes runs.
type Begun struct {
	Group     string
	FromKafka bool // it reads from Kafka, and not from outbox
}

// SQLBegun reads up to $2 groups that have begun: the group $1, or all for "".
const SQLBegun = `
WITH RECURSIVE names AS (
   (SELECT s.consumer_group::text AS name FROM {schema}.consumer_start AS s
     WHERE $1::text = '' OR s.consumer_group = $1 ORDER BY s.consumer_group LIMIT 1)
     UNION ALL
    SELECT next.name FROM names
     CROSS JOIN LATERAL (SELECT s.consumer_group::text AS name FROM {schema}.consumer_start AS s
                          WHERE s.consumer_group > names.name AND $1::text = '' ORDER BY s.consumer_group LIMIT 1) AS next
)
(SELECT n.name, NOT EXISTS (SELECT FROM {schema}.event_subscription AS s WHERE s.consumer_group = n.name AND s.state <> 'left')
   FROM names AS n LIMIT $2)
 UNION
(SELECT s.consumer_group::text, s.state = 'left' FROM {schema}.event_subscription AS s WHERE $1::text = '' OR s.consumer_group = $1
  ORDER BY s.consumer_group LIMIT $2)
 ORDER BY name LIMIT $2`

// maxBegun is how many of these are read.
const maxBegun = 1_000

// GroupReader reads what consumer groups still have to handle, and the processes that do so.
type GroupReader struct {
	db                                                     *pgxpool.Pool
	waiting, waitingOf, missed, members, leftBehind, begun string
}

// NewGroupReader returns the reader of a schema.
func NewGroupReader(db *pgxpool.Pool, schema string) GroupReader {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return GroupReader{db, in(SQLWaiting), in(SQLWaitingOfGroup), in(SQLMissed), in(SQLMembers), in(SQLLeftBehind), in(SQLBegun)}
}

// Waiting counts the deliveries of a group that are not done, or of all groups for "", by group, action, topic and
// status, up to most of each. Oldest is when the first of them was recorded.
func (r GroupReader) Waiting(ctx context.Context, group string, most int) (counts []EventCount, err error) {
	filter := DeliveryFilter{Group: group, Statuses: []string{"PENDING", "PARKED", "DEAD"}}
	statement := r.waiting
	if group != "" {
		statement = r.waitingOf
	}
	err = pg.Query(ctx, r.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		counts, err = pgx.CollectRows(rows, scanWaiting)
		return err
	}, statement, append(filter.Args(), most, max(most, MaxCounted))...)
	if err != nil {
		return nil, fmt.Errorf("count what waits for handlers: %w", err)
	}
	return counts, nil
}

// Missed counts the events that actions of a group have missed, or of all groups for "". Oldest is since when.
func (r GroupReader) Missed(ctx context.Context, group string) ([]EventCount, error) {
	counts, err := pg.Collect(ctx, r.db, scanWaiting, r.missed, group, MaxGaps)
	if err != nil {
		return nil, fmt.Errorf("count what actions have missed: %w", err)
	}
	return counts, nil
}

func scanWaiting(row pgx.CollectableRow) (c EventCount, err error) {
	return c, row.Scan(&c.Group, &c.Action, &c.Topic, &c.Status, &c.Events, &c.More, pg.Time{At: &c.Oldest})
}

// Members returns the processes of a group, or of all groups for "", sorted by group.
func (r GroupReader) Members(ctx context.Context, group string) ([]Member, error) {
	members, err := pg.Collect(ctx, r.db, func(row pgx.CollectableRow) (m Member, err error) {
		err = row.Scan(&m.Group, &m.Name, &m.FromKafka, pg.Time{At: &m.StartedAt}, pg.Time{At: &m.RenewedAt}, &m.Live, &m.Works, &m.Reasons, &m.Routes,
			&m.Skipped, &m.State, pg.Time{At: &m.KafkaAt}, pg.Time{At: &m.Now})
		m.State = m.State.ByClock(m.RenewedAt)
		return m, err
	}, r.members, group, MaxMembers)
	if err != nil {
		return nil, fmt.Errorf("read the processes of groups: %w", err)
	}
	return members, nil
}

// LeftBehind returns whether a cut to PostgreSQL has left a group behind, or which groups for "".
func (r GroupReader) LeftBehind(ctx context.Context, group string) ([]Left, error) {
	left, err := pg.Collect(ctx, r.db, pgx.RowToStructByPos[Left], r.leftBehind, group, maxLeftBehind)
	if err != nil {
		return nil, fmt.Errorf("look for groups that a cut has left behind: %w", err)
	}
	return left, nil
}

// Begun returns whether a group has begun, or which groups have for "", sorted.
func (r GroupReader) Begun(ctx context.Context, group string) ([]Begun, error) {
	begun, err := pg.Collect(ctx, r.db, pgx.RowToStructByPos[Begun], r.begun, group, maxBegun)
	if err != nil {
		return nil, fmt.Errorf("read the groups that have begun: %w", err)
	}
	return begun, nil
}

// GroupsState is what consumer groups still have to handle, and the processes that do so.
type GroupsState struct {
	Members []Member
	Counts  []EventCount // by group, action, topic and status; pending has no action and no topic
	Left    []Left
}

// Look reads the processes of a group, or of all groups for "", and whether a cut has left it behind. The counts are
// the caller's.
func (r GroupReader) Look(ctx context.Context, group string, counts []EventCount) (g GroupsState, err error) {
	g.Counts = counts
	if g.Members, err = r.Members(ctx, group); err != nil {
		return g, err
	}
	g.Left, err = r.LeftBehind(ctx, group)
	return g, err
}
