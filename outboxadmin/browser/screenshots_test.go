package browser

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

var screenshots = flag.String("screenshots", "", "folder to write pictures of all pages into")

// views are all pages, with something on them.
var views = []struct{ name, path string }{
	{"overview", ""},
	{"failed", "failed"},
	{"failed-filtered", "failed?status=dead&since=2026-01-01T00:00"},
	{"event-dead", fmt.Sprintf("failed/%d", seed.Dead)},
	{"event-waiting", "failed/5"},
	{"bulk-retry", "failed/retry?status=dead"},
	{"bulk-resolve", "failed/resolve?class=message_too_large"},
	{"events", "events"},
	{"aggregate", "events?aggregate_type=Order&aggregate_id=" + seed.Order},
	{"event", "events/4099001"},
	{"audit", "audit"},
	{"empty", "failed?type=nobody.ever.recorded.v1"},
	{"not-found", "failed/999999"},
}

var looks = []struct {
	name, scheme  string
	width, height int64
	scale         float64
}{
	{"light", "light", 1280, 800, 1},
	{"dark", "dark", 1280, 800, 1},
	{"phone", "light", 360, 740, 2},
	{"phone-dark", "dark", 360, 740, 2},
}

// look makes a tab have a width and a colour scheme.
func look(t *testing.T, tab context.Context, scheme string, width, height int64, scale float64) {
	t.Helper()
	do(t, tab, chromedp.EmulateViewport(width, height, chromedp.EmulateScale(scale)))
	_, err := chromedp.Call(tab, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	require.NoError(t, err)
}

// Pictures of each page in each look, worth looking at. They are kept where -screenshots
// says.
func TestScreenshots(t *testing.T) {
	if *screenshots == "" {
		t.Skip("without -screenshots: make screenshots")
	}
	require.NoError(t, os.MkdirAll(*screenshots, 0o750))
	h := newHouse(t, operator)
	warmUp(t, h)
	for _, l := range looks {
		for _, v := range views {
			t.Run(v.name+"-"+l.name, func(t *testing.T) {
				query[int](t, h, `WITH led AS (UPDATE {s}.outbox_lease SET expires_at = now() + interval '24 s' RETURNING name) SELECT count(*) FROM led`)
				tab := newTab(t)
				look(t, tab, l.scheme, l.width, l.height, l.scale)
				do(t, tab, chromedp.Navigate(h.url+v.path), chromedp.WaitReady(chromedp.CSS("#main")))
				picture, err := chromedp.Run(tab, chromedp.FullScreenshot(100))
				require.NoError(t, err)
				require.NoError(t, os.WriteFile(filepath.Join(*screenshots, v.name+"-"+l.name+".png"), picture, 0o600))
			})
		}
	}
}

// warmUp looks at the overview for some seconds, so that its plot of the backlog has
// something to show.
func warmUp(t *testing.T, h *house) {
	t.Helper()
	for n := range 5 {
		if n > 0 {
			time.Sleep(2100 * time.Millisecond)
		}
		response, err := http.Get(h.url)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}
}
