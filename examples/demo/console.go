package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// console prints lines of a few kinds, each with its columns. It is safe for
// concurrent use.
type console struct {
	quiet, color bool

	mu sync.Mutex
	w  io.Writer
}

// newConsole uses colour if the output is a terminal and the user has not turned colour off
// (no-color.org). quiet leaves the summary.
func newConsole(w io.Writer, quiet bool) *console {
	terminal := false
	if file, ok := w.(*os.File); ok {
		info, err := file.Stat()
		terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return &console{w: w, quiet: quiet, color: terminal && os.Getenv("NO_COLOR") == ""}
}

// SGR parameters of the terminal.
const (
	bold  = "1"
	faint = "2"
	red   = "31"
	green = "32"
)

func (c *console) paint(sgr, text string) string {
	if !c.color {
		return text
	}
	return "\x1b[" + sgr + "m" + text + "\x1b[0m"
}

func (c *console) println(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, _ = fmt.Fprintln(c.w, text) // who closed the pipe is still told by the exit code
}

func (c *console) header(cfg config, runID, page string) {
	if c.quiet {
		return
	}
	pace := "as fast as possible"
	if cfg.rate > 0 {
		pace = fmt.Sprintf("%d a second", cfg.rate)
	}
	kind := cfg.kind
	if kind == "" {
		kind = "kafka"
	}
	c.title("A small shop on outbox")
	c.row("orders", "%s by %d customers, %s", thousands(cfg.orders), cfg.shoppers, pace)
	c.row("PostgreSQL", "schema %s, of this run", runID)
	c.row("Kafka", "%s at %s", kind, strings.Join(cfg.Brokers, ", "))
	until := "until the end; -keep keeps it open"
	if cfg.keep {
		until = "until Ctrl-C"
	}
	c.row("page", "%s, for operators, %s", page, until)
	c.println("")
}

// event is one that arrived.
func (c *console) event(since time.Duration, topic, key, payload string) {
	if !c.quiet {
		c.println(fmt.Sprintf("%s  %-19s  %6s  %s", c.time(since), topic, key, payload))
	}
}

// rate is how it goes on.
func (c *console) rate(since time.Duration, total int, rate float64) {
	if !c.quiet {
		c.println(fmt.Sprintf("%s  %6s events received, %6s", c.time(since), thousands(total), perSecond(rate)))
	}
}

// note is what the shop has to say.
func (c *console) note(format string, args ...any) {
	if !c.quiet {
		c.println(fmt.Sprintf("%9s  %s", "", fmt.Sprintf(format, args...)))
	}
}

func (c *console) time(since time.Duration) string {
	return c.paint(faint, fmt.Sprintf("%7.2f s", since.Seconds()))
}

func (c *console) title(text string) { c.println("\n" + c.paint(bold, text)) }

// row is a line of header and summary.
func (c *console) row(name, format string, args ...any) {
	c.println(fmt.Sprintf("  %-15s  %s", name, fmt.Sprintf(format, args...)))
}

// count is a row with a number that should be 0. If wrong is set, others are red.
func (c *console) count(name string, n int, wrong bool) {
	text := thousands(n)
	if n > 0 && wrong {
		text = c.paint(red, text)
	}
	c.row(name, "%s", text)
}

func (c *console) good(text string) { c.println("\n" + c.paint(green, text)) }
func (c *console) bad(text string)  { c.println("\n" + c.paint(red, text)) }

// thousands writes n with a comma before each group of three digits.
func thousands(n int) string {
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
