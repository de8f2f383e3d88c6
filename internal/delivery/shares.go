package delivery

import (
	"context"
	"slices"
	"time"
)

// Actions share the lanes of their kind. So that an action whose calls take long holds up no other, it gets a share of
// the lanes only.

// slowAction is how long a delivery of a slow action takes, on average.
const slowAction = time.Second

// IsSlow reports whether an action is slow and shares the lanes with others.
func (k *LaneKind) IsSlow(action string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.isSlow(action)
}

func (k *LaneKind) isSlow(action string) bool { return k.actions > 1 && k.pace[action] > slowAction }

// takeTurn reports whether actions that are not slow have the only lane next. Several lanes need no turns.
func (k *LaneKind) takeTurn(quick, slow []Claimable) bool {
	if k.usual > 1 || len(quick) == 0 || len(slow) == 0 {
		return false
	}
	k.quickTurn = !k.quickTurn
	return k.quickTurn
}

// shareOf returns how many more lanes may get a delivery of a slow action. If others have due deliveries, an action has
// at most half of the lanes. All slow actions together have at most all lanes but one.
func (k *LaneKind) shareOf(action string, othersDue bool) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.share(action, othersDue)
}

// share is shareOf. The caller holds mu.
func (k *LaneKind) share(action string, othersDue bool) int {
	ofAll := max(k.usual-1, 1)
	most := ofAll
	if othersDue {
		most = max(k.usual/2, 1)
	}
	for l, actions := range k.with {
		if k.replaced[l] {
			continue
		}
		if slices.Contains(actions, action) {
			most--
		}
		if slices.ContainsFunc(actions, k.isSlow) {
			ofAll--
		}
	}
	return min(most, ofAll)
}

// noteAtShare notes that a slow action has its share of the lanes and may have more due rows. HasShareAgain says when
// they can be claimed.
func (k *LaneKind) noteAtShare(action string, othersDue bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.atShare[action] = othersDue
}

// AwaitsShare reports whether a new row of a slow action cannot be claimed before one of the action's lanes ends. Then
// its rows are claimed at that time.
func (k *LaneKind) AwaitsShare(action string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	const othersDue = false
	awaits := k.isSlow(action) && k.share(action, othersDue) <= 0
	if awaits {
		k.atShare[action] = othersDue
	}
	return awaits
}

// takeAtShare removes the notes of noteAtShare, and returns those of the pairs that had one.
func (k *LaneKind) takeAtShare(pairs []Claimable) (noted []Claimable) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, p := range pairs {
		if _, ok := k.atShare[p.Action]; ok {
			noted = append(noted, p)
		}
	}
	clear(k.atShare)
	return noted
}

// hasShareAgain reports whether a lane of a slow action that had its share has ended or was replaced.
func (k *LaneKind) hasShareAgain() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	for action, othersDue := range k.atShare {
		if k.share(action, othersDue) > 0 {
			return true
		}
	}
	return false
}

// claimDue claims due rows for a kind of lanes. It reports whether there may be more, at once or when a lane has room.
// Slow actions come first, because the others take all lanes as long as they have a backlog. Each slow action has its
// share of the lanes, and more if the others have no due rows.
func (d *Dispatcher) claimDue(ctx context.Context, k *LaneKind) (more, later bool, err error) {
	var quick, slow []Claimable
	for _, p := range d.claimablePairs(k) {
		if k.IsSlow(p.Action) {
			slow = append(slow, p)
		} else {
			quick = append(quick, p)
		}
	}
	k.takeAtShare(nil)
	slowLater := false
	rest := slow
	if !k.takeTurn(quick, slow) {
		if slowLater, err = d.claimSlow(ctx, k, slow, true); err != nil {
			return false, false, err
		}
		rest = nil
	}
	rows, limit := 0, k.Room()*k.Batch()
	if limit > 0 {
		rows, err = d.claim(ctx, k, claimRequest{pairs: quick, limit: limit, follow: k.Batch(), budget: d.Claimed.Budget()})
		if err != nil {
			return false, false, err
		}
	}
	later = len(quick) > 0 && rows >= limit
	more = later && k.Room() > 0
	if rest == nil && rows == 0 { // the slow actions get more than half of the lanes
		rest = k.takeAtShare(slow)
	}
	restLater, err := d.claimSlow(ctx, k, rest, rows > 0)
	return more, later || slowLater || restLater, err
}

// claimSlow claims due rows of slow actions up to their shares of the lanes, which are smaller if others have due rows.
// It reports whether there may be more when a lane has room. It notes which actions have their shares.
func (d *Dispatcher) claimSlow(ctx context.Context, k *LaneKind, slow []Claimable, othersDue bool) (later bool, err error) {
	for _, p := range slow {
		share := k.shareOf(p.Action, othersDue)
		limit, rows := min(k.Room(), share), 0
		if limit > 0 {
			rows, err = d.claim(ctx, k, claimRequest{pairs: []Claimable{p}, limit: limit, follow: k.Batch(), budget: d.Claimed.Budget()})
			if err != nil {
				return false, err
			}
		}
		switch {
		case rows < limit: // no more are due
		case limit == share:
			k.noteAtShare(p.Action, othersDue)
		default:
			later = true
		}
	}
	return later, nil
}
