package itest

import (
	"context"
	"errors"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// refusedOptions are those that a consumer does not take, and a word of the reason. With
// each of them it would do something else than it promises.
var refusedOptions = map[string]struct {
	opts []kgo.Opt
	want string
}{
	"ConsumerGroup":        {[]kgo.Opt{kgo.ConsumerGroup("g")}, "the argument group of NewConsumer"},
	"ShareGroup":           {[]kgo.Opt{kgo.ShareGroup("g")}, "option ShareGroup"},
	"GroupProtocol":        {[]kgo.Opt{kgo.GroupProtocol("mine")}, "option GroupProtocol"},
	"ConsumeTopics":        {[]kgo.Opt{kgo.ConsumeTopics("a")}, "follow from the handlers"},
	"ConsumePartitions":    {[]kgo.Opt{kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"a": {0: kgo.NewOffset()}})}, "follow from the handlers"},
	"ConsumeRegex":         {[]kgo.Opt{kgo.ConsumeRegex()}, "option ConsumeRegex"},
	"ConsumeExcludeTopics": {[]kgo.Opt{kgo.ConsumeRegex(), kgo.ConsumeExcludeTopics("a")}, "option ConsumeRegex"},
	"KeepControlRecords":   {[]kgo.Opt{kgo.KeepControlRecords()}, "markers"},
	"ConsumeStartOffset":   {[]kgo.Opt{kgo.ConsumeStartOffset(kgo.NewOffset().AtStart())}, "HandlerConfig.From says"},
	"ConsumeResetOffset":   {[]kgo.Opt{kgo.ConsumeResetOffset(kgo.RewindOffset(time.Minute))}, "option ConsumeResetOffset"},
	"FetchIsolationLevel":  {[]kgo.Opt{kgo.FetchIsolationLevel(kgo.ReadUncommitted())}, "aborted transactions"},
	"SessionTimeout":       {[]kgo.Opt{kgo.SessionTimeout(5 * time.Minute)}, "5m0s must be shorter than MaxPollInterval, 5m0s"},
	"HeartbeatInterval":    {[]kgo.Opt{kgo.HeartbeatInterval(30 * time.Second)}, "30s must be above 0 and shorter than SessionTimeout, 30s"},
	"RebalanceTimeout":     {[]kgo.Opt{kgo.RebalanceTimeout(time.Minute)}, "MaxPollInterval"},
	"OnPartitionsAssigned": {[]kgo.Opt{kgo.OnPartitionsAssigned(ignorePartitions)}, "gives up partitions by itself"},
	"OnPartitionsRevoked":  {[]kgo.Opt{kgo.OnPartitionsRevoked(ignorePartitions)}, "gives up partitions by itself"},
	"OnPartitionsLost":     {[]kgo.Opt{kgo.OnPartitionsLost(ignorePartitions)}, "gives up partitions by itself"},
	"OnOffsetsFetched":     {[]kgo.Opt{kgo.OnOffsetsFetched(func(context.Context, *kgo.Client, *kmsg.OffsetFetchResponse) error { return errors.New("no") })}, "keep the member"},
	"AdjustFetchOffsetsFn": {[]kgo.Opt{kgo.AdjustFetchOffsetsFn(func(context.Context, map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
		return nil, nil
	})}, "option AdjustFetchOffsetsFn"},
	"DisableAutoCommit":              {[]kgo.Opt{kgo.DisableAutoCommit()}, "commits offsets"},
	"GreedyAutoCommit":               {[]kgo.Opt{kgo.GreedyAutoCommit()}, "commits offsets"},
	"AutoCommitMarks":                {[]kgo.Opt{kgo.AutoCommitMarks()}, "commits offsets"},
	"AutoCommitCallback":             {[]kgo.Opt{kgo.AutoCommitCallback(func(*kgo.Client, *kmsg.OffsetCommitRequest, *kmsg.OffsetCommitResponse, error) {})}, "commits offsets"},
	"ShareMaxRecords":                {[]kgo.Opt{kgo.ShareMaxRecords(5)}, "ShareMaxRecords"},
	"ShareMaxRecordsStrict":          {[]kgo.Opt{kgo.ShareMaxRecordsStrict()}, "ShareMaxRecords"},
	"ShareAckCallback":               {[]kgo.Opt{kgo.ShareAckCallback(func(*kgo.Client, kgo.ShareAckResults) {})}, "ShareAckCallback"},
	"TransactionalID":                {[]kgo.Opt{kgo.TransactionalID("t")}, "option TransactionalID"},
	"ManualFlushing":                 {[]kgo.Opt{kgo.ManualFlushing()}, "nobody would flush"},
	"DefaultProduceTopicAlways":      {[]kgo.Opt{kgo.DefaultProduceTopic("a"), kgo.DefaultProduceTopicAlways()}, "a topic of its own"},
	"StopProducerOnDataLossDetected": {[]kgo.Opt{kgo.StopProducerOnDataLossDetected()}, "no dead letter"},
	"WithContext":                    {[]kgo.Opt{kgo.WithContext(endingContext())}, "end the context of the call"},
}

func ignorePartitions(context.Context, *kgo.Client, map[string][]int32) {}

func endingContext() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	context.AfterFunc(ctx, cancel)
	return ctx
}

// takenOptions are all others, by what they are about.
var takenOptions = map[string]string{
	"the connection and who it is": `ClientID SoftwareNameAndVersion WithLogger RequestTimeoutOverhead ConnIdleTimeout Dialer DialTimeout DialTLSConfig DialTLS
		SeedBrokers MaxVersions MinVersions RetryBackoffFn RequestRetries RetryTimeout RetryTimeoutFn SASL OnRebootstrapRequired DisableClientMetrics
		UserMetricsFn AlwaysRetryEOF WithHooks WithPools MetadataMaxAge MetadataMinAge ConsiderMissingTopicDeletedAfter`,
	"how much a fetch brings, and from which replica": `FetchMaxWait FetchMaxBytes FetchMinBytes FetchMaxPartitionBytes MaxConcurrentFetches BrokerMaxReadBytes
		MaxDecompressBatchBytes WithDecompressor Rack BalanceRacks RecheckPreferredReplicaInterval DisableFetchSessions DisableFetchCRCValidation`,
	"the order in which partitions are fetched; each is fetched":                    `ConsumePreferringLagFn`,
	"errors that pass by themselves; they are logged like any other":                `KeepRetryableFetchErrors`,
	"how the group shares partitions":                                               `Balancers ServerSideBalancer InstanceID`,
	"a signal to the host, in a goroutine of its own":                               `OnPartitionsCallbackBlocked`,
	"without an effect: nothing is committed automatically, and offsets are stable": `AutoCommitInterval RequireStableFetchOffsets`,
	"how dead letters are sent": `BrokerMaxWriteBytes DefaultProduceTopic DisableIdempotentWrite MaxProduceRequestsInflightPerBroker
		ProducerBatchCompression WithCompressor StreamingCompression MaxBufferedRecords MaxBufferedBytes RecordPartitioner RackAwarePartitioning
		ProduceRequestTimeout RecordRetries UnknownTopicRetries ProducerOnDataLossDetected`,
	"the consumer sets a stricter one, see consumerOpts": `RequiredAcks AllowIdempotentProduceCancellation ProducerBatchMaxBytes ProducerBatchMaxBytesFn
		ProducerLinger RecordDeliveryTimeout BlockRebalanceOnPoll`,
	"for transactions, of which there are none":        `TransactionTimeout ConcurrentTransactionsBackoff`,
	"topics that do not exist; the host may want them": `AllowAutoTopicCreation`,
}

// Each option of franz-go is either refused, by name and with the reason, or does no harm.
// An option that a later version brings has to be decided about here.
func TestConsumerOptions(t *testing.T) {
	t.Parallel()
	decided := slices.Collect(maps.Keys(refusedOptions))
	for _, names := range takenOptions {
		decided = append(decided, strings.Fields(names)...)
	}
	slices.Sort(decided)
	require.Equal(t, kgoOptions(t), decided)

	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID))
	require.NoError(t, err)
	handler := outbox.HandleNoTx("A", func(context.Context, sale, outbox.Metadata) error { return nil })
	newConsumer := func(opts ...kgo.Opt) error {
		_, err := outbox.NewConsumer(nil, opts, events, "g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, handler)
		return err
	}
	for name, tt := range refusedOptions {
		err := newConsumer(tt.opts...)
		require.ErrorContains(t, err, tt.want, name)
		require.ErrorContains(t, err, name, "the option that was given")
	}
	require.NoError(t, newConsumer(kgo.SessionTimeout(45*time.Second), kgo.HeartbeatInterval(3*time.Second), kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.WithContext(context.Background()), kgo.InstanceID("i"),
		kgo.KeepRetryableFetchErrors(), kgo.ConsumePreferringLagFn(kgo.PreferLagAt(1)), kgo.DisableFetchSessions(), kgo.Balancers(kgo.RangeBalancer())))
}

// The session timeout is an option of franz-go, whose error names it. MaxPollInterval and the heartbeat stay within
// its bounds.
func TestSessionTimeout(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID))
	require.NoError(t, err)
	handler := outbox.HandleNoTx("A", func(context.Context, sale, outbox.Metadata) error { return nil })
	for _, tt := range []struct {
		name    string
		maxPoll time.Duration
		opts    []kgo.Opt
		want    []string
	}{
		{"30 s by default", 30*time.Second + 1, nil, nil},
		{"a short one, with its own heartbeat", 7 * time.Second, []kgo.Opt{kgo.SessionTimeout(6 * time.Second)}, nil},
		{"a long one", 0, []kgo.Opt{kgo.SessionTimeout(5*time.Minute - 1)}, nil},
		{"as long as the poll interval by default", 30 * time.Second, nil, []string{"field MaxPollInterval is 30s: must be longer than SessionTimeout, 30s by default"}},
		{"as long as a poll interval", time.Minute, []kgo.Opt{kgo.SessionTimeout(time.Minute)}, []string{"kafka option SessionTimeout: 1m0s must be shorter than MaxPollInterval, 1m0s"}},
		{"zero", 0, []kgo.Opt{kgo.SessionTimeout(0)}, []string{"SessionTimeout"}},
		{"negative", 0, []kgo.Opt{kgo.SessionTimeout(-time.Second)}, []string{"SessionTimeout"}},
		{"beside a heartbeat as long", 0, []kgo.Opt{kgo.SessionTimeout(6 * time.Second), kgo.HeartbeatInterval(6 * time.Second)},
			[]string{"kafka option HeartbeatInterval: 6s must be above 0 and shorter than SessionTimeout, 6s"}},
		{"beside a longer heartbeat", 0, []kgo.Opt{kgo.SessionTimeout(6 * time.Second), kgo.HeartbeatInterval(7 * time.Second)}, []string{"SessionTimeout", "HeartbeatInterval"}},
	} {
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, HandlerTimeout: time.Second}, MaxPollInterval: tt.maxPoll}
		_, err := outbox.NewConsumer(nil, tt.opts, events, "g", cfg, handler)
		if tt.want == nil {
			require.NoError(t, err, tt.name)
		}
		for _, want := range tt.want {
			require.ErrorContains(t, err, want, tt.name)
		}
	}
}

// kgoOptions returns the names of the functions that make options for a client.
func kgoOptions(t *testing.T) (names []string) {
	t.Helper()
	kgo, err := build.Import("github.com/twmb/franz-go/pkg/kgo", ".", 0)
	require.NoError(t, err)
	for _, name := range kgo.GoFiles {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(kgo.Dir, name), nil, 0)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Recv != nil || !f.Name.IsExported() || f.Type.Results.NumFields() != 1 {
				continue
			}
			result, ok := f.Type.Results.List[0].Type.(*ast.Ident)
			if ok && slices.Contains([]string{"Opt", "ConsumerOpt", "ProducerOpt", "GroupOpt"}, result.Name) {
				names = append(names, f.Name.Name)
			}
		}
	}
	require.NotEmpty(t, names)
	slices.Sort(names)
	return names
}

// A consumer whose topics were a pattern would consume its own dead letters, and send each
// of them on to a dead-letter topic of the dead-letter topic.
func TestDeadLettersAreNotConsumed(t *testing.T) {
	t.Parallel()
	events, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Topic("sales"),
		outbox.Event("test.shipment.made.v1", "Product", shipment.productID).Topic("sales.dlq"))
	require.NoError(t, err)
	handlers := []outbox.Handler{
		outbox.HandleNoTx("A", func(context.Context, sale, outbox.Metadata) error { return nil }),
		outbox.HandleNoTx("B", func(context.Context, shipment, outbox.Metadata) error { return nil }),
	}
	for name, tt := range map[string]struct {
		topic func(string) string
		want  string
	}{
		"by their usual names":   {nil, "dead letters of sales would go to sales.dlq, which this consumer reads"},
		"to where they are from": {func(topic string) string { return topic }, "dead letters of sales would go to sales,"},
		"to no topic":            {func(string) string { return "" }, "field DeadLetterTopic: of sales: "},
		"nobody knows where":     {func(string) string { panic("lost") }, "field DeadLetterTopic: of sales: panic: lost"},
		"elsewhere":              {func(topic string) string { return "dead-" + topic }, ""},
	} {
		_, err := outbox.NewConsumer(nil, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, events,
			"g", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, DeadLetterTopic: tt.topic}, handlers...)
		if tt.want == "" {
			require.NoError(t, err, name)
		} else {
			require.ErrorContains(t, err, tt.want, name)
		}
	}
}

// A dead-letter topic that does not exist is known when the consumer starts, and not only
// when the first dead letter has to wait for it. If the first dead letter creates it, it is not missing.
func TestDeadLetterTopicsAreChecked(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	missing := func(topic string) string { return "missing-" + topic }
	logs := map[string]*testenv.Buffer{}
	for _, tt := range []struct {
		name  string
		topic func(string) string
		opts  []kgo.Opt
	}{
		{"there", nil, nil},
		{"created", missing, []kgo.Opt{kgo.AllowAutoTopicCreation()}},
		{"missing", missing, nil},
	} {
		logs[tt.name] = new(testenv.Buffer)
		cfg := outbox.ConsumerConfig{DeadLetterTopic: tt.topic, HandlerConfig: outbox.HandlerConfig{Schema: s.schema, From: outbox.FromStart}}
		cfg.Logger = slog.New(slog.NewTextHandler(logs[tt.name], nil))
		c, err := outbox.NewConsumer(s.db, append(tt.opts, kgo.SeedBrokers(s.brokers...)), s.events, tt.name+"-"+s.topic, cfg, outbox.Handle("COUNTED", s.count))
		require.NoError(t, err)
		testenv.Run(t, c.Run)
	}
	require.Eventually(t, func() bool { return strings.Contains(logs["missing"].String(), "kafka-topics.sh --create") }, testenv.Patience, 10*time.Millisecond)
	require.Contains(t, logs["missing"].String(), "topic=missing-"+s.topic)
	for name, want := range map[string]int{"there": 0, "created": 0, "missing": 1} { // the others began earlier
		require.Equal(t, want, strings.Count(logs[name].String(), "a dead-letter topic cannot be used"), name)
	}
}
