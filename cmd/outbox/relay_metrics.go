package main

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

// Labels have the same names as in the module outboxotel behind OpenTelemetry's exporter, and so have
// metrics. So dashboards and rules work for both.
const (
	relayLabel  = "outbox_relay_name"
	groupLabel  = "messaging_consumer_group_name"
	topicLabel  = "messaging_destination_name"
	typeLabel   = "cloudevents_event_type"
	errorLabel  = "error_type"
	retryLabel  = "outbox_retry"
	stateLabel  = "outbox_state"
	statusLabel = "outbox_status"
	tableLabel  = "db_collection_name"
	outageLabel = "outbox_outage"
)

// Bounds of histograms, as in outboxotel.
var (
	durationBounds = []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	latencyBounds  = []float64{0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200}
	batchBounds    = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000}
)

// relayMetrics are the metrics of a relay. Its hooks count. A scrape reads its health and, at most every
// lookInterval, the state in the database.
type relayMetrics struct {
	relay  string
	health func() outbox.RelayHealth
	look   lookAtRelays

	mu                            sync.Mutex
	topics                        *short.Topics // that series name; of others there is one series
	types                         short.Types
	sent, rejected, dead, removed counters
	expired                       counters
	latency, batchSize, sendTook  map[labels]*histogram
	send                          [2]labels // of batches, by whether they are retries
	lastLook                      time.Time
	seen                          *short.Labels[labels] // had stale events lately, so 0 is reported
	seenRelays
	stale, staleAge map[labels]float64
	outages         *short.Labels[labels] // that series name
	outageAge       map[labels]float64
	lookErr         error
}

// seenRelays is the state of relays in the database.
type seenRelays struct {
	clock   pg.Clock
	relays  []outbox.RelayStatus
	waiting []outbox.EventCount // for too long
	delayed outboxops.DelayedStatus
}

// lookAtRelays reads the state of relays.
type lookAtRelays func(ctx context.Context) (seenRelays, error)

// The interval and the timeout of reads from the database.
const (
	lookInterval = 5 * time.Second
	lookPatience = 3 * time.Second
)

func newRelayMetrics(relay string) *relayMetrics {
	m := &relayMetrics{
		relay: cmp.Or(relay, "default"), sent: counters{}, rejected: counters{}, dead: counters{}, removed: counters{}, expired: counters{},
		latency: map[labels]*histogram{}, batchSize: map[labels]*histogram{}, sendTook: map[labels]*histogram{},
		seen: short.NewLabels(maxOwners, func(labels) {}), outages: short.NewLabels(maxOwners, func(labels) {}),
	}
	m.topics = short.NewTopics(func(topic string) { m.forget(labelsOf(topicLabel, topic)) })
	m.types = short.NewTypes(func(of [2]string) { m.forget(labelsOf(topicLabel, of[0], typeLabel, of[1])) })
	m.send = [2]labels{m.operation("false"), m.operation("true")}
	return m
}

// maxOwners is how many relays and consumer groups of stale events are named, and how many outages.
const maxOwners = 1_000

// forget removes the series of a topic that no event was counted for lately. The caller holds mu.
func (m *relayMetrics) forget(of labels) {
	has := func(l labels) bool { return strings.Contains(string(l)+",", string(of)+",") }
	for _, counter := range []counters{m.sent, m.rejected, m.dead} {
		maps.DeleteFunc(counter, func(l labels, _ float64) bool { return has(l) })
	}
	maps.DeleteFunc(m.latency, func(l labels, _ *histogram) bool { return has(l) })
}

func (m *relayMetrics) operation(retried string) labels {
	return labelsOf("messaging_system", "kafka", "messaging_operation_name", "send", relayLabel, m.relay, retryLabel, retried)
}

// watch sets the relay and the database that scrapes read.
func (m *relayMetrics) watch(relay *outbox.Relay, db *pgxpool.Pool, cfg outbox.RelayConfig) error {
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: cfg.Schema})
	if err != nil {
		return err
	}
	delayed, err := outboxops.NewDelayed(db, outboxops.DelayedConfig{Schema: cfg.Schema})
	if err != nil {
		return err
	}
	m.health = relay.Health
	m.look = func(ctx context.Context) (s seenRelays, err error) {
		var errs [4]error
		s.clock, errs[0] = pg.ReadClock(ctx, db)
		s.relays, errs[1] = inspector.Relays(ctx)
		s.waiting, errs[2] = inspector.Stale(ctx, cmp.Or(cfg.Alerts.StaleAfter, defaultMaxAge))
		s.delayed, errs[3] = delayed.Status(ctx)
		return s, errors.Join(errs[:]...)
	}
	return nil
}

func (m *relayMetrics) hooks() outbox.RelayHooks {
	return outbox.RelayHooks{
		Sent:     m.countBatch,
		Rejected: func(e outbox.FailedEvent) { m.countFailed(m.rejected, e) },
		Dead:     func(e outbox.FailedEvent) { m.countFailed(m.dead, e) },
		RowsRemoved: func(r outbox.RetentionResult) {
			m.mu.Lock()
			defer m.mu.Unlock()
			for table, n := range map[string]int64{"outbox": r.Published, "outbox_cursor": r.Cursors, "outbox_failed": r.Resolved,
				"event_handled": r.Handled, "outbox_audit": r.Audited, "event_delivery": r.Delivered} {
				if n > 0 {
					m.removed[labelsOf(relayLabel, m.relay, tableLabel, table)] += float64(n)
				}
			}
		},
	}
}

func (m *relayMetrics) countFailed(counter counters, e outbox.FailedEvent) {
	m.mu.Lock()
	defer m.mu.Unlock()
	topic := m.topics.Name(e.Topic, false)
	counter[labelsOf(relayLabel, m.relay, topicLabel, topic, typeLabel, m.types.Name(topic, e.Type), errorLabel, e.Class)]++
}

// countBatch counts runs of events of the same topic with one access to the maps, because a batch has
// thousands of events. The first event of each run gives the exemplar: it is often the oldest one.
func (m *relayMetrics) countBatch(b outbox.SentBatch) {
	m.mu.Lock()
	defer m.mu.Unlock()
	about := m.send[0]
	if b.Retried {
		about = m.send[1]
	}
	if b.Expired > 0 {
		m.expired[labelsOf(relayLabel, m.relay)] += float64(b.Expired)
	}
	end := b.Began.Add(b.Took)
	var topic, name, first string // first is the traceparent of the first event
	var latency *histogram
	n := 0
	count := func() {
		if n > 0 {
			m.sent[about.with(topicLabel, name)] += float64(n)
		}
	}
	for e := range b.All() {
		if latency == nil || e.Topic() != topic {
			count()
			topic, n = e.Topic(), 0
			name = m.topics.Name(topic, true)
			latency = series(m.latency, labelsOf(relayLabel, m.relay, topicLabel, name), latencyBounds)
		}
		took := max(0, end.Sub(e.RecordedAt()).Seconds())
		if n++; n > 1 {
			latency.observe(took)
			continue
		}
		traceParent := e.TraceParent()
		latency.observeIn(took, traceParent, end)
		first = cmp.Or(first, traceParent)
	}
	count()
	if tried := b.Events + b.Failed; tried > 0 {
		series(m.batchSize, about, batchBounds).observeIn(float64(tried), first, end)
		took := about.with("messaging_operation_type", "send").with(errorLabel, sendFailure(b))
		series(m.sendTook, took, durationBounds).observeIn(b.Took.Seconds(), first, end)
	}
	for e, class := range b.NotTaken() {
		m.sent[about.with(topicLabel, m.topics.Name(e.Topic(), false)).with(errorLabel, class)]++
	}
}

// sendFailure returns the class of the first error of a batch of which Kafka has accepted nothing.
func sendFailure(b outbox.SentBatch) string {
	if b.Events == 0 {
		for _, class := range b.NotTaken() {
			return class
		}
	}
	return ""
}

func series(of map[labels]*histogram, l labels, bounds []float64) *histogram {
	h := of[l]
	if h == nil {
		h = newHistogram(bounds)
		of[l] = h
	}
	return h
}

// ServeHTTP answers a scrape.
func (m *relayMetrics) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	health := m.health()
	m.mu.Lock()
	due := time.Since(m.lastLook) >= lookInterval
	if due {
		m.lastLook = time.Now() // other scrapes meanwhile get the older result
	}
	m.mu.Unlock()
	if due {
		m.refresh(r.Context())
	}
	x := exposition{open: strings.Contains(r.Header.Get("Accept"), openMetrics)}
	m.write(&x, health)
	w.Header().Set("Content-Type", x.end())
	w.Header().Set("Cache-Control", "no-store")
	_, _ = w.Write(x.Bytes()) // the client has gone
}

// refresh reads the database. It does not hold the lock meanwhile, because hooks need the lock.
func (m *relayMetrics) refresh(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookPatience)
	defer cancel()
	seen, err := m.look(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lookErr = err; err != nil {
		return
	}
	m.seenRelays = seen
	m.ageOutages()
	for _, r := range m.relays {
		m.seen.Use(labelsOf(relayLabel, r.Name))
	}
	m.stale, m.staleAge = map[labels]float64{}, map[labels]float64{}
	for _, l := range m.seen.Lately() {
		m.stale[l], m.staleAge[l] = 0, 0
	}
	for _, c := range m.waiting {
		l := labelsOf(relayLabel, c.Relay, groupLabel, c.Group)
		switch {
		case m.seen.Use(l):
		case c.Group != "":
			l = labelsOf(groupLabel, short.Other)
		default:
			l = labelsOf(relayLabel, short.Other)
		}
		m.stale[l] += float64(c.Events)
		m.staleAge[l] = max(m.staleAge[l], m.clock.Since(c.Oldest).Seconds())
	}
}

// write writes all metrics.
func (m *relayMetrics) write(x *exposition, health outbox.RelayHealth) {
	m.mu.Lock()
	defer m.mu.Unlock()
	x.values("messaging_client_sent_messages_total", typeCounter, "Events that Kafka has accepted or not taken.", m.sent)
	x.histograms("messaging_client_operation_duration_seconds", "Duration of the send of a batch.", m.sendTook)
	x.histograms("outbox_relay_publish_latency_seconds", "Time from the start of the transaction that recorded an event, by the clock of PostgreSQL, until Kafka had it, by that of the relay.", m.latency)
	x.histograms("outbox_relay_batch_size", "Events that were sent together.", m.batchSize)
	x.values("outbox_relay_rejected_total", typeCounter, "Events that Kafka rejected and that are tried again.", m.rejected)
	x.values("outbox_relay_dead_total", typeCounter, "Events that Kafka rejected until their retries were used up.", m.dead)
	x.values("outbox_relay_expired_total", typeCounter, "Events that were not sent because they had expired.", m.expired)
	x.values("outbox_relay_removed_total", typeCounter, "Rows that retention removed.", m.removed)
	m.writeHealth(x, health)
	m.writeLook(x)
}

func (m *relayMetrics) writeHealth(x *exposition, h outbox.RelayHealth) {
	name := labelsOf(relayLabel, m.relay)
	gauge := func(metric, help string, yes bool) {
		x.values(metric, typeGauge, help, map[labels]float64{name: oneIf(yes)})
	}
	gauge("outbox_relay_leader", "1 where this process leads.", h.Leading)
	gauge("outbox_relay_live", "0 where only a restart can help.", h.Live)
	gauge("outbox_relay_ready", "0 where this process should get no requests.", h.Ready)
	gauge("outbox_relay_works", "0 where this process does not do its part.", h.Works)
	info := thisBuild()
	x.values("outbox_build_info", typeGauge, "1, with the version.", map[labels]float64{labelsOf("version", info.Version, "revision", info.Revision, "go", info.Go): 1})
}

// writeLook writes the metrics from the database. If the database did not answer, they are missing.
func (m *relayMetrics) writeLook(x *exposition) {
	x.values("outbox_watch_up", typeGauge, "1 if the last query of the database worked, 0 if not.",
		map[labels]float64{labelsOf("outbox_watched", "relays"): oneIf(m.lookErr == nil)})
	if m.lookErr != nil {
		return
	}
	pending, age, led, stored, keys := map[labels]float64{}, map[labels]float64{}, map[labels]float64{}, map[labels]float64{}, map[labels]float64{}
	transaction := map[labels]float64{}
	for _, r := range m.relays {
		l := labelsOf(relayLabel, r.Name)
		pending[l], age[l], led[l] = float64(r.Pending), m.clock.Since(r.Oldest).Seconds(), oneIf(r.Holder != "")
		if r.CursorTopic != "" {
			transaction[l] = float64(r.Transaction)
		}
		for status, n := range map[string]int64{outbox.StatusWaiting: r.Waiting, outbox.StatusFailed: r.Failed, outbox.StatusParked: r.Parked, outbox.StatusDead: r.Dead} {
			stored[l.with(statusLabel, status)] = float64(n)
		}
		keys[l.with(stateLabel, "parked")], keys[l.with(stateLabel, "held")] = float64(r.ParkedKeys), float64(r.HeldKeys)
	}
	x.values("outbox_relay_pending", typeGauge, "Committed events that were not attempted, counted up to 100,000.", pending)
	x.values("outbox_relay_pending_age_seconds", typeGauge, "How long ago the oldest pending event was recorded; 0 without one.", age)
	x.values("outbox_relay_led", typeGauge, "1 if somebody holds the lease, 0 if nobody.", led)
	x.values("outbox_relay_transaction", typeGauge, "Number of the newest transaction in Kafka that was confirmed when the cursor moved last, of a relay that sends exactly once.", transaction)
	m.writeSaid(x)
	x.values("outbox_relay_stored", typeGauge, "Failed events, and those behind them, in outbox_failed, each status counted up to 10,000.", stored)
	x.values("outbox_relay_keys", typeGauge, "Keys whose events wait, counted up to 10,000.", keys)
	x.values("outbox_stale", typeGauge, "Events that have waited for longer than they should, wherever they wait; of each kind up to 10,000 rows are read.", m.stale)
	x.values("outbox_stale_age_seconds", typeGauge, "How long ago the oldest of them was recorded; 0 without one.", m.staleAge)
	x.values("outbox_delayed", typeGauge, "Events in outbox_delayed, by whether outbox has rejected them; each counted up to 10,000.", map[labels]float64{
		labelsOf(statusLabel, "waiting"): float64(m.delayed.Waiting), labelsOf(statusLabel, "rejected"): float64(m.delayed.Rejected)})
	x.values("outbox_delayed_age_seconds", typeGauge, "For how long the oldest of them has been due that was not moved to outbox; 0 without one.",
		map[labels]float64{labelsOf(): m.delayed.Late.Seconds()})
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
