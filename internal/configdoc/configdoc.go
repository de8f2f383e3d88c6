// Package configdoc reads what the comments of configuration structs say: tests
// compare it with docs/configuration.md and with the defaults of the code.
package configdoc

import (
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Struct is a configuration.
type Struct struct {
	// Name of the type, for example RelayConfig.
	Name string
	// Text is its comment, in one line.
	Text string
	// Fields in the order of the source.
	Fields []Field
}

// Field is a field of a configuration.
type Field struct {
	// Name of the field.
	Name string
	// Type as it stands in the source.
	Type string
	// Default is what the comment says about a zero value; empty if it says nothing.
	Default string
	// Text is the rest of the comment, in one line.
	Text string
	// Embedded is set for an embedded struct, whose type has the same name.
	Embedded bool
}

// Structs returns the exported structs of a package whose names end with Config or Policy, in
// the order of their names.
func Structs(dir string) ([]Struct, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	var all []Struct
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		for _, decl := range file.Decls {
			all = append(all, configs(decl)...)
		}
	}
	slices.SortFunc(all, func(a, b Struct) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

var isConfig = regexp.MustCompile(`(Config|Policy)$`)

func configs(decl ast.Decl) (all []Struct) {
	types, ok := decl.(*ast.GenDecl)
	if !ok || types.Tok != token.TYPE {
		return nil
	}
	for _, spec := range types.Specs {
		spec := spec.(*ast.TypeSpec)
		fields, ok := spec.Type.(*ast.StructType)
		if !ok || !spec.Name.IsExported() || !isConfig.MatchString(spec.Name.Name) {
			continue
		}
		s := Struct{Name: spec.Name.Name, Text: oneLine(types.Doc.Text())}
		for _, f := range fields.Fields.List {
			s.Fields = append(s.Fields, fieldsOf(f)...)
		}
		all = append(all, s)
	}
	return all
}

// fieldsOf returns the exported fields of a line.
func fieldsOf(f *ast.Field) (all []Field) {
	var typ strings.Builder
	_ = printer.Fprint(&typ, token.NewFileSet(), f.Type) // a parsed type can be printed
	field := Field{Type: strings.Join(strings.Fields(typ.String()), " ")}
	field.Text, field.Default = splitDefault(oneLine(f.Doc.Text()))
	if len(f.Names) == 0 {
		field.Name, field.Embedded = field.Type[strings.LastIndex(field.Type, ".")+1:], true
		return []Field{field}
	}
	for _, name := range f.Names {
		if name.IsExported() {
			field.Name = name.Name
			all = append(all, field)
		}
	}
	return all
}

var (
	docLink     = regexp.MustCompile(`\[\*?([A-Za-z][\w.]*)\]`)
	sentenceEnd = regexp.MustCompile("\\.(\\s+)[A-Z`]")
	aboutZero   = regexp.MustCompile(`^(?:Zero|Empty|Nil) (?:means:? (?:that )?)?`)
)

func oneLine(comment string) string {
	return docLink.ReplaceAllString(strings.Join(strings.Fields(comment), " "), "`$1`")
}

// splitDefault takes the sentence about the zero value out of a comment.
func splitDefault(comment string) (text, def string) {
	var rest []string
	for _, sentence := range sentences(comment) {
		switch about := aboutZero.FindString(sentence); {
		case sentence == "Required.":
			def = "required"
		case about != "" && def == "":
			def = strings.TrimSuffix(sentence[len(about):], ".")
		default:
			rest = append(rest, sentence)
		}
	}
	return strings.Join(rest, " "), def
}

func sentences(text string) (all []string) {
	start := 0
	for _, end := range sentenceEnd.FindAllStringSubmatchIndex(text, -1) {
		all = append(all, text[start:end[2]])
		start = end[3]
	}
	if start < len(text) {
		all = append(all, text[start:])
	}
	return all
}
