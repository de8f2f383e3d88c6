package outboxadmin

import (
	"context"
	"net/http"

	"github.com/outboxgo/outbox/outboxops"
)

// groupRow is a line of the table of consumer groups: a topic, or all of them.
type groupRow struct {
	Group string
	All   bool // of the group's topics
	outboxops.ConsumerTopic
}

// groupRows returns a line for each topic of each group, and in front of these one for all
// topics if all are paused.
func groupRows(groups []outboxops.ConsumerGroup) (rows []groupRow) {
	for _, g := range groups {
		if g.Pause != nil {
			rows = append(rows, groupRow{Group: g.Group, All: true, ConsumerTopic: outboxops.ConsumerTopic{Pause: g.Pause}})
		}
		for _, t := range g.Topics {
			rows = append(rows, groupRow{Group: g.Group, ConsumerTopic: t})
		}
	}
	return rows
}

// What names what the line is about.
func (r groupRow) What() string {
	if r.All {
		return "all topics"
	}
	return r.Topic
}

func (a *admin) apiConsumers(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	if err := q.done(); err != nil {
		return err
	}
	groups, err := a.consumers.List(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiGroupList{Groups: each(groups, groupOf)})
	return nil
}

// apiPause is pause or resume.
func apiPause(action string) func(*admin, http.ResponseWriter, *http.Request) error {
	return func(a *admin, w http.ResponseWriter, r *http.Request) error {
		var body apiPauseRequest
		if err := readJSON(r, &body); err != nil {
			return err
		}
		do := map[string]func(ctx context.Context, group, topic string, why outboxops.AuditInfo) error{"pause": a.consumers.Pause, "resume": a.consumers.Resume}[action]
		err := do(r.Context(), body.Group, body.Topic, auditInfo(r, body.Reason))
		if err == nil {
			w.WriteHeader(http.StatusNoContent)
		}
		return err
	}
}
