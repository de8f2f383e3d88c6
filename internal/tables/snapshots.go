package tables

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// SnapshotMax returns the xmax of a snapshot's text, xmin:xmax:xip,…
func SnapshotMax(snapshot string) string {
	_, rest, _ := strings.Cut(snapshot, ":")
	xmax, _, _ := strings.Cut(rest, ":")
	return xmax
}

// SnapshotMin returns the least transaction id that was in progress, or else the id of the next
// transaction.
func SnapshotMin(snapshot string) string {
	least, _, _ := strings.Cut(snapshot, ":")
	return least
}

// SnapshotInProgress returns the transactions that were in progress, in their order.
func SnapshotInProgress(snapshot string) []string {
	list := snapshot[strings.LastIndexByte(snapshot, ':')+1:]
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

// maxAdded is how many transactions [SnapshotAdds] looks at.
const maxAdded = 100

// SnapshotAdds reports whether a snapshot shows that a transaction has ended since an earlier
// snapshot. It ignores own, and transactions that began at or after the xmax begun, unless begun is
// empty. It may return true for snapshots whose transaction ids are far from each other, and for
// those it cannot read.
func SnapshotAdds(before, after, own, begun string) bool {
	if before == after {
		return false
	}
	from, err := strconv.ParseUint(SnapshotMax(before), 10, 64)
	if err != nil {
		return true
	}
	to, err := strconv.ParseUint(SnapshotMax(after), 10, 64)
	if err != nil || to < from {
		return true
	}
	bound := uint64(math.MaxUint64)
	if begun != "" {
		if bound, err = strconv.ParseUint(begun, 10, 64); err != nil {
			return true
		}
		to = min(to, bound)
	}
	if to > from && to-from > maxAdded {
		return true
	}
	running := SnapshotInProgress(after)
	ended := func(xid string) bool { return xid != own && !slices.Contains(running, xid) }
	for _, xid := range SnapshotInProgress(before) {
		n, err := strconv.ParseUint(xid, 10, 64)
		if err != nil || n < bound && ended(xid) {
			return true
		}
	}
	for xid := from; xid < to; xid++ {
		if ended(strconv.FormatUint(xid, 10)) {
			return true
		}
	}
	return false
}
