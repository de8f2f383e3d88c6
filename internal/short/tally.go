package short

import "strconv"

// Tally is how many there are. With More set, there may be more: a read has met its limit.
type Tally struct {
	N    int64
	More bool
}

// TallyOf is the tally of a count.
func TallyOf[N int | int64](n N, more bool) Tally { return Tally{int64(n), more} }

// Plus adds up.
func (a Tally) Plus(b Tally) Tally { return Tally{a.N + b.N, a.More || b.More} }

// String writes the number, with a plus if there may be more.
func (a Tally) String() string {
	if a.More {
		return Thousands(a.N) + "+"
	}
	return Thousands(a.N)
}

// Of writes the number with what it counts.
func (a Tally) Of(one, many string) string {
	if a.More {
		return a.String() + " " + many
	}
	return Plural(a.N, one, many)
}

// Plural is a number of things.
func Plural(n int64, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return Thousands(n) + " " + many
}

// Thousands writes a number with commas.
func Thousands[N int | int32 | int64](n N) string {
	text := strconv.FormatInt(int64(n), 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
