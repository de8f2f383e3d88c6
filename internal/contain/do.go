package contain

import "errors"

// Do calls f in a goroutine of its own, waits for it and returns its error: [ErrGoexit] if f
// has ended that goroutine, which would be the caller's otherwise. A panic of f becomes one of
// the caller, with a [Crash].
func Do(f func() error) error {
	var crash *Crash
	err, done := ErrGoexit, make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if v := recover(); v != nil {
				c := CrashOf(v)
				crash = &c
			}
		}()
		err = f()
	}()
	<-done
	if crash != nil {
		panic(*crash)
	}
	return err
}

var errNone = errors.New("no error has this one in it")

// CallMethods calls the methods of an error of the host, unless it is nil, for a caller that
// recovers from their panics. Those of a nil pointer mostly panic, and it is no nil error.
func CallMethods(err error) {
	if err != nil {
		_, _ = err.Error(), errors.Is(err, errNone)
	}
}
