package proxy_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/faults/internal/proxy"
)

// cutAtWrites cuts at statements that write.
func cutAtWrites(answered bool) proxy.Fault {
	return proxy.Fault{Statements: &proxy.Statements{Answered: answered, Cut: func(sql string) bool { return strings.HasPrefix(sql, "UPDATE") }}}
}

// frontendMessages returns messages as a client sends them.
func frontendMessages(t *testing.T, messages ...pgproto3.FrontendMessage) (text string) {
	t.Helper()
	var bytes []byte
	var err error
	for _, m := range messages {
		bytes, err = m.Encode(bytes)
		require.NoError(t, err)
	}
	return string(bytes)
}

// A connection is cut at a statement that is executed, whether it was prepared or not, and before
// the server has all of it. What is only prepared passes, and so do other statements.
func TestCutAtStatement(t *testing.T) {
	t.Parallel()
	startup := &pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersionNumber, Parameters: map[string]string{"user": "kim"}}
	for name, last := range map[string]pgproto3.FrontendMessage{
		"prepared": &pgproto3.Bind{PreparedStatement: "w", Parameters: [][]byte{[]byte("a value")}}, "simple": &pgproto3.Query{String: "UPDATE t"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, accept := listen(t)
			client, server := dial(t, p), accept()
			pass := func(messages ...pgproto3.FrontendMessage) {
				text := frontendMessages(t, messages...)
				say(t, client, text)
				requireHears(t, server, text)
			}
			pass(startup)
			pass(&pgproto3.Parse{Name: "w", Query: "UPDATE t"}, &pgproto3.Parse{Name: "r", Query: "SELECT"}, &pgproto3.Sync{})
			pass(last)
			p.Set(cutAtWrites(false))
			pass(&pgproto3.Parse{Name: "w2", Query: "UPDATE t"}, &pgproto3.Bind{PreparedStatement: "r"}, &pgproto3.Query{String: "SELECT"}, &pgproto3.Sync{})
			text := frontendMessages(t, last)
			say(t, client, text[:7])
			requireHears(t, server, text[:7])
			say(t, client, text[7:])
			requireReset(t, client)
			requireReset(t, server)
		})
	}
}

// The server gets the statement, and the client no answer.
func TestCutInFrontOfAnswer(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client, server := dial(t, p), accept()
	p.Set(cutAtWrites(true))
	text := frontendMessages(t,
		&pgproto3.StartupMessage{ProtocolVersion: pgproto3.ProtocolVersionNumber, Parameters: map[string]string{"user": "kim"}}, &pgproto3.Query{String: "SELECT"})
	say(t, client, text)
	requireHears(t, server, text)
	say(t, server, "an answer")
	requireHears(t, client, "an answer")
	text = frontendMessages(t, &pgproto3.Query{String: "UPDATE t"})
	say(t, client, text)
	requireHears(t, server, text)
	say(t, server, "an answer")
	requireReset(t, client)
	requireReset(t, server)
}

// Bytes of another protocol pass, whatever they are.
func TestOtherProtocolHasNoStatements(t *testing.T) {
	t.Parallel()
	p, accept := listen(t)
	client, server := dial(t, p), accept()
	p.Set(cutAtWrites(false))
	for _, text := range []string{"\x00\x00\x00\x20\x00\x12\x00\x04 of Kafka", frontendMessages(t, &pgproto3.Query{String: "UPDATE t"})} {
		say(t, client, text)
		requireHears(t, server, text)
	}
}
