package outboxadmin

import (
	"context"
	"net/http"
	"net/url"

	"github.com/outboxgo/outbox/outboxops"
)

// pausePage asks for the reason of a pause, or of its end.
type pausePage struct {
	Action       string // pause or resume
	Group, Topic string // no topic stands for all topics of the group
	Pause        *outboxops.ConsumerPause
	Reason       string // as the user wrote it
	Wrong        string // why the action was refused
}

// pauseNames are the parameters and the fields of a pause.
var pauseNames = []string{"group", "topic"}

// pauseTitles are the titles of the page, by action.
var pauseTitles = map[string]string{"pause": "Pause a consumer group", "resume": "Resume a consumer group"}

// pauseLink leads to the page that pauses or resumes a topic of a group, or all of them.
func pauseLink(r groupRow) string { return pausePath(r.Pause, r.Group, r.Topic) }

// groupPauseLink leads to the page that pauses or resumes all topics of a group.
func groupPauseLink(g groupView) string { return pausePath(g.Pause, g.Group, "") }

func pausePath(present *outboxops.ConsumerPause, group, topic string) string {
	values := url.Values{"group": {group}}
	if topic != "" {
		values.Set("topic", topic)
	}
	if present != nil {
		return "consumers/resume?" + values.Encode()
	}
	return "consumers/pause?" + values.Encode()
}

// changePause returns the function that runs an action on the pauses of a group.
func (a *admin) changePause(action string) func(context.Context, string, string, outboxops.AuditInfo) error {
	switch action {
	case "pause":
		return a.consumers.Pause
	case "resume":
		return a.consumers.Resume
	}
	return nil
}

// pauseReview shows what a pause, or its end, does.
func (a *admin) pauseReview(r *request) (answer, error) {
	q := &r.query
	page := pausePage{Action: r.PathValue("action"), Group: q.text("group"), Topic: q.text("topic")}
	if page.Group == "" {
		q.fail("group", "is missing")
	}
	if err := q.done(); err != nil {
		return answer{}, err
	}
	return a.showPause(r, http.StatusOK, page)
}

// showPause completes the page with the present pause.
func (a *admin) showPause(r *request, status int, page pausePage) (answer, error) {
	title, ok := pauseTitles[page.Action]
	if !ok {
		return answer{}, errNowhere
	}
	groups, _, err := a.consumers.List(r.Context(), outboxops.ConsumerFilter{Group: page.Group})
	if err != nil {
		return answer{}, err
	}
	page.Pause = presentPause(groups, page.Topic)
	return a.page(r.Request, status, "pause", title, page), nil
}

// presentPause returns the pause of a topic, or the pause of all topics for "".
func presentPause(groups []outboxops.ConsumerGroup, topic string) *outboxops.ConsumerPause {
	for _, row := range groupRows(groups) {
		if row.Pause != nil && row.All == (topic == "") && row.Topic == topic {
			return row.Pause
		}
	}
	return nil
}

// pauseAct pauses or resumes a group. If that is refused, it shows the page again, with the reason that the user
// wrote.
func (a *admin) pauseAct(r *request) (answer, error) {
	q := &r.query
	page := pausePage{Action: r.PathValue("action"), Group: q.text("group"), Topic: q.text("topic"), Reason: q.text("reason")}
	change := a.changePause(page.Action)
	if change == nil {
		return answer{}, errNowhere
	}
	err := change(r.Context(), page.Group, page.Topic, auditInfo(r, page.Reason))
	if err == nil {
		return redirectTo("../consumers?done=" + page.Action), nil
	}
	p, ours := shown(err)
	if !ours {
		return answer{}, err
	}
	page.Wrong = p.text
	return a.showPause(r, p.status, page)
}
