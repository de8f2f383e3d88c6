package main

import (
	"context"
	"errors"
	"math"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
)

func TestRetries(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		err  error
		want int
	}{
		"data refused":       {&pgconn.PgError{Code: "22003"}, 3},
		"constraint":         {&pgconn.PgError{Code: "23514"}, 3},
		"panic":              {&outbox.PanicError{Value: "oh"}, 3},
		"shutdown":           {&pgconn.PgError{Code: "57P01"}, math.MaxInt},
		"connection refused": {&pgconn.ConnectError{}, math.MaxInt},
		"Redis":              {errors.New("LOADING"), math.MaxInt},
		"too slow":           {context.DeadlineExceeded, math.MaxInt},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tt.want, retries(tt.err)) })
	}
}

// Topics are shared. What others send there is passed over, also where it looks like
// an event of ours.
func TestEventsOfOthersArePassedOver(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	deliver := a.statistics(t)
	ours := a.newRecord(t, productViewed, ProductViewedEventV1{ProductID: 3, happened: noon})
	other := *a
	other.source = "other"
	theirs := other.newRecord(t, productViewed, ProductViewedEventV1{ProductID: 3, happened: noon})
	deliver(theirs, ours, theirs)
	a.requireStatistic(t, 3, 0, 0, 1)
}
