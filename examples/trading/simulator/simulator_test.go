package simulator_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/examples/trading/simulator"
	"github.com/stretchr/testify/require"
)

// order returns the status of an order.
func order(s *simulator.Simulator, identifier string, validUntil time.Time) int {
	w := httptest.NewRecorder()
	body := fmt.Sprintf(`{"identifier": %q, "validUntil": %q}`, identifier, validUntil.Format(time.RFC3339Nano))
	s.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/orders", strings.NewReader(body)))
	return w.Code
}

func accept(string) simulator.Behaviour { return simulator.Accept }

func TestIdentifierIsTakenOnce(t *testing.T) {
	t.Parallel()
	s := simulator.New(1, accept)
	require.Equal(t, http.StatusCreated, order(s, "a", time.Now().Add(time.Minute)))
	require.Equal(t, http.StatusConflict, order(s, "a", time.Now().Add(time.Minute)))
	require.Equal(t, []string{"a"}, s.Orders())
	asked, again := s.Asked()
	require.Equal(t, []int{2, 1}, []int{asked, again})
}

func TestOrderThatIsNoLongerValid(t *testing.T) {
	t.Parallel()
	s := simulator.New(1, accept)
	require.Equal(t, http.StatusUnprocessableEntity, order(s, "a", time.Now().Add(-time.Second)))
	require.Empty(t, s.Orders())
}
