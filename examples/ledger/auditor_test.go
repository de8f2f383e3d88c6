package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// at returns a posting of ann's account that adds 10 to a balance of 10 for each one before it.
func at(sequence int64) Posting {
	return Posting{AccountID: "ann", Sequence: sequence, Change: 10, Balance: 10 * sequence, Entries: []JournalEntry{{bank, -10}, {"ann", 10}}}
}

var auditorTests = []struct {
	name      string
	sequences []int64
	gaps      int
	want      auditor
}{
	{"nothing", nil, 0, auditor{}},
	{"in order", []int64{1, 2, 3}, 0, auditor{rows: 3}},
	{"the first is missing", []int64{2, 3}, 1, auditor{rows: 2}},
	{"two are missing", []int64{1, 4, 5}, 2, auditor{rows: 3}},
	{"one comes late", []int64{1, 3, 2, 4}, 0, auditor{rows: 4, late: 1}},
	{"one comes twice", []int64{1, 2, 2, 3}, 0, auditor{rows: 4, repeats: 1}},
	{"all come twice", []int64{1, 2, 1, 2, 3}, 0, auditor{rows: 5, repeats: 2}},
	{"late and twice", []int64{1, 3, 2, 2}, 0, auditor{rows: 4, late: 1, repeats: 1}},
	{"before the first", []int64{0, 1}, 0, auditor{rows: 2, repeats: 1}},
}

func TestAuditor(t *testing.T) {
	t.Parallel()
	for _, tt := range auditorTests {
		t.Run(tt.name, func(t *testing.T) {
			var a auditor
			for _, sequence := range tt.sequences {
				a.next(at(sequence))
			}
			require.Equal(t, tt.gaps, a.gaps())
			a.accounts = nil
			require.Equal(t, tt.want, a)
		})
	}
}

func TestAuditorChecksAmounts(t *testing.T) {
	t.Parallel()
	var a auditor
	wrong := at(2)
	wrong.Balance = 21
	unbalanced := at(1)
	unbalanced.AccountID, unbalanced.Entries = "bob", []JournalEntry{{bank, -10}, {"bob", 11}}
	for _, p := range []Posting{at(1), wrong, unbalanced} {
		a.next(p)
	}
	require.Equal(t, 1, a.wrongBalance)
	require.Equal(t, 1, a.unbalanced)
	require.Zero(t, a.gaps()+a.repeats+a.late)
}
