package interop

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/protobuf/shoppb"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxschema"
)

// item is an event that travels in all formats. Its message is the second one of its file.
type item struct {
	ProductID int64 `avro:"product_id" json:"product_id"`
	Quantity  int32 `avro:"quantity" json:"quantity"`
	Price     int64 `avro:"price" json:"price"`
}

func (item) OccurredAt() time.Time { return time.Unix(1_800_000_000, 0) }
func (e item) AggregateID() string { return strconv.FormatInt(e.ProductID, 10) }
func message(e item) *shoppb.Item {
	return &shoppb.Item{ProductId: e.ProductID, Quantity: e.Quantity, Price: e.Price}
}
func itemOf(m *shoppb.Item) (item, error) {
	return item{m.GetProductId(), m.GetQuantity(), m.GetPrice()}, nil
}

const itemSchema = `{"$schema": "http://json-schema.org/draft-07/schema#", "title": "item", "type": "object", "required": ["product_id"],
	"properties": {"product_id": {"type": "integer"}, "quantity": {"type": "integer"}, "price": {"type": "integer"}}}`

// schemaPackages returns a folder with the Python packages of testdata/schema_requirements.txt. It is kept in bin/.
func schemaPackages(t *testing.T) string {
	t.Helper()
	wanted, err := os.ReadFile("testdata/schema_requirements.txt")
	require.NoError(t, err)
	dir, err := filepath.Abs(fmt.Sprintf("../bin/python-schemas-%.4x", sha256.Sum256(wanted)))
	require.NoError(t, err)
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	part := dir + ".part"
	require.NoError(t, os.RemoveAll(part))
	cmd := exec.CommandContext(t.Context(), "python3", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
		"--only-binary=:all:", "--target", part, "-r", "testdata/schema_requirements.txt")
	run(t, cmd)
	require.NoError(t, os.Rename(part, dir))
	return dir
}

// Clients of another language read what we write with a registry, and we read what they write.
func TestPythonSchemas(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	brokers, address := testenv.RealBrokers(t), testenv.SchemaRegistry(t)
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client, err := sr.NewClient(sr.URLs(address), sr.HTTPClient(&http.Client{Transport: transport, Timeout: 10 * time.Second}))
	require.NoError(t, err)

	avro := outboxschema.Avro[item]()
	formats := map[string]outboxschema.Format{"protobuf": outboxschema.ProtobufOf(message, itemOf), "avro": avro, "json": outboxschema.JSON[item](itemSchema)}
	ours, theirs := map[string]string{}, map[string]string{}
	sent := item{ProductID: 1 << 40, Quantity: 3, Price: -5}
	for kind, format := range formats {
		ours[kind], theirs[kind] = newTopic(t, brokers), newTopic(t, brokers)
		schemas := outboxschema.New(client, nil)
		events, err := outbox.NewRegistry("shop", outbox.Event("loopers.item.sold.v1", "Item", item.AggregateID).
			Topic(ours[kind]).Codec(schemas.Codec(ours[kind], format)))
		require.NoError(t, err)
		require.NoError(t, schemas.Register(t.Context()))
		rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error { return rec.Record(t.Context(), tx, sent) }))
	}
	relay(t, db, brokers, outbox.RelayConfig{Schema: schema})

	file, err := proto.Marshal(protodesc.ToFileDescriptorProto(shoppb.File_shoppb_shop_proto))
	require.NoError(t, err)
	avroSchema, err := client.SchemaTextByVersion(t.Context(), ours["avro"]+"-value", -1)
	require.NoError(t, err)
	task, err := json.Marshal(map[string]any{
		"registry": address, "brokers": strings.Join(brokers, ","), "read": ours, "write": theirs, "order": sent,
		"file": base64.StdEncoding.EncodeToString(file), "message": "loopers.shop.v1.Item", "avro": avroSchema, "json": itemSchema,
	})
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), "python3", "testdata/schemas.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+schemaPackages(t))
	cmd.Stdin = strings.NewReader(string(task))
	lines := strings.Split(strings.TrimSpace(run(t, cmd)), "\n")
	require.Len(t, lines, len(formats))
	for _, text := range lines {
		var got struct {
			Kind  string
			Value map[string]any
		}
		require.NoError(t, json.Unmarshal([]byte(text), &got))
		require.EqualValues(t, 3, got.Value["quantity"], text)
	}
	for kind, format := range formats {
		require.Equal(t, sent, handled(t, brokers, theirs[kind], outboxschema.New(client, nil).Reader(format)), kind)
	}
}

// handled returns the first event of a topic, whose records have no headers.
func handled(t *testing.T, brokers []string, topic string, codec outbox.Codec) item {
	t.Helper()
	events, err := outbox.NewRegistry("shop", outbox.Event("loopers.item.sold.v1", "Item", item.AggregateID).Topic(topic).Codec(codec))
	require.NoError(t, err)
	arrived := make(chan item, 1)
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Decode: outbox.PlainRecords{Type: "loopers.item.sold.v1"}.Decode}
	c, err := outbox.NewConsumer(nil, []kgo.Opt{kgo.SeedBrokers(brokers...)}, events, topic, cfg, outbox.HandleNoTx("SEE",
		func(_ context.Context, e item, _ outbox.Metadata) error { arrived <- e; return nil }))
	require.NoError(t, err)
	defer testenv.Run(t, c.Run)()
	select {
	case e := <-arrived:
		return e
	case <-time.After(testenv.Patience):
		require.Fail(t, "nothing was handled")
		return item{}
	}
}
