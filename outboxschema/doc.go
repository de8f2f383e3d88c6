// Package outboxschema has codecs for Protobuf, Avro and JSON with JSON Schema, with or without a schema registry.
//
//   - A [Format] says how the events of one Go type become bytes: [Protobuf], [ProtobufOf], [Avro], [AvroSchema],
//     [JSON]. [Format.Codec] is the codec without a registry.
//   - [Registry] is a client of a schema registry. [Registry.Codec] and [Registry.Reader] are codecs whose payloads
//     have the wire format of Confluent's serializers: a zero byte, the id of the schema, in Protobuf the index of the
//     message, the payload.
//
// Promises of the codecs with a registry:
//
//   - [Registry.Register] is the only function that writes to the registry. A service without the right to do so calls
//     [Registry.Lookup] instead.
//   - Ids and schemas are cached. While the registry is away, events whose schema is known are recorded and decoded.
//   - An event whose schema cannot be fetched waits, as it would for any outage of its handlers, and is no dead letter.
//     An event whose schema does not exist is one.
//   - An event is decoded with the schema that it was written with. Avro fills in what the reader's schema has besides.
//   - CloudEvents' dataschema is the address of the schema. The content type names the wire format.
//
// It is a module of its own because of what it links.
package outboxschema
