# outbox: what can be made. `make` alone tells.

SHELL       := bash
.SHELLFLAGS := -eo pipefail -c

export ARGS # more arguments for go test, or for an example

MODULES  := . outboxtest outboxotel outboxadmin/browser tools examples faults interop bench
SERVICES := bin/services
RUN      := $(SERVICES) run $(if $(POSTGRES),-postgres $(POSTGRES)) $(if $(KAFKA),-kafka $(KAFKA)) --
SHOW     := $(SERVICES) run -postgres $(or $(POSTGRES),embedded) -kafka $(if $(filter real,$(KAFKA)),auto,$(or $(KAFKA),fake)) --

.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(SERVICES) ## A small shop whose events flow: needs only Go (KAFKA=real: a real broker, needs Java, or Docker)
	@go build -C examples -o ../bin/demo ./demo
	@$(SHOW) bin/demo $(ARGS)

.PHONY: commerce
commerce: $(SERVICES) ## A shop and the consumers of its events, which count what is liked, sold and viewed (KAFKA=real, as above)
	@go build -C examples -o ../bin/commerce ./commerce
	@$(SHOW) bin/commerce $(ARGS)

.PHONY: observability
observability: $(SERVICES) ## A service with metrics for Prometheus, and traces (ARGS="-traces" prints them; KAFKA=real, as above)
	@go build -C examples -o ../bin/observability ./observability
	@$(SHOW) bin/observability $(ARGS)

# -p 1, here and below: packages share one PostgreSQL, and what TestOtherCursorsFail
# shows of others' cursors depends on who else has a transaction open.
.PHONY: test
test: $(SERVICES) ## Test everything against a real PostgreSQL and a real Kafka, with the race detector
	@$(RUN) bash -ec 'for m in $(MODULES); do echo "== $$m"; (cd $$m && eval "go test -p 1 -race -timeout 15m $$ARGS ./..."); done'

.PHONY: screenshots
screenshots: $(SERVICES) ## Pictures of the operators' page into screenshots/: light, dark, as a phone shows it (needs Chromium)
	@$(SHOW) bash -ec 'cd outboxadmin/browser && go test -count=1 -timeout 15m -run "^TestScreenshots$$" . -screenshots=$(CURDIR)/screenshots'
	@ls screenshots

.PHONY: oracle
oracle: $(SERVICES) ## Commit EVENTS=200000 under transactions of every kind and check what arrives (SEED=… repeats a plan)
	@$(RUN) go test -count=1 -timeout 0 -run '^TestOracle$$' . -v -oracle.events=$(or $(EVENTS),200000) $(if $(SEED),-oracle.seed=$(SEED)) \
		| awk '{print} match($$0, /\{"seed".*/) && $$0 !~ /oracle:/ {verdict = substr($$0, RSTART)} END {print verdict}'

.PHONY: test-versions
test-versions: $(SERVICES) ## Test what is SQL on PostgreSQL 14 to 18
	@for v in $(or $(VERSIONS),14 15 16 17 18); do echo "== PostgreSQL $$v"; \
		OUTBOX_POSTGRES_VERSION=$$v $(SERVICES) run -quiet -postgres $$v $(if $(KAFKA),-kafka $(KAFKA)) -- \
		bash -ec 'for m in . outboxtest faults; do (cd $$m && eval "go test -p 1 -count=1 -race -timeout 15m $$ARGS ./..."); done'; done

.PHONY: test-pgbouncer
test-pgbouncer: $(SERVICES) ## Test the library and the examples through PgBouncer, which must be installed, in transaction mode
	@$(SERVICES) run -pgbouncer $(if $(POSTGRES),-postgres $(POSTGRES)) $(if $(KAFKA),-kafka $(KAFKA)) -- \
		bash -ec 'for m in . outboxtest examples; do echo "== $$m"; (cd $$m && eval "go test -p 1 -timeout 15m $$ARGS ./..."); done'

.PHONY: bench
bench: $(SERVICES) ## Measure against the least that could do the same, on a real Kafka (ARGS="-h" tells more)
	@go build -C bench -o ../bin/bench .
	@$(RUN) bin/bench $(ARGS)

.PHONY: faults
faults: ## Kill, freeze and cut off relays, PostgreSQL and Kafka for MINUTES=15 and check what arrives (SEED=… repeats a plan)
	@cd faults && go test -count=1 -timeout 0 -run '^TestFaults$$' . -v -faults.minutes=$(or $(MINUTES),15) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {verdict = substr($$0, RSTART)} END {if (verdict) print verdict}')

.PHONY: faults-consumer
faults-consumer: ## Kill KILLS=50 consumers, stop and freeze others, while they handle EVENTS=100000 (BALANCER=eager; SEED=… repeats a plan)
	@cd faults && go test -count=1 -race -timeout 0 -run '^TestKilledConsumers$$' . -v -faults.kills=$(or $(KILLS),50) -faults.events=$(or $(EVENTS),100000) \
		$(if $(BALANCER),-faults.balancer=$(BALANCER)) $(if $(SEED),-faults.seed=$(SEED)) $(ARGS) \
		| (trap '' INT; awk '{print; fflush()} match($$0, /\{"seed".*/) && $$0 !~ /faults:/ {verdict = substr($$0, RSTART)} END {if (verdict) print verdict}')

.PHONY: services
services: $(SERVICES) ## Keep PostgreSQL and Kafka running for `go test`, until Ctrl-C
	@$(SERVICES) up

.PHONY: lint
lint: bin/golangci-lint ## Check form and style
	@for m in $(MODULES); do echo "== $$m"; (cd $$m && go vet ./... && $(CURDIR)/bin/golangci-lint run --config $(CURDIR)/.golangci.yml ./...) || exit 1; done

.PHONY: fmt
fmt: ## Format the code
	@gofmt -w $$(git ls-files '*.go')

.PHONY: clean
clean: ## Remove what was built
	@rm -rf bin

# The go command knows best whether these are up to date.
.PHONY: $(SERVICES) bin/golangci-lint
$(SERVICES):
	@go build -C tools -o ../bin/services ./services

bin/golangci-lint:
	@go build -C tools/lint -o ../../bin/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
