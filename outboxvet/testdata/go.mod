module example.com/vet

go 1.26.0

require (
	github.com/jackc/pgx/v5 v5.12.0
	github.com/outboxgo/outbox v0.1.0
	github.com/twmb/franz-go v1.22.3
)
