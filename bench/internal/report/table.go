package report

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// columns of the table; those with true are numbers and stand to the right.
var columns = []struct {
	title string
	right bool
}{
	{"scenario", false}, {"value", true}, {"unit", false}, {"ratio", true}, {"against", false},
	{"target", false}, {"met", false}, {"spread", true}, {"runs", true},
}

// table returns notes and results for people.
func (r *Report) table() string {
	rows := [][]string{make([]string, len(columns))}
	for i, c := range columns {
		rows[0][i] = c.title
	}
	for _, result := range r.results {
		rows = append(rows, result.cells())
	}
	return strings.Join(r.notes, "\n") + "\n\n" + align(rows)
}

func (r Result) cells() []string {
	if r.Failed != "" {
		return []string{r.Scenario, "FAILED: " + r.Failed}
	}
	ratio, met := "", ""
	if r.Against != "" {
		ratio = fmt.Sprintf("%.2f", r.Ratio)
	}
	if r.Met != nil {
		met = map[bool]string{true: "yes", false: "NO"}[*r.Met]
	}
	return []string{
		r.Scenario, Number(r.Value), r.Unit, ratio, r.Against, r.Target, met,
		fmt.Sprintf("%.0f %%", 100*r.Spread), strconv.Itoa(r.Runs),
	}
}

// align pads cells to the width of their columns. What ends a row before its
// time is a remark, and as wide as it likes.
func align(rows [][]string) string {
	width := make([]int, len(columns))
	for _, row := range rows {
		for i, cell := range row {
			if remark(row, i) {
				continue
			}
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		var line strings.Builder
		for i, cell := range row {
			if remark(row, i) {
				line.WriteString(cell)
				continue
			}
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if columns[i].right {
				cell = pad + cell
			} else {
				cell += pad
			}
			line.WriteString(cell + "  ")
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	return b.String()
}

func remark(row []string, i int) bool { return len(row) < len(columns) && i == len(row)-1 }

// Number writes three digits or more: 5.43, 54.3, 543, 5,432.
func Number(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	digits := fmt.Sprintf("%.0f", v)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
