package main

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/stretchr/testify/require"
)

func TestPoisonsAreOneAmongSoMany(t *testing.T) {
	l := laps.New(100, 10, 300*time.Millisecond, 2*time.Second) // 3 and 20 transactions
	poisons := poisonsOf(l, 10)
	require.Equal(t, map[int]bool{0: true, 8: true, 18: true}, poisons)
	for n := range poisons {
		require.Contains(t, l.Aside, n)
	}
	require.Equal(t, 23-len(l.Aside), l.Missing)
}
