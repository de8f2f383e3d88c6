package processors

import "fmt"

// Rounds runs the rounds of a measurement. A round is disturbed if the host of this machine gave more than a fifth of
// what it wanted of the processors to others; it is run again, a few times. What was measured plays no part in that.
type Rounds struct {
	Again int                              // how often a disturbed round is run again
	Say   func(format string, args ...any) // how far the run is; nil to discard it

	again     int // rounds that were run again
	disturbed int // rounds that count although they were
	read      func() Time
}

const mostStolen = 0.2

// Run runs a round, and again if it was disturbed. Only what its last call has measured counts.
func (t *Rounds) Run(round func() error) error {
	read := t.read
	if read == nil {
		read = Read
	}
	for try := 1; ; try++ {
		before := read()
		if err := round(); err != nil {
			return err
		}
		stolen := read().Since(before).stolenShare()
		switch {
		case stolen <= mostStolen:
			return nil
		case try > t.Again:
			t.disturbed++
			t.say("the host gave %.0f %% of the processors to others; the round counts all the same, after %d tries", 100*stolen, try)
			return nil
		}
		t.again++
		t.say("the host gave %.0f %% of the processors to others: this round again", 100*stolen)
	}
}

func (t *Rounds) say(format string, args ...any) {
	if t.Say != nil {
		t.Say(format, args...)
	}
}

// String says how many rounds were disturbed.
func (t *Rounds) String() string {
	if t.again == 0 {
		return fmt.Sprintf("no round lost more than %.0f %% of the processors to others", 100*mostStolen)
	}
	return fmt.Sprintf("%d rounds ran again because the host gave more than %.0f %% of the processors to others; %d count all the same, after %d tries",
		t.again, 100*mostStolen, t.disturbed, t.Again+1)
}
