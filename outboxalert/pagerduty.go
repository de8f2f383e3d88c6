package outboxalert

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// PagerDutyConfig tunes [PagerDuty]. The zero value is ready for production.
type PagerDutyConfig struct {
	// URL takes the events; in the European region https://events.eu.pagerduty.com/v2/enqueue. Empty means
	// https://events.pagerduty.com/v2/enqueue.
	URL string
	// Page is the address of the operators' page, for a link in each incident. Empty means none.
	Page string
	// Client sends the requests, each of which may take 10 s. Nil means http.DefaultClient.
	Client *http.Client
}

const pagerDutyURL = "https://events.pagerduty.com/v2/enqueue"

// PagerDuty returns an alerter that triggers incidents of PagerDuty by its Events API v2, and
// resolves them when the condition of the alert is over. An alert that comes again belongs to the
// incident that is open. Reports trigger no incident: they are left out.
//
// The routing key is the integration key of a service in PagerDuty. Source names the monitored
// system, for example "orders, production". It distinguishes the incidents of one database from
// those of others, so all processes of the database give the same. Errors do not contain the
// routing key.
func PagerDuty(routingKey, source string, cfg PagerDutyConfig) (outbox.Alerter, error) {
	if routingKey == "" || source == "" {
		return nil, errors.New("outboxalert: PagerDuty needs a routing key and a source")
	}
	hook, err := newWebhook(cmp.Or(cfg.URL, pagerDutyURL), cfg.Client, routingKey)
	if err != nil {
		return nil, err
	}
	return &pagerDuty{hook, routingKey, source, cfg.Page}, nil
}

type pagerDuty struct {
	*webhook
	routingKey, source, page string
}

// pagerDutyEvent is the body of a request.
type pagerDutyEvent struct {
	RoutingKey string            `json:"routing_key"`
	Action     string            `json:"event_action"`
	DedupKey   string            `json:"dedup_key"`
	Payload    *pagerDutyPayload `json:"payload,omitempty"` // of a trigger
	Links      []pagerDutyLink   `json:"links,omitempty"`
}

type pagerDutyPayload struct {
	Summary   string           `json:"summary"`
	Source    string           `json:"source"`
	Severity  string           `json:"severity"`
	Timestamp time.Time        `json:"timestamp"`
	Component string           `json:"component,omitempty"`
	Class     string           `json:"class"`
	Details   pagerDutyDetails `json:"custom_details"`
}

type pagerDutyDetails struct {
	Dead   []pagerDutyDead   `json:"dead,omitempty"`
	Counts []pagerDutyCounts `json:"counts,omitempty"`
}

type pagerDutyDead struct {
	ID            int64  `json:"id"`
	EventID       string `json:"event_id"`
	Type          string `json:"type"`
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	Action        string `json:"action,omitempty"`
	Class         string `json:"class"`
	Error         string `json:"error,omitempty"`
}

type pagerDutyCounts struct {
	Relay  string    `json:"relay,omitempty"`
	Group  string    `json:"group,omitempty"`
	Action string    `json:"action,omitempty"`
	Status string    `json:"status"`
	Type   string    `json:"type"`
	Class  string    `json:"class,omitempty"`
	Events int       `json:"events"`
	More   bool      `json:"more,omitempty"`
	Oldest time.Time `json:"oldest"`
}

type pagerDutyLink struct {
	Href string `json:"href"`
	Text string `json:"text"`
}

const (
	maxSummary  = 1024 // characters, of PagerDuty
	maxDedupKey = 255
	maxDetails  = 100 // kinds of events, so that a request stays below 512 KB
)

// Alert implements [outbox.Alerter].
func (p *pagerDuty) Alert(ctx context.Context, a outbox.Alert) error {
	if a.Kind == outbox.AlertReport {
		return nil
	}
	event := pagerDutyEvent{RoutingKey: p.routingKey, Action: "resolve", DedupKey: p.dedupKey(a)}
	if !a.Over {
		event.Action, event.Payload, event.Links = "trigger", p.payload(a), p.links(a)
	}
	return p.post(ctx, event)
}

// Resolve resolves the incident of an alert that another process may have sent, see [outbox.Alerter]. Without one,
// PagerDuty does nothing.
func (p *pagerDuty) Resolve(ctx context.Context, a outbox.Alert) error { return p.Alert(ctx, a) }

// dedupKey names the incident of an alert.
func (p *pagerDuty) dedupKey(a outbox.Alert) string {
	key := p.source + "/" + string(a.Kind) + "/" + a.Relay + "/" + a.Group + "/" + a.Topic
	if len(key) > maxDedupKey {
		digest := sha256.Sum256([]byte(key))
		return hex.EncodeToString(digest[:])
	}
	return key
}

func (p *pagerDuty) payload(a outbox.Alert) *pagerDutyPayload {
	payload := &pagerDutyPayload{
		Summary: short.Line(p.source+": "+a.String(), maxSummary), Source: p.source, Severity: severityOf(a.Kind), Timestamp: a.At.UTC(),
		Component: field(cmp.Or(a.Relay, a.Group)), Class: string(a.Kind),
	}
	for _, e := range a.Dead {
		dead := pagerDutyDead{ID: e.ID, EventID: field(e.EventID), Type: field(e.Type), AggregateType: field(e.AggregateType),
			AggregateID: field(e.AggregateID), Action: field(e.Action), Class: field(e.Class)}
		if e.Err != nil {
			dead.Error = field(e.Err.Error())
		}
		payload.Details.Dead = append(payload.Details.Dead, dead)
	}
	for _, c := range a.Counts[:min(len(a.Counts), maxDetails)] {
		payload.Details.Counts = append(payload.Details.Counts, pagerDutyCounts{field(c.Relay), field(c.Group), field(c.Action),
			field(c.Status), field(c.Type), field(c.Class), c.Events, c.More, c.Oldest})
	}
	return payload
}

// severityOf returns one of PagerDuty's severities. Single events that died hold up nothing else.
func severityOf(kind outbox.AlertKind) string {
	switch kind {
	case outbox.AlertDead, outbox.AlertDeadDeliveries:
		return "error"
	default:
		return "critical"
	}
}

func (p *pagerDuty) links(a outbox.Alert) (links []pagerDutyLink) {
	if link := Runbook(a.Kind); link != "" {
		links = append(links, pagerDutyLink{link, "What to do"})
	}
	if p.page != "" {
		links = append(links, pagerDutyLink{p.page, "Operators' page"})
	}
	return links
}
