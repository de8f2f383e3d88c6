package main

import (
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// injected are variables that Kubernetes sets in each container because of services named outbox and outbox-relay.
var injected = []string{
	"OUTBOX_SERVICE_HOST=10.0.0.1", "OUTBOX_SERVICE_PORT=9464", "OUTBOX_SERVICE_PORT_METRICS=9464", "OUTBOX_PORT=tcp://10.0.0.1:9464",
	"OUTBOX_PORT_9464_TCP=tcp://10.0.0.1:9464", "OUTBOX_PORT_9464_TCP_PROTO=tcp", "OUTBOX_PORT_9464_TCP_PORT=9464", "OUTBOX_PORT_9464_TCP_ADDR=10.0.0.1",
	"OUTBOX_RELAY_SERVICE_HOST=10.0.0.2", "OUTBOX_RELAY_SERVICE_PORT=53", "OUTBOX_RELAY_PORT=udp://10.0.0.2:53", "OUTBOX_RELAY_PORT_53_UDP_ADDR=10.0.0.2",
}

// A relay names variables that it does not know, which may be mistyped, and goes on.
func TestMisspeltVariable(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	p := d.startRelay(t, append(injected, "OUTBOX_MAX_RETRY=3", "OUTBOX_COLOUR_OF_THE_SKY=blue-and-secret", "OUTBOX_PORT=9464")...)
	line := p.awaitLine("outbox: variables are not known and have no effect")
	require.Equal(t, "WARN", line["level"])
	require.Equal(t, `OUTBOX_COLOUR_OF_THE_SKY, OUTBOX_MAX_RETRY (did you mean OUTBOX_MAX_RETRIES?), OUTBOX_PORT`, line["variables"])
	require.NotContains(t, p.log.String(), "blue-and-secret")
	p.address()
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
}

// A relay says nothing about variables of Kubernetes, or about those that it and its tools read.
func TestVariablesOfKubernetes(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	p := d.startRelay(t, append(injected, "OUTBOX_STALE_AFTER=1m", "OUTBOX_KAFKA_KIND=x", "OUTBOX_TEST_QUICK=1", "OUTBOX_BATCH=")...)
	p.address()
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	require.NotContains(t, p.log.String(), "not known")
}

// The other commands read OUTBOX_SCHEMA alone. They name what looks like it, and nothing else: the variable may belong
// to the host.
func TestMisspeltSchema(t *testing.T) {
	t.Parallel()
	for name, warns := range map[string]bool{"OUTBOX_SHCEMA": true, "OUTBOX_SCHEMAS": true, "OUTBOX_SCHEMA": false, "OUTBOX_BATCH": false,
		"OUTBOX_COLOUR": false, "OUTBOX_SCHEMA_SERVICE_HOST": false, "SHCEMA": false} {
		d := &commandFixture{vars: map[string]string{name: "x"}}
		a := d.call(t, "version")
		require.Equal(t, exitOK, a.code)
		if !warns {
			require.Empty(t, a.err, name)
			continue
		}
		require.Equal(t, "outbox: warning: $"+name+" is not known and has no effect: did you mean $OUTBOX_SCHEMA?", strings.TrimSpace(a.err))
	}
}
