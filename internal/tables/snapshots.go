package tables

import (
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

// SnapshotAdds reports whether the text of a snapshot shows that a transaction has ended since an earlier one, other than own, of those
// that had begun at an xmax, or at any time if that is empty. It may say so of any two that are far apart, or cannot be read.
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
	if begun != "" {
		bound, err := strconv.ParseUint(begun, 10, 64)
		if err != nil {
			return true
		}
		to = min(to, bound)
	}
	if to > from && to-from > maxAdded {
		return true
	}
	running := SnapshotInProgress(after)
	ended := func(xid string) bool { return xid != own && !slices.Contains(running, xid) }
	if slices.ContainsFunc(SnapshotInProgress(before), ended) {
		return true
	}
	for xid := from; xid < to; xid++ {
		if ended(strconv.FormatUint(xid, 10)) {
			return true
		}
	}
	return false
}
