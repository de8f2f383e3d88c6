// Package trace writes what the engines do, so that TLC can walk it: `make spec-traces`, spec/LeaseTrace.tla.
//
// It exists in a build with the tag outbox_trace. In every other build [On] is false, and each call stands in an if
// that asks for it, so the compiler leaves it out.
//
// A [Step] is one statement, one request or one decision. It is written twice: before it begins and after it has
// ended. So a step of a process that was killed meanwhile is known, and may have been done or not.
package trace
