package outboxadmin

import (
	"context"

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

func (a *admin) apiConsumers(r *request) (answer, error) {
	q := &r.query
	if err := q.done(); err != nil {
		return answer{}, err
	}
	groups, more, err := a.consumers.List(r.Context(), outboxops.ConsumerFilter{})
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiGroupList{Groups: each(groups, groupOf), More: more})
}

// apiPause is pause or resume.
func apiPause(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		var body apiPauseRequest
		if err := r.decode(&body); err != nil {
			return answer{}, err
		}
		do := map[string]func(context.Context, string, string, outboxops.AuditInfo) error{"pause": a.consumers.Pause, "resume": a.consumers.Resume}[action]
		return done, do(r.Context(), string(body.Group), string(body.Topic), auditInfo(r, string(body.Reason)))
	}
}
