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
	cfg, err := parse([]string{"-run", "drain|poll", "-rates", "10, 20", "-json", "-"}, io.Discard)
	require.NoError(t, err)
	require.Equal(t, []int{10, 20}, cfg.rates)
	require.Equal(t, []string{"one:9092", "two:9092"}, cfg.Brokers)
	require.True(t, cfg.which.MatchString("poll"))
}

func TestParseRefuses(t *testing.T) {
	servicesSet(t)
	for want, args := range map[string][]string{
		"not a flag":           {"drain"},
		"matches no scenario":  {"-run", "speed"},
		"missing closing":      {"-run", "("},
		"not a number above 0": {"-rates", "10,fast"},
		"-events starts at":    {"-events", "10"},
		"-handled starts at":   {"-handled", "10"},
		"-retained starts at":  {"-retained", "10"},
		"-failing-events st":   {"-failing-events", "10"},
		"-failing-seconds st":  {"-failing-seconds", "0"},
		"-bus-hot start at":    {"-bus-hot", "10"},
		"-silence and":         {"-silences", "0"},
		"-kills":               {"-kills", "0"},
		"-bus-open starts at":  {"-bus-open", "-1"},
		"start above 0":        {"-runs", "0"},
		"-poisons starts":      {"-poisons", "0"},
		"-outage starts at 3":  {"-outage", "1"},
		"not defined: -speed":  {"-speed"},
	} {
		_, err := parse(args, io.Discard)
		require.ErrorContains(t, err, want)
	}
	t.Setenv("OUTBOX_KAFKA_KIND", "kfake")
	_, err := parse(nil, io.Discard)
	require.ErrorContains(t, err, "real Kafka")
}

func TestHelpNamesEveryScenario(t *testing.T) {
	var b bytes.Buffer
	_, err := parse([]string{"-h"}, &b)
	require.ErrorIs(t, err, flag.ErrHelp)
	for _, s := range scenarios {
		require.Contains(t, b.String(), s.what)
	}
}
