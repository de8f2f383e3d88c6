package jsonb

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/testenv"
)

// PostgreSQL's codes of the reasons for which it rejects a JSON text.
const (
	notText       = "22021" // character_not_in_repertoire
	notJSON       = "22P02" // invalid_text_representation
	noSuchChar    = "22P05" // untranslatable_character
	numberTooFar  = "22003" // numeric_value_out_of_range
	stackTooSmall = "54001" // statement_too_complex
)

// jsonbTests are texts that both accept or both reject; code is PostgreSQL's reason to
// reject them, and want ours.
var jsonbTests = []struct {
	name, text string
	code       string
	want       error
}{
	{"null", `null`, "", nil},
	{"an empty string", `""`, "", nil},
	{"an empty object", `{}`, "", nil},
	{"white space of all kinds", " \t\r\n{ \"a\" :\t[ ] }\n", "", nil},
	{"a space that JSON does not have", "\u00a0{}", notJSON, check.ErrJSON},
	{"a byte order mark", "\ufeff{}", notJSON, check.ErrJSON},
	{"nothing", ``, notJSON, check.ErrJSON},
	{"two values", `1 2`, notJSON, check.ErrJSON},
	{"a comma too many", `[1,]`, notJSON, check.ErrJSON},
	{"a key twice", `{"a":1,"a":[1,2,3],"b":null,"a":2}`, "", nil},
	{"a key twice, once escaped", `{"a":1,"\u0061":2}`, "", nil},
	{"an empty key", `{"":0}`, "", nil},

	{"a pair of surrogates", `"\ud83d\ude00"`, "", nil},
	{"the last pair of surrogates", `"\uDBFF\uDFFF"`, "", nil},
	{"a lone high surrogate", `"\ud800"`, notJSON, check.ErrJSON},
	{"a lone low surrogate", `"\udc00"`, notJSON, check.ErrJSON},
	{"a high surrogate before a letter", `"\ud800a"`, notJSON, check.ErrJSON},
	{"a high surrogate before an escaped letter", `"\ud800\u0061"`, notJSON, check.ErrJSON},
	{"a high surrogate before a newline", `"\ud800\n\udc00"`, notJSON, check.ErrJSON},
	{"two high surrogates, then a low one", `"\ud800\ud800\udc00"`, notJSON, check.ErrJSON},
	{"a pair of surrogates the wrong way round", `"\udc00\ud800"`, notJSON, check.ErrJSON},
	{"a low surrogate behind a pair", `"\ud800\udc00\udc00"`, notJSON, check.ErrJSON},
	{"a lone surrogate in a key", `{"\uDFFF":1}`, notJSON, check.ErrJSON},
	{"a surrogate behind an escaped backslash", `"\\ud800"`, "", nil},
	{"a surrogate behind an escaped backslash and a backslash", `"\\\ud800"`, notJSON, check.ErrJSON},
	{"the letters around the surrogates", `"\ud7ff\ue000\uffff\ufffe"`, "", nil},
	{"U+FFFD, escaped and not", `"\ufffd` + "\ufffd" + `"`, "", nil},

	{"NUL", `"\u0000"`, noSuchChar, check.ErrNUL},
	{"NUL in a key", `{"\u0000":1}`, noSuchChar, check.ErrNUL},
	{"NUL within a text", `["a","b\u0000c"]`, noSuchChar, check.ErrNUL},
	{"NUL behind an escaped backslash", `"\\u0000"`, "", nil},
	{"NUL behind two escaped backslashes", `"\\\\u0000"`, "", nil},
	{"NUL behind an escaped backslash and a backslash", `"\\\u0000"`, noSuchChar, check.ErrNUL},
	{"zeros that are not NUL", `"\u0001\u00001"`, noSuchChar, check.ErrNUL},
	{"other control characters, escaped", `"\u0001\u001f\b\f\n\r\t\"\\\/\u007f"`, "", nil},
	{"DEL as it is", "\"\x7f\"", "", nil},
	{"a newline as it is", "\"\n\"", notJSON, check.ErrJSON},
	{"an escape that JSON does not have", `"\x41"`, notJSON, check.ErrJSON},
	{"three hexadecimal digits", `"\u123"`, notJSON, check.ErrJSON},

	{"a raw 0xFF", "\"\xff\"", notText, check.ErrUTF8},
	{"half a character", "\"\xe2\x82\"", notText, check.ErrUTF8},
	{"a surrogate in UTF-8", "\"\xed\xa0\x80\"", notText, check.ErrUTF8},
	{"an overlong slash", "\"\xc0\xaf\"", notText, check.ErrUTF8},
	{"a character beyond U+10FFFF", "\"\xf4\x90\x80\x80\"", notText, check.ErrUTF8},
	{"the last character", "\"\U0010ffff\"", "", nil},
	{"a NUL as it is", "\"\x00\"", notText, check.ErrJSON},

	{"minus zero", `-0`, "", nil},
	{"minus zero with digits", `-0.00`, "", nil},
	{"a leading zero", `01`, notJSON, check.ErrJSON},
	{"a plus sign", `+1`, notJSON, check.ErrJSON},
	{"no digit before the point", `.5`, notJSON, check.ErrJSON},
	{"no digit behind the point", `5.`, notJSON, check.ErrJSON},
	{"no exponent", `1e`, notJSON, check.ErrJSON},
	{"infinity", `Infinity`, notJSON, check.ErrJSON},
	{"not a number", `NaN`, notJSON, check.ErrJSON},
	{"131072 digits", `1e131071`, "", nil},
	{"131073 digits", `1e131072`, numberTooFar, check.ErrJSON},
	{"131072 digits, negative", `-1e131071`, "", nil},
	{"131073 digits, negative", `-1e131072`, numberTooFar, check.ErrJSON},
	{"131072 digits, written", strings.Repeat("9", 131072), "", nil},
	{"131073 digits, written", strings.Repeat("9", 131073), numberTooFar, check.ErrJSON},
	{"131072 digits, some behind the point", `12.34E131070`, "", nil},
	{"131073 digits, some behind the point", `12.34E131071`, numberTooFar, check.ErrJSON},
	{"131072 digits behind a small fraction", `0.001e131074`, "", nil},
	{"131073 digits behind a small fraction", `0.001e131075`, numberTooFar, check.ErrJSON},
	{"131073 digits that shrink", strings.Repeat("9", 131073) + "e-1", "", nil},
	{"an exponent with zeros in front", `1e+000000000000000000000000000005`, "", nil},
	{"1e200000", `1e200000`, numberTooFar, check.ErrJSON},
	{"16383 digits behind the point", `1e-16383`, "", nil},
	{"16384 digits behind the point", `1e-16384`, numberTooFar, check.ErrJSON},
	{"16383 digits behind the point, written", "0." + strings.Repeat("1", 16383), "", nil},
	{"16384 digits behind the point, written", "0." + strings.Repeat("1", 16384), numberTooFar, check.ErrJSON},
	{"16384 zeros behind the point", "1." + strings.Repeat("0", 16384), numberTooFar, check.ErrJSON},
	{"16384 digits behind the point that grow", "0." + strings.Repeat("1", 16384) + "e1", "", nil},
	{"the most digits on both sides", strings.Repeat("9", 131072) + "." + strings.Repeat("9", 16383), "", nil},
	{"one digit too many before the point", strings.Repeat("9", 131073) + "." + strings.Repeat("9", 16383), numberTooFar, check.ErrJSON},
	{"one digit too many behind the point", strings.Repeat("9", 131072) + "." + strings.Repeat("9", 16384), numberTooFar, check.ErrJSON},
	{"zero with a large exponent", `0e200000`, "", nil},
	{"zero with a small exponent", `0e-16383`, "", nil},
	{"zero with an exponent too small", `0e-16384`, numberTooFar, check.ErrJSON},
	{"zero with digits and an exponent", `-0.000e-16380`, "", nil},
	{"zero with digits and an exponent too small", `0.000e-16381`, numberTooFar, check.ErrJSON},
	{"zero with the largest exponent of all", `0e1073741822`, "", nil},
	{"zero with an exponent beyond the largest of all", `0e1073741824`, numberTooFar, check.ErrJSON},
	{"zero with an exponent beyond an integer", `0e99999999999999999999`, numberTooFar, check.ErrJSON},
	{"one with an exponent beyond an integer", `1e-99999999999999999999`, numberTooFar, check.ErrJSON},
	{"a bad number in an array", `[1, {"a": 1e200000}]`, numberTooFar, check.ErrJSON},

	{"999 arrays", deep("[", "]", 999), "", nil},
	{"1000 arrays", deep("[", "]", 1000), "", nil},
	{"1000 objects", deep(`{"a":`, `}`, 1000), "", nil},
	{"2000 arrays side by side", "[" + strings.Repeat("[],", 1999) + "[]]", "", nil},
	{"a million arrays", strings.Repeat("[", 1_000_000), stackTooSmall, check.ErrJSON},
}

func deep(before, after string, n int) string {
	return strings.Repeat(before, n) + "1" + strings.Repeat(after, n)
}

// Check agrees with PostgreSQL.
func TestJSONB(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	for _, tt := range jsonbTests {
		t.Run(tt.name, func(t *testing.T) {
			size, err := Check([]byte(tt.text))
			printed, code := printJSONB(t, pg, tt.text)
			require.Equal(t, tt.code, code, "PostgreSQL")
			require.ErrorIs(t, err, tt.want, "checkJSONB")
			if tt.code == "" {
				require.NoError(t, err, "checkJSONB")
				require.GreaterOrEqual(t, size, printed)
			}
		})
	}
}

// PostgreSQL 15 rejects the exponent 2^30-1 (INT_MAX/2) whatever the digits, also if they
// are zero; 18 does not. Check rejects it for all versions.
var disputedExponent = regexp.MustCompile(`[eE][+-]?0*1073741823([^0-9]|$)`)

func TestJSONBLargestExponent(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	for _, text := range []string{`0e1073741823`, `[0.0e+01073741823]`, `1e1073741823`, `0e1073741824`, `0e99999999999999999999`} {
		_, err := Check([]byte(text))
		require.ErrorIs(t, err, check.ErrJSON, text)
		requireAgreement(t, pg, text)
	}
	requireAgreement(t, pg, `0e1073741822`)
}

// Our limit is lower than PostgreSQL's, which depends on its stack.
func TestJSONBDepth(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	for _, text := range []string{deep("[", "]", 1001), deep(`{"a":`, `}`, 1001), deep(`[{"a":`, `}]`, 501)} {
		_, err := Check([]byte(text))
		require.ErrorIs(t, err, check.ErrJSON)
		require.Greater(t, nesting(text), maxDepth)
		_, code := printJSONB(t, pg, text)
		require.Empty(t, code, "PostgreSQL would take it")
	}
}

// nesting returns how deep the values of a JSON text are, at most 10,000.
func nesting(text string) (deepest int) {
	depth := 0
	for tokens := json.NewDecoder(strings.NewReader(text)); ; {
		token, err := tokens.Token()
		if err != nil {
			return deepest
		}
		switch token {
		case json.Delim('['), json.Delim('{'):
			depth++
			deepest = max(deepest, depth)
		case json.Delim(']'), json.Delim('}'):
			depth--
		}
	}
}

var sizeTests = []string{
	`[1e300]`,
	`[1e-300,-1E300]`,
	`{"a":[1,2,3],"b":{"c":"d"}}`,
	`[[],{},"",null,true,false,-0.0]`,
	" {\n\t\"a\" : [ ] ,\r\n \"b\":1 } ",
	`{"a":0e-1000}`,
	`123.456e2`,
	`123.456e-2`,
	`0.00123e3`,
	`0.00123e5`,
	`-0.00123e-5`,
	`100e-2`,
	`1e131071`,
	`-1e-16383`,
	`0e9999`,
	`"\u00e9\u20ac\ud83d\ude00\u0041\u2028<>&"`,
	`"\u0001\u001f\u0008\u000a\u0022\u005c\u002f\u007f"`,
	`"\b\f\n\r\t\"\\\/"`,
	"\"\u00e9\u20ac\U0001f600\u2028\x7f\"",
}

// The size is what jsonb prints.
func TestJSONBSize(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	for _, text := range sizeTests {
		size, err := Check([]byte(text))
		require.NoError(t, err)
		printed, _ := printJSONB(t, pg, text)
		require.Equal(t, printed, size, text)
	}
}

// Thousands of random texts. Repeat a failure with its seed.
func TestJSONBRandom(t *testing.T) {
	t.Parallel()
	pg := testenv.Pool(t, nil)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	g := jsonMaker{rand.New(rand.NewPCG(seed, 0))}
	for range 1500 {
		requireAgreement(t, pg, g.number())
		requireAgreement(t, pg, g.value(4))
		requireAgreement(t, pg, g.damaged(g.value(3)))
	}
}

// FuzzJSONB looks for a text for which Check panics or disagrees with PostgreSQL; under -short only for the former.
func FuzzJSONB(f *testing.F) {
	for _, tt := range jsonbTests {
		if len(tt.text) < 1000 {
			f.Add(tt.text)
		}
	}
	var pg *pgxpool.Pool
	if !testing.Short() {
		pg = testenv.Pool(f, func(cfg *pgxpool.Config) { cfg.MaxConns = 2 })
	}
	f.Fuzz(func(t *testing.T, text string) {
		if pg == nil {
			size, err := Check([]byte(text))
			require.True(t, size > 0 || err != nil)
			return
		}
		requireAgreement(t, pg, text)
	})
}

// requireAgreement requires that PostgreSQL stores a text and prints no more than Check
// returns, or that both reject it.
func requireAgreement(t *testing.T, pg *pgxpool.Pool, text string) {
	t.Helper()
	size, err := Check([]byte(text))
	printed, code := printJSONB(t, pg, text)
	excerpt := text[:min(len(text), 300)]
	switch {
	case err == nil:
		require.Empty(t, code, "we accept what PostgreSQL refuses: %q", excerpt)
		require.GreaterOrEqual(t, size, printed, "larger than we say: %q", excerpt)
	case errors.Is(err, check.ErrJSON) && nesting(text) > maxDepth: // tighter than PostgreSQL
	case errors.Is(err, errNumber) && disputedExponent.MatchString(text): // tighter than some of its versions
	default:
		require.NotEmpty(t, code, "we refuse what PostgreSQL accepts: %v: %q", err, excerpt)
		require.Contains(t, sharedReasons(err), code, "for another reason: %v: %q", err, excerpt)
	}
}

// sharedReasons are the codes with which PostgreSQL may reject a text that Check rejects
// with err. A text can be wrong in several ways, and Check looks for NUL, lone surrogates
// and numbers out of range only in valid JSON.
func sharedReasons(err error) []string {
	switch {
	case errors.Is(err, check.ErrUTF8):
		return []string{notText}
	case errors.Is(err, check.ErrNUL), errors.Is(err, errNumber):
		return []string{noSuchChar, numberTooFar, notJSON}
	default:
		return []string{notJSON, noSuchChar, numberTooFar, stackTooSmall, notText}
	}
}

// printJSONB returns the length of a text as jsonb prints it, or the code with
// which PostgreSQL rejects it.
func printJSONB(t *testing.T, pg *pgxpool.Pool, text string) (printed int, code string) {
	t.Helper()
	err := pg.QueryRow(context.Background(), `SELECT octet_length($1::text::jsonb::text)`, text).Scan(&printed)
	if rejected, ok := errors.AsType[*pgconn.PgError](err); ok {
		return 0, rejected.Code
	}
	require.NoError(t, err)
	return printed, ""
}

// jsonMaker generates JSON texts, most of them valid, many of them edge cases.
type jsonMaker struct{ *rand.Rand }

func (g jsonMaker) value(depth int) string {
	kind := g.IntN(8)
	if depth == 0 {
		kind = g.IntN(5)
	}
	switch kind {
	case 0, 1:
		return g.text()
	case 2, 3:
		return g.smallNumber()
	case 4:
		return []string{"null", "true", "false"}[g.IntN(3)]
	case 5, 6:
		return "[" + g.several(func() string { return g.value(depth - 1) }) + "]"
	default:
		return "{" + g.several(func() string { return g.text() + g.space() + ":" + g.value(depth-1) }) + "}"
	}
}

func (g jsonMaker) several(one func() string) string {
	all := make([]string, g.IntN(5))
	for i := range all {
		all[i] = g.space() + one() + g.space()
	}
	return strings.Join(all, ",")
}

func (g jsonMaker) space() string {
	return strings.Repeat([]string{" ", "\n", "\t", "\r"}[g.IntN(4)], g.IntN(2))
}

func (g jsonMaker) text() string {
	// jsonb rejects the last ones, alone or combined.
	pieces := []string{"a", "Z", "é", "주", "😀", "�", "\x7f", `\n`, `\"`, `\\`, `\/`, `\u0001`, `\u001F`, `\u00e9`, `\uFFFD`, `\ud83d\uDE00`, "u0000", "ud800"}
	if g.IntN(10) == 0 {
		pieces = append(pieces, `\u0000`, `\ud800`, `\uDBFF`, `\udc00`, `\uDFFF`)
	}
	var b strings.Builder
	for range g.IntN(6) {
		b.WriteString(pieces[g.IntN(len(pieces))])
	}
	return `"` + b.String() + `"`
}

func (g jsonMaker) smallNumber() string {
	return g.mantissa(6) + []string{"", "", "e5", "E-5", "e+0", "e300", "e-300", "E-0012"}[g.IntN(8)]
}

// number is one at the edge of what numeric holds, on one side or the other.
func (g jsonMaker) number() string {
	m := g.mantissa(40)
	integer, fraction, _ := strings.Cut(strings.TrimPrefix(m, "-"), ".")
	leading := len(integer+fraction) - len(strings.TrimLeft(integer+fraction, "0"))
	exponent := maxIntegerDigits - (len(integer) - leading)
	if g.IntN(2) == 0 {
		exponent = len(fraction) - maxFractionDigits
	}
	return m + "e" + strconv.Itoa(exponent+g.IntN(5)-2)
}

func (g jsonMaker) mantissa(most int) string {
	digits := func(n int) string {
		b := bytes.Repeat([]byte{'0'}, n)
		for i := g.IntN(n + 1); i < n; i++ { // some leading zeros
			b[i] = "0123456789"[g.IntN(10)]
		}
		return string(b)
	}
	m := []string{"", "-"}[g.IntN(2)]
	if integer := strings.TrimLeft(digits(1+g.IntN(most)), "0"); integer != "" {
		m += integer
	} else {
		m += "0"
	}
	if g.IntN(2) == 0 {
		m += "." + digits(1+g.IntN(most))
	}
	return m
}

// damaged changes a text a little, so that it mostly is no JSON any more.
func (g jsonMaker) damaged(text string) string {
	b := []byte(text)
	i := g.IntN(len(b))
	switch g.IntN(4) {
	case 0:
		b[i] = byte(g.IntN(256))
	case 1:
		b = slices.Delete(b, i, i+1)
	case 2:
		b = slices.Insert(b, i, `\u"[]{},:e-0.`[g.IntN(13)])
	default:
		b = b[:i]
	}
	return string(b)
}

// The generator makes valid and invalid texts, and not always the same.
func TestJSONMaker(t *testing.T) {
	t.Parallel()
	g := jsonMaker{rand.New(rand.NewPCG(1, 2))}
	seen := map[string]int{}
	for range 2000 {
		for kind, text := range map[string]string{"number": g.number(), "value": g.value(4), "damaged": g.damaged(g.value(3))} {
			_, err := Check([]byte(text))
			seen[fmt.Sprintf("%s accepted: %t", kind, err == nil)]++
			if kind != "damaged" {
				require.True(t, json.Valid([]byte(text)) && utf8.ValidString(text), text)
			}
		}
	}
	for _, kind := range []string{"number", "value", "damaged"} {
		require.Greater(t, seen[kind+" accepted: true"], 100, "%s: %v", kind, seen)
		require.Greater(t, seen[kind+" accepted: false"], 100, "%s: %v", kind, seen)
	}
}
