package main

import (
	"bytes"
	"flag"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
)

func servicesSet(t *testing.T) {
	t.Helper()
	t.Setenv("OUTBOX_POSTGRES_URL", "postgres://localhost/postgres")
	t.Setenv("OUTBOX_KAFKA_BROKERS", "one:9092,two:9092")
	t.Setenv("OUTBOX_KAFKA_KIND", "kafka")
}

func TestParse(t *testing.T) {
	servicesSet(t)
	cfg, err := parse([]string{"-run", "drain|wal", "-rates", "10, 20", "-peers", "river,debezium", "-json", "-"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []int{10, 20}, cfg.rates)
	require.Equal(t, []string{"one:9092", "two:9092"}, cfg.Brokers)
	require.True(t, cfg.which.MatchString("wal"))

	var names []string
	for _, p := range (&bench{cfg: cfg}).chosen() {
		names = append(names, p.name)
	}
	require.Equal(t, []string{"outbox", "debezium", "river"}, names, "ours is always measured")
}

func TestParseRefuses(t *testing.T) {
	servicesSet(t)
	for want, args := range map[string][]string{
		"not a flag":           {"drain"},
		"matches no scenario":  {"-run", "speed"},
		"missing closing":      {"-run", "("},
		"not a number above 0": {"-rates", "10,fast"},
		`"sequin" is none of`:  {"-peers", "river,sequin"},
		"-events and -wal-ev":  {"-events", "10"},
		"-drain-seconds start": {"-drain-seconds", "0"},
		"-seconds starts":      {"-seconds", "0"},
		"start above 0":        {"-runs", "0"},
		"-render needs -docs":  {"-render"},
		"not defined: -speed":  {"-speed"},
	} {
		_, err := parse(args, io.Discard)
		require.ErrorContains(t, err, want)
	}
	t.Setenv("OUTBOX_KAFKA_KIND", "kfake")
	_, err := parse(nil, io.Discard)
	require.ErrorContains(t, err, "real Kafka")
}

func TestHelpNamesScenariosAndPeers(t *testing.T) {
	var b bytes.Buffer
	_, err := parse([]string{"-h"}, &b)
	require.ErrorIs(t, err, flag.ErrHelp)
	for _, s := range scenarios {
		require.Contains(t, b.String(), s.what)
	}
	for _, p := range peers {
		require.Contains(t, b.String(), p.what)
	}
}
