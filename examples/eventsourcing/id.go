package main

import (
	"fmt"
	"time"

	"github.com/google/uuid"
)

// newID returns the id of a new order, a UUIDv7: 48 bits are the milliseconds since 1970, and
// 74 bits follow that no other machine draws too. So ids sort by time as text, as bytes and in
// an index, and say when they were made, which is what a Snowflake id is taken for.
func newID() (uuid.UUID, error) { return uuid.NewV7() }

// createdAt returns when newID returned an id, to the millisecond.
func createdAt(id uuid.UUID) (time.Time, error) {
	if id.Version() != 7 {
		return time.Time{}, fmt.Errorf("%s has no time: it is of version %d", id, id.Version())
	}
	return time.Unix(id.Time().UnixTime()).UTC().Truncate(time.Millisecond), nil
}

// numberOf is what a customer reads on the bill.
func numberOf(id uuid.UUID) string { return fmt.Sprintf("ORD-%X-%X", id[:6], id[12:]) }
