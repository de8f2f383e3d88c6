package command

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRun(t *testing.T) {
	failed := errors.New("no disk")
	for _, c := range []struct {
		name   string
		args   []string
		code   int
		stdout string
		stderr string
	}{
		{"done", []string{"-n", "1"}, ExitDone, "", ""},
		{"fails", []string{"-n", "2"}, ExitFailed, "", "bench: no disk\n"},
		{"help", []string{"-h"}, ExitDone, "Bench measures.\n\nFlags:\n  -n int\n    \tturns\n", ""},
		{"no such flag", []string{"-speed"}, ExitUsage, "", "bench: flag provided but not defined: -speed; see bench -h\n"},
		{"not a flag", []string{"drain"}, ExitUsage, "", "bench: \"drain\" is not a flag; see bench -h\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			code := Command{Name: "bench", Start: func(args []string, stdout, _ io.Writer) (func(context.Context) error, error) {
				flags := flag.NewFlagSet("bench", flag.ContinueOnError)
				n := flags.Int("n", 0, "turns")
				err := ParseFlags(flags, args, stdout, func(w io.Writer) { fmt.Fprintln(w, "Bench measures.") })
				return func(context.Context) error {
					if *n > 1 {
						return failed
					}
					return nil
				}, err
			}}.run(context.Background(), c.args, &stdout, &stderr)
			require.Equal(t, c.code, code)
			require.Equal(t, c.stdout, stdout.String())
			require.Equal(t, c.stderr, stderr.String())
		})
	}
}

func TestNumbers(t *testing.T) {
	numbers, err := Numbers("rates", "10, 20")
	require.NoError(t, err)
	require.Equal(t, []int{10, 20}, numbers)
	for _, bad := range []string{"", "0", "10,fast", "1,,2"} {
		_, err := Numbers("rates", bad)
		require.ErrorContains(t, err, "-rates: ")
	}
}

// A child has its job and the orders behind it, and ends with its input.
func TestServe(t *testing.T) {
	var stderr bytes.Buffer
	input, parent := io.Pipe()
	go fmt.Fprintln(parent, `"count" 1 2`)
	var seen []int
	code := Serve(context.Background(), "bench", input, &stderr, func(ctx context.Context, job string, orders <-chan int) error {
		require.Equal(t, "count", job)
		seen = append(seen, <-orders, <-orders)
		require.NoError(t, ctx.Err())
		require.NoError(t, parent.Close())
		<-ctx.Done()
		return errors.New("my input has ended")
	})
	require.Equal(t, ExitFailed, code)
	require.Equal(t, []int{1, 2}, seen)
	require.Equal(t, "bench: child: my input has ended\n", stderr.String())

	stderr.Reset()
	require.Equal(t, ExitUsage, Serve(context.Background(), "bench", strings.NewReader("{"), &stderr, func(context.Context, string, <-chan int) error { return nil }))
	require.Contains(t, stderr.String(), "read job")
}
