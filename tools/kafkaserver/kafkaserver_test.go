package kafkaserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/internal/maven"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

func start(t *testing.T, cfg kafkaserver.Config) *kafkaserver.Server {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
	cfg.Progress = t.Output()
	began := time.Now()
	s, err := kafkaserver.Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Logf("ready in %v", time.Since(began))
	t.Cleanup(func() { require.NoError(t, s.Stop(context.Background())) })
	return s
}

func client(t *testing.T, s *kafkaserver.Server, opts ...kgo.Opt) *kgo.Client {
	t.Helper()
	c, err := kgo.NewClient(append(opts, kgo.SeedBrokers(s.Brokers()...), kgo.AllowAutoTopicCreation())...)
	require.NoError(t, err)
	t.Cleanup(c.Close)
	return c
}

func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}, 5*time.Second, 5*time.Millisecond, "process %d", pid)
}

func TestRecordSurvivesCrash(t *testing.T) {
	long.Test(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	s := start(t, kafkaserver.Config{Brief: true})
	brokers, pid := s.Brokers(), s.PID()
	producer := client(t, s, kgo.TransactionalID("t"))
	require.NoError(t, producer.BeginTransaction())
	require.NoError(t, producer.ProduceSync(t.Context(), &kgo.Record{Topic: "kept", Value: []byte("v")}).FirstErr())
	require.NoError(t, producer.EndTransaction(t.Context(), kgo.TryCommit))

	require.NoError(t, s.Kill())
	requireGone(t, pid)
	began := time.Now()
	require.NoError(t, s.Restart(t.Context()))
	t.Logf("back in %v", time.Since(began))
	require.Equal(t, brokers, s.Brokers())

	consumer := client(t, s, kgo.ConsumeTopics("kept"), kgo.ConsumerGroup("g"),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	began = time.Now()
	fetches := consumer.PollRecords(t.Context(), 1)
	require.NoError(t, fetches.Err())
	require.Equal(t, "v", string(fetches.Records()[0].Value))
	t.Logf("consumed in %v", time.Since(began))
	producer.Close()
	consumer.Close()

	began = time.Now()
	pid = s.PID()
	require.NoError(t, s.Stop(t.Context()))
	t.Logf("stopped in %v", time.Since(began))
	requireGone(t, pid)
	require.ErrorIs(t, s.Restart(t.Context()), kafkaserver.ErrStopped)
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

// A broker that has just started serves groups and transactions at the first request.
func TestCoordinatorsAreReady(t *testing.T) {
	long.Test(t)
	s := start(t, kafkaserver.Config{})
	for i := range 20 {
		name := fmt.Sprintf("name-%d-%d", i, i*i*i)
		c := client(t, s, kgo.RequestRetries(0), kgo.RetryTimeout(0))
		offsets := kmsg.NewOffsetFetchRequest()
		offsets.Groups = []kmsg.OffsetFetchRequestGroup{{Group: name}}
		fetched, err := offsets.RequestWith(t.Context(), c)
		require.NoError(t, err)
		require.NoError(t, kerr.ErrorForCode(fetched.Groups[0].ErrorCode))
		id := kmsg.NewInitProducerIDRequest()
		id.TransactionalID, id.TransactionTimeoutMillis = &name, 1000
		begun, err := id.RequestWith(t.Context(), c)
		require.NoError(t, err)
		require.NoError(t, kerr.ErrorForCode(begun.ErrorCode))
	}
}

func TestFailedStartTellsWhy(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	var log bytes.Buffer
	_, err := kafkaserver.Start(t.Context(), kafkaserver.Config{
		Log: &log, Settings: map[string]string{"num.io.threads": "many"},
	})
	require.ErrorContains(t, err, "num.io.threads")
	require.Contains(t, log.String(), "num.io.threads")
	entries, err := os.ReadDir(tmp)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func TestConfigErrors(t *testing.T) {
	_, err := kafkaserver.Start(t.Context(), kafkaserver.Config{Settings: map[string]string{
		"listeners": "x", "a b": "", "c": "two\nlines",
	}, Listeners: map[string]string{"PLAINTEXT": "SSL", "my,own": "SSL"}})
	require.ErrorContains(t, err, `listener "PLAINTEXT"`)
	require.ErrorContains(t, err, `listener "my,own"`)
	require.ErrorContains(t, err, "setting listeners")
	require.ErrorContains(t, err, `setting "a b"`)
	require.ErrorContains(t, err, "setting c:")
}

func TestMissingProgramsAreNamed(t *testing.T) {
	t.Setenv("JAVA_HOME", "")
	t.Setenv("PATH", t.TempDir())
	require.ErrorIs(t, kafkaserver.Available(), kafkaserver.ErrNoJava)
	_, err := kafkaserver.Start(t.Context(), kafkaserver.Config{})
	require.ErrorIs(t, err, kafkaserver.ErrNoJava)
}

// The default is one of the versions, and a list has the archives of the version that it is named for.
func TestListedVersions(t *testing.T) {
	require.Contains(t, kafkaserver.Versions(), kafkaserver.Version)
	for _, version := range kafkaserver.Versions() {
		list, err := os.ReadFile("jars/" + version + ".txt")
		require.NoError(t, err)
		_, err = maven.ParseList(string(list))
		require.NoError(t, err)
		for _, name := range []string{"kafka_2.13", "kafka-server", "kafka-clients"} {
			require.Contains(t, string(list), "/"+name+"-"+version+".jar\n")
		}
	}
}

func TestUnknownVersion(t *testing.T) {
	_, err := kafkaserver.Libraries(t.Context(), "4.9.0", nil)
	require.EqualError(t, err, `kafka: version "4.9.0" is not one of 4.0.2, 4.1.0, 4.4.0`)
}

// A repository that has nothing is named, and nothing remains in the cache.
func TestRepositoryWithoutKafka(t *testing.T) {
	empty := httptest.NewServer(http.NotFoundHandler())
	defer empty.Close()
	cache := t.TempDir()
	t.Setenv("OUTBOX_SERVICES_CACHE", cache)
	t.Setenv("OUTBOX_MAVEN_REPOSITORY", empty.URL+"/")
	_, err := kafkaserver.Libraries(t.Context(), "", nil)
	require.ErrorContains(t, err, "404")
	require.ErrorContains(t, err, ".jar")
	entries, err := os.ReadDir(cache)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing but the lock")
}
