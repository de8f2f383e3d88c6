package faults

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// viaProxy is the listener through which the processes reach the broker. It wants a login.
const viaProxy = "PROXIED"

// viewsService is the name of the process with the consumer and the worker.
const viewsService = "service"

// viewsSite is servers, the processes that use them through proxies, and all views.
type viewsSite struct {
	*crew
	truth
	dir                 string
	program             string // the command line
	db                  *pgxpool.Pool
	address             string // of PostgreSQL, through its proxy
	kafka               *kafkaserver.Server
	login               *guardedKafka // adds logins
	topic               string
	toPostgres, toKafka *proxy.Proxy
	relays              map[string]*viewsProcess
	service             *viewsProcess
	killed              string // the relay that does not run
	page                http.Handler
	alerts              *alerted
	watching            *pgxpool.Pool // of the page, the monitor and the view of rows
	recorded            atomic.Int64
}

// viewsProcess is a process whose log is kept.
type viewsProcess struct {
	*worker
	name string
	log  string // a file
	at   atomic.Pointer[string]
}

// address returns where it serves, or "".
func (p *viewsProcess) address() string {
	if at := p.at.Load(); at != nil {
		return *at
	}
	return ""
}

func newViewsSite(t *testing.T) *viewsSite {
	t.Helper()
	s := &viewsSite{crew: newCrew(t), dir: t.TempDir(), program: buildCommandLine(t), topic: "views-" + uuid.NewString(), relays: map[string]*viewsProcess{}}
	s.toKafka = through(t, "")
	s.startGuarded(t)
	server := startServer(t, nil)
	at, err := url.Parse(server.URL())
	require.NoError(t, err)
	s.toPostgres = through(t, at.Host)
	s.db = s.pool(t, server.URL())
	at.Host = s.toPostgres.Addr()
	s.address = at.String()
	s.watching = s.pool(t, s.address)
	require.NoError(t, outbox.Migrate(s.ctx, s.db, outbox.MigrateConfig{}))
	s.makeTrigger(t)
	brokers := s.kafka.Brokers()
	testenv.CreateTopic(t, brokers, s.topic, 3)
	testenv.CreateTopic(t, brokers, outbox.DeadLetterTopic(s.topic), 1)
	testenv.CreateTopic(t, brokers, s.topic+"-rights", 1)
	testenv.CreateTopic(t, brokers, s.topic+"-parts", 2, blockable...)
	return s
}

func (s *viewsSite) pool(t *testing.T, address string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(address)
	require.NoError(t, err)
	cfg.MaxConns = 12
	return openPool(t, cfg)
}

// startGuarded starts a broker that lets the processes in by a login, through the proxy.
func (s *viewsSite) startGuarded(t *testing.T) {
	t.Helper()
	cfg := brokerConfig(t)
	cfg.Settings = shortSessions()
	cfg.Settings["group.initial.rebalance.delay.ms"], cfg.Settings["broker.session.timeout.ms"] = "0", "90000" // longer than it is frozen
	cfg.Settings["auto.create.topics.enable"] = "false"
	cfg.Settings["sasl.enabled.mechanisms"] = "SCRAM-SHA-256"
	cfg.Settings["listener.name."+strings.ToLower(viaProxy)+".scram-sha-256.sasl.jaas.config"] = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
	cfg.Listeners = map[string]string{viaProxy: "SASL_PLAINTEXT"}
	cfg.Advertised = map[string]string{viaProxy: s.toKafka.Addr()}
	var err error
	s.kafka, err = kafkaserver.Start(s.ctx, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.kafka.Stop(context.Background())) })
	s.toKafka.LeadTo(s.kafka.Address(viaProxy))
	admin, err := kgo.NewClient(kgo.SeedBrokers(s.kafka.Brokers()...))
	require.NoError(t, err)
	t.Cleanup(admin.Close)
	s.login = &guardedKafka{Server: s.kafka, admin: admin}
	s.login.addScram(t, viewsUser, viewsPassword)
}

// start starts the processes and the views in this one.
func (s *viewsSite) start(t *testing.T) {
	t.Helper()
	for _, name := range []string{"relay 1", "relay 2"} {
		s.startRelay(t, name)
	}
	s.service = &viewsProcess{name: viewsService, log: filepath.Join(s.dir, viewsService+".log")}
	file := filepath.Join(s.dir, "address")
	s.started++
	s.service.worker = s.launch(t, viewsVar, viewsSpec{Postgres: s.address, Broker: s.toKafka.Addr(), Topic: s.topic, Address: file, Gone: s.gone(), Log: s.service.log})
	s.awaitAddress(t, s.service, func() string {
		text, err := os.ReadFile(file)
		if err != nil {
			return ""
		}
		return string(text)
	})
	quiet := slog.New(slog.DiscardHandler) // what fails there is seen by those who look
	s.alerts = &alerted{active: map[outbox.AlertKind]bool{}}
	monitor, err := outboxops.NewMonitor(s.watching, outboxops.MonitorConfig{Alerts: outbox.AlertConfig{Alerter: s.alerts, Interval: alertsInterval}, Logger: quiet})
	require.NoError(t, err)
	testenv.Run(t, monitor.Run)
	s.page, err = outboxadmin.New(s.watching, outboxadmin.Config{QueryTimeout: lookPatience, Logger: quiet, Authorize: func(*http.Request) (outboxadmin.Access, error) {
		return outboxadmin.Access{Role: outboxadmin.Reader, Operator: "views"}, nil
	}})
	require.NoError(t, err)
}

func (s *viewsSite) gone() string { return filepath.Join(s.dir, "gone") }

func (s *viewsSite) awaitAddress(t *testing.T, p *viewsProcess, find func() string) {
	t.Helper()
	require.True(t, s.await(t, testenv.Patience, func() bool {
		at := find()
		p.at.Store(&at)
		return at != ""
	}), "%s does not serve", p.name)
}

var servesAt = regexp.MustCompile(`msg="outbox: relay process starts".* listen=(\S+)`)

// startRelay starts `outbox relay`. A process of the same name before it has another log.
func (s *viewsSite) startRelay(t *testing.T, name string) {
	t.Helper()
	s.started++
	p := s.relays[name]
	if p == nil {
		p = &viewsProcess{name: name}
		s.relays[name] = p
	}
	p.log = filepath.Join(s.dir, fmt.Sprintf("%s-%d.log", name, s.started))
	file, err := os.Create(p.log)
	require.NoError(t, err)
	defer file.Close()
	cmd := exec.Command(s.program, "relay", "--listen", "127.0.0.1:0", "--lease", viewsLease.String(), "--poll", viewsPoll.String())
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + s.dir, "DATABASE_URL=" + s.address, "KAFKA_BROKERS=" + s.toKafka.Addr(), "KAFKA_USER=" + viewsUser, "KAFKA_PASSWORD=" + viewsPassword}
	cmd.Stdout, cmd.Stderr = file, file
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, cmd.Start())
	w := &worker{cmd: cmd, done: make(chan struct{})}
	go func() {
		w.err = cmd.Wait()
		close(w.done)
	}()
	t.Cleanup(w.kill)
	s.workers = append(s.workers, w)
	p.worker = w
	s.awaitAddress(t, p, func() string {
		text, err := os.ReadFile(p.log)
		require.NoError(t, err)
		if m := servesAt.FindSubmatch(text); m != nil {
			return string(m[1])
		}
		return ""
	})
}

// viewers returns all views.
func (s *viewsSite) viewers() []viewer {
	all := []viewer{lookAtRows(s.watching), lookAtStatus(s.program, s.address), lookAtAPI(s.page), lookAtPage(s.page), lookAtAlerts(s.alerts, s.watching),
		lookAtHealth(viewsService, s.service.address), lookAtReadiness(viewsService, s.service.address)}
	for name, p := range s.relays {
		all = append(all, lookAtHealth(name, p.address), lookAtReadiness(name, p.address), lookAtMetrics(name, p.address))
	}
	return all
}

// record records events of all topics until ctx ends, not through the proxy.
func (s *viewsSite) record(ctx context.Context, rec *outbox.Recorder, rng *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		e := viewNoted{Key: fmt.Sprint("key-", rng.IntN(500)), At: time.Now()}
		err := pgx.BeginTxFunc(ctx, s.db, pgx.TxOptions{AccessMode: pgx.ReadWrite}, func(tx pgx.Tx) error {
			return rec.Record(ctx, tx, e, viewOther{e}, viewPart{e})
		})
		if err == nil {
			s.recorded.Add(3)
		}
		select {
		case <-ctx.Done():
		case <-time.After(viewsTrickle):
		}
	}
}

func (s *viewsSite) letKafka(*testing.T)    { s.toKafka.Set(proxy.Fault{}) }
func (s *viewsSite) letPostgres(*testing.T) { s.toPostgres.Set(proxy.Fault{}) }

func (s *viewsSite) freezeKafka(t *testing.T) {
	t.Helper()
	require.NoError(t, s.kafka.Freeze())
}

func (s *viewsSite) thawKafka(t *testing.T) {
	t.Helper()
	require.NoError(t, s.kafka.Thaw())
}

// rejectLogin gives the user another password. Kafka asks only who connects.
func (s *viewsSite) rejectLogin(t *testing.T) {
	t.Helper()
	s.login.addScram(t, viewsUser, "another-password")
	s.toKafka.Reset()
}

func (s *viewsSite) acceptLogin(t *testing.T) {
	t.Helper()
	s.login.addScram(t, viewsUser, viewsPassword)
}

// denyTopic forbids all users to write a topic.
func (s *viewsSite) denyTopic(t *testing.T) {
	t.Helper()
	request := kmsg.NewPtrCreateACLsRequest()
	for op, permission := range map[kmsg.ACLOperation]kmsg.ACLPermissionType{
		kmsg.ACLOperationAll: kmsg.ACLPermissionTypeAllow, kmsg.ACLOperationWrite: kmsg.ACLPermissionTypeDeny,
	} {
		c := kmsg.NewCreateACLsRequestCreation()
		c.ResourceType, c.ResourceName, c.ResourcePatternType = kmsg.ACLResourceTypeTopic, s.topic+"-rights", kmsg.ACLResourcePatternTypeLiteral
		c.Principal, c.Host, c.Operation, c.PermissionType = "User:*", "*", op, permission
		request.Creations = append(request.Creations, c)
	}
	response, err := request.RequestWith(s.ctx, s.login.admin)
	require.NoError(t, err)
	for _, r := range response.Results {
		require.NoError(t, kerr.ErrorForCode(r.ErrorCode))
	}
}

func (s *viewsSite) allowTopic(t *testing.T) {
	t.Helper()
	name := s.topic + "-rights"
	filter := kmsg.NewDeleteACLsRequestFilter()
	filter.ResourceType, filter.ResourceName, filter.ResourcePatternType = kmsg.ACLResourceTypeTopic, &name, kmsg.ACLResourcePatternTypeLiteral
	filter.Operation, filter.PermissionType = kmsg.ACLOperationAny, kmsg.ACLPermissionTypeAny
	request := kmsg.NewPtrDeleteACLsRequest()
	request.Filters = append(request.Filters, filter)
	response, err := request.RequestWith(s.ctx, s.login.admin)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Results[0].ErrorCode))
}

func (s *viewsSite) blockPartition(t *testing.T) {
	t.Helper()
	require.NoError(t, absent.Block(s.ctx, s.kafka.Brokers(), s.topic+"-parts", []int32{0}))
}

func (s *viewsSite) unblockPartition(t *testing.T) {
	t.Helper()
	require.NoError(t, absent.Unblock(s.ctx, s.kafka.Brokers(), s.topic+"-parts", []int32{0}))
}

// forbidWrites makes PostgreSQL read-only for all but those who ask for more. It takes a moment until all sessions
// know.
func (s *viewsSite) forbidWrites(t *testing.T) {
	t.Helper()
	alterSystem(t, s.db, `SET default_transaction_read_only = on`)
}

func (s *viewsSite) permitWrites(t *testing.T) {
	t.Helper()
	alterSystem(t, s.db, `RESET default_transaction_read_only`)
}

// viewsFull has a table that says whether the disk is full, and triggers that fail then.
const viewsFull = `
CREATE TABLE views_full (yes bool NOT NULL);
INSERT INTO views_full VALUES (false);
CREATE FUNCTION views_full() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (SELECT yes FROM public.views_full) THEN
        RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = '53100';
    END IF;
    RETURN NULL;
END $$;`

// makeTrigger makes the triggers that stand for a full disk.
func (s *viewsSite) makeTrigger(t *testing.T) {
	t.Helper()
	sql := viewsFull
	for _, table := range []string{"outbox_cursor", "outbox_lease", "outbox_failed", "event_delivery", "event_handled", "event_member"} {
		sql += fmt.Sprintf("CREATE TRIGGER views_full BEFORE INSERT OR UPDATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION views_full();\n", table)
	}
	_, err := s.db.Exec(s.ctx, sql)
	require.NoError(t, err)
}

func (s *viewsSite) fillDisk(t *testing.T) { s.setFull(t, true) }
func (s *viewsSite) freeDisk(t *testing.T) { s.setFull(t, false) }

func (s *viewsSite) setFull(t *testing.T, full bool) {
	t.Helper()
	_, err := s.db.Exec(s.ctx, `UPDATE views_full SET yes = $1`, full)
	require.NoError(t, err)
}

func (s *viewsSite) takeDependency(t *testing.T) {
	t.Helper()
	require.NoError(t, os.WriteFile(s.gone(), nil, 0o600))
}

func (s *viewsSite) giveDependency(t *testing.T) {
	t.Helper()
	require.NoError(t, os.Remove(s.gone()))
}

// killLeader kills the process that holds the lease, or the first one if none does.
func (s *viewsSite) killLeader(t *testing.T) {
	t.Helper()
	var pid int
	err := s.db.QueryRow(s.ctx, `SELECT split_part(holder, '/', 2)::int FROM outbox_lease WHERE name = 'default' AND expires_at > clock_timestamp()`).Scan(&pid)
	s.killed = "relay 1"
	for name, p := range s.relays {
		if err == nil && p.cmd.Process.Pid == pid {
			s.killed = name
		}
	}
	p := s.relays[s.killed]
	none := ""
	p.at.Store(&none)
	s.kill(p.worker)
	t.Logf("killed %s, process %d", s.killed, p.cmd.Process.Pid)
}

func (s *viewsSite) restartRelay(t *testing.T) {
	t.Helper()
	s.startRelay(t, s.killed)
}
