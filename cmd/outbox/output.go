package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
)

// output is the standard output. It keeps its first error, and calls failed then, which ends the command.
type output struct {
	w      io.Writer
	failed func()

	mu  sync.Mutex
	err error // under mu
}

// Write implements [io.Writer].
func (o *output) Write(b []byte) (int, error) {
	n, err := o.w.Write(b)
	if err != nil {
		o.mu.Lock()
		first := o.err == nil
		o.err = cmp.Or(o.err, err)
		o.mu.Unlock()
		if first {
			o.failed()
		}
	}
	return n, err
}

// error returns the error of the first write that failed, or nil.
func (o *output) error() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err == nil {
		return nil
	}
	return fmt.Errorf("write to standard output: %w", o.err)
}

// writeJSON writes one document.
func (e *env) writeJSON(v any) error {
	enc := json.NewEncoder(e.stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// writeLine writes one line of JSON.
func (e *env) writeLine(v any) error {
	enc := json.NewEncoder(e.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

func (e *env) printf(format string, args ...any) { fmt.Fprintf(e.stdout, format, args...) }

// maxText is how much of an error or a finding is shown, in bytes: it may repeat the content of a
// table, a topic or an argument.
const maxText = 4_000

// printError prints an error.
func (e *env) printError(text string) {
	text = "outbox: " + visibleLines(short.Text(e.mask(text), maxText))
	if e.errTTY {
		text = strings.Join(wrap(text, e.width), "\n")
	}
	fmt.Fprintln(e.stderr, text)
}

// say writes a text for people, on a terminal in lines that fit.
func (e *env) say(text string) {
	if e.outTTY {
		text = strings.Join(wrap(text, e.width), "\n")
	}
	e.printf("%s\n", text)
}

// color is an escape sequence of terminals.
type color string

const (
	red    color = "\x1b[31m"
	yellow color = "\x1b[33m"
	green  color = "\x1b[32m"
	dim    color = "\x1b[2m"
	plainC color = "\x1b[0m"
)

func (e *env) paint(c color, text string) string {
	if !e.outTTY || e.noColor || e.getenv("NO_COLOR") != "" {
		return text
	}
	return string(c) + text + string(plainC)
}

// visible replaces control characters, which could move the cursor or do harm. Keys and errors are
// untrusted input.
func visible(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '·'
		}
		return r
	}, text)
}

// visibleLines is visible for a text of several lines.
func visibleLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = visible(lines[i])
	}
	return strings.Join(lines, "\n")
}

// table is data in columns. On a terminal, the columns in flex, by index, are cut so that a row fits on its
// line.
type table struct {
	head []string
	flex []int
	rows [][]string
}

func (t *table) add(cells ...string) {
	for i := range cells {
		cells[i] = visible(cells[i])
	}
	t.rows = append(t.rows, cells)
}

const (
	gap     = 2 // between columns
	minFlex = 6
)

func (t *table) widths(limit int) []int {
	widths := make([]int, len(t.head))
	total := -gap
	for i := range widths {
		for _, row := range append([][]string{t.head}, t.rows...) {
			widths[i] = max(widths[i], utf8.RuneCountInString(row[i]))
		}
		total += widths[i] + gap
	}
	for limit > 0 && total > limit {
		widest := -1
		for _, i := range t.flex {
			if widths[i] > minFlex && (widest < 0 || widths[i] > widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		widths[widest]--
		total--
	}
	return widths
}

func (e *env) writeTable(t table) {
	limit := 0
	if e.outTTY {
		limit = e.width
	}
	widths := t.widths(limit)
	e.writeRow(t.head, widths, dim)
	for _, row := range t.rows {
		e.writeRow(row, widths, "")
	}
}

func (e *env) writeRow(row []string, widths []int, c color) {
	var line strings.Builder
	for i, cell := range row {
		cell = cut(cell, widths[i])
		line.WriteString(cell)
		line.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+gap))
	}
	text := strings.TrimRight(line.String(), " ")
	if c != "" {
		text = e.paint(c, text)
	}
	fmt.Fprintln(e.stdout, text)
}

// cut shortens a text to width characters.
func cut(text string, width int) string {
	if utf8.RuneCountInString(text) <= width {
		return text
	}
	return string([]rune(text)[:max(width-1, 0)]) + "…"
}

// wrap breaks a text at spaces into lines of at most width characters. A longer word gets its own line.
func wrap(text string, width int) (lines []string) {
	for _, paragraph := range strings.Split(text, "\n") {
		line := ""
		for _, word := range strings.Fields(paragraph) {
			switch {
			case line == "":
				line = word
			case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width:
				line += " " + word
			default:
				lines, line = append(lines, line), word
			}
		}
		lines = append(lines, line)
	}
	return lines
}

// count writes a number with commas.
func count[N int | int32 | int64](n N) string { return short.Thousands(n) }

func plural(n int64, one, many string) string { return short.Plural(n, one, many) }

// tally is how many there are, and whether there may be more.
type tally = short.Tally

// upTo returns a number that was counted up to [outbox.MaxCounted].
func upTo[N int | int64](n N) tally { return short.TallyOf(n, n == outbox.MaxCounted) }

// age returns roughly the age of a time; "-" for never.
func age(t, now time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return length(now.Sub(t))
}

// length writes a time in its two largest units.
func length(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// clock writes a point in time; "-" for none.
func clock(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05")
}

// optional returns a time for JSON, or nil for the zero time.
func optional(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	utc := t.UTC()
	return &utc
}

// body is a payload for JSON: as it is if it is JSON itself, else in base64.
func body(payload []byte) (asJSON json.RawMessage, base64 []byte) {
	if json.Valid(payload) {
		return payload, nil
	}
	return nil, payload
}

// progress shows the progress of a command: as a bar on a terminal, otherwise as a line now and then.
type progress struct {
	w     io.Writer
	bar   bool
	quiet bool
	what  string
	total int // 0: not known
	now   func() time.Time
	shown time.Time
	after string // behind the bar
}

const (
	barWidth  = 30
	barEvery  = 100 * time.Millisecond
	lineEvery = 5 * time.Second
)

func (e *env) progress(what string, total int) *progress {
	return &progress{w: e.stderr, bar: e.errTTY, quiet: e.json, what: visible(what), total: total, now: e.now, shown: e.now()}
}

func (p *progress) show(done int) {
	every := lineEvery
	if p.bar {
		every = barEvery
	}
	if p.quiet || p.now().Sub(p.shown) < every {
		return
	}
	p.shown = p.now()
	far := count(done)
	if p.total > 0 {
		far += " of " + count(p.total)
	}
	if !p.bar {
		fmt.Fprintf(p.w, "%s %s\n", p.what, far)
		return
	}
	full := barWidth * min(done, p.total) / max(p.total, 1)
	fmt.Fprintf(p.w, "\r%s [%s%s] %s%s ", p.what, strings.Repeat("#", full), strings.Repeat(".", barWidth-full), far, p.after)
}

// showNext is show for work that another run can continue. The bar has the id that the run continues behind. A line has
// the whole command, and is written with --json too.
func (p *progress) showNext(done int, next int64, command func() string) {
	if p.bar && !p.quiet {
		p.after = fmt.Sprintf(", --after %d", next)
		p.show(done)
		return
	}
	if p.now().Sub(p.shown) >= lineEvery {
		p.shown = p.now()
		fmt.Fprintf(p.w, "%s %s of %s; to go on: %s\n", p.what, count(done), count(p.total), command())
	}
}

// toGoOn prints the command that continues one that is interrupted.
func (e *env) toGoOn(command string) { fmt.Fprintf(e.stderr, "to go on: %s\n", command) }

// end takes the bar away.
func (p *progress) end() {
	if p.bar && !p.quiet {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
