package main

import (
	"fmt"
	"html"
	"strings"

	"github.com/outboxgo/outbox/bench/internal/report"
)

// bar is one bar of a chart.
type bar struct {
	label string
	value float64
	note  string // in place of a bar, if it is not empty
	ours  bool
}

// group is some bars below a title.
type group struct {
	title string
	bars  []bar
}

// plots returns the charts by the names of their files. One without bars is left out.
func (d *document) plots() map[string]string {
	all := map[string]string{}
	add := func(name, title, unit string, groups []group) {
		for _, g := range groups {
			if len(g.bars) > 0 {
				all[name] = chart(title, unit, groups)
				return
			}
		}
	}
	for _, p := range []string{"p50", "p99"} {
		var groups []group
		for _, rate := range d.Rates {
			groups = append(groups, group{
				fmt.Sprintf("%d transactions/s", rate),
				d.bars(func(peer string) (point, figure string) {
					point = fmt.Sprintf("latency/%d/%s", rate, peer)
					return point, point + "-" + p
				}),
			})
		}
		add("benchmarks-latency-"+p+".svg", "From commit to arrival, "+p, "ms", groups)
	}
	for name, title := range map[string][2]string{"drain": {"Relaying a backlog", "events/s"}, "wal": {"WAL of an event", "bytes"}} {
		bars := d.bars(func(peer string) (point, figure string) { return name + "/" + peer, name + "/" + peer })
		add("benchmarks-"+name+".svg", title[0], title[1], []group{{"", bars}})
	}
	return all
}

// bars returns the bars of all peers for one figure. Point is where a failure is reported.
func (d *document) bars(of func(peer string) (point, figure string)) (bars []bar) {
	for _, p := range d.Peers {
		point, figure := of(p.Name)
		if r, ok := d.find(point, ""); ok && r.Failed != "" {
			bars = append(bars, bar{label: p.Name, note: "fell behind"})
		} else if r, ok := d.find(figure, ""); ok {
			bars = append(bars, bar{label: p.Name, value: r.Value, ours: isOurs(p.Name)})
		}
	}
	return bars
}

// Sizes of a chart, in pixels.
const (
	chartWidth  = 720
	chartLeft   = 130 // of the bars
	chartRight  = 110 // for the figures
	barHeight   = 22
	barDistance = 28
	titleHeight = 40
	groupHeight = 30
)

// chart draws horizontal bars from 0 on, on one scale.
func chart(title, unit string, groups []group) string {
	most, height := 0.0, titleHeight
	for _, g := range groups {
		height += groupHeight + len(g.bars)*barDistance
		for _, b := range g.bars {
			most = max(most, b.value)
		}
	}
	var s strings.Builder
	fmt.Fprintf(&s, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %[1]d %[2]d" font-family="sans-serif" font-size="13">`+"\n", chartWidth, height)
	fmt.Fprintf(&s, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", chartWidth, height)
	fmt.Fprintf(&s, `<text x="16" y="26" font-size="16" fill="#1f2933">%s (%s)</text>`+"\n", html.EscapeString(title), html.EscapeString(unit))
	y := titleHeight
	for _, g := range groups {
		fmt.Fprintf(&s, `<text x="16" y="%d" fill="#52606d">%s</text>`+"\n", y+18, html.EscapeString(g.title))
		y += groupHeight
		for _, b := range g.bars {
			b.draw(&s, y, most)
			y += barDistance
		}
	}
	s.WriteString("</svg>\n")
	return s.String()
}

func (b bar) draw(s *strings.Builder, y int, most float64) {
	fmt.Fprintf(s, `<text x="%d" y="%d" text-anchor="end" fill="#1f2933">%s</text>`+"\n", chartLeft-8, y+16, html.EscapeString(b.label))
	if b.note != "" {
		fmt.Fprintf(s, `<text x="%d" y="%d" fill="#9b1c1c">%s</text>`+"\n", chartLeft, y+16, html.EscapeString(b.note))
		return
	}
	color := "#9aa5b1"
	if b.ours {
		color = "#2b6cb0"
	}
	width := 1.0
	if most > 0 {
		width = max(1, b.value/most*(chartWidth-chartLeft-chartRight))
	}
	fmt.Fprintf(s, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", chartLeft, y, width, barHeight, color)
	fmt.Fprintf(s, `<text x="%.1f" y="%d" fill="#1f2933">%s</text>`+"\n", chartLeft+width+6, y+16, report.Number(b.value))
}
