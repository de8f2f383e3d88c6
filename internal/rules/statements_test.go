package rules

import (
	"context"
	"go/ast"
	"go/constant"
	"go/types"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
)

// ofTests are packages that only tests use.
var ofTests = []string{"internal/testenv", "internal/oracle", "outboxadmin/internal/seed"}

// safePath are packages whose statements run under [privileges.SafePath].
var safePath = []string{"internal/privileges", "internal/migrator"}

// template replaces what packages replace themselves.
var template = strings.NewReplacer("{archive}", "'public.outbox_archive'", "{prepare}", "'public.outbox_archive_prepare(timestamptz[])'",
	"{table}", "outbox", "{column}", "payload_bytes")

// incomplete are texts that are no statement without what is added when they run: to call nothing, or for an operator.
var incomplete = regexp.MustCompile(`^SELECT setval\('?%s'?, %d\)$|^(INSERT INTO|DELETE FROM) %(\[1\])?s\.`)

// ambiguous is what PostgreSQL says of a parameter that only a text has that a function returns.
var ambiguous = regexp.MustCompile("could not determine data type of parameter")

// PostgreSQL's functions, aggregates and operators fit exactly what statements pass to them, or are named with their
// schema. So what another role makes in a schema that comes first in search_path is not run, also if it fits better.
func TestStatementsRunNothingOfOthers(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	testenv.Direct(t)
	ctx := context.Background()
	db := testenv.OtherDatabase(t)
	require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{}))
	table, err := outboxarchive.NewTable(db, outboxarchive.TableConfig{})
	require.NoError(t, err)
	require.NoError(t, table.Ensure(ctx))
	conn, err := db.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()

	texts := statements(t)
	require.GreaterOrEqual(t, len(texts), 200)
	_, err = conn.Exec(ctx, `SELECT set_config('test.functions', $1, false)`, strings.Join(called(texts), " "))
	require.NoError(t, err)
	var variadic string
	require.NoError(t, conn.QueryRow(ctx, `SELECT string_agg(DISTINCT proname, '|') FROM pg_catalog.pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
		AND provariadic <> 0 AND proname = ANY (string_to_array(current_setting('test.functions'), ' '))`).Scan(&variadic))
	_, err = conn.Exec(ctx, plantedInexact, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	rows := rowsOfSources(t, texts)
	anyNumber := regexp.MustCompile(`(^|[^.\w])(` + variadic + `)\(`)
	for text, dir := range texts {
		if m := anyNumber.FindString(text); m != "" && !slices.Contains(safePath, dir) {
			t.Errorf("%s calls %s of any number of arguments without pg_catalog: %s", dir, m, text)
		}
		complete := pg.InSchema(template.Replace(strings.ReplaceAll(text, "(%s) AS found", "("+rows+") AS found")), pg.DefaultSchema)
		d, err := conn.Conn().Prepare(ctx, "", complete)
		if err != nil {
			require.True(t, incomplete.MatchString(text) || ambiguous.MatchString(err.Error()) || partOfAnother(texts, text), "%s: %v: %s", dir, err, text)
			continue
		}
		for _, what := range planted(t, conn, complete, d.ParamOIDs) {
			if !slices.Contains(safePath, dir) {
				t.Errorf("%s runs %s: %s", dir, what, text)
			}
		}
	}
}

// rowsOfSources returns the rows that statements of outboxarchive read from both tables.
func rowsOfSources(t *testing.T, texts map[string]string) string {
	t.Helper()
	var both []string
	for text, dir := range texts {
		if dir == "outboxarchive" && strings.HasPrefix(text, "(\n    SELECT") {
			both = append(both, text)
		}
	}
	require.Len(t, both, 2)
	return strings.Join(both, " UNION ALL ")
}

// statements returns the SQL texts of all packages, constants and others, and the folders of their packages.
func statements(t *testing.T) map[string]string {
	t.Helper()
	begins := regexp.MustCompile(`^[\s(]*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|MERGE INTO)\s+\S`)
	all, err := listPackages("./...")
	require.NoError(t, err)
	texts := map[string]string{}
	for _, dir := range packageDirs(t) {
		if slices.Contains(ofTests, dir) {
			continue
		}
		info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}}
		_, files, err := all.check(dir, info)
		require.NoError(t, err)
		for _, file := range files {
			ast.Inspect(file, func(n ast.Node) bool {
				e, is := n.(ast.Expr)
				if !is {
					return true
				}
				text, whole := textOf(info, e)
				if whole && begins.MatchString(text) {
					texts[text] = dir
				}
				return !whole
			})
		}
	}
	return texts
}

// textOf returns the value of a text, or of texts that are put together, with a condition for those that functions
// return.
func textOf(info *types.Info, e ast.Expr) (text string, is bool) {
	if value := info.Types[e].Value; value != nil && value.Kind() == constant.String {
		return constant.StringVal(value), true
	}
	switch e := e.(type) {
	case *ast.BinaryExpr:
		a, isText := textOf(info, e.X)
		b, areBoth := textOf(info, e.Y)
		return a + b, isText && areBoth
	case *ast.CallExpr:
		return " true ", info.Types[e].Type == types.Typ[types.String]
	}
	return "", false
}

// called returns the names before parentheses.
func called(texts map[string]string) (names []string) {
	for text := range texts {
		for _, m := range regexp.MustCompile(`\b([a-z_0-9]+)\(`).FindAllStringSubmatch(text, -1) {
			names = append(names, m[1])
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func partOfAnother(texts map[string]string, text string) bool {
	for other := range texts {
		if other != text && strings.Contains(other, text) {
			return true
		}
	}
	return false
}

// planted returns what a statement runs of [plantedInexact]. A function of the statement depends on it.
func planted(t *testing.T, conn *pgxpool.Conn, statement string, parameters []uint32) (what []string) {
	t.Helper()
	ctx := context.Background()
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	var types string
	require.NoError(t, tx.QueryRow(ctx, `SELECT coalesce(string_agg(pg_catalog.format_type(t, NULL), ', ' ORDER BY n), '')
		FROM ROWS FROM (pg_catalog.unnest($1::oid[])) WITH ORDINALITY AS p (t, n)`, parameters).Scan(&types))
	_, err = tx.Exec(ctx, "CREATE FUNCTION hostile.statement("+types+") RETURNS void BEGIN ATOMIC "+statement+"; END", pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err, statement)
	_, err = tx.Exec(ctx, "SET LOCAL search_path = pg_catalog")
	require.NoError(t, err)
	require.NoError(t, tx.QueryRow(ctx, `
		SELECT coalesce(array_agg(DISTINCT coalesce(o.oid::regoperator::text, f.oid::regprocedure::text)), '{}') FROM pg_depend AS d
		  LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid AND o.oprnamespace = 'hostile'::regnamespace
		  LEFT JOIN pg_proc AS f ON d.refclassid = 'pg_proc'::regclass AND f.oid = d.refobjid AND f.pronamespace = 'hostile'::regnamespace
		 WHERE d.classid = 'pg_proc'::regclass AND coalesce(o.oid, f.oid) IS NOT NULL
		   AND d.objid = (SELECT oid FROM pg_proc WHERE proname = 'statement' AND pronamespace = 'hostile'::regnamespace)`).Scan(&what))
	return what
}

// plantedInexact makes, for each operator and each function that is called, those with the types for which
// PostgreSQL's own needs a conversion, or which it takes as any type, in a schema that comes first.
const plantedInexact = `
CREATE SCHEMA hostile;
CREATE TEMPORARY TABLE fit AS
SELECT a.oid AS given, b.oid AS taken, format_type(a.oid, NULL) AS name
  FROM unnest('{bool,int2,int4,int8,numeric,float8,text,varchar,name,"\"char\"",oid,regclass,regrole,regprocedure,timestamptz,timestamp,date,interval,xid8,bytea,uuid,jsonb,
       pg_snapshot,text[],varchar[],name[],int4[],int8[],bool[],bytea[],uuid[],jsonb[],timestamptz[],interval[]}'::text[]) AS t (name)
  JOIN pg_type AS a ON a.oid = t.name::regtype
  JOIN pg_type AS b ON b.oid = a.oid OR b.typname IN ('any', 'anyelement', 'anynonarray', 'anycompatible') OR a.typcategory = 'A' AND b.typname IN ('anyarray', 'anycompatiblearray')
       OR EXISTS (SELECT FROM pg_cast AS c WHERE c.castsource = a.oid AND c.casttarget = b.oid AND c.castcontext = 'i');
CREATE FUNCTION pg_temp.result(result oid, given oid) RETURNS text LANGUAGE sql AS $$
    SELECT format_type(CASE WHEN r.typname IN ('anyarray', 'anycompatiblearray') AND g.typarray <> 0 THEN g.typarray
                            WHEN r.typtype = 'p' AND r.typname <> 'void' THEN g.oid ELSE r.oid END, NULL)
      FROM pg_type AS r, pg_type AS g WHERE r.oid = result AND g.oid = given $$;
DO $$ DECLARE r record; BEGIN
FOR r IN SELECT DISTINCT ON (o.oprname, a.given, b.given) o.oprname, a.name AS a, b.name AS b, pg_temp.result(o.oprresult, a.given) AS result
           FROM pg_operator AS o JOIN fit AS a ON a.taken = o.oprleft JOIN fit AS b ON b.taken = o.oprright
          WHERE o.oprname IN ('=', '<>', '<', '>', '<=', '>=', '||', '+', '-', '*', '/', '%', '~', '->', '->>', '@>', '~~', '<@', '&&', '^@', '!~', '~*', '!~*', '!~~', '~~*')
            AND NOT EXISTS (SELECT FROM pg_operator AS own WHERE own.oprname = o.oprname AND own.oprleft = a.given AND own.oprright = b.given)
          ORDER BY o.oprname, a.given, b.given, (a.given = a.taken)::int + (b.given = b.taken)::int DESC, o.oprresult = 'text'::regtype DESC LOOP
    EXECUTE format('CREATE FUNCTION hostile.%I(a %s, b %s) RETURNS %s LANGUAGE plpgsql AS $f$ BEGIN END $f$', r.oprname, r.a, r.b, r.result);
    EXECUTE format('CREATE OPERATOR hostile.%s (FUNCTION = hostile.%1$I, LEFTARG = %s, RIGHTARG = %s)', r.oprname, r.a, r.b);
END LOOP;
FOR r IN WITH called AS (
             SELECT p.* FROM pg_proc AS p
              WHERE p.pronamespace = 'pg_catalog'::regnamespace AND p.prokind IN ('f', 'a', 'w') AND p.proname = ANY (string_to_array(current_setting('test.functions'), ' '))
                AND NOT EXISTS (SELECT FROM pg_aggregate AS g WHERE g.aggfnoid = p.oid AND g.aggkind <> 'n')
         ), fitting AS (
             SELECT p.oid, ARRAY[a.given] AS given, a.name AS names FROM called AS p JOIN fit AS a ON p.pronargs = 1 AND a.taken = p.proargtypes[0]
              UNION ALL
             SELECT p.oid, ARRAY[a.given, b.given], concat_ws(', ', a.name, b.name)
               FROM called AS p JOIN fit AS a ON p.pronargs = 2 AND a.taken = p.proargtypes[0] JOIN fit AS b ON b.taken = p.proargtypes[1]
              UNION ALL
             SELECT p.oid, ARRAY[a.given, b.given, c.given], concat_ws(', ', a.name, b.name, c.name)
               FROM called AS p JOIN fit AS a ON p.pronargs = 3 AND a.taken = p.proargtypes[0] JOIN fit AS b ON b.taken = p.proargtypes[1] JOIN fit AS c ON c.taken = p.proargtypes[2])
         SELECT DISTINCT ON (p.proname, f.given) p.proname, f.names, p.proretset, p.prokind,
                CASE WHEN p.proname = 'unnest' THEN rtrim(f.names, '[]') ELSE pg_temp.result(p.prorettype, f.given[1]) END AS result
           FROM fitting AS f JOIN pg_proc AS p ON p.oid = f.oid
          WHERE NOT EXISTS (SELECT FROM pg_proc AS own WHERE own.pronamespace = p.pronamespace AND own.proname = p.proname AND own.proargtypes::oid[] = f.given) LOOP
    IF r.prokind = 'f' THEN
        EXECUTE format('CREATE FUNCTION hostile.%I(%s) RETURNS %s %s LANGUAGE plpgsql AS $f$ BEGIN END $f$', r.proname, r.names, CASE WHEN r.proretset THEN 'SETOF' END, r.result);
    ELSE -- An aggregate can stand for a window function.
        EXECUTE format('CREATE OR REPLACE FUNCTION hostile.step(%1$s, %2$s) RETURNS %1$s LANGUAGE plpgsql AS $f$ BEGIN END $f$', r.result, r.names);
        EXECUTE format('CREATE AGGREGATE hostile.%I(%s) (SFUNC = hostile.step, STYPE = %s)', r.proname, r.names, r.result);
    END IF;
END LOOP;
END $$;
SET search_path = hostile, public`

var (
	ownCall  = regexp.MustCompile(`(\w+ )?\{schema\}\.outbox_\w+\(`)
	typeless = regexp.MustCompile(`^(\$\d+|'[^']*'|-?\d+|NULL)$`)
)

// Each argument of a function of outbox has its type. PostgreSQL chooses the function that fits best, and to an unknown
// type another role's function of that name fits better if it takes text.
func TestStatementsCallTheirOwnFunctions(t *testing.T) {
	t.Parallel()
	calls := 0
	for text, dir := range statements(t) {
		for _, at := range ownCall.FindAllStringSubmatchIndex(text, -1) {
			if at[2] >= 0 && text[at[2]:at[3]] == "FUNCTION " { // a definition, or a grant
				continue
			}
			calls++
			for _, argument := range argumentsOf(text[at[1]:]) {
				require.NotRegexp(t, typeless, argument, "%s: %s", dir, text)
			}
		}
	}
	require.Greater(t, calls, 50)
}

// argumentsOf splits what follows the opening parenthesis of a call.
func argumentsOf(text string) (all []string) {
	depth, from, quoted := 0, 0, false
	for i, c := range text {
		switch {
		case c == '\'':
			quoted = !quoted
		case quoted:
		case c == '(' || c == '[':
			depth++
		case depth > 0 && (c == ')' || c == ']'):
			depth--
		case depth == 0 && (c == ',' || c == ')'):
			all, from = append(all, strings.TrimSpace(text[from:i])), i+1
			if c == ')' {
				return all
			}
		}
	}
	return all
}
