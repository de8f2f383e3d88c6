package guardtx

import "strings"

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
	execute         // likewise, and a word that follows is the name of one
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

// endsTransaction reports whether one of the statements of a text ends its transaction. Savepoints do not.
func endsTransaction(sql string) bool {
	first, last := true, "" // the next word begins a statement; the last word was one that may end the transaction
	for sql != "" {
		if body, ok := dollarQuoted(sql); ok {
			sql, first = sql[len(body):], false
			continue
		}
		var token string
		token, sql = nextToken(sql)
		c := token[0]
		if c == ' ' {
			continue
		}
		word := strings.ToLower(token)
		switch {
		case last == "rollback" && (word == "work" || word == "transaction"):
			continue
		case last == "rollback" && word != "to", last == "prepare" && word == "transaction":
			return true
		}
		last = ""
		if first && isAlpha(c) {
			switch word {
			case "commit", "end", "abort":
				return true
			case "rollback", "prepare":
				last = word
			}
		}
		first = c == ';'
	}
	return last == "rollback"
}

// dollarQuoted returns the text in dollar quotes with which a text begins.
func dollarQuoted(sql string) (quoted string, ok bool) {
	n := strings.IndexByte(sql[1:], '$') + 1
	if sql[0] != '$' || n == 0 || strings.ContainsFunc(sql[1:n], func(r rune) bool { return r < 0x80 && !isAlpha(byte(r)) && (r < '0' || r > '9') }) {
		return "", false
	}
	mark := sql[:n+1]
	end := strings.Index(sql[n+1:], mark)
	if end < 0 {
		return sql, true
	}
	return sql[:n+1+end+len(mark)], true
}
