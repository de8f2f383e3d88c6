package handling

import (
	"log/slog"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// No hook is forgotten.
func TestEveryHookIsContained(t *testing.T) {
	t.Parallel()
	log := new(testenv.Buffer)
	var hooks Hooks
	all := reflect.ValueOf(&hooks).Elem()
	for i := range all.NumField() {
		all.Field(i).Set(reflect.MakeFunc(all.Field(i).Type(), func([]reflect.Value) []reflect.Value { panic("no such metric") }))
	}
	hooks = hooks.guarded(slog.New(slog.NewTextHandler(log, nil)))
	for i := range all.NumField() {
		name, hook := all.Type().Field(i).Name, all.Field(i)
		args := make([]reflect.Value, hook.Type().NumIn())
		for n := range args {
			args[n] = reflect.Zero(hook.Type().In(n))
		}
		hook.Call(args)
		require.Contains(t, log.String(), `level=ERROR msg="outbox: Hooks.`+name+` has panicked" error="panic: no such metric"`)
	}
}
