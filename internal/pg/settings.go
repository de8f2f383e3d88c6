package pg

// TextFormats makes the rest of a transaction print values in the formats that pgx reads, whatever the role is
// configured to. Pools in [pgx.QueryExecModeExec] or [pgx.QueryExecModeSimpleProtocol] get values as text. [Query],
// [QueryRow], [Collect] and [Exec] send it where it is needed.
const TextFormats = `pg_catalog.set_config('DateStyle', 'ISO', true), pg_catalog.set_config('IntervalStyle', 'postgres', true),
       pg_catalog.set_config('bytea_output', 'hex', true)`

// TextSettings is [TextFormats] as a statement.
const TextSettings = `SELECT ` + TextFormats

// PlannerSettings precedes a statement in the same round trip and so in the same transaction.
//
// The planner must not choose: a plan that it makes for an empty table reads all of outbox for each
// event when the table has grown, and is used until the table is analysed. With these settings only
// the plans remain that the comments at the statements describe: ORDER BY names the index, because
// nothing is sorted that an index has in order. Each connection plans a statement once.
//
// Before PostgreSQL 18 an index scan is bounded by columns that are equal to something, and by a
// range of the column behind them. A second range bounds nothing, and neither does the second
// column of a row that is compared.
const PlannerSettings = `
SELECT set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true), set_config('jit', 'off', true)`

// Durable makes its transaction wait for the disk of its server where the role's
// synchronous_commit is off.
const Durable = `SELECT ` + DurableCommit

// DurableCommit is [Durable] for a list of settings.
const DurableCommit = `CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'local', true) END`

// NoTransactionTimeout is for a list of settings: it lets a transaction last for as long as it takes. PostgreSQL has
// transaction_timeout from version 17 on.
const NoTransactionTimeout = `CASE WHEN current_setting('transaction_timeout', true) <> '0' THEN set_config('transaction_timeout', '0', true) END`

// Unbounded lets the rest of a transaction, and each statement in it, last for as long as it takes, whatever the role
// is configured to.
const Unbounded = `
SELECT set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '0', true),
       ` + NoTransactionTimeout
