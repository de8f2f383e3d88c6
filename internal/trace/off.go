//go:build !outbox_trace

package trace

// On says that steps are written.
const On = false

// Step is a step that has begun.
type Step struct{}

// Begin begins a step. Its arguments are names and values.
func Begin(string, ...any) Step { return Step{} }

// End ends the step. Its arguments are names and values.
func (Step) End(...any) {}
