package retrynil

import (
	"errors"
	"time"

	"github.com/outboxgo/outbox"
)

func try() error             { return nil }
func next() (int, error)     { return 0, nil }
func change(err *error) bool { return *err == nil }

var global error

func constant() error {
	_ = outbox.Permanent(nil)                                        // want `Permanent\(nil\) is nil`
	_ = outbox.Unavailable(nil)                                      // want `Unavailable\(nil\) is nil`
	return outbox.RetryAfter(outbox.Unavailable((nil)), time.Second) // want `Unavailable\(nil\) is nil`
}

func inBranch() error {
	if err := try(); err == nil {
		return outbox.RetryAfter(err, time.Second) // want `err is nil here`
	}
	err := try()
	if nil != err {
		return err
	} else if len("") == 0 {
		return outbox.Permanent(err) // want `err is nil here`
	}
	switch {
	case err == nil && len("") == 0:
		return outbox.Permanent(err) // want `err is nil here`
	}
	return nil
}

func afterReturn(more bool) error {
	err := try()
	if err != nil || more {
		return outbox.RetryAfter(err, time.Second)
	}
	if more {
		return outbox.RetryAfter(err, time.Second) // want `err is nil here`
	}
	for range 3 {
		_, err := next()
		if err != nil {
			continue
		}
		return outbox.Permanent(err) // want `err is nil here`
	}
	return outbox.Permanent(err) // want `err is nil here`
}

func good(more bool) error {
	err := try()
	if err != nil {
		return outbox.RetryAfter(err, time.Second)
	}
	_, err = next()
	if more {
		return outbox.RetryAfter(err, time.Second) // assigned since
	}
	if err == nil || more {
		return outbox.RetryAfter(err, time.Second) // or not
	}
	if err == nil {
		err = errors.New("too early")
		return outbox.RetryAfter(err, time.Second)
	}
	if err == nil && change(&err) {
		return outbox.RetryAfter(err, time.Second)
	}
	if err == nil {
		err := errors.New("another one")
		return outbox.Permanent(err)
	}
	return outbox.RetryAfter(errors.New("too early"), time.Second)
}

func loops() error {
	err := try()
	if err != nil {
		return err
	}
	for {
		if global != nil {
			return outbox.Permanent(err) // of the round before
		}
		_, err = next()
	}
}

func shared() error {
	if global == nil {
		return outbox.Permanent(global) // which others may assign
	}
	return nil
}

func later() func() error {
	err := try()
	if err == nil {
		return func() error { return outbox.Permanent(err) } // runs later
	}
	return nil
}
