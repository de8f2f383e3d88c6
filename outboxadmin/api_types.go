package outboxadmin

import (
	"encoding/json"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
)

// Every member is always present, unless it is omitempty and not required. Times are in UTC. A missing time
// is null.

type apiError struct {
	Error  string `json:"error"`
	Events *int   `json:"events,omitempty"`
}

type apiRelayList struct {
	Relays []apiRelay `json:"relays"`
}

type apiRelay struct {
	Name        string            `json:"name"`
	Holder      string            `json:"holder"`
	Epoch       int64             `json:"epoch"`
	LeaseUntil  *time.Time        `json:"lease_until"`
	MovedAt     *time.Time        `json:"moved_at"`
	CursorTopic string            `json:"cursor_topic"`
	Transaction int64             `json:"transaction"`
	Pending     int64             `json:"pending"`
	PendingMore bool              `json:"pending_more"`
	Oldest      *time.Time        `json:"oldest"`
	Waiting     int64             `json:"waiting"`
	Failed      int64             `json:"failed"`
	Parked      int64             `json:"parked"`
	Dead        int64             `json:"dead"`
	ParkedKeys  int64             `json:"parked_keys"`
	HeldKeys    int64             `json:"held_keys"`
	State       *outage.RelayForm `json:"state"`
	Health      *apiHealth        `json:"health"`
}

type apiHealth struct {
	Live    bool     `json:"live"`
	Ready   bool     `json:"ready"`
	Works   bool     `json:"works"`
	Leading bool     `json:"leading"`
	Breaker string   `json:"breaker"`
	Reasons []string `json:"reasons"`
}

type apiProgressList struct {
	StepSeconds float64       `json:"step_seconds"`
	Progress    []apiProgress `json:"progress"`
}

type apiProgress struct {
	At        time.Time `json:"at"`
	Events    int64     `json:"events"`
	LatencyMS *float64  `json:"latency_ms"`
}

type apiSampleList struct {
	Samples []apiSample `json:"samples"`
}

type apiSample struct {
	At      time.Time `json:"at"`
	Pending int64     `json:"pending"`
	Failed  int64     `json:"failed"`
}

type apiGroupSampleList struct {
	Samples []apiGroupSample `json:"samples"`
}

type apiGroupSample struct {
	At      time.Time `json:"at"`
	Pending int64     `json:"pending"`
	Failed  int64     `json:"failed"`
	Lag     *int64    `json:"lag"`
}

type apiTransactionList struct {
	Transactions []apiTransaction `json:"transactions"`
}

type apiTransaction struct {
	PID         int       `json:"pid"`
	Prepared    string    `json:"prepared"`
	Database    string    `json:"database"`
	User        string    `json:"user"`
	Application string    `json:"application"`
	Client      string    `json:"client"`
	State       string    `json:"state"`
	Since       time.Time `json:"since"`
	Query       string    `json:"query"`
	Recording   bool      `json:"recording"`
	WaitsFor    []int32   `json:"waits_for"`
}

type apiPartitionList struct {
	Partitions []apiPartition `json:"partitions"`
}

type apiPartition struct {
	Name    string `json:"name"`
	First   *int64 `json:"first"`
	Behind  *int64 `json:"behind"`
	Bytes   int64  `json:"bytes"`
	Current bool   `json:"current"`
}

type apiFailedList struct {
	Failed []apiFailed `json:"failed"`
	Next   *string     `json:"next"`
}

type apiFailed struct {
	ID            string     `json:"id"`
	Kind          string     `json:"kind"`
	Relay         string     `json:"relay"`
	Group         string     `json:"group"`
	Action        string     `json:"action"`
	OutboxID      int64      `json:"outbox_id"`
	Partition     *int32     `json:"partition"`
	Offset        *int64     `json:"offset"`
	EventID       string     `json:"event_id"`
	Type          string     `json:"type"`
	Source        string     `json:"source"`
	AggregateType string     `json:"aggregate_type"`
	AggregateID   string     `json:"aggregate_id"`
	Topic         string     `json:"topic"`
	Key           string     `json:"key"`
	ContentType   string     `json:"content_type"`
	Status        string     `json:"status"`
	Held          bool       `json:"held"`
	Retries       int        `json:"retries"`
	Attempts      int        `json:"attempts"`
	MaxAttempts   int        `json:"max_attempts"`
	LastAttemptAt *time.Time `json:"last_attempt_at"`
	LockedBy      string     `json:"locked_by"`
	LockedUntil   *time.Time `json:"locked_until"`
	ChangedAt     *time.Time `json:"changed_at"`
	Class         string     `json:"class"`
	Error         string     `json:"error"`
	OccurredAt    time.Time  `json:"occurred_at"`
	CreatedAt     time.Time  `json:"created_at"`
	FailedAt      time.Time  `json:"failed_at"`
	NextRetryAt   time.Time  `json:"next_retry_at"`
	ResolvedAt    *time.Time `json:"resolved_at"`
	ResolvedBy    string     `json:"resolved_by"`
	Resolution    string     `json:"resolution"`
}

// apiPayload has one of three members. If the masked payload is not JSON, it is in base64. If the payload
// could not be read, the error is there.
type apiPayload struct {
	Payload       json.RawMessage `json:"payload,omitempty"`
	PayloadBase64 *string         `json:"payload_base64,omitempty"`
	PayloadError  string          `json:"payload_error,omitempty"`
	Masked        bool            `json:"masked"`
}

type apiFailedWhole struct {
	apiFailed
	apiPayload
	Headers map[string]string `json:"headers"`
	History []apiAudit        `json:"history"`
	Seen    string            `json:"seen"`
}

type apiCountList struct {
	Counts []apiCount `json:"counts"`
}

type apiCount struct {
	Kind   string    `json:"kind"`
	Relay  string    `json:"relay"`
	Group  string    `json:"group"`
	Action string    `json:"action"`
	Status string    `json:"status"`
	Type   string    `json:"type"`
	Class  string    `json:"class"`
	Events int       `json:"events"`
	More   bool      `json:"more"`
	Oldest time.Time `json:"oldest"`
}

type apiAuditList struct {
	Audit []apiAudit `json:"audit"`
	Next  *int64     `json:"next"`
}

type apiAudit struct {
	ID        int64       `json:"id"`
	At        time.Time   `json:"at"`
	Operator  string      `json:"operator"`
	Login     string      `json:"login"`
	Action    string      `json:"action"`
	Reason    string      `json:"reason"`
	Relay     string      `json:"relay"`
	Topic     string      `json:"topic"`
	Key       string      `json:"key"`
	Group     string      `json:"group"`
	Handler   string      `json:"handler"`
	FailureID string      `json:"failure_id"`
	OutboxID  int64       `json:"outbox_id"`
	EventID   string      `json:"event_id"`
	Before    *apiPayload `json:"before"`
}

type apiOverview struct {
	At           time.Time     `json:"at"`
	Notices      []apiNotice   `json:"notices"`
	Unresolved   apiUnresolved `json:"unresolved"`
	StaleSeconds float64       `json:"stale_seconds"`
	Stale        []apiStale    `json:"stale"`
}

type apiNotice struct {
	Level string `json:"level"`
	Text  string `json:"text"`
}

type apiUnresolved struct {
	Events     int64      `json:"events"`
	Deliveries int64      `json:"deliveries"`
	More       bool       `json:"more"`
	Oldest     *time.Time `json:"oldest"`
}

type apiStale struct {
	Relay  string    `json:"relay"`
	Group  string    `json:"group"`
	Action string    `json:"action"`
	Status string    `json:"status"`
	Type   string    `json:"type"`
	Class  string    `json:"class"`
	Events int       `json:"events"`
	More   bool      `json:"more"`
	Oldest time.Time `json:"oldest"`
}

type apiGroupList struct {
	Groups      []apiGroup         `json:"groups"`
	More        bool               `json:"more"`
	LagAt       *time.Time         `json:"lag_at"`
	LagError    string             `json:"lag_error"`
	DeadLetters []apiDeadLetters   `json:"dead_letters"`
	Deliveries  []apiDeliveryCount `json:"deliveries"`
	Workers     []apiWorkers       `json:"workers"`
	Waiting     []apiWaiting       `json:"waiting"`
	Members     []apiMember        `json:"members"`
	Processes   []apiProcess       `json:"processes"`
}

type apiDeadLetters struct {
	Topic   string `json:"topic"`
	Of      string `json:"of"`
	Records int64  `json:"records"`
}

type apiDeliveryCount struct {
	Group      string     `json:"group"`
	Topic      string     `json:"topic"`
	Action     string     `json:"action"`
	Status     string     `json:"status"`
	Deliveries int        `json:"deliveries"`
	More       bool       `json:"more"`
	Held       int        `json:"held"`
	Oldest     time.Time  `json:"oldest"`
	Due        *time.Time `json:"due"`
}

type apiWorkers struct {
	Group       string     `json:"group"`
	CreatedAt   time.Time  `json:"created_at"`
	State       string     `json:"state"`
	Relay       string     `json:"relay"`
	ChangedAt   time.Time  `json:"changed_at"`
	Pending     int64      `json:"pending"`
	PendingMore bool       `json:"pending_more"`
	Oldest      *time.Time `json:"oldest"`
	ProgressAt  *time.Time `json:"progress_at"`
}

type apiProcess struct {
	Group   string   `json:"group"`
	Kind    string   `json:"kind"`
	Live    bool     `json:"live"`
	Works   bool     `json:"works"`
	Reasons []string `json:"reasons"`
}

type apiGroup struct {
	Group  string          `json:"group"`
	Pause  *apiPauseInfo   `json:"pause"`
	Topics []apiGroupTopic `json:"topics"`
}

type apiGroupTopic struct {
	Topic      string        `json:"topic"`
	Partitions int           `json:"partitions"`
	Lag        *int64        `json:"lag"`
	SavedAt    *time.Time    `json:"saved_at"`
	Lost       int64         `json:"lost"`
	Pause      *apiPauseInfo `json:"pause"`
}

type apiPauseInfo struct {
	Operator string    `json:"operator"`
	Reason   string    `json:"reason"`
	At       time.Time `json:"at"`
}

type apiPauseRequest struct {
	Group  jsonText `json:"group"`
	Topic  jsonText `json:"topic,omitempty"`
	Reason jsonText `json:"reason"`
}

type apiEventList struct {
	Events []apiEvent `json:"events"`
	Next   *int64     `json:"next"`
}

type apiEvent struct {
	OutboxID      int64      `json:"outbox_id"`
	EventID       string     `json:"event_id"`
	Type          string     `json:"type"`
	Source        string     `json:"source"`
	AggregateType string     `json:"aggregate_type"`
	AggregateID   string     `json:"aggregate_id"`
	Topic         string     `json:"topic"`
	Key           string     `json:"key"`
	ContentType   string     `json:"content_type"`
	OccurredAt    time.Time  `json:"occurred_at"`
	CreatedAt     time.Time  `json:"created_at"`
	Size          int        `json:"size"`
	Removed       bool       `json:"removed"`
	States        []apiState `json:"states"`
}

type apiState struct {
	Relay     string `json:"relay"`
	Status    string `json:"status"`
	FailureID string `json:"failure_id"`
}

type apiEventWhole struct {
	apiEvent
	apiPayload
	Headers map[string]string `json:"headers"`
	Sent    []apiSent         `json:"sent"`
}

type apiTimeline struct {
	OutboxID    int64              `json:"outbox_id"`
	EventID     string             `json:"event_id"`
	InOutbox    bool               `json:"in_outbox"`
	Entries     []apiTimelineEntry `json:"entries"`
	Searched    []string           `json:"searched"`
	NotSearched []string           `json:"not_searched"`
}

type apiTimelineEntry struct {
	At        *time.Time `json:"at"`
	What      string     `json:"what"`
	Error     string     `json:"error"`
	Table     string     `json:"table"`
	FailureID string     `json:"failure_id"`
}

type apiSent struct {
	Relay     string    `json:"relay"`
	Batch     int64     `json:"batch"`
	Topic     string    `json:"topic"`
	Partition int32     `json:"partition"`
	Offset    int64     `json:"offset"`
	At        time.Time `json:"at"`
	Retried   bool      `json:"retried"`
	Repeat    bool      `json:"repeat"`
	Expired   bool      `json:"expired"`
}

type apiReason struct {
	Reason jsonText `json:"reason"`
	Seen   jsonText `json:"seen,omitempty"`
}

type apiEdit struct {
	apiReason

	Payload       json.RawMessage `json:"payload,omitempty"`
	PayloadBase64 *jsonText       `json:"payload_base64,omitempty"`
}

type apiBulkRequest struct {
	Filter jsonFilter `json:"filter"`
	Reason jsonText   `json:"reason,omitempty"`
	DryRun jsonBool   `json:"dry_run,omitempty"`
}

type apiBulkResult struct {
	Events int        `json:"events"`
	DryRun bool       `json:"dry_run"`
	Topics []apiTopic `json:"topics"`
	// Handlers are the handlers of the deliveries among them.
	Handlers []apiHandler `json:"handlers"`
}

type apiHandler struct {
	Group      string `json:"group"`
	Action     string `json:"action"`
	Deliveries int    `json:"deliveries"`
}

type apiTopic struct {
	Topic  string `json:"topic"`
	Events int    `json:"events"`
}
