package outboxschema

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/bufbuild/protocompile/parser"
	"github.com/bufbuild/protocompile/reporter"
	"github.com/jhump/protoreflect/v2/protoprint"
	"github.com/twmb/franz-go/pkg/sr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Protobuf returns the format of events that are Protobuf messages. E is a struct that embeds a pointer to the
// generated message and nothing else, so it has the methods of the message, and may be copied:
//
//	type OrderCreated struct{ *shoppb.OrderCreated }
//
//	func (e OrderCreated) OccurredAt() time.Time { return e.GetCreatedAt().AsTime() }
func Protobuf[E proto.Message]() Format {
	goType := reflect.TypeFor[E]()
	if goType.Kind() != reflect.Struct || goType.NumField() != 1 || !goType.Field(0).Anonymous ||
		goType.Field(0).Type.Kind() != reflect.Pointer || !goType.Field(0).IsExported() {
		panic(fmt.Sprintf("outboxschema: %v is not a struct that embeds a pointer to a message and nothing else", goType))
	}
	message := goType.Field(0).Type
	f := protobufFormat(reflect.Zero(message).Interface().(proto.Message).ProtoReflect().Descriptor())
	f.goType = goType
	f.encode = typed(func(_ context.Context, e E) ([]byte, error) { return marshal(e) })
	f.decode = into(func(_ context.Context, data []byte, e *E) error {
		m := reflect.New(message.Elem())
		err := proto.Unmarshal(data, m.Interface().(proto.Message))
		if err == nil {
			reflect.ValueOf(e).Elem().Field(0).Set(m)
		}
		return err
	})
	f.reader = protobufReader(f)
	return f
}

// ProtobufOf returns the format of events of E, plain structs, that travel as Protobuf messages of the type M, a
// pointer to a generated struct. The functions convert one to the other, and must not keep what they are given.
func ProtobufOf[E any, M proto.Message](toMessage func(E) M, fromMessage func(M) (E, error)) Format {
	var none M // a nil message, which still knows its type
	f := protobufFormat(none.ProtoReflect().Descriptor())
	f.goType = reflect.TypeFor[E]()
	f.encode = typed(func(_ context.Context, e E) ([]byte, error) { return marshal(toMessage(e)) })
	f.decode = into(func(_ context.Context, data []byte, e *E) error {
		m := none.ProtoReflect().New().Interface().(M)
		if err := proto.Unmarshal(data, m); err != nil {
			return err
		}
		decoded, err := fromMessage(m)
		if err == nil {
			*e = decoded
		}
		return err
	})
	f.reader = protobufReader(f)
	return f
}

// marshal writes the same bytes for the same message, as long as the library stays the same.
func marshal(m proto.Message) ([]byte, error) {
	if !m.ProtoReflect().IsValid() {
		return nil, errors.New("the message is nil")
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// protobufFormat returns a format without functions.
func protobufFormat(message protoreflect.MessageDescriptor) Format {
	file := message.ParentFile()
	return Format{
		contentType: "application/protobuf", kind: sr.TypeProtobuf, record: string(message.FullName()),
		schema: printFile(file), references: importsOf(file), index: indexOf(message),
	}
}

// printFile returns a file as it is in a .proto file, without its comments.
func printFile(file protoreflect.FileDescriptor) string {
	return must((&protoprint.Printer{OmitComments: protoprint.CommentsAll}).PrintProtoToString(file))("print " + file.Path())
}

// importsOf returns the files that a file imports. Registries know the files of Protobuf itself.
func importsOf(file protoreflect.FileDescriptor) (references []Reference) {
	for i := range file.Imports().Len() {
		imported := file.Imports().Get(i).FileDescriptor
		if strings.HasPrefix(imported.Path(), "google/protobuf/") {
			continue
		}
		references = append(references, Reference{
			Name: imported.Path(), Subject: imported.Path(), Schema: printFile(imported), References: importsOf(imported),
		})
	}
	return references
}

// indexOf returns the path of a message in its file: its index, after those of the messages that it is in.
func indexOf(message protoreflect.MessageDescriptor) (index []int) {
	for d := protoreflect.Descriptor(message); ; d = d.Parent() {
		if _, is := d.(protoreflect.MessageDescriptor); !is {
			slices.Reverse(index)
			return index
		}
		index = append(index, d.Index())
	}
}

// protobufReader returns the reader of a format. Protobuf reads what any version has written, if that is the same
// message.
func protobufReader(f Format) func(written, []int) (decoder, error) {
	return func(w written, index []int) (decoder, error) {
		name, err := messageAt(w.schema, index)
		if err != nil {
			return nil, err
		}
		if name != f.record {
			return nil, fmt.Errorf("it is a %s, want a %s", name, f.record)
		}
		return f.decode, nil
	}
}

// messageAt returns the full name of a message of a schema.
func messageAt(schema string, index []int) (string, error) {
	file, err := parseFile(schema)
	if err != nil {
		return "", err
	}
	name, messages := file.GetPackage(), file.GetMessageType()
	for _, i := range index {
		if i < 0 || i >= len(messages) {
			return "", fmt.Errorf("the schema has no message %v", index)
		}
		name, messages = strings.TrimPrefix(name+"."+messages[i].GetName(), "."), messages[i].GetNestedType()
	}
	return name, nil
}

// parseFile reads a .proto file, or the descriptor that some serializers register instead.
func parseFile(schema string) (*descriptorpb.FileDescriptorProto, error) {
	if descriptor, err := base64.StdEncoding.DecodeString(schema); err == nil {
		file := new(descriptorpb.FileDescriptorProto)
		return file, proto.Unmarshal(descriptor, file)
	}
	handler := reporter.NewHandler(nil)
	parsed, err := parser.Parse("schema.proto", strings.NewReader(schema), handler)
	if err != nil {
		return nil, err
	}
	result, err := parser.ResultFromAST(parsed, false, handler)
	if err != nil {
		return nil, err
	}
	return result.FileDescriptorProto(), nil
}
