package main

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// What the bad topics take nothing for, and that the good one takes everything
// meanwhile.
func TestBadTopics(t *testing.T) {
	ctx, cfg := context.Background(), tiny(t)
	s, err := connect(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	b := &bench{Services: s, cfg: cfg, stderr: os.Stderr}
	client, err := kgo.NewClient(kgo.SeedBrokers(cfg.Brokers...), kgo.RecordRetries(1), kgo.DisableIdempotentWrite(), kgo.UnknownTopicRetries(1))
	require.NoError(t, err)
	defer client.Close()
	for want, prepare := range map[error]func(*bench, context.Context) (name, topic string, err error){
		kerr.UnknownTopicOrPartition: (*bench).missingTopic,
		kerr.NotEnoughReplicas:       (*bench).shortTopic,

		kerr.TopicAuthorizationFailed: (*bench).deniedTopic,
	} {
		_, topic, err := prepare(b, ctx)
		require.NoError(t, err)
		require.ErrorIs(t, client.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: []byte("x")}).FirstErr(), want)
		require.NoError(t, client.ProduceSync(ctx, &kgo.Record{Topic: b.Topic, Value: []byte("x")}).FirstErr())
	}
}
