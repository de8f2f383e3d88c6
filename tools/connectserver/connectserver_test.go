package connectserver_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/tools/connectserver"
	"github.com/outboxgo/outbox/tools/kafkaserver"
)

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Connect and the broker are of the same release.
func TestVersion(t *testing.T) { require.Equal(t, kafkaserver.Version, connectserver.KafkaVersion) }

func TestStartRefuses(t *testing.T) {
	for want, cfg := range map[string]connectserver.Config{
		"no address in Brokers":               {},
		"setting listeners cannot be changed": {Brokers: []string{"b:1"}, Settings: map[string]string{"listeners": "x"}},
		`setting "a b": not a name`:           {Brokers: []string{"b:1"}, Settings: map[string]string{"a b": "x"}},
		"setting a: more than one line":       {Brokers: []string{"b:1"}, Settings: map[string]string{"a": "x\ny"}},
	} {
		_, err := connectserver.Start(t.Context(), cfg)
		require.ErrorContains(t, err, want)
	}
}

func TestNoJava(t *testing.T) {
	t.Setenv("JAVA_HOME", "")
	t.Setenv("PATH", t.TempDir())
	_, err := connectserver.Start(t.Context(), connectserver.Config{Brokers: []string{"b:1"}})
	require.ErrorIs(t, err, kafkaserver.ErrNoJava)
}
