# outbox: what can be made. `make` alone tells.

SHELL       := bash
.SHELLFLAGS := -eo pipefail -c

# The version of all modules that is tagged next. After a change: make tidy.
RELEASE := v0.1.0

export ARGS # more arguments for go test, or for an example

# A program with the race detector would sleep for a second before it ends, in case
# goroutines go on. Tests start hundreds of them, and fail if a goroutine goes on.
export GORACE ?= atexit_sleep_ms=0

MODULES  := . outboxtest outboxotel outboxvet outboxcontract outboxschema outboxadmin/browser tools examples examples/nats examples/transactions faults interop bench bench/peers
TESTED   := $(filter-out bench/peers,$(MODULES)) # make test-peers tests that one, which brings Kafka Connect along
LEFT     := outboxschema examples/nats outboxadmin/browser interop bench # make test leaves these for make test-all
SERVICES := bin/services
EXAMPLES := $(addprefix bin/,demo commerce eventsourcing ledger ordering trading observability)
SHORT    := $(filter -short -short=true -test.short,$(ARGS))
USE      := $(if $(POSTGRES),-postgres $(POSTGRES)) -kafka $(or $(KAFKA),$(if $(SHORT),fake,real))
REGISTRY := $(if $(SHORT),,-registry)
RUN      := $(SERVICES) run $(USE) --
SHOW     := $(SERVICES) run -postgres $(or $(POSTGRES),embedded) -kafka $(or $(KAFKA),fake) --

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/demo ## A small shop whose events flow: needs only Go (KAFKA=real: a real broker, needs Java, or Docker)
	@$(SHOW) bin/demo $(ARGS)

.PHONY: commerce
commerce: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/commerce ## A shop by HTTP and the consumers of its events, which count what is liked, sold and viewed, while the shop is killed (ARGS=-load: measure only; KAFKA=real, as above)
	@$(SHOW) bin/commerce $(ARGS)

.PHONY: eventsourcing
eventsourcing: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/eventsourcing ## Orders that are their events: a service that is killed, a read model that is rebuilt (ARGS=-worker: without Kafka; KAFKA=real, as above)
	@$(SHOW) bin/eventsourcing $(ARGS)

.PHONY: trading
trading: needs-demo $(SERVICES) bin/trading ## Bots, an exchange that fails and workers that are killed, on PostgreSQL alone: needs only Go
	@$(SERVICES) run -postgres $(or $(POSTGRES),embedded) -kafka none -- bin/trading $(ARGS)

.PHONY: ledger
ledger: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/ledger ## A ledger and a feed for its auditors, whose processes are killed (ARGS="-topics=two": a topic for each type; KAFKA=real, as above)
	@$(SHOW) bin/ledger $(ARGS)

.PHONY: ordering
ordering: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/ordering ## A saga of orders, inventory, reward and notification, whose processes are killed (ARGS="-stock=30": more orders are cancelled; KAFKA=real, as above)
	@$(SHOW) bin/ordering $(ARGS)

.PHONY: nats
nats: needs-demo $(SERVICES) ## Publish events to NATS JetStream, whose server is killed again and again, and count what the stream has
	@$(SERVICES) run -quiet -postgres $(or $(POSTGRES),embedded) -kafka none -- bash -ec 'cd examples/nats && go test -count=1 -v .'

.PHONY: observability
observability: needs-$(if $(filter real,$(KAFKA)),kafka,demo) $(SERVICES) bin/observability ## A service with metrics for Prometheus, and traces (ARGS="-traces" prints them; KAFKA=real, as above)
	@$(SHOW) bin/observability $(ARGS)

# -p 1, here and below: packages share one PostgreSQL, and what TestOtherCursorsFail
# shows of others' cursors depends on who else has a transaction open. -parallel 4,
# however many processors there are: tests wait most of the time, and with more of
# them at once some would be late on two processors.
.PHONY: test
test: needs-$(if $(SHORT),short,test) $(SERVICES) bin/testall ## Test before each commit, within 10 minutes, on a real PostgreSQL and a real Kafka (ARGS=-short: what needs only Go, git and gcc)
	@OUTBOX_TEST_QUICK=1 $(RUN) bash -ec 'eval "exec bin/testall $(filter-out $(LEFT),$(TESTED)) -left $(LEFT) -rest bin/rest -- -p 1 -parallel 4 -timeout 30m $$ARGS"'

.PHONY: test-all
test-all: needs-$(if $(SHORT),short,test-all) $(SERVICES) bin/testall ## Test everything: with the race detector, faults, Debezium, a browser, the benchmark (ARGS=-short: as above)
	@$(SERVICES) run $(USE) $(REGISTRY) -- bash -ec 'eval "exec bin/testall $(TESTED) -- -p 1 -parallel 4 -race -timeout 30m $$ARGS"'

# UNRACED have tests of processes that are killed, limited and measured, of a browser and of programs in Java, which
# take most of the time. make test-all has the race detector for them, too.
UNRACED ?= faults interop outboxadmin/browser bench

.PHONY: test-rest
test-rest: needs-test-all $(SERVICES) bin/testall ## Test what the last make test left, with the race detector (UNRACED: the modules without it)
	@[ -e bin/rest ] || { echo "make test says what is left, and has not ended here" >&2; exit 2; }
	@$(SERVICES) run $(USE) $(REGISTRY) -- bash -ec 'eval "exec bin/testall -only bin/rest $(if $(UNRACED),-unraced $(UNRACED)) -- -p 1 -parallel 4 -race -timeout 30m $$ARGS"'

.PHONY: test-peers
test-peers: needs-bench-peers $(SERVICES) bin/testall ## Test the benchmark beside other libraries, with all of these
	@$(RUN) bash -ec 'eval "exec bin/testall bench/peers -- -p 1 -race -timeout 15m $$ARGS"'

.PHONY: screenshots
screenshots: needs-screenshots $(SERVICES) ## Pictures of the operators' page into screenshots/: light, dark, as a phone shows it (needs Chromium)
	@$(SHOW) bash -ec 'cd outboxadmin/browser && go test -count=1 -timeout 15m -run "^TestScreenshots$$" . -screenshots=$(CURDIR)/screenshots'
	@ls screenshots

.PHONY: oracle
oracle: needs-kafka $(SERVICES) ## Commit EVENTS=200000 under transactions of every kind and check what arrives (WRITERS=mixed: by pgx, database/sql, lib/pq, GORM and ent; SEED=… repeats a plan)
	@[ -z "$(filter-out mixed,$(WRITERS))" ] || { echo "WRITERS is $(WRITERS), and can be mixed or nothing" >&2; exit 2; }
	@$(RUN) go test -count=1 -timeout 0 $(ORACLE) -v -oracle.events=$(or $(EVENTS),200000) $(if $(SEED),-oracle.seed=$(SEED)) \
		| awk '{print} match($$0, /\{"seed".*/) && $$0 !~ /oracle:/ {result = substr($$0, RSTART)} END {print result}'
oracle: ORACLE := $(if $(WRITERS),-run '^TestOracleOfMixedWriters$$' ./examples/transactions/mixed,-run '^TestOracle$$' ./internal/itest)

# VERSIONS are those of PostgreSQL, each with the Kafka of all other commands. KAFKAS are the other versions of
# Kafka, each with the newest PostgreSQL, because no SQL depends on Kafka. They are for the tests whose outcome a
# broker decides: the packages with tests that need a real broker, those that send and fetch, and the faults in
# which brokers end, members of groups come and go, and topics and rights change.
VERSIONS ?= 14 15 16 17 18
KAFKAS   ?= 4.0.2 4.4.0
FAULTY   := ^Test((Cluster)?Faults\b|Stops|KilledConsumer|CalmConsumers|Failures|KafkaRestarted|Topic|RightsInKafka|CommandLine|Replay|ReadAfterOutage)
BROKERS  := . ./cmd/outbox ./internal/consumer ./internal/exactly ./internal/itest ./internal/kafka ./internal/relay ./outboxadmin ./outboxdlq ./outboxops ./outboxreplay ./outboxtest ./outboxtopics

.PHONY: test-versions
test-versions: needs-test-versions $(SERVICES) ## Test what is SQL on PostgreSQL 14 to 18 (VERSIONS=…), and what needs a real broker on Kafka 4.0 and 4.4 (KAFKAS=…)
	@for v in $(VERSIONS); do echo "== PostgreSQL $$v"; \
		OUTBOX_POSTGRES_VERSION=$$v $(SERVICES) run -quiet -postgres $$v -kafka $(or $(KAFKA),real) -- \
		bash -ec 'for m in . outboxtest faults; do (cd $$m && eval "go test -p 1 -parallel 4 -count=1 -race -timeout 15m $$ARGS ./..."); done'; done
	@for v in $(KAFKAS); do echo "== Kafka $$v"; \
		OUTBOX_KAFKA_VERSION=$$v $(SERVICES) run -quiet -postgres embedded -kafka $$v -- bash -ec ' \
		run="go test -p 1 -parallel 4 -count=1 -race -timeout 15m"; \
		eval "$$run $$ARGS $(BROKERS)"; \
		eval "$$run -run \"$(FAULTY)\" $$ARGS ./faults"'; done

.PHONY: test-pgbouncer
test-pgbouncer: needs-test-pgbouncer $(SERVICES) bin/testall ## Test the library and the examples through PgBouncer in transaction mode (THROUGH: the modules)
	@$(SERVICES) run -pgbouncer $(USE) -- bash -ec 'eval "exec bin/testall $(or $(THROUGH),. outboxtest examples examples/transactions) -- -p 1 -parallel 4 -timeout 20m $$ARGS"'

.PHONY: bench
bench: needs-kafka $(SERVICES) bin/bench ## Measure against the least that could do the same, on a real Kafka (ARGS="-h" tells more)
	@$(RUN) bin/bench $(ARGS)

.PHONY: bench-gate
bench-gate: needs-kafka $(SERVICES) bin/bench ## Fail if a few ratios exceed the generous bounds in bench/bounds.json twice (about a minute, three where it measures again)
	@$(RUN) bin/bench -gate bench/bounds.json -run '^(latency|drain)$$' -rates 200 -runs 3 -seconds 6 -warm 0.5 -events 60000 -backlog 100000 $(ARGS)

.PHONY: bench-peers
bench-peers: needs-bench-peers $(SERVICES) bin/bench-peers ## Measure beside Debezium, River and Watermill; ARGS="-docs docs" writes docs/benchmarks.md (ARGS="-h" tells more)
	@$(SERVICES) run $(USE) -pg-set wal_level=logical -- bin/bench-peers $(ARGS)

.PHONY: faults
faults: needs-faults ## Kill, freeze and cut off relays, PostgreSQL and Kafka for MINUTES=15, and check what arrives and how soon; MODE=pgbouncer: through PgBouncer; MODE=stops: stop a relay STOPS=300 times; MODE=cluster: three brokers, and how much sooner a plain producer recovers; MODE=exactly-once: relays that send exactly once (SEED=… repeats a plan)
	@[ -z "$(filter-out pgbouncer stops cluster exactly-once,$(MODE))" ] || { echo "MODE is $(MODE), and can be pgbouncer, stops, cluster, exactly-once or nothing" >&2; exit 2; }
	@cd faults && go test -count=1 -timeout 0 . -v $(FAULTS) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {result = substr($$0, RSTART)} END {if (result) print result}')
faults: FAULTS := $(if $(filter stops,$(MODE)),-run '^TestStops$$' -faults.stops=$(or $(STOPS),300),-run '^Test$(if $(filter cluster,$(MODE)),Cluster)Faults$(if $(filter pgbouncer,$(MODE)),ThroughPgBouncer)$$' -faults.minutes=$(or $(MINUTES),$(if $(filter exactly-once,$(MODE)),60,15)) $(if $(filter exactly-once,$(MODE)),-faults.exactly))

.PHONY: faults-consumer
faults-consumer: needs-faults ## Kill KILLS=50 consumers, stop and freeze others, while they handle EVENTS=100000 of which some fail for minutes or for ever (BALANCER=eager or kip848; SEED=… repeats a plan; JOINDELAY=0 instead of Kafka's default)
	@cd faults && go test -count=1 -race -timeout 0 -run '^Test(Killed|Calm)Consumers$$' . -v -faults.kills=$(or $(KILLS),50) -faults.events=$(or $(EVENTS),100000) \
		-faults.joindelay=$(or $(JOINDELAY),3s) $(if $(BALANCER),-faults.balancer=$(BALANCER)) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {result = result substr($$0, RSTART) "\n"} END {printf "%s", result}')

.PHONY: faults-worker
faults-worker: needs-short ## Kill KILLS=50 processes with workers, stop and freeze others, and crash PostgreSQL, while they handle EVENTS=100000 (SEED=… repeats a plan)
	@cd faults && go test -count=1 -race -timeout 0 -run '^TestKilledWorkers$$' . -v -faults.kills=$(or $(KILLS),50) -faults.events=$(or $(EVENTS),100000) \
		$(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {result = substr($$0, RSTART)} END {if (result) print result}')

.PHONY: faults-handling
faults-handling: needs-faults ## Kill, stop, freeze and cut off consumers and workers of two releases for MINUTES=15, while what handlers need comes and goes, and check what they did (SEED=… repeats a plan)
	@cd faults && go test -count=1 -race -timeout 0 -run '^TestHandlingFaults$$' . -v -faults.minutes=$(or $(MINUTES),15) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {result = substr($$0, RSTART)} END {if (result) print result}')

.PHONY: faults-views
faults-views: needs-faults ## Take servers, topics, logins and what handlers need away for MINUTES=20, kill the leader, and check each second that no view says something false (SEED=… repeats a plan)
	@cd faults && go test -count=1 -race -timeout 0 -run '^TestViews$$' . -v -faults.minutes=$(or $(MINUTES),20) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {result = substr($$0, RSTART)} END {if (result) print result}')

.PHONY: test-bounds
test-bounds: needs-short $(SERVICES) ## Run processes with a memory limit against events of 10, 200 and 900 MB, and check that they live and send the others within 2 s
	@$(SERVICES) run -quiet $(if $(POSTGRES),-postgres $(POSTGRES)) -kafka fake -- bash -ec 'cd faults && go test -count=1 -timeout 0 -run "^TestBounds" . -v $(ARGS)'

.PHONY: faults-pair
faults-pair: needs-short $(SERVICES) ## Measure RUNS=5 times how long a group of workers takes, alone and beside one whose handlers fail for ever
	@$(SERVICES) run -quiet $(if $(POSTGRES),-postgres $(POSTGRES)) -kafka fake -- bash -ec 'cd faults && go test -count=1 -timeout 0 -run "^TestFailingGroup$$" . -v -faults.pairs=$(or $(RUNS),5) $(ARGS)'

.PHONY: spec
spec: needs-spec ## Check the models in spec/ with TLC, within 15 minutes (SPEC="Gaps.cfg …": only these)
	@tools/spec.sh $(SPEC)

.PHONY: spec-traces
spec-traces: needs-spec-traces $(SERVICES) ## Have TLC walk two minutes of a fault run through the model of the lease, and reject the runs of four mistakes (MISTAKES="retry …": only these; SEED=… repeats the disturbances)
	@SEED=$(SEED) $(SERVICES) run -quiet -postgres none -kafka real -- tools/spec_traces.sh $(MISTAKES)

.PHONY: services
services: needs-$(if $(filter fake,$(KAFKA)),demo,kafka) $(SERVICES) ## Keep PostgreSQL and Kafka running until Ctrl-C, addresses in .services.env (KAFKA=fake: no Java; ARGS=-registry: a schema registry, too)
	@$(SERVICES) up $(USE) $(ARGS)

.PHONY: lint
lint: bin/golangci-lint ## Check form and style, with vet, and the workflows
	@for m in $(MODULES); do echo "== $$m"; (cd $$m && $(CURDIR)/bin/golangci-lint run --config $(CURDIR)/.golangci.yml ./...) || exit 1; done
	@echo "== .github/workflows" && GOWORK=off go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12 -shellcheck= -pyflakes=

.PHONY: vulncheck
vulncheck: bin/govulncheck bin/vulncheck ## Look for known vulnerabilities in what is called; says so where their database cannot be reached
	@bin/vulncheck bin/govulncheck $(MODULES)

.PHONY: fuzz
fuzz: needs-demo $(SERVICES) ## Run each fuzz target with INPUTS=5000 inputs, or for TIME=5m each
	@$(SHOW) tools/fuzz.sh

.PHONY: tidy
tidy: bin/release ## Tidy all modules and the workspace; they require each other at RELEASE, the version that is tagged next
	@bin/release tidy $(RELEASE)
tidy: MOD := -mod=mod # the tool itself may miss something that tidy adds

.PHONY: release-check
release-check: bin/release ## Check that RELEASE can be tagged: get, build and use it from empty modules; archives (unless QUICK=1), chart and site get into bin/dist
	@rm -rf bin/dist && mkdir -p bin/dist
	@$(MAKE) --no-print-directory deploy-check ARGS=-out=$(CURDIR)/bin/dist
	@$(MAKE) --no-print-directory site ARGS=
	@tar -czf bin/dist/outbox_$(RELEASE)_site.tar.gz -C bin/site/site .
	@bin/release check $(if $(QUICK),,-archives bin/dist) $(RELEASE)

.PHONY: release
release: release-check ## Make the tags of RELEASE at this commit, one for each public module; git push publishes them
	@bin/release tag $(RELEASE)

# The module is not in the workspace: Helm's dependencies must not decide about versions of ours.
.PHONY: deploy-check
deploy-check: ## Check the Helm charts, the manifests and docker-compose.yml (ARGS=-update writes deploy/kubernetes.yaml)
	@cd tools/deploy && GOWORK=off go test -count=1 . $(ARGS)

.PHONY: site
site: needs-site ## Build the site of the documents into bin/site/site; a link that leads nowhere fails
	@python3 tools/site/site.py build bin/site

.PHONY: site-serve
site-serve: needs-site ## Show the site at http://localhost:8000 until Ctrl-C (start it again after a change)
	@python3 tools/site/site.py serve bin/site

.PHONY: fmt
fmt: ## Format the code
	@gofmt -w $$(git ls-files '*.go')

.PHONY: clean
clean: ## Remove what was built
	@rm -rf bin

# What a command needs is checked before anything is compiled. tools/needs.sh has the list.
needs-%:
	@tools/needs.sh $*

# The go command knows best whether these are up to date.
.PHONY: $(SERVICES) $(EXAMPLES) bin/testall bin/bench bin/bench-peers bin/release bin/golangci-lint bin/govulncheck bin/vulncheck
$(SERVICES) bin/testall bin/vulncheck:
	@echo "building $@"
	@go build -C tools -o ../$@ ./$(@F)

$(EXAMPLES):
	@echo "building $@"
	@go build -C examples -o ../$@ ./$(@F)

bin/bench:
	@echo "building $@"
	@go build -C bench -o ../$@ .

bin/bench-peers:
	@echo "building $@"
	@go build -C bench/peers -o ../../$@ .

# These do not depend on the workspace: one checks it, the other is not in it.
bin/release:
	@echo "building $@"
	@GOWORK=off go build -C tools $(MOD) -o ../bin/release ./release

bin/govulncheck:
	@echo "building $@"
	@GOWORK=off go build -C tools/vuln -o ../../$@ golang.org/x/vuln/cmd/govulncheck

bin/golangci-lint:
	@echo "building $@"
	@GOWORK=off go build -C tools/lint -o ../../$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint
