package outboxadmin_test

import (
	"log"
	"net/http"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxadmin"
)

type user struct {
	Name   string
	OnCall bool
}

var (
	db       *pgxpool.Pool
	relay    *outbox.Relay
	consumer *outbox.Consumer
	kafka    []kgo.Opt
	mux      *http.ServeMux
	session  func(*http.Request) (user, error)
	email    = regexp.MustCompile(`[\w.]+@[\w.]+`)
)

func ExampleNew() {
	admin, err := outboxadmin.New(db, outboxadmin.Config{
		Authorize: func(r *http.Request) (outboxadmin.Access, error) {
			user, err := session(r) // yours: a cookie, a header of your proxy, basic authentication
			if err != nil {
				return outboxadmin.Access{}, err // answered with 401
			}
			role := outboxadmin.Reader // may look
			if user.OnCall {
				role = outboxadmin.Operator // may act
			}
			return outboxadmin.Access{Operator: user.Name, Role: role}, nil
		},
		Health:    func() []outbox.RelayHealth { return []outbox.RelayHealth{relay.Health()} },          // of this process
		Consumers: func() []outbox.ConsumerHealth { return []outbox.ConsumerHealth{consumer.Health()} }, // of this process
		Kafka:     kafka,                                                                                // where to ask for the lag
		Mask: func(t outboxadmin.Text) []byte {
			if t.Kind == outboxadmin.TextStatement {
				return []byte("not shown here")
			}
			return email.ReplaceAll(t.Value, []byte("…@…"))
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	mux.Handle("/ops/outbox/", http.StripPrefix("/ops/outbox", admin))
}

// The server's own timeouts protect the rest of the process from slow clients.
func ExampleNew_server() {
	server := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 10 * time.Second, // a client that sends its header byte by byte
		ReadTimeout:       30 * time.Second, // the same with its body
		WriteTimeout:      5 * time.Minute,  // a client that does not read; from the header on, so the handler's time is in it
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
	}
	log.Fatal(server.ListenAndServe())
}
