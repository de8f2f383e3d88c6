package wait

import (
	"context"
	"time"
)

// Grace returns a context that ends by as much as grace later than ctx, or with cancel.
func Grace(ctx context.Context, grace time.Duration) (later context.Context, cancel context.CancelFunc) {
	later, end := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		Sleep(later, grace)
		end()
	})
	return later, func() {
		stop()
		end()
	}
}
