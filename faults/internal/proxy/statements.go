package proxy

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// Statements cuts connections to PostgreSQL at statements of their clients. It knows the statements of connections
// without TLS.
type Statements struct {
	// Cut says whether the connection of a statement is cut, by the statement's text. It is called each time the
	// statement is executed, by several goroutines at once.
	Cut func(sql string) bool
	// Answered lets PostgreSQL have the statement, and cuts the connection in front of the answer. Without it
	// PostgreSQL does not get the statement.
	Answered bool
}

// Lengths and codes of the first message of a connection.
const (
	maxFirst      = 10_000
	protocol3     = 3
	lengthOfFirst = 8 // bytes that every first message has
	lengthOfOther = 5 // type and length of all later messages
)

// frontend follows what a client of PostgreSQL sends. On a connection of another protocol it finds no statement. Only
// one goroutine uses it.
type frontend struct {
	begun   bool              // the first message is over
	foreign bool              // this is not PostgreSQL's protocol
	rest    []byte            // of a message that has not ended
	texts   map[string]string // of prepared statements, by name
}

// executed returns the texts of the statements that are executed by messages which end in data.
func (f *frontend) executed(data []byte) (texts []string) {
	if f.foreign {
		return nil
	}
	f.rest = append(f.rest, data...)
	for {
		kind, body, ok := f.next()
		if !ok {
			return texts
		}
		switch parts := bytes.SplitN(body, []byte{0}, 3); {
		case kind == 'Q' && len(parts) > 1:
			texts = append(texts, string(parts[0]))
		case kind == 'P' && len(parts) > 2:
			f.texts[string(parts[0])] = string(parts[1])
		case kind == 'B' && len(parts) > 2: // of a portal, then of a statement
			texts = append(texts, f.texts[string(parts[1])])
		}
	}
}

// next takes a message from what has come. The first one has no type.
func (f *frontend) next() (kind byte, body []byte, ok bool) {
	head, skip := lengthOfOther, 1
	if !f.begun {
		head, skip = lengthOfFirst, 0
	}
	if f.foreign || len(f.rest) < head {
		return 0, nil, false
	}
	length := skip + int(binary.BigEndian.Uint32(f.rest[skip:]))
	if !f.begun && (length < lengthOfFirst || length > maxFirst || binary.BigEndian.Uint16(f.rest[4:]) != protocol3) || length < head {
		f.foreign, f.rest = true, nil
		return 0, nil, false
	}
	if len(f.rest) < length {
		return 0, nil, false
	}
	if f.begun {
		kind = f.rest[0]
	}
	f.begun = true
	body = slices.Clone(f.rest[head:length])
	f.rest = f.rest[length:]
	return kind, body, true
}

// passUp says whether data may go to the server, as the fault has it.
func (l *link) passUp(data []byte) bool { return l.passStatements(data) && l.passRequests(data) }

// passStatements says whether data may go to PostgreSQL.
func (l *link) passStatements(data []byte) bool {
	texts := l.frontend.executed(data)
	fault, _, _ := l.look()
	s := fault.Statements
	if s == nil || !slices.ContainsFunc(texts, s.Cut) {
		return true
	}
	if s.Answered {
		l.unanswered.Store(true)
	}
	return s.Answered
}

// passDown says whether what the server has sent may go to the client.
func (l *link) passDown([]byte) bool { return !l.unanswered.Load() }
