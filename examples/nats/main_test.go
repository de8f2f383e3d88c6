package nats_test

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"
)

// Variables by which the test starts itself as a server of NATS, which it can kill.
const (
	dirVar  = "OUTBOX_NATS_DIR"
	portVar = "OUTBOX_NATS_PORT"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(dirVar); dir != "" {
		if err := serve(dir, os.Getenv(portVar)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// serve runs a server of NATS until the process is killed, or the one that started it is gone.
func serve(dir, port string) error {
	number, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: number, JetStream: true, StoreDir: dir, NoSigs: true})
	if err != nil {
		return err
	}
	parent := os.Getppid()
	s.Start()
	for os.Getppid() == parent {
		time.Sleep(100 * time.Millisecond)
	}
	s.Shutdown()
	return nil
}
