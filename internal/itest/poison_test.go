package itest

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

// huge is a text that an attacker sends to fill a log, an error or a page.
var huge = strings.Repeat("x", 600_000)

// rowPoison is a column of a row that a writer inserts with plain SQL; the others are good.
// {id} is the event's id.
var rowPoison = []struct{ name, column, sql, want string }{
	{"a good row", "source", `'shop'`, "handled"},
	{"a type without a topic", "event_type", `'x'`, "passed over"},
	{"a type of nothing", "event_type", `''`, "dead: invalid_event"},
	{"a type of blanks", "event_type", `'   '`, "passed over"},
	{"a type with a line break", "event_type", `E'test.sale\n.made.v1'`, "passed over"},
	{"a type that nobody knows", "event_type", `'test.sale.lost.v9'`, "passed over"},
	{"a type that is too long", "event_type", `repeat('x', 101)`, "refused: 23514"},
	{"a source with a control character", "source", `E'sh\x01op'`, "handled"},
	{"no source", "source", `''`, "dead: invalid_event"},
	{"a source of somebody else", "source", `'bank'`, "handled"},
	{"no aggregate", "aggregate_id", `''`, "dead: invalid_event"},
	{"an aggregate with a control character", "aggregate_id", `E'\x02'`, "handled"},
	{"an aggregate type with a noncharacter", "aggregate_type", `chr(65535)`, "handled"},
	{"a topic with a slash", "topic", `'{topic}/x'`, "waiting: invalid_topic"},
	{"a topic that does not exist", "topic", `'{topic}-missing'`, "waiting: unknown_topic"},
	{"a topic of nothing", "topic", `''`, "waiting: invalid_topic"},
	{"a topic of Kafka itself", "topic", `'__consumer_offsets'`, "waiting: invalid_topic"},
	{"a topic of two dots", "topic", `'..'`, "waiting: invalid_topic"},
	{"a key of control characters", "partition_key", `E'\x01\x02'`, "handled"},
	{"an empty key", "partition_key", `''`, "handled"},
	{"headers that are an array", "headers", `'["a"]'`, "dead: invalid_event"},
	{"headers that are a text", "headers", `'"a"'`, "dead: invalid_event"},
	{"headers that are null", "headers", `'null'`, "handled"},
	{"a header that is a number", "headers", `'{"a": 1}'`, "dead: invalid_event"},
	{"a header that is an object", "headers", `'{"a": {"b": "c"}}'`, "dead: invalid_event"},
	{"a header that is null", "headers", `'{"a": null}'`, "handled"},
	{"a header like an attribute", "headers", `'{"id": "forged", "subject": "forged"}'`, "handled"},
	{"an attribute of its own", "headers", `'{"ce_market": "KRW-BTC"}'`, "handled"},
	{"an attribute that is a column", "headers", `'{"ce_id": "forged"}'`, "dead: invalid_event"},
	{"an attribute that is a field", "headers", `'{"ce_data": "forged"}'`, "dead: invalid_event"},
	{"an attribute in capitals", "headers", `'{"CE_ID": "forged"}'`, "dead: invalid_event"},
	{"a content type among the headers", "headers", `'{"Content-Type": "application/cloudevents+json"}'`, "dead: invalid_event"},
	{"an attribute with a bad name", "headers", `'{"ce_Market": "KRW-BTC"}'`, "dead: invalid_event"},
	{"a header of a dead letter", "headers", `'{"dlq_group": "forged", "dlq_original_topic": "x"}'`, "handled"},
	{"a header of a replay", "headers", `'{"replay_group": "forged", "replay_of": "x-0-0"}'`, "handled"},
	{"a header with a line break", "headers", `'{"a\nb": "c"}'`, "handled"},
	{"huge headers", "headers", `jsonb_build_object('a', repeat('x', 2000000))`, "dead: message_too_large"},
	{"ten thousand headers", "headers", `(SELECT jsonb_object_agg('h' || i, 'v') FROM generate_series(1, 10000) AS i)`, "handled"},
	{"no payload", "payload", `NULL`, "refused: 23514"},
	{"a payload of null", "payload", `'null'`, "dead letter: undecodable"},
	{"a payload that is a number", "payload", `'1'`, "dead letter: undecodable"},
	{"a payload of another shape", "payload", `'{"product": {"a": [1]}}'`, "dead letter: undecodable"},
	{"a huge payload", "payload", `jsonb_build_object('product', '{id}', 'x', repeat('x', 2000000))`, "dead: message_too_large"},
	{"a deep payload", "payload", `(repeat('[', 3000) || repeat(']', 3000))::jsonb`, "dead letter: undecodable"},
	{"a payload that cannot be printed", "payload", "'" + testenv.Unprintable + "'", "refused: 54000"},
	{"a number that Go cannot hold", "payload", `'{"product": "{id}", "amount": 1e400}'`, "dead letter: undecodable"},
	{"a content type of nothing", "content_type", `''`, "refused: 23514"},
	{"a content type that is none", "content_type", `'no type at all'`, "dead letter: undecodable"},
	{"a content type of an event", "content_type", `'application/cloudevents+json'`, "dead: invalid_event"},
	{"the end of time", "occurred_at", `'infinity'`, "dead: invalid_event"},
	{"the beginning of time", "occurred_at", `'-infinity'`, "dead: invalid_event"},
	{"a time before Christ", "occurred_at", `'0044-03-15 BC'`, "dead: invalid_event"},
	{"a time after the year 9999", "occurred_at", `'200000-01-01'`, "dead: invalid_event"},
	{"a time to come", "occurred_at", `now() + interval '1000 years'`, "handled"},
	{"a size of its own", "size", `1`, "refused: 428C9"},
	{"a transaction id of its own", "xid", `'3'`, "refused: 42501"},
	{"an id of its own", "id", `1`, "refused: 42501"},
	{"a time of recording of its own", "created_at", `'infinity'`, "refused: 42501"},
	{"an event id of another event", "event_id", `'00000000-0000-0000-0000-000000000000'`, "passed over"},
}

// recordPoison are records that an attacker with the right to write to the topic puts into it.
// change gets a good record.
var recordPoison = []struct {
	name   string
	change func(*kgo.Record)
	want   string
}{
	{"a good record", func(*kgo.Record) {}, "handled"},
	{"no headers", func(r *kgo.Record) { r.Headers = nil }, "dead letter: undecodable"},
	{"nothing at all", func(r *kgo.Record) { r.Headers, r.Key, r.Value = nil, nil, nil }, "dead letter: undecodable"},
	{"a tombstone", func(r *kgo.Record) { r.Value = nil }, "dead letter: undecodable"},
	{"a value that is no JSON", func(r *kgo.Record) { r.Value = []byte("\xff\x00") }, "dead letter: undecodable"},
	{"a value of null", func(r *kgo.Record) { r.Value = []byte("null") }, "dead letter: undecodable"},
	{"a deep value", func(r *kgo.Record) { r.Value = []byte(strings.Repeat(`{"product":`, 20_000)) }, "dead letter: undecodable"},
	{"a huge value", func(r *kgo.Record) { r.Value = []byte(`{"product":"` + huge + `","amount":"x"}`) }, "dead letter: undecodable"},
	{"a type that nobody knows", setHeader("ce_type", "a.b.c.v1"), "passed over"},
	{"a huge type", setHeader("ce_type", huge), "passed over"},
	{"a huge id", setHeader("ce_id", huge), "handled"},
	{"an empty id", setHeader("ce_id", ""), "dead letter: undecodable"},
	{"an id with NUL", setHeader("ce_id", "a\x00b"), "dead letter: undecodable"},
	{"a source that is no UTF-8", setHeader("ce_source", "\xff"), "dead letter: undecodable"},
	{"another version", setHeader("ce_specversion", "0.3"), "dead letter: undecodable"},
	{"a time that is none", setHeader("ce_time", "yesterday"), "dead letter: undecodable"},
	{"a content type that is none", setHeader("content-type", "no type at all"), "dead letter: undecodable"},
	{"an event in a format of its own", setHeader("content-type", "application/cloudevents+avro"), "dead letter: undecodable"},
	{"a huge attribute", setHeader("ce_x", huge), "handled"},
	{"an attribute with a huge name", setHeader("ce_"+huge, "\x00"), "dead letter: undecodable"},
	{"a header twice", func(r *kgo.Record) { r.Headers = append(r.Headers, r.Headers...) }, "handled"},
	{"five thousand headers", func(r *kgo.Record) {
		for i := range 5000 {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: "h" + strconv.Itoa(i)})
		}
	}, "handled"},
	{"a structured event that is an array", func(r *kgo.Record) {
		setHeader("content-type", "application/cloudevents+json")(r)
		r.Value = []byte("[]")
	}, "dead letter: undecodable"},
	{"headers of a dead letter", setHeader(outbox.DeadLetterGroup, "forged"), "handled"},
	{"headers of a replay for another group", func(r *kgo.Record) {
		setHeader(outbox.ReplayGroup, "other")(r)
		setHeader(outbox.ReplayFrom, r.Topic+".dlq-0-0")(r)
	}, "handled"},
	{"headers of a replay from anywhere", func(r *kgo.Record) {
		setHeader(outbox.ReplayGroup, "other")(r)
		setHeader(outbox.ReplayFrom, huge)(r)
	}, "handled"},
	{"a timestamp before all", func(r *kgo.Record) { r.Timestamp = time.UnixMilli(1) }, "handled"},
	{"an id that was handled", setHeader("ce_id", "again"), "handled"},
	{"the same id again", setHeader("ce_id", "again"), "passed over"},
}

// setHeader sets a header, or adds it.
func setHeader(name, value string) func(*kgo.Record) {
	return func(r *kgo.Record) {
		for i, h := range r.Headers {
			if h.Key == name {
				r.Headers[i].Value = []byte(value)
				return
			}
		}
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
}

// deadLetterPoison are records that an attacker with the right to write to the dead-letter topic
// puts into it, and what an operator gets who replays them.
var deadLetterPoison = []struct {
	name   string
	change func(*kgo.Record)
	want   string
}{
	{"no dead letter", func(r *kgo.Record) { r.Headers = nil }, "refused: dlq_original_topic is empty"},
	{"a huge nothing", func(r *kgo.Record) { r.Headers, r.Value = nil, []byte(huge) }, "refused: dlq_original_topic is empty"},
	{"another topic", setHeader(outbox.DeadLetterOriginalTopic, "payments"), "refused: the dead letter is one of another topic: payments"},
	{"a topic that is none", setHeader(outbox.DeadLetterOriginalTopic, "../x\x1b[31m"), "refused: dlq_original_topic"},
	{"a huge topic", setHeader(outbox.DeadLetterOriginalTopic, huge), "refused: dlq_original_topic"},
	{"a partition below zero", setHeader(outbox.DeadLetterOriginalPartition, "-1"), "refused: dlq_original_partition"},
	{"an offset that is none", setHeader(outbox.DeadLetterOriginalOffset, huge), "refused: dlq_original_offset"},
	{"a number that overflows", setHeader(outbox.DeadLetterAttempts, "99999999999999999999"), "refused: dlq_attempts"},
	{"a time that is none", setHeader(outbox.DeadLetterFailedAt, huge), "refused: dlq_failed_at"},
	{"no group", setHeader(outbox.DeadLetterGroup, ""), "refused: dlq_group is empty"},
	{"an omitted value of a record that is not there", func(r *kgo.Record) {
		setHeader(outbox.DeadLetterOriginalOffset, "900000000")(r)
		setHeader(outbox.DeadLetterValueOmitted, "5")(r)
	}, "refused: the original record is gone"},
	{"an omitted value of another record", setHeader(outbox.DeadLetterValueOmitted, "5"), "refused: the original record is gone"},
	{"an omitted key of a partition that is not there", func(r *kgo.Record) {
		setHeader(outbox.DeadLetterOriginalPartition, "77")(r)
		setHeader(outbox.DeadLetterKeyOmitted, "5")(r)
	}, "refused:"},
	{"another group", setHeader(outbox.DeadLetterGroup, "other"), "sent, passed over"},
	{"a huge group", setHeader(outbox.DeadLetterGroup, huge), "sent, passed over"},
	{"an action that is not there", setHeader(outbox.DeadLetterAction, "PAY"), "sent, dead letter: unknown_action"},
	{"a type that nobody knows", setHeader("ce_type", "a.b.c.v1"), "sent, dead letter: unknown_type"},
	{"a place of its own", setHeader(outbox.ReplayOf, "forged-0-0"), "sent, handled"},
	{"an event of its own", func(*kgo.Record) {}, "sent, handled"},
}

// editPoison is what an operator does to a dead event.
var editPoison = []struct {
	name string
	do   func(context.Context, *outboxops.Failures, outboxops.FailureID) error
	want string
}{
	{"a payload that is no JSON", edit("{", kim), "JSON"},
	{"a payload of nothing", edit("", kim), "JSON"},
	{"a payload with half a character", edit(`{"a": "\ud800"}`, kim), "JSON"},
	{"a payload with NUL", edit(`{"a": "\u0000"}`, kim), "NUL"},
	{"a payload that is too large", edit(`{"a": "`+huge+huge+`"}`, kim), "too large"},
	{"a payload that is too deep", edit(strings.Repeat("[", 20_000)+strings.Repeat("]", 20_000), kim), "JSON"},
	{"a payload that prints as a gigabyte", edit(testenv.Unprintable, kim), "too large"},
	{"no reason", edit("{}", outboxops.AuditInfo{Operator: "kim"}), "empty"},
	{"nobody", edit("{}", outboxops.AuditInfo{Reason: "r"}), "empty"},
	{"a huge reason", edit("{}", outboxops.AuditInfo{Operator: "kim", Reason: huge}), "too long"},
	{"a reason with NUL", edit("{}", outboxops.AuditInfo{Operator: "kim", Reason: "a\x00"}), "NUL"},
	{"a name that is no UTF-8", edit("{}", outboxops.AuditInfo{Operator: "\xff", Reason: "r"}), "UTF-8"},
	{"an event that is not there", func(ctx context.Context, f *outboxops.Failures, id outboxops.FailureID) error {
		id.Number += 1_000_000
		return f.Retry(ctx, id, kim)
	}, "not found"},
	{"a key of an event that is not there", func(ctx context.Context, f *outboxops.Failures, id outboxops.FailureID) error {
		id.Number += 1_000_000
		return f.Hold(ctx, id, kim)
	}, "not found"},
	{"a key that is not held", func(ctx context.Context, f *outboxops.Failures, id outboxops.FailureID) error {
		return f.Release(ctx, id, kim)
	}, "its key is not held"},
}

func edit(payload string, why outboxops.AuditInfo) func(context.Context, *outboxops.Failures, outboxops.FailureID) error {
	return func(ctx context.Context, f *outboxops.Failures, id outboxops.FailureID) error {
		return f.Edit(ctx, id, []byte(payload), why)
	}
}

// requestPoison is what is asked of the page. {id} is that of a dead event.
var requestPoison = []struct {
	name, method, target, contentType, body string
	want                                    int
}{
	{"a page", "GET", "/", "", "", 200},
	{"a page that is not there", "GET", "/nowhere", "", "", 404},
	{"a way out", "GET", "/../../etc/passwd", "", "", 404},
	{"an event that is not there", "GET", "/failed/event-999999", "", "", 404},
	{"an event of nonsense", "GET", "/failed/%00%ff", "", "", 404},
	{"a query of nonsense", "GET", "/failed?topic=%zz", "", "", 400},
	{"a query with NUL", "GET", "/failed?topic=%00", "", "", 400},
	{"a query that is no UTF-8", "GET", "/failed?key=%ff", "", "", 400},
	{"a status that is none", "GET", "/failed?status=dad", "", "", 400},
	{"a time that is none", "GET", "/failed?since=soon", "", "", 400},
	{"a deletion", "DELETE", "/failed/{id}", "", "", 404},
	{"a document of nonsense", "POST", "/api/failed/retry", "application/json", `{`, 400},
	{"a document of another shape", "POST", "/api/failed/retry", "application/json", `{"filters": {}}`, 400},
	{"a deep document", "POST", "/api/failed/retry", "application/json", strings.Repeat(`{"filter":`, 20_000), 400},
	{"a document with NUL", "POST", "/api/failed/retry", "application/json", `{"reason": "r", "filter": {"topic": "\u0000"}}`, 400},
	{"a form in place of a document", "POST", "/api/failed/retry", "application/x-www-form-urlencoded", `reason=r`, 415},
}

// The tables have poison for a table, a topic, a dead-letter topic, an edit and a request, and its
// outcome. Relay, consumer and page go on: behind each poison, a good event arrives and the page
// answers.
func TestPoisonMatrix(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := newPoisonFixture(t)
	for _, row := range rowPoison {
		p.run(t, "row/"+row.name, row.want, func(t *testing.T) func() string { return p.insert(t, row.column, row.sql) })
	}
	for _, record := range recordPoison {
		p.run(t, "record/"+record.name, record.want, func(t *testing.T) func() string { return p.produce(t, record.change) })
	}
	p.run(t, "record/a batch that cannot be decompressed", "refused: UNKNOWN_SERVER_ERROR", func(t *testing.T) func() string { return p.produceBroken(t) })
	for _, dead := range deadLetterPoison {
		p.run(t, "dead letter/"+dead.name, dead.want, func(t *testing.T) func() string { return p.replay(t, dead.change) })
	}
	dead := p.deadEvent(t)
	for _, e := range editPoison {
		p.run(t, "operator/"+e.name, e.want, func(t *testing.T) func() string {
			err := e.do(background, p.failures(t), dead)
			require.Error(t, err)
			require.Less(t, len(err.Error()), 2000)
			return func() string { return err.Error() }
		})
	}
	for _, r := range requestPoison {
		p.run(t, "request/"+r.name, strconv.Itoa(r.want), func(t *testing.T) func() string {
			return func() string {
				return p.ask(r.method, strings.ReplaceAll(r.target, "{id}", dead.String()), r.contentType, r.body)
			}
		})
	}
	require.NoError(t, p.failures(t).Edit(background, dead, []byte(`{"product": "edited", "amount": 1}`), kim))
	require.Eventually(t, func() bool { return p.counts(t)["edited"] == 1 }, testenv.Patience, 10*time.Millisecond)
}

// poisonFixture is a shop with a relay, a consumer and a page that work.
type poisonFixture struct {
	*consumerFixture
	group  string
	writer *pgxpool.Pool
	page   http.Handler
	client *kgo.Client
	log    *testenv.Buffer
	goods  int

	mu   sync.Mutex
	dead []*kgo.Record // what came into the dead-letter topic
}

func newPoisonFixture(t *testing.T) *poisonFixture {
	t.Helper()
	s := newConsumerFixture(t, 1)
	p := &poisonFixture{consumerFixture: s, group: "poison-" + s.topic, writer: newRoles(t, s.relayFixture).as(t, "writer"), log: new(testenv.Buffer)}
	opts := []kgo.Opt{kgo.SeedBrokers(s.brokers...)}
	log := slog.New(slog.NewTextHandler(p.log, nil))
	relay, err := outbox.NewRelay(s.db, opts, outbox.RelayConfig{Schema: s.schema, Retry: outbox.RetryPolicy{MaxRetries: 1, RetryWait: time.Millisecond}, RetryInterval: 20 * time.Millisecond, Logger: log})
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	consumer, err := outbox.NewConsumer(s.db, opts, s.events, p.group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Retry: outbox.RetryPolicy{RetryWait: time.Millisecond}, Logger: log, From: outbox.FromStart}}, outbox.Handle("COUNT", s.count))
	require.NoError(t, err)
	testenv.Run(t, consumer.Run)
	p.page, err = outboxadmin.New(s.db, outboxadmin.Config{Schema: s.schema, Logger: log,
		Authorize: func(*http.Request) (outboxadmin.Access, error) {
			return outboxadmin.Access{Operator: "kim", Role: outboxadmin.Operator}, nil
		}})
	require.NoError(t, err)
	p.client, err = kgo.NewClient(append(opts, kgo.ConsumeTopics(s.topic+".dlq"), kgo.ProducerBatchMaxBytes(20<<20), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	t.Cleanup(p.client.Close)
	ctx, cancel := context.WithCancel(background)
	t.Cleanup(cancel)
	go func() {
		for ctx.Err() == nil {
			fetches := p.client.PollFetches(ctx)
			p.mu.Lock()
			p.dead = append(p.dead, fetches.Records()...)
			p.mu.Unlock()
		}
	}()
	return p
}

// run gives the poison out and waits until what became of it is what the table says, and
// until a good event has arrived and the page answers.
func (p *poisonFixture) run(t *testing.T, name, want string, give func(*testing.T) func() string) {
	t.Run(name, func(t *testing.T) {
		before := len(p.log.String())
		outcome := give(t)
		got := ""
		for end := time.Now().Add(testenv.Patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if got = outcome(); strings.Contains(got, want) {
				break
			}
		}
		require.Contains(t, got, want)
		p.goods++
		product := fmt.Sprintf("good-%d", p.goods)
		p.sell(t, sale{Product: product, Amount: 1})
		require.Eventually(t, func() bool { return p.counts(t)[product] == 1 }, testenv.Patience, 10*time.Millisecond, "a good event behind it")
		require.Equal(t, "200", p.ask("GET", "/", "", ""))
		require.Equal(t, "200", p.ask("GET", "/failed", "", ""))
		require.Less(t, len(p.log.String())-before, 100_000, "a log that somebody fills")
	})
}

func (p *poisonFixture) ask(method, target, contentType, body string) string {
	r := httptest.NewRequest(method, "http://ops.example/", strings.NewReader(body))
	path, query, _ := strings.Cut(target, "?")
	r.URL.Path, r.URL.RawQuery, r.RequestURI = path, query, target
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	w := httptest.NewRecorder()
	p.page.ServeHTTP(w, r)
	return strconv.Itoa(w.Code)
}

// insert puts a row into the outbox as a writer, and returns what becomes of it.
func (p *poisonFixture) insert(t *testing.T, column, sql string) func() string {
	id := uuid.NewString()
	columns := map[string]string{
		"event_id": `'{id}'`, "event_type": `'` + saleType + `'`, "source": `'shop'`, "aggregate_type": `'Product'`, "aggregate_id": `'{id}'`,
		"payload": `'{"product": "{id}", "amount": 1}'`, "content_type": `'application/json'`, "topic": `'{topic}'`, "occurred_at": `now()`,
	}
	columns[column] = sql
	var names, values []string
	for name, value := range columns {
		names, values = append(names, name), append(values, value)
	}
	statement := strings.NewReplacer("{id}", id, "{topic}", p.topic).Replace(strings.Join(values, ", "))
	offset := p.end(t)
	_, err := p.writer.Exec(background, p.sql(`INSERT INTO {s}.outbox (`+strings.Join(names, ", ")+`) VALUES (`+statement+`)`))
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return func() string { return "refused: " + pg.Code }
	}
	require.NoError(t, err)
	if column == "event_id" {
		id = strings.Trim(sql, "'")
	}
	return func() string {
		var status, class string
		if p.db.QueryRow(background, p.sql(`SELECT status, coalesce(error_class, '') FROM {s}.outbox_failed WHERE event_id = $1`), id).Scan(&status, &class) == nil {
			return status + ": " + class
		}
		if p.end(t) == offset {
			return "not sent yet"
		}
		return p.consumed(t, offset, id)
	}
}

// consumed returns what the consumer did with the record at an offset.
func (p *poisonFixture) consumed(t *testing.T, offset int64, product string) string {
	if p.counts(t)[product] == 1 {
		return "handled"
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.dead {
		if h := deadLetterHeaders(r); h[outbox.DeadLetterOriginalOffset] == strconv.FormatInt(offset, 10) && h[outbox.DeadLetterGroup] == p.group {
			return "dead letter: " + h[outbox.DeadLetterClass]
		}
	}
	if p.committed(t, p.group, 0) > offset {
		return "passed over"
	}
	return "not handled yet"
}

// end returns the offset of the next record of the topic.
func (p *poisonFixture) end(t *testing.T) int64 {
	request := kmsg.NewPtrListOffsetsRequest()
	partition := kmsg.NewListOffsetsRequestTopicPartition()
	partition.Timestamp = -1
	request.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: p.topic, Partitions: []kmsg.ListOffsetsRequestTopicPartition{partition}}}
	response, err := request.RequestWith(background, p.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
	return response.Topics[0].Partitions[0].Offset
}

// good is a record as a relay sends it.
func (p *poisonFixture) good() (record *kgo.Record, product string) {
	product = uuid.NewString()
	record = p.saleRecord(product, []byte(`{"product": "`+product+`", "amount": 1}`))
	record.Key = []byte(product)
	return record, product
}

func (p *poisonFixture) produce(t *testing.T, change func(*kgo.Record)) func() string {
	record, product := p.good()
	change(record)
	require.NoError(t, p.client.ProduceSync(background, record).FirstErr())
	return func() string { return p.consumed(t, record.Offset, product) }
}

// produceBroken sends a batch that says that it is compressed, and is not.
func (p *poisonFixture) produceBroken(t *testing.T) func() string {
	now := time.Now().UnixMilli()
	batch := kmsg.RecordBatch{PartitionLeaderEpoch: -1, Magic: 2, Attributes: 1, FirstTimestamp: now, MaxTimestamp: now, ProducerID: -1, ProducerEpoch: -1, FirstSequence: -1,
		NumRecords: 1, Records: []byte("this is not gzip")}
	raw := batch.AppendTo(nil)
	batch.Length = int32(len(raw) - 12)
	batch.CRC = int32(crc32.Checksum(raw[21:], crc32.MakeTable(crc32.Castagnoli)))
	request := kmsg.NewPtrProduceRequest()
	request.Acks, request.TimeoutMillis = -1, 5000
	request.Topics = []kmsg.ProduceRequestTopic{{Topic: p.topic, TopicID: p.topicID(t), Partitions: []kmsg.ProduceRequestTopicPartition{{Records: batch.AppendTo(nil)}}}}
	response, err := p.client.Broker(1).Request(background, request)
	require.NoError(t, err)
	code := response.(*kmsg.ProduceResponse).Topics[0].Partitions[0].ErrorCode
	return func() string { return "refused: " + kerr.ErrorForCode(code).Error() }
}

func (p *poisonFixture) topicID(t *testing.T) [16]byte {
	request := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = &p.topic
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(background, p.client)
	require.NoError(t, err)
	return response.Topics[0].TopicID
}

// replay puts a record into the dead-letter topic and sends it back as an operator, and
// returns what becomes of it.
func (p *poisonFixture) replay(t *testing.T, change func(*kgo.Record)) func() string {
	record, product := p.good()
	record.Topic = p.topic + ".dlq"
	for name, value := range map[string]string{outbox.DeadLetterOriginalTopic: p.topic, outbox.DeadLetterOriginalPartition: "0", outbox.DeadLetterOriginalOffset: "0",
		outbox.DeadLetterGroup: p.group, outbox.DeadLetterAction: "COUNT"} {
		setHeader(name, value)(record)
	}
	change(record)
	require.NoError(t, p.client.ProduceSync(background, record).FirstErr())
	before := p.end(t)
	report, err := outboxdlq.Replay(background, []kgo.Opt{kgo.SeedBrokers(p.brokers...)}, outboxdlq.ReplayConfig{Topic: record.Topic, From: map[int32]int64{0: record.Offset}})
	require.NoError(t, err)
	if len(report.Failed) > 0 {
		require.Less(t, len(report.Failed[0].Err.Error()), 2000)
		return func() string {
			return "refused: " + strings.TrimPrefix(report.Failed[0].Err.Error(), "outbox: ")
		}
	}
	require.Equal(t, 1, report.Sent)
	return func() string { return "sent, " + p.consumed(t, before, product) }
}

// deadEvent returns an event that is dead, of a payload that no broker takes.
func (p *poisonFixture) deadEvent(t *testing.T) outboxops.FailureID {
	t.Helper()
	var began time.Time // others of the table are too large, too
	require.NoError(t, p.db.QueryRow(background, `SELECT now()`).Scan(&began))
	p.insert(t, "payload", `jsonb_build_object('product', '{id}', 'x', repeat('y', 2000000))`)
	var id outboxops.FailureID
	require.Eventually(t, func() bool {
		rows, err := p.failures(t).List(background, outboxops.FailureFilter{Statuses: []string{outbox.StatusDead}, Class: "message_too_large", Since: began}, outboxops.FailurePage{Limit: 1})
		require.NoError(t, err)
		if len(rows) == 1 {
			id = rows[0].ID
		}
		return len(rows) == 1
	}, testenv.Patience, 20*time.Millisecond)
	return id
}
