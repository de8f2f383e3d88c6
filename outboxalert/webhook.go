package outboxalert

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// webhook is an address that takes alerts by HTTP.
type webhook struct {
	url    string
	client *http.Client
	secrets
}

// newWebhook returns a webhook. The content of its address is secret, and so are other texts. A nil
// client means http.DefaultClient; redirects are not followed.
func newWebhook(address string, client *http.Client, secret ...string) (*webhook, error) {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Hostname() == "" || u.Scheme != "https" && u.Scheme != "http":
		return nil, errors.New("outboxalert: webhook is no https URL")
	case u.Scheme == "http" && !isLoopback(u.Hostname()):
		return nil, errors.New("outboxalert: webhook is an http URL, which shows itself and the alerts to the network; want https")
	}
	own := *cmp.Or(client, http.DefaultClient)
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	password, _ := u.User.Password()
	secret = append(secret, address, u.String(), u.Redacted(), u.RequestURI(), u.EscapedPath(), u.Path, u.RawQuery, password)
	return &webhook{url: address, client: &own, secrets: newSecrets(secret...)}, nil
}

// post sends a message as JSON. An answer other than 2xx is an error.
func (w *webhook) post(ctx context.Context, message any) error {
	body, err := json.Marshal(message)
	if err != nil {
		return fmt.Errorf("outboxalert: encode alert: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, w.url, bytes.NewReader(body))
	if err != nil {
		return errors.New("outboxalert: webhook is no URL")
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := w.client.Do(request)
	if err != nil {
		var failed *url.Error
		if errors.As(err, &failed) {
			err = failed.Err // without the URL
		}
		return fmt.Errorf("outboxalert: post alert: %w", w.maskErr(err))
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode/100 != 2 {
		answer, _ := io.ReadAll(io.LimitReader(response.Body, 4<<10)) // as far as it goes
		return fmt.Errorf("outboxalert: post alert: %s", w.mask(response.Status+": "+string(bytes.TrimSpace(answer))))
	}
	_, err = io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20)) // so that the connection is used again
	return err
}
