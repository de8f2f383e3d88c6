package browser

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/stretchr/testify/require"
)

// The header of one page among several leads to the others, on a phone too, and without JavaScript.
func TestPlaces(t *testing.T) {
	h := newAdminFixture(t, operator)
	mux, names := http.NewServeMux(), []string{"shop", "bank-of-a-long-name-in-the-eu-west"}
	for _, name := range names {
		page, err := outboxadmin.New(h.db, outboxadmin.Config{Schema: h.schema, Name: name, Names: names,
			Authorize: func(*http.Request) (outboxadmin.Access, error) { return operator, nil }})
		require.NoError(t, err)
		mux.Handle("/outbox/"+name+"/", http.StripPrefix("/outbox/"+name, page))
	}
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	for _, l := range looks {
		tab := newTab(t)
		look(t, tab, l.scheme, l.width, l.height, 1)
		do(t, tab, chromedp.Navigate(server.URL+"/outbox/"+names[1]+"/failed/event-1"), chromedp.WaitReady(chromedp.CSS("#main")))
		require.Contains(t, js[string](t, tab, `document.title`), names[1])
		do(t, tab, chromedp.Click(chromedp.CSS(".places summary")))
		require.Empty(t, js[[]string](t, tab, tooWide), l.name)
		require.Empty(t, js[[]string](t, tab, faint), l.name)
		if *screenshots != "" {
			picture, err := chromedp.Run(tab, chromedp.CaptureScreenshot())
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(*screenshots, "places-"+l.name+".png"), picture, 0o600))
		}
		_, err := chromedp.RunResponse(tab, chromedp.Click("//ul[@aria-label='Databases']//a[text()='shop']"))
		require.NoError(t, err)
		require.Equal(t, "/outbox/shop/", js[string](t, tab, `location.pathname`), l.name)
	}
}
