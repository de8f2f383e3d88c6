// Package simulator is the world outside of the trading system, for its demonstration and
// its tests: an exchange that is often late, sometimes wrong and now and then silent, and a
// service that pushes messages to telephones.
//
// The exchange promises what a real one has to promise so that orders can be reconciled: it
// knows each order by the identifier that the client gave it, takes an identifier once, and
// takes an order before its validUntil or never.
package simulator

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"net/http"
	"sync"
	"time"
)

// Behaviour is what the exchange does with an order, or with a question about one.
type Behaviour int

// What the exchange can do.
const (
	Accept     Behaviour = iota // takes the order and says so
	Reject                      // says that the order is wrong: 422
	Throttle                    // says that there are too many: 429, with the time to wait
	Fail                        // fails before it has taken the order: 503
	FailTaken                   // takes the order and fails then: 502
	Hang                        // does not answer
	HangTaken                   // takes the order and does not answer
	TakeLate                    // does not answer, and takes the order only after the client has stopped waiting
	behaviours                  // how many there are
)

// shares says of how many orders in a hundred each is the behaviour. The rest are accepted.
var shares = [behaviours]int{Reject: 5, Throttle: 5, Fail: 3, FailTaken: 3, Hang: 2, HangTaken: 3, TakeLate: 3}

const (
	throttled = 100 * time.Millisecond // what a client that is too fast has to wait
	lateness  = 400 * time.Millisecond // of TakeLate
)

// Simulator is an [http.Handler] with the two services. The same seed gives the same order the
// same behaviour. It is safe for concurrent use.
type Simulator struct {
	http.Handler
	seed   uint64
	choose func(identifier string) Behaviour
	late   sync.WaitGroup // orders that will be taken

	mu     sync.Mutex
	orders map[string]string // order ids by identifiers
	taken  []string          // identifiers, in the order in which the orders were taken
	asked  map[string]int    // how often each identifier was ordered
	looked map[string]int    // how often each identifier was looked for
	pushed map[string]int    // how often each event was pushed
}

// New returns a simulator. Choose says what is done with an order; nil means what the seed says.
func New(seed uint64, choose func(identifier string) Behaviour) *Simulator {
	s := &Simulator{seed: seed, choose: choose, orders: map[string]string{}, asked: map[string]int{}, looked: map[string]int{}, pushed: map[string]int{}}
	if choose == nil {
		s.choose = s.draw
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", s.order)
	mux.HandleFunc("GET /orders/{identifier}", s.find)
	mux.HandleFunc("POST /push", s.push)
	s.Handler = mux
	return s
}

// percent returns a number below 100 that depends on the seed and on what is asked.
func (s *Simulator) percent(what string) int {
	h := fnv.New64a()
	_ = binary.Write(h, binary.LittleEndian, s.seed) // a hash takes everything
	_, _ = h.Write([]byte(what))
	return int(h.Sum64() >> 32 % 100)
}

func (s *Simulator) draw(identifier string) Behaviour {
	n := s.percent(identifier)
	for b, share := range shares {
		if n -= share; n < 0 {
			return Behaviour(b)
		}
	}
	return Accept
}

type order struct {
	Identifier string    `json:"identifier"`
	ValidUntil time.Time `json:"validUntil"`
}

func (s *Simulator) order(w http.ResponseWriter, r *http.Request) {
	var o order
	if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.Identifier == "" {
		answer(w, http.StatusBadRequest, map[string]any{"error": "malformed"})
		return
	}
	s.mu.Lock()
	s.asked[o.Identifier]++
	again := s.asked[o.Identifier] > 1
	s.mu.Unlock()
	if again {
		answer(w, http.StatusConflict, map[string]any{"error": "identifier already used"})
		return
	}
	switch s.choose(o.Identifier) {
	case Reject:
		answer(w, http.StatusUnprocessableEntity, map[string]any{"error": "insufficient funds"})
	case Throttle:
		answer(w, http.StatusTooManyRequests, map[string]any{"error": "too many requests", "retryAfterMs": throttled.Milliseconds()})
	case Fail:
		answer(w, http.StatusServiceUnavailable, map[string]any{"error": "unavailable"})
	case FailTaken:
		s.take(o)
		answer(w, http.StatusBadGateway, map[string]any{"error": "bad gateway"})
	case Hang:
		<-r.Context().Done()
	case HangTaken:
		s.take(o)
		<-r.Context().Done()
	case TakeLate:
		s.late.Add(1)
		time.AfterFunc(lateness, func() { defer s.late.Done(); s.take(o) })
		<-r.Context().Done()
	default:
		if id := s.take(o); id != "" {
			answer(w, http.StatusCreated, map[string]any{"orderId": id})
			return
		}
		answer(w, http.StatusUnprocessableEntity, map[string]any{"error": "no longer valid"})
	}
}

// take takes an order and returns its id, or "" if the order is no longer valid.
func (s *Simulator) take(o order) (id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Now().After(o.ValidUntil) {
		return ""
	}
	s.taken = append(s.taken, o.Identifier)
	s.orders[o.Identifier] = fmt.Sprintf("order-%d", len(s.taken))
	return s.orders[o.Identifier]
}

// find says whether there is an order. One question in ten is not answered well.
func (s *Simulator) find(w http.ResponseWriter, r *http.Request) {
	identifier := r.PathValue("identifier")
	s.mu.Lock()
	s.looked[identifier]++
	question := fmt.Sprint(identifier, " ", s.looked[identifier])
	id := s.orders[identifier]
	s.mu.Unlock()
	switch {
	case s.percent(question) < 10:
		answer(w, http.StatusBadGateway, map[string]any{"error": "bad gateway"})
	case id == "":
		answer(w, http.StatusNotFound, map[string]any{"error": "no such order"})
	default:
		answer(w, http.StatusOK, map[string]any{"orderId": id})
	}
}

func (s *Simulator) push(w http.ResponseWriter, r *http.Request) {
	var message struct {
		EventID string `json:"eventId"`
	}
	if err := json.NewDecoder(r.Body).Decode(&message); err != nil {
		answer(w, http.StatusBadRequest, map[string]any{"error": "malformed"})
		return
	}
	s.mu.Lock()
	s.pushed[message.EventID]++
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

// answer writes JSON. Who no longer listens misses it, as in life.
func answer(w http.ResponseWriter, status int, body map[string]any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

// Orders returns the identifiers of all orders that were taken, in that order, when none will
// be taken any more of those that were asked for.
func (s *Simulator) Orders() []string {
	s.late.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string{}, s.taken...)
}

// Asked returns how many orders were asked for, and how many identifiers more than once.
func (s *Simulator) Asked() (orders, again int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return count(s.asked)
}

// Pushed returns the events that were pushed, and how many of them more than once.
func (s *Simulator) Pushed() (events []string, again int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for event := range s.pushed {
		events = append(events, event)
	}
	_, again = count(s.pushed)
	return events, again
}

func count(times map[string]int) (all, again int) {
	for _, n := range times {
		all += n
		if n > 1 {
			again++
		}
	}
	return all, again
}
