package main

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

var depositTests = []struct {
	name    string
	amount  int64
	entries []JournalEntry
	err     error
}{
	{"too small for a fee", 99, []JournalEntry{{bank, -99}, {"ann", 99}}, nil},
	{"with a fee, rounded down", 12_345, []JournalEntry{{bank, -12_345}, {"ann", 12_222}, {fees, 123}}, nil},
	{"nothing", 0, nil, errAmount},
	{"less than nothing", -1, nil, errAmount},
	{"more than anybody has", math.MaxInt64, nil, errAmount},
}

func TestDeposit(t *testing.T) {
	t.Parallel()
	for _, tt := range depositTests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Deposit("ann", tt.amount, noon)
			require.ErrorIs(t, err, tt.err)
			require.Equal(t, tt.entries, got.Entries)
		})
	}
}

// A reversal takes back every entry, and cannot be reversed itself.
func TestReversal(t *testing.T) {
	t.Parallel()
	deposit, err := Deposit("ann", 200, noon)
	require.NoError(t, err)
	deposit.ID = 7
	got, err := deposit.Reversal("a mistake", noon)
	require.NoError(t, err)
	require.Equal(t, Transaction{Account: "ann", Reverses: 7, Reason: "a mistake", At: noon, Entries: []JournalEntry{{bank, 200}, {"ann", -198}, {fees, -2}}}, got)
	require.Equal(t, Balance{0, 5}, Balance{198, 4}.After(got))
	_, err = got.Reversal("another", noon)
	require.ErrorIs(t, err, errReversed)
}

func TestEntriesMustBalance(t *testing.T) {
	t.Parallel()
	for name, entries := range map[string][]JournalEntry{
		"none": nil, "one": {{"ann", 0}}, "a cent too much": {{bank, -10}, {"ann", 11}},
	} {
		require.ErrorIs(t, Transaction{Entries: entries}.check(), errBalanced, name)
	}
}
