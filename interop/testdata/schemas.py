"""Reads and writes orders with the serializers of confluent-kafka.

What to do comes as JSON from standard input. The orders that were read are printed as JSON, a line for each.
"""
import base64
import faulthandler
import json
import sys

import confluent_kafka
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory, timestamp_pb2  # noqa: F401

faulthandler.dump_traceback_later(240, exit=True)  # says where this program hangs
task = json.load(sys.stdin)
registry = SchemaRegistryClient({"url": task["registry"], "timeout": 30})  # the default is to wait for ever
pool = descriptor_pool.Default()
pool.AddSerializedFile(base64.b64decode(task["file"]))
message = message_factory.GetMessageClass(pool.FindMessageTypeByName(task["message"]))
readers = {
    # Without the registry: this client asks it for a descriptor in base64, and Apicurio 3.3.3 sends the bytes themselves.
    "protobuf": lambda: ProtobufDeserializer(message, {"use.deprecated.format": False}),
    "avro": lambda: AvroDeserializer(registry),
    "json": lambda: JSONDeserializer(None, schema_registry_client=registry),
}
writers = {
    "protobuf": lambda: ProtobufSerializer(message, registry, {"use.deprecated.format": False}),
    "avro": lambda: AvroSerializer(registry, task["avro"]),
    "json": lambda: JSONSerializer(task["json"], registry),
}
for kind, topic in task["read"].items():
    consumer = confluent_kafka.Consumer({"bootstrap.servers": task["brokers"], "group.id": "python", "enable.auto.commit": False})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    record = consumer.poll(60)
    assert record is not None and record.error() is None, record and record.error()
    value = readers[kind]()(record.value(), SerializationContext(topic, MessageField.VALUE))
    if kind == "protobuf":
        value = json_format.MessageToDict(value, preserving_proto_field_name=True)
    print(json.dumps({"kind": kind, "value": value}))
    consumer.close()
producer = confluent_kafka.Producer({"bootstrap.servers": task["brokers"]})
for kind, topic in task["write"].items():
    value = task["order"]
    if kind == "protobuf":
        value = json_format.ParseDict(value, message())
    producer.produce(topic, writers[kind]()(value, SerializationContext(topic, MessageField.VALUE)))
producer.flush(60)
