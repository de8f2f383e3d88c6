package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	rules "github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
)

// The doctor looks into the schemas that PostgreSQL searches: where schemas of the names exist, PostgreSQL's
// current_schemas has them, and no others.
func FuzzSearchPath(f *testing.F) {
	for _, text := range []string{`"$user", public`, `pg_catalog, pg_temp`, `$user,A,"B""b"`, `a"b, "c,d" ,e`, "Ä,\"ß\"", strings.Repeat("long", 20),
		`"` + strings.Repeat("é", 40) + `"`, "a\vb", "a\tb", `""`, `"a" b`, `,`, ` a ,	b`, `"PG_TEMP", Pg_Catalog`, "\u00a0a"} {
		f.Add(text)
	}
	var pg *pgxpool.Pool
	if !testing.Short() {
		pg = testenv.Pool(f, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 })
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 1_000 || text != "" && rules.Text(text, 1_000) != nil || strings.Contains(text, "\v") { // a blank since PostgreSQL 16
			return
		}
		names := path{role: "fuzz \"role", schemas: text}.names()
		require.NotContains(t, names, "")
		if pg != nil {
			requireSearched(t, pg, text, names)
		}
	})
}

// Quotes, capitals and long names in a search_path name the schemas that PostgreSQL searches.
func TestPathNames(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("é", 40)
	for text, want := range map[string][]string{
		`"$user", Public`:          {"app", "public"},
		`$USER,"B""b" , "c, d"`:    {"app", `B"b`, "c, d"},
		`a"b, "pg_temp",c`:         {`a"b`, "c"},
		`Ä, É`:                     {"Ä", "É"},
		long + `, "x` + long + `"`: {long[:62], "x" + long[:62]},
		"":                         nil,
	} {
		require.Equal(t, want, path{role: "app", schemas: text}.names(), text)
	}
}

// requireSearched requires that names are the schemas of a search_path, if PostgreSQL takes it.
func requireSearched(t *testing.T, pg *pgxpool.Pool, text string, names []string) {
	t.Helper()
	tx, err := pg.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), `SELECT pg_catalog.set_config('search_path', $1::text, true)`, text); err != nil {
		return
	}
	var want, got []string
	for _, name := range names {
		if slices.Contains(want, name) || isOwnSchema(name) {
			continue
		}
		if want = append(want, name); name == "pg_catalog" {
			continue
		}
		_, err = tx.Exec(t.Context(), `CREATE SCHEMA IF NOT EXISTS `+pgx.Identifier{name}.Sanitize())
		require.NoError(t, err, "%q", name)
	}
	// $user is the role of the session, which is not the role of the path.
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT pg_catalog.current_schemas(false)::text[]`).Scan(&got))
	got = slices.DeleteFunc(got, isOwnSchema)
	if strings.Contains(strings.ToLower(text), "$user") {
		want = slices.DeleteFunc(want, func(name string) bool { return name == `fuzz "role` })
		var user string
		require.NoError(t, tx.QueryRow(t.Context(), `SELECT current_user::text`).Scan(&user))
		got = slices.DeleteFunc(got, func(name string) bool { return name == user })
		want = slices.DeleteFunc(want, func(name string) bool { return name == user })
	}
	require.Equal(t, len(want), len(got), "%q: %q, PostgreSQL has %q", text, want, got)
	for i := range want {
		require.Equal(t, want[i], got[i], "%q", text)
	}
}

// isOwnSchema reports whether a schema is one of PostgreSQL's own, such as that of temporary tables.
func isOwnSchema(name string) bool { return strings.HasPrefix(name, "pg_") && name != "pg_catalog" }

// A file of users has users with names and passwords, or an error that shows no password.
func FuzzUsers(f *testing.F) {
	f.Add("# users\noperator o.operator 0123456789abcdef\nreader r.reader  fedcba9876543210\n", "o.operator", "0123456789abcdef")
	f.Add("owner x 0123456789abcdef", "x", "0123456789abcdef")
	f.Add("reader a\u200bb 0123456789abcdef\r\n", "a", "b")
	f.Add("reader \u00a0 short", "", "")
	file := filepath.Join(f.TempDir(), "users")
	f.Fuzz(func(t *testing.T, text, name, password string) {
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		users, err := userFile(file).read()
		if err != nil {
			require.Empty(t, users)
			for _, word := range strings.Fields(text) {
				if len(word) >= minPassword && !strings.Contains(file, word) {
					require.NotContains(t, err.Error(), word)
				}
			}
			return
		}
		require.NotEmpty(t, users)
		require.LessOrEqual(t, len(users), strings.Count(text, "\n")+1)
		for _, u := range users {
			require.NoError(t, rules.Operator(u.Operator))
			require.Contains(t, []outboxadmin.Role{outboxadmin.Reader, outboxadmin.Operator}, u.Role)
		}
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.SetBasicAuth(name, password)
		access, err := userFile(file).authorize(r)
		require.Equal(t, err == nil, access.Role != outboxadmin.None)
		if err == nil {
			require.Equal(t, name, access.Operator)
			require.Regexp(t, `(?m)^\s*`+access.Role.String()+`\s+`+regexp.QuoteMeta(name)+`\s+`+regexp.QuoteMeta(password)+`\s*$`, text)
		}
	})
}

// A time of a flag is in the past or a date, and a span is positive; neither overflows.
func FuzzTimes(f *testing.F) {
	for _, text := range []string{"7d", "90m", "1e300d", "NaNd", "infd", "-1d", "106752d", "0.5d", "2006-01-02", "2006-01-02T15:04:05Z", "1d1h", "0x1p3d", "0.0000000007d", "1_0d", "2562047h48m"} {
		f.Add(text)
	}
	now := time.Date(2026, 11, 27, 0, 0, 0, 0, time.UTC)
	f.Fuzz(func(t *testing.T, text string) {
		var w when
		if w.Set(text) == nil {
			at := w.time(now)
			require.False(t, w.ago > 0 && !at.Before(now), "%v", at)
			require.True(t, w.ago > 0 || w.at.Year() <= 9999)
		}
		var s span
		if s.Set(text) != nil {
			return
		}
		require.Positive(t, time.Duration(s))
		var days float64
		if n, err := fmt.Sscanf(text, "%gd", &days); err == nil && n == 1 && strings.HasSuffix(text, "d") && !strings.ContainsAny(text, "hmsuµn_xXpP") {
			want := days * 24 * float64(time.Hour)
			require.InDelta(t, want, float64(s), max(1, want*1e-6), "a span has whole nanoseconds")
		}
	})
}

// What others have written obeys no terminal: each character prints, and lines stay lines.
func FuzzTerminal(f *testing.F) {
	for _, text := range []string{"a\x1b[2Jb", "a\r\nb", "\u202e\u200b\u2028\u0085", "\xff\xfe", "주문 😀", strings.Repeat("x ", 200)} {
		f.Add(text, 40)
	}
	f.Fuzz(func(t *testing.T, text string, width int) {
		one := visible(text)
		require.True(t, utf8.ValidString(one))
		require.Equal(t, utf8.RuneCountInString(text), utf8.RuneCountInString(one))
		require.False(t, strings.ContainsFunc(one, func(r rune) bool { return !unicode.IsPrint(r) }), "%q", one)
		require.Equal(t, strings.Count(text, "\n"), strings.Count(visibleLines(text), "\n"))
		if width < 20 || width > 300 {
			return
		}
		long := 0 // a word is not cut
		for _, word := range strings.Fields(visibleLines(text)) {
			long = max(long, utf8.RuneCountInString(word))
		}
		for _, line := range wrap(visibleLines(text), width) {
			require.LessOrEqual(t, utf8.RuneCountInString(line), max(width, long), "%q", line)
		}
	})
}
