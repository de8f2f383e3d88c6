package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	rules "github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxhttp"
)

// pagePath is where the operators' page is.
const pagePath = "/outbox"

// challenge has a browser ask for a name and a password.
const challenge = `Basic realm="outbox"`

// handler returns the HTTP handler of the process.
func (r *relayProcess) handler(e *env, db *pgxpool.Pool, relay *outbox.Relay, kafka []kgo.Opt, metrics *relayMetrics, log *slog.Logger) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.Handle("GET /livez", outboxhttp.Live(outboxhttp.Relay(relay)))
	mux.Handle("GET /readyz", outboxhttp.Ready(outboxhttp.Own(outboxhttp.Relay(relay))))
	mux.Handle("GET /healthz", outboxhttp.Health(outboxhttp.Relay(relay)))
	mux.Handle("GET /metrics", metrics)
	if r.page == "" {
		return mux, nil
	}
	users := userFile(r.page)
	if _, err := users.read(); err != nil {
		return nil, fmt.Errorf("%s: %w", r.called("page"), err)
	}
	page, err := outboxadmin.New(db, outboxadmin.Config{
		Authorize: users.authorize, Challenge: challenge, Schema: e.schema, AuditReads: true,
		Health: func() []outbox.RelayHealth { return []outbox.RelayHealth{relay.Health()} }, Kafka: kafka, StaleAfter: r.stale, Logger: log,
	})
	if err != nil {
		return nil, err
	}
	mux.Handle(pagePath+"/", http.StripPrefix(pagePath, page))
	return mux, nil
}

// httpServer is the server of a process, or none.
type httpServer struct {
	*http.Server
	listener net.Listener
	ended    chan struct{}
}

// serve begins to serve.
func (r *relayProcess) serve(ctx context.Context, handler http.Handler, log *slog.Logger) (*httpServer, error) {
	listener, err := r.listenAt(ctx)
	if listener == nil {
		return &httpServer{}, err
	}
	return startServer(listener, handler, log), nil
}

// startServer serves at a listener until the server is stopped.
func startServer(listener net.Listener, handler http.Handler, log *slog.Logger) *httpServer {
	s := &httpServer{listener: listener, ended: make(chan struct{}), Server: &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: 5 * time.Minute, IdleTimeout: 2 * time.Minute,
		MaxHeaderBytes: 64 << 10, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}}
	go func() {
		defer close(s.ended)
		if err := s.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Error("outbox: HTTP is not served any more", "error", err)
		}
	}()
	return s
}

// address is where it listens.
func (s *httpServer) address() string {
	if s.listener == nil {
		return listenOff
	}
	return s.listener.Addr().String()
}

// stop lets requests under way end, for a moment.
func (s *httpServer) stop() {
	if s.listener == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), serverStops)
	defer cancel()
	if s.Shutdown(ctx) != nil {
		_ = s.Close() // the process ends
	}
	<-s.ended
}

// userFile is the path of a file with users of the operators' page. Each line has the role, the name and
// the password of a user. The file is read at each request, so changes need no restart.
type userFile string

// minPassword is long enough for a password not to be guessed: nothing here slows down who tries.
const minPassword = 16

type pageUser struct {
	outboxadmin.Access
	password [sha256.Size]byte
}

// read returns the users.
func (f userFile) read() (users []pageUser, err error) {
	err = eachLine(string(f), func(line string) error {
		user, err := readUser(strings.Fields(line))
		if err == nil {
			users = append(users, user)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("users: %w", err)
	}
	if len(users) == 0 {
		return nil, fmt.Errorf("users: %s: no user is in it", f)
	}
	return users, nil
}

// eachLine calls read with the lines of a file, but for those that are blank or begin with #. An error names its line.
func eachLine(path string, read func(line string) error) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if err := read(line); err != nil {
			return fmt.Errorf("%s: line %d: %w", path, n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// readUser reads the words of a line. Errors do not show them.
func readUser(words []string) (u pageUser, err error) {
	if len(words) != 3 {
		return u, errors.New("want three words: reader or operator, a name and a password")
	}
	switch words[0] {
	case outboxadmin.Reader.String():
		u.Role = outboxadmin.Reader
	case outboxadmin.Operator.String():
		u.Role = outboxadmin.Operator
	default:
		return u, errors.New("the first word is neither reader nor operator")
	}
	if err := rules.Operator(words[1]); err != nil {
		return u, fmt.Errorf("the name %w", err)
	}
	if len(words[2]) < minPassword {
		return u, fmt.Errorf("a password has at least %d characters", minPassword)
	}
	u.Operator, u.password = words[1], sha256.Sum256([]byte(words[2]))
	return u, nil
}

// authorize identifies the user by basic authentication.
func (f userFile) authorize(r *http.Request) (outboxadmin.Access, error) {
	name, password, given := r.BasicAuth()
	if !given {
		return outboxadmin.Access{}, nil // the browser asks
	}
	users, err := f.read()
	if err != nil {
		return outboxadmin.Access{}, err
	}
	sum, found := sha256.Sum256([]byte(password)), outboxadmin.Access{}
	for _, u := range users {
		if u.Operator == name && subtle.ConstantTimeCompare(sum[:], u.password[:]) == 1 {
			found = u.Access
		}
	}
	if found.Role == outboxadmin.None {
		return found, errors.New("wrong name or password")
	}
	return found, nil
}
