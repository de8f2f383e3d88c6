package outboxadmin

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// maxGroupCards bounds the groups that have a card with plots. Other groups are lines of a table.
const maxGroupCards = 20

// groupView is a consumer group on its card.
type groupView struct {
	groupState

	Pause *outboxops.ConsumerPause // of all its topics; nil if there is none
	Plots []plot
}

// Count returns the number of events with a status.
func (g groupState) Count(status string) tally { return g.By[status] }

// groupStat is a number on the card of a group, which leads to its deliveries.
func groupStat(name string, g groupView, status, note string) stat {
	return stat{name, status, failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: g.Group, Statuses: []string{status}}), note, g.Count(status)}
}

// groupViews returns the cards of groups.
func (a *admin) groupViews(ctx context.Context, states []groupState, v groupsView, now time.Time, s span) (views []groupView, err error) {
	for _, g := range states {
		view := groupView{groupState: g}
		for _, of := range v.groups {
			if of.Group == g.Group {
				view.Pause = of.Pause
			}
		}
		if view.Plots, err = a.groupPlots(ctx, g, now, s); err != nil {
			return nil, err
		}
		views = append(views, view)
	}
	return views, nil
}

// groupPlots draws a group: for workers also how many events they pick up, and how soon.
func (a *admin) groupPlots(ctx context.Context, g groupState, now time.Time, s span) (plots []plot, err error) {
	if g.Workers != nil {
		progress, err := a.inspect.Progress(ctx, tables.WorkerPrefix+g.Group, now.Add(-s.length), s.step)
		if err != nil {
			return nil, err
		}
		plots = progressPlots("Picked up", "Time to pick up", progress, now, s)
	}
	var backlog, lag []point
	for _, w := range a.groupSamples.since(g.Group, now.Add(-s.length)) {
		backlog = append(backlog, point{w.at, float64(w.pending + w.failed)})
		if w.lag != nil {
			lag = append(lag, point{w.at, float64(*w.lag)})
		}
	}
	plots = append(plots, sampledPlot("Backlog", backlog, now, s))
	if g.Topics > 0 {
		plots = append(plots, sampledPlot("Lag", lag, now, s))
	}
	return plots, nil
}

// progressPlots draws the moves of a position: events in a second, and the time from the start of a transaction until
// the position was behind its events.
func progressPlots(rateName, latencyName string, progress []outboxops.RelayProgress, now time.Time, s span) []plot {
	var rate, latency []point
	for _, p := range progress {
		rate = append(rate, point{p.At, float64(p.Events) / s.step.Seconds()})
		if p.Latency > 0 {
			latency = append(latency, point{p.At, float64(p.Latency.Microseconds()) / 1000})
		}
	}
	rates := scale{from: now.Add(-s.length), to: now, gap: s.step + s.step/2, least: 1, format: rateText}
	latencies := scale{from: now.Add(-s.length), to: now, gap: 3 * s.step, least: 10, format: millisText}
	return []plot{newPlot(rateName, rate, rates).aged(now, rate, s.step), newPlot(latencyName, latency, latencies).aged(now, latency, s.step)}
}

// sampledPlot draws a number that is known only of the times at which a page was open.
func sampledPlot(name string, points []point, now time.Time, s span) plot {
	p := newPlot(name, points, scale{from: now.Add(-s.length), to: now, gap: sampleBreath, least: 10, format: countText}).aged(now, points, 0)
	p.From += ", known while a page is open"
	return p
}

// sampleGroups adds the state of all groups to the samples. A lag that Kafka has not confirmed lately is left out.
func (a *admin) sampleGroups(now time.Time, v groupsView) {
	a.groupSamples.add(now, func(yield func(string, sample) bool) {
		for _, g := range v.all() {
			one := sample{pending: g.Count(statePending).N, failed: g.Waiting().N - g.Count(statePending).N}
			if now.Sub(v.kafka.At) <= kafkaFresh {
				one.lag = g.Lag
			}
			if !yield(g.Group, one) {
				return
			}
		}
	})
}
