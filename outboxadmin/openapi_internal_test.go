package outboxadmin

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
)

// openAPI is the part of openapi.json that the tests need.
type openAPI struct {
	OpenAPI    string
	Paths      map[string]map[string]operation
	Components struct {
		Schemas map[string]*schema
	}
}

type operation struct {
	OperationID string
	Parameters  []struct {
		Name, In string
		Schema   *schema
	}
	RequestBody struct {
		Content map[string]struct{ Schema *schema }
	}
	Responses map[string]struct {
		Content map[string]struct{ Schema *schema }
	}
}

// schema is the part of JSON Schema that the file uses; with anything else it cannot be
// read.
type schema struct {
	Ref                  string             `json:"$ref"`
	Type                 any                // a name or several
	Format, Description  string             //
	Enum                 []string           //
	OneOf                []*schema          //
	Properties           map[string]*schema //
	Required             []string           //
	AdditionalProperties any                // false, or a schema
	Items                *schema            //
	Default              any                //
	Minimum, Maximum     *float64           //
	MaxLength            *int               //
}

func readOpenAPI(t *testing.T) (file openAPI) {
	t.Helper()
	data, err := assetFiles.ReadFile("openapi.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &file))
	require.Equal(t, "3.1.0", file.OpenAPI)
	var whole struct {
		Components struct{ Schemas map[string]json.RawMessage }
	}
	require.NoError(t, json.Unmarshal(data, &whole))
	for name, one := range whole.Components.Schemas {
		d := json.NewDecoder(strings.NewReader(string(one)))
		d.DisallowUnknownFields()
		require.NoError(t, d.Decode(new(schema)), "%s says what this test does not understand", name)
	}
	return file
}

// types returns the names of the types that a schema allows.
func (s *schema) types() []string {
	switch t := s.Type.(type) {
	case string:
		return []string{t}
	case []any:
		var names []string
		for _, one := range t {
			names = append(names, one.(string))
		}
		return names
	}
	return nil
}

// check returns an error if a value does not match a schema.
func (f *openAPI) check(at string, s *schema, v any) error {
	if s.Ref != "" {
		name := strings.TrimPrefix(s.Ref, "#/components/schemas/")
		if f.Components.Schemas[name] == nil {
			return fmt.Errorf("%s: no schema %s", at, s.Ref)
		}
		return f.check(at, f.Components.Schemas[name], v)
	}
	if len(s.OneOf) > 0 {
		fits := 0
		for _, one := range s.OneOf {
			if f.check(at, one, v) == nil {
				fits++
			}
		}
		if fits != 1 {
			return fmt.Errorf("%s: %d of the schemas fit %v", at, fits, v)
		}
		return nil
	}
	kind := map[bool]string{true: "number"}[reflect.TypeOf(v) == reflect.TypeFor[float64]()]
	switch v := v.(type) {
	case nil:
		kind = "null"
	case string:
		kind = "string"
		if len(s.Enum) > 0 && !slices.Contains(s.Enum, v) {
			return fmt.Errorf("%s: %q is none of %v", at, v, s.Enum)
		}
		if s.Format == "date-time" {
			if _, err := time.Parse(time.RFC3339Nano, v); err != nil || !strings.HasSuffix(v, "Z") {
				return fmt.Errorf("%s: %q is no time in UTC", at, v)
			}
		}
	case bool:
		kind = "boolean"
	case float64:
		if v == float64(int64(v)) && slices.Contains(s.types(), "integer") {
			kind = "integer"
		}
	case []any:
		kind = "array"
		for i, one := range v {
			if s.Items == nil {
				break
			}
			if err := f.check(fmt.Sprintf("%s[%d]", at, i), s.Items, one); err != nil {
				return err
			}
		}
	case map[string]any:
		kind = "object"
		if err := f.checkObject(at, s, v); err != nil {
			return err
		}
	}
	if types := s.types(); types != nil && !slices.Contains(types, kind) {
		return fmt.Errorf("%s: it is %s, not %v", at, kind, types)
	}
	return nil
}

func (f *openAPI) checkObject(at string, s *schema, v map[string]any) error {
	for _, name := range s.Required {
		if _, ok := v[name]; !ok {
			return fmt.Errorf("%s: %s is missing", at, name)
		}
	}
	for name, one := range v {
		if property := s.Properties[name]; property != nil {
			if err := f.check(at+"."+name, property, one); err != nil {
				return err
			}
		} else if s.AdditionalProperties == false {
			return fmt.Errorf("%s: %s is not described", at, name)
		}
	}
	return nil
}

// Every route is in the file, and everything in the file is a route.
func TestOpenAPIHasTheRoutes(t *testing.T) {
	t.Parallel()
	file := readOpenAPI(t)
	var described, served []string
	ids := map[string]bool{}
	for path, operations := range file.Paths {
		for method, op := range operations {
			described = append(described, strings.ToUpper(method)+" /api"+path)
			require.False(t, ids[op.OperationID], op.OperationID)
			ids[op.OperationID] = true
			var inPath []string
			for _, p := range op.Parameters {
				if p.In == "path" {
					inPath = append(inPath, "{"+p.Name+"}")
				}
			}
			require.Equal(t, regexp.MustCompile(`\{[a-z]+\}`).FindAllString(path, -1), inPath, path)
		}
	}
	for _, rt := range routes {
		if strings.HasPrefix(rt.path, "/api/") {
			served = append(served, rt.method+" "+rt.path)
		}
	}
	require.ElementsMatch(t, served, described)
}

// The schemas are the Go types, member by member.
func TestOpenAPIHasTheTypes(t *testing.T) {
	t.Parallel()
	file := readOpenAPI(t)
	types := map[string]any{
		"Error": apiError{}, "RelayList": apiRelayList{}, "Relay": apiRelay{}, "RelayState": outage.RelayForm{}, "Outage": outage.Form{}, "Breaker": outage.BreakerForm{}, "Health": apiHealth{}, "ProgressList": apiProgressList{}, "Progress": apiProgress{},
		"SampleList": apiSampleList{}, "Sample": apiSample{}, "GroupSampleList": apiGroupSampleList{}, "GroupSample": apiGroupSample{}, "TransactionList": apiTransactionList{}, "Transaction": apiTransaction{},
		"PartitionList": apiPartitionList{}, "Partition": apiPartition{},
		"FailedList": apiFailedList{}, "Failed": apiFailed{}, "FailedWhole": apiFailedWhole{}, "CountList": apiCountList{}, "Count": apiCount{},
		"AuditList": apiAuditList{}, "Audit": apiAudit{}, "Payload": apiPayload{}, "EventList": apiEventList{}, "Event": apiEvent{}, "State": apiState{},
		"EventWhole": apiEventWhole{}, "Timeline": apiTimeline{}, "TimelineEntry": apiTimelineEntry{}, "Sent": apiSent{}, "Reason": apiReason{}, "Edit": apiEdit{}, "BulkRequest": apiBulkRequest{}, "BulkResult": apiBulkResult{}, "Topic": apiTopic{}, "Handler": apiHandler{},
		"Overview": apiOverview{}, "Notice": apiNotice{}, "Unresolved": apiUnresolved{}, "Stale": apiStale{},
		"DeliveryCount": apiDeliveryCount{}, "DeadLetters": apiDeadLetters{}, "Workers": apiWorkers{}, "Process": apiProcess{}, "Member": apiMember{}, "Waiting": apiWaiting{},
		"GroupList": apiGroupList{}, "Group": apiGroup{}, "GroupTopic": apiGroupTopic{}, "Pause": apiPauseInfo{}, "PauseRequest": apiPauseRequest{},
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(types)), slices.Collect(maps.Keys(file.Components.Schemas)))
	for name, typ := range types {
		s := file.Components.Schemas[name]
		var members, required []string
		for _, field := range reflect.VisibleFields(reflect.TypeOf(typ)) {
			tag := field.Tag.Get("json")
			if field.Anonymous || tag == "" {
				continue
			}
			member, optional := strings.CutSuffix(tag, ",omitempty")
			members = append(members, member)
			if !optional {
				required = append(required, member)
			}
			require.NotNil(t, s.Properties[member], "%s.%s", name, member)
			if want := jsonTypes(field.Type, optional); want != nil && s.Properties[member].Ref == "" && s.Properties[member].OneOf == nil {
				require.ElementsMatch(t, want, s.Properties[member].types(), "%s.%s", name, member)
			}
		}
		require.ElementsMatch(t, members, slices.Collect(maps.Keys(s.Properties)), name)
		require.ElementsMatch(t, required, s.Required, name)
		require.Equal(t, false, s.AdditionalProperties, name)
	}
}

// jsonTypes are the types in JSON of a Go type; nil for any.
func jsonTypes(t reflect.Type, optional bool) []string {
	if t == reflect.TypeFor[json.RawMessage]() {
		return nil
	}
	if t == reflect.TypeFor[time.Time]() {
		return []string{"string"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		if optional {
			return jsonTypes(t.Elem(), false)
		}
		return append(jsonTypes(t.Elem(), false), "null")
	case reflect.String:
		return []string{"string"}
	case reflect.Bool:
		return []string{"boolean"}
	case reflect.Float64:
		return []string{"number"}
	case reflect.Slice:
		return []string{"array"}
	case reflect.Map, reflect.Struct:
		return []string{"object"}
	default:
		return []string{"integer"}
	}
}

// Each answer matches the file, for every GET, every parameter, and errors.
func TestOpenAPIHasTheAnswers(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	h.get("/") // a sample of the backlog
	file := readOpenAPI(t)
	values := map[string]string{"kind": "delivery", "failure": "event-1", "status": "dead", "since": "2026-01-01T00:00:00Z", "until": "2126-01-01T00:00", "outbox_id": "4099003", "after": "event-90", "before": "4200000",
		"limit": "3", "span": "1h", "open_seconds": "1"}
	require.Error(t, file.check("", &schema{Ref: "#/components/schemas/Count"}, map[string]any{"relay": 1.0}), "the check checks")
	asked := 0
	for path, operations := range file.Paths {
		op, ok := operations["get"]
		if !ok {
			continue
		}
		at := "/api" + strings.NewReplacer("/events/{id}", "/events/4099001", "{id}", fmt.Sprintf("event-%d", seed.Dead), "{relay}", "default", "{group}", "stats").Replace(path)
		ask := func(query string) {
			w := h.send("reader", http.MethodGet, at+query, "", "")
			require.Equal(t, http.StatusOK, w.Code, "%s%s: %s", at, query, w.Body)
			var v any
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &v))
			require.NoError(t, file.check(at+query, op.Responses["200"].Content["application/json"].Schema, v))
			asked++
		}
		ask("")
		for _, p := range op.Parameters {
			if value, ok := values[p.Name]; p.In == "query" && ok {
				ask("?" + p.Name + "=" + value)
			} else if p.In == "query" {
				ask("?" + p.Name + "=x")
			}
		}
		if len(op.Parameters) > 0 && !strings.Contains(path, "{id}") {
			require.Equal(t, http.StatusBadRequest, h.send("reader", http.MethodGet, at+"?unheard=of", "", "").Code, at)
		}
	}
	require.GreaterOrEqual(t, asked, 50)
	for _, path := range []string{"/api/failed/event-99999", "/api/nowhere", "/api/failed?status=gone"} {
		var v any
		require.NoError(t, json.Unmarshal(h.send("reader", http.MethodGet, path, "", "").Body.Bytes(), &v))
		require.NoError(t, file.check(path, &schema{Ref: "#/components/schemas/Error"}, v))
	}
}

// Lists of the API go on where they ended.
func TestAPIPaging(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	for _, path := range []string{"/api/failed?after=", "/api/audit?before=", "/api/events?before="} {
		var ids []string
		for next := ""; next != "null"; {
			answer := h.get(path + next + "&limit=37")
			ids = append(ids, regexp.MustCompile(`\{"(?:id|outbox_id)":"?((?:event-)?\d+)`).FindAllString(answer, -1)...)
			next = regexp.MustCompile(`"next":"?([\w-]+)`).FindStringSubmatch(answer)[1]
		}
		require.Greater(t, len(ids), 15, path)
		slices.Sort(ids)
		require.Len(t, slices.Compact(slices.Clone(ids)), len(ids), path)
	}
}
