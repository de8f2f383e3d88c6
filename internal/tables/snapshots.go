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

// IsSnapshot reports whether PostgreSQL reads a text as a snapshot: its transactions are in their order.
func IsSnapshot(text string) bool {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return false
	}
	running, last := SnapshotInProgress(text), uint64(1)
	for i, id := range slices.Concat(parts[:1], running, parts[1:2]) {
		n, err := strconv.ParseUint(id, 10, 63)
		if err != nil || n < last || n == last && i > len(running) && i > 1 {
			return false
		}
		last = n
	}
	return true
}

// WrittenBy is the transaction that has written a row. The row has the lower half of its id. The other half is that of
// the statement's own snapshot, or one less; for a row that the statement's own transaction has written it is wrong.
const WrittenBy = `((SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint) - (((SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::bigint) - xmin::text::bigint) & 4294967295))::text::xid8`

// Unchanged selects rows that the snapshot $16 shows as they are, or all rows if it is empty. It is for tables that are
// written without savepoints, because a snapshot does not have the ids of these.
const Unchanged = `coalesce(pg_catalog.pg_visible_in_snapshot(
           ` + WrittenBy + `, (SELECT nullif($16::text, '')::pg_snapshot)), true)`

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
