package guardtx

import (
	"slices"
	"strings"
)

// changesSettings reports whether a statement may change settings of its transaction: SET,
// RESET, DISCARD or set_config, also in the body of a DO; or something else whose text is not
// here, such as a prepared statement.
func changesSettings(sql string) bool {
	if isName(sql) {
		return true
	}
	first, code := true, false // the next word begins a statement; the next literal is one
	named := false             // the next word names a statement, or makes one
	for sql != "" {
		var token string
		token, sql = nextToken(sql)
		switch c := token[0]; {
		case c == ' ':
		case isAlpha(c):
			k := kindOf(token)
			if k == sets || k == setsAtFirst && first || named {
				return true
			}
			first, code, named = k == beforeStatement, k == beforeCode || k == execute, k == execute && first
		case c == '\'' && code && changesSettings(token[1:]):
			return true
		default:
			first, code, named = c == ';' || c == '$', false, false
		}
	}
	return false
}

// isName reports whether a text is not a statement, but the name of a prepared one. No statement
// without a space or a parenthesis changes settings.
func isName(sql string) bool { return sql != "" && !strings.ContainsAny(sql, " \t\r\n(") }

// wordKind says what a word means for [changesSettings].
type wordKind uint8

const (
	other wordKind = iota
	sets
	setsAtFirst     // if it begins a statement
	beforeStatement // a statement follows, in PL/pgSQL
	beforeCode      // a literal that follows is a statement, or several
	execute         // as beforeCode, and a word that follows is the name of a statement
)

// words by their length, which differs for most: handlers pass here with every statement.
var words = [...]map[string]wordKind{
	2:  {"do": beforeCode},
	3:  {"set": setsAtFirst},
	4:  {"then": beforeStatement, "else": beforeStatement, "loop": beforeStatement},
	5:  {"reset": setsAtFirst, "begin": beforeStatement},
	7:  {"discard": setsAtFirst, "execute": execute},
	10: {"set_config": sets},
}

func kindOf(word string) wordKind {
	if len(word) >= len(words) || words[len(word)] == nil {
		return other
	}
	var lower [len(words)]byte
	for i := range len(word) {
		lower[i] = word[i] | 0x20
		if word[i] == '_' {
			lower[i] = '_'
		}
	}
	return words[len(word)][string(lower[:len(word)])]
}

// nextToken cuts a token from the beginning of a text: a word, a quoted text, the mark of a
// dollar-quoted text, another character, or a space for what does not matter.
func nextToken(sql string) (token, rest string) {
	switch c := sql[0]; {
	case strings.HasPrefix(sql, "--"):
		return " ", behind(sql, "\n", 2)
	case strings.HasPrefix(sql, "/*"):
		return " ", behind(sql, "*/", 2)
	case c == '\'', c == '"':
		rest = behind(sql, string(c), 1)
		return sql[:len(sql)-len(rest)], rest
	case c == ' ', c == '\n', c == '\t', c == '\r':
		return " ", sql[1:]
	case isAlpha(c):
		n := 1
		for n < len(sql) && (isAlpha(sql[n]) || sql[n] >= '0' && sql[n] <= '9' || sql[n] == '$') {
			n++
		}
		return sql[:n], sql[n:]
	}
	return sql[:1], sql[1:]
}

// behind returns what follows the first end in a text, from an index on, or nothing.
func behind(sql, end string, from int) string {
	if n := strings.Index(sql[from:], end); n >= 0 {
		return sql[from+n+len(end):]
	}
	return ""
}

func isAlpha(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' || c == '_' || c >= 0x80 }

// endsTransaction reports whether one of the statements with these beginnings ends its transaction. Savepoints do not.
func endsTransaction(statements [][]string) bool {
	for _, words := range statements {
		switch words[0] {
		case "commit", "end", "abort":
			return true
		case "rollback":
			if _, ok := savepointOf(words); !ok {
				return true
			}
		case "prepare":
			if len(words) > 1 && words[1] == "transaction" {
				return true
			}
		}
	}
	return false
}

// savepointOf returns the name of the savepoint that a statement sets, releases or goes back to.
func savepointOf(words []string) (name string, ok bool) {
	verb, words := words[0], words[1:]
	skip := func(word string) bool {
		if len(words) == 0 || words[0] != word {
			return false
		}
		words = words[1:]
		return true
	}
	switch verb {
	case "savepoint":
	case "release":
		skip("savepoint")
	case "rollback":
		_ = skip("work") || skip("transaction")
		if !skip("to") {
			return "", false
		}
		skip("savepoint")
	default:
		return "", false
	}
	if len(words) == 0 {
		return "", true
	}
	return strings.Trim(words[0], `"`), true
}

// beginnings returns the first words of each statement of a text, as many as the longest of [savepointOf] has. They
// are in lower case but for quoted names.
func beginnings(sql string) (all [][]string) {
	const longest = 5 // ROLLBACK TRANSACTION TO SAVEPOINT name
	var words []string
	for sql != "" {
		var token string
		if body, ok := dollarQuoted(sql); ok {
			token, sql = body[:1], sql[len(body):]
		} else if token, sql = nextToken(sql); token == " " {
			continue
		}
		if token == ";" {
			all, words = append(all, words), nil
			continue
		}
		if len(words) == longest {
			continue
		}
		if isAlpha(token[0]) {
			token = strings.ToLower(token)
		}
		words = append(words, token)
	}
	return slices.DeleteFunc(append(all, words), func(words []string) bool { return len(words) == 0 })
}

// dollarQuoted returns the text in dollar quotes with which a text begins.
func dollarQuoted(sql string) (quoted string, ok bool) {
	if sql[0] != '$' {
		return "", false
	}
	n := strings.IndexByte(sql[1:], '$') + 1
	if n == 0 || strings.ContainsFunc(sql[1:n], func(r rune) bool { return r < 0x80 && !isAlpha(byte(r)) && (r < '0' || r > '9') }) {
		return "", false
	}
	mark := sql[:n+1]
	end := strings.Index(sql[n+1:], mark)
	if end < 0 {
		return sql, true
	}
	return sql[:n+1+end+len(mark)], true
}
