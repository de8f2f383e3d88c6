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
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

var screenshots = flag.String("screenshots", "", "folder to write pictures of all pages into")

type view struct {
	name, path string
	outage     bool
}

// views are all pages, with something on them.
var views = []view{
	{"overview", "", false},
	{"overview-trouble", "?span=1h", true},
	{"failed", "failed", false},
	{"failed-filtered", "failed?status=dead&since=2026-01-01T00:00", false},
	{"event-dead", fmt.Sprintf("failed/event-%d", seed.Dead), false},
	{"event-waiting", "failed/event-4", false},
	{"delivery-dead", "failed/delivery-1", false},
	{"delivery-busy", "failed/delivery-9", false},
	{"consumers", "consumers", false},
	{"pause", "consumers/pause?group=mail&topic=order-events", false},
	{"bulk-selected", "failed/selected/retry?status=dead&id=event-1&id=event-2&id=delivery-1", false},
	{"bulk-edit", "failed/selected/edit?id=event-1&id=delivery-1", false},
	{"delayed", "delayed", false},
	{"bulk-retry", "failed/retry?status=dead", false},
	{"bulk-resolve", "failed/resolve?class=message_too_large", false},
	{"events", "events", false},
	{"aggregate", "events?aggregate_type=Order&aggregate_id=" + seed.Order, false},
	{"event", "events/4099001", false},
	{"audit", "audit", false},
	{"empty", "failed?type=nobody.ever.recorded.v1", false},
	{"not-found", "failed/event-999999", false},
}

var looks = []struct {
	name, scheme  string
	width, height int64
	scale         float64
}{
	{"light", "light", 1280, 800, 1},
	{"dark", "dark", 1280, 800, 1},
	{"phone", "light", 360, 740, 2},
	{"phone-dark", "dark", 390, 844, 2},
}

// pictures are those of the documents, in docs/images.
var pictures = []struct {
	name, path, scheme string
	width, height      int64
	click              string // what to do before
}{
	{"overview", "", "light", 1280, 1060, ""},
	{"failures", "failed?status=dead", "light", 1280, 900, `document.querySelectorAll("tbody input").forEach((box, n) => { if (n > 0 && n < 4) box.click() })`},
	{"consumers", "consumers", "dark", 1280, 900, ""},
	{"phone", "consumers", "light", 390, 844, ""},
	{"phone-failures", "failed?status=dead", "dark", 390, 844, `document.querySelectorAll("tbody input")[1].click(); scrollTo(0, 500)`},
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
	h := newAdminFixture(t, operator)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	require.NoError(t, seed.Work(t.Context(), h.db, h.schema))
	tx, err := h.db.Begin(t.Context()) // is open for more than 10 s when the pictures are taken
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE `+pgx.Identifier{h.schema, "outbox"}.Sanitize()+` IN ROW EXCLUSIVE MODE`)
	require.NoError(t, err)
	warmUp(t, h)
	for _, p := range pictures {
		t.Run("docs-"+p.name, func(t *testing.T) {
			h.prepare(t, views[0])
			tab := newTab(t)
			look(t, tab, p.scheme, p.width, p.height, 0.75)
			do(t, tab, chromedp.Navigate(h.url+p.path), chromedp.WaitReady(chromedp.CSS("#main")))
			if p.click != "" {
				do(t, tab, chromedp.Evaluate[chromedp.Void](p.click))
			}
			picture, err := chromedp.Run(tab, chromedp.CaptureScreenshot())
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(*screenshots, "docs-"+p.name+".png"), picture, 0o600))
		})
	}
	for _, l := range looks {
		for _, v := range views {
			t.Run(v.name+"-"+l.name, func(t *testing.T) {
				h.prepare(t, v)
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
func warmUp(t *testing.T, h *adminFixture) {
	t.Helper()
	for n := range 6 {
		if n > 0 {
			time.Sleep(2100 * time.Millisecond)
		}
		response, err := http.Get(h.url) // samples groups, too
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
	}
}
