package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/outboxgo/outbox/bench/internal/report"
)

// prose is the text of the document; document fills in what was measured.
//
//go:embed benchmarks.md.tmpl
var prose string

// document is what docs/benchmarks.md is made of.
type document struct {
	Machine []fact          `json:"machine"` // and versions
	Rounds  string          `json:"rounds"`  // how many were disturbed
	Peers   []described     `json:"peers"`
	Runs    int             `json:"runs"`
	Seconds float64         `json:"seconds"` // at each latency point, all turns together
	Workers int             `json:"workers"`
	Rates   []int           `json:"rates"`
	Events  int             `json:"events"` // of a backlog
	Results []report.Result `json:"results"`
}

// described is a peer of the document.
type described struct {
	Name     string `json:"name"`
	What     string `json:"what"`
	Settings string `json:"settings"`
	Events   int    `json:"events"` // of its backlog
}

// document returns what this run has measured.
func (b *bench) document() *document {
	d := &document{
		Machine: b.machine, Rounds: b.rounds.String(), Runs: b.cfg.runs, Seconds: b.cfg.seconds, Workers: b.cfg.workers, Rates: b.cfg.rates, Events: b.cfg.events,
		Results: b.report.Results(),
	}
	for _, p := range b.chosen() {
		d.Peers = append(d.Peers, described{p.name, p.what, p.settings, max(minEvents, b.cfg.events/p.share)})
	}
	return d
}

const (
	documentFile = "benchmarks.md"
	dataFile     = "benchmarks.json"
	imagesDir    = "images"
)

// renderAgain writes the document in a folder again, from its data.
func renderAgain(dir string) error {
	data, err := os.ReadFile(filepath.Join(dir, dataFile))
	if err != nil {
		return err
	}
	var d document
	if err := json.Unmarshal(data, &d); err != nil {
		return fmt.Errorf("read %s: %w", dataFile, err)
	}
	return d.write(dir)
}

// write writes data, text and plots into a folder.
func (d *document) write(dir string) error {
	data, err := json.MarshalIndent(d, "", "\t")
	if err != nil {
		return err
	}
	text, err := d.text()
	if err != nil {
		return err
	}
	err = errors.Join(os.MkdirAll(filepath.Join(dir, imagesDir), 0o755), writeFile(filepath.Join(dir, dataFile), append(data, '\n')),
		writeFile(filepath.Join(dir, documentFile), text))
	for name, plot := range d.plots() {
		err = errors.Join(err, writeFile(filepath.Join(dir, imagesDir, name), []byte(plot)))
	}
	return err
}

func writeFile(name string, content []byte) error { return os.WriteFile(name, content, 0o644) }

// text returns the document.
func (d *document) text() ([]byte, error) {
	t, err := template.New(documentFile).Option("missingkey=error").Funcs(template.FuncMap{
		"number": report.Number, "latency": d.latencyTable, "drain": d.drainTable, "wal": d.walTable, "targets": d.targets,
	}).Parse(prose)
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, d); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// find returns the result of a scenario that is compared with another one, or with none.
func (d *document) find(scenario, against string) (report.Result, bool) {
	i := slices.IndexFunc(d.Results, func(r report.Result) bool { return r.Scenario == scenario && r.Against == against })
	if i < 0 {
		return report.Result{}, false
	}
	return d.Results[i], true
}

// notMeasured stands where a figure is missing.
const notMeasured = "–"

// value is the cell of a figure.
func (d *document) value(scenario string) string {
	if r, ok := d.find(scenario, ""); ok {
		return report.Number(r.Value)
	}
	return notMeasured
}

// ratio is the cell of what ours is compared with a peer's, with its spread.
func (d *document) ratio(scenario, against string) string {
	if r, ok := d.find(scenario, against); ok {
		return fmt.Sprintf("%.2f ±%.0f %%", r.Ratio, 50*r.Spread)
	}
	return notMeasured
}

// table returns rows as Markdown. The first is the head.
func table(rows [][]string) string {
	var b strings.Builder
	for i, row := range rows {
		b.WriteString("| " + strings.Join(row, " | ") + " |\n")
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", len(row)) + "\n")
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

func (d *document) latencyTable() string {
	rows := [][]string{{"tx/s", "peer", "p50, ms", "p99, ms", "CPU, µs/tx", "outbox : peer at p50", "at p99", "CPU"}}
	for _, rate := range d.Rates {
		for _, p := range d.Peers {
			point := fmt.Sprintf("latency/%d/%s", rate, p.Name)
			if r, ok := d.find(point, ""); ok && r.Failed != "" {
				rows = append(rows, []string{fmt.Sprint(rate), p.Name, r.Failed, "", "", "", "", ""})
				continue
			}
			row := []string{fmt.Sprint(rate), p.Name}
			for _, what := range []string{"p50", "p99", "cpu"} {
				row = append(row, d.value(point+"-"+what))
			}
			for _, what := range []string{"p50", "p99", "cpu"} {
				row = append(row, d.ratio(fmt.Sprintf("latency/%d/%s-%s", rate, ours, what), point+"-"+what))
			}
			rows = append(rows, row)
		}
	}
	return table(rows)
}

func (d *document) drainTable() string {
	rows := [][]string{{"peer", "events", "events/s", "outbox : peer"}}
	for _, p := range d.Peers {
		point := "drain/" + p.Name
		if r, ok := d.find(point, ""); ok && r.Failed != "" {
			rows = append(rows, []string{p.Name, report.Number(float64(p.Events)), r.Failed, ""})
			continue
		}
		rows = append(rows, []string{p.Name, report.Number(float64(p.Events)), d.value(point), d.ratio("drain/"+ours, point)})
	}
	return table(rows)
}

func (d *document) walTable() string {
	rows := [][]string{{"peer", "bytes/event", "outbox : peer"}}
	for _, p := range d.Peers {
		point := "wal/" + p.Name
		if r, ok := d.find(point, ""); ok && r.Failed != "" {
			rows = append(rows, []string{p.Name, r.Failed, ""})
			continue
		}
		rows = append(rows, []string{p.Name, d.value(point), d.ratio("wal/"+ours, point)})
	}
	return table(rows)
}

// targets lists the targets that were not met.
func (d *document) targets() string {
	rows, all := [][]string{{"", "against", "ratio", "target"}}, 0
	for _, r := range d.Results {
		if r.Met == nil {
			continue
		}
		if all++; !*r.Met {
			rows = append(rows, []string{r.Scenario, r.Against, fmt.Sprintf("%.2f", r.Ratio), r.Target})
		}
	}
	if len(rows) == 1 {
		return fmt.Sprintf("All %d ratios are on the better side of their targets.\n", all)
	}
	return fmt.Sprintf("%d of %d ratios miss their targets:\n\n%s", len(rows)-1, all, table(rows))
}
