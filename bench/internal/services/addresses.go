package services

import (
	"fmt"
	"strings"
)

// Addresses say where PostgreSQL and Kafka are.
type Addresses struct {
	Postgres string   // URL
	Brokers  []string // host:port
	Kind     string   // what Kafka is
}

// AddressesFrom reads the environment.
func AddressesFrom(get func(string) string) (a Addresses) {
	a.Postgres, a.Kind = get("OUTBOX_POSTGRES_URL"), get("OUTBOX_KAFKA_KIND")
	if brokers := get("OUTBOX_KAFKA_BROKERS"); brokers != "" {
		a.Brokers = strings.Split(brokers, ",")
	}
	return a
}

// Validate refuses services that are not there, and anything but a real Kafka. How says
// which command starts both.
func (a Addresses) Validate(how string) error {
	if a.Postgres == "" || len(a.Brokers) == 0 {
		return fmt.Errorf("OUTBOX_POSTGRES_URL and OUTBOX_KAFKA_BROKERS are not set: run it with `%s`", how)
	}
	if a.Kind != "kafka" {
		return fmt.Errorf("OUTBOX_KAFKA_KIND is %q: figures of anything but a real Kafka, kind kafka, say nothing", a.Kind)
	}
	return nil
}
