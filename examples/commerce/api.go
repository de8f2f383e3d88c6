package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/outboxgo/outbox"
)

// api is what customers and the payment provider call. What they send is input of strangers.
func (s *service) api() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /products/{id}", s.endpoint(http.StatusOK, s.viewProduct))
	mux.Handle("GET /products/{id}/statistic", s.endpoint(http.StatusOK, s.readStatistic))
	mux.Handle("POST /products/{id}/likes", s.endpoint(http.StatusOK, s.likeProduct))
	mux.Handle("POST /orders", s.endpoint(http.StatusCreated, s.placeOrder))
	mux.Handle("POST /orders/{id}/payment", s.endpoint(http.StatusOK, s.payOrder))
	mux.Handle("POST /orders/{id}/decline", s.endpoint(http.StatusOK, s.declineOrder))
	return mux
}

var errMalformed = errors.New("not understood")

// endpoint answers with what f returns as JSON, or with what its error means.
func (s *service) endpoint(done int, f func(*http.Request) (any, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := f(r)
		status := done
		if err != nil {
			status = statusOf(err)
			body = problem{err.Error()}
			if status == http.StatusInternalServerError && r.Context().Err() == nil { // the client is still there
				s.log.ErrorContext(r.Context(), "request failed", "request", r.Pattern, "error", err)
			}
			if status == http.StatusInternalServerError {
				body = problem{"the shop has a problem"}
			}
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(body) // the client has gone
	})
}

type problem struct {
	Error string `json:"error"`
}

func statusOf(err error) int {
	var pg *pgconn.PgError
	switch {
	case errors.Is(err, errMalformed), errors.As(err, new(*outbox.FieldError)): // an Idempotency-Key that is too long, for example
		return http.StatusBadRequest
	case errors.Is(err, outbox.ErrOtherRequest):
		return http.StatusUnprocessableEntity
	case errors.Is(err, errNotFound), errors.As(err, &pg) && pg.Code == "23503": // a product that is not there
		return http.StatusNotFound
	case errors.Is(err, errConflict), errors.Is(err, outbox.ErrInProgress):
		return http.StatusConflict
	default:
		return http.StatusInternalServerError
	}
}

type orderRequest struct {
	UserID int64       `json:"userId"`
	Items  []orderItem `json:"items"`
}

type orderItem struct {
	ProductID int64 `json:"productId"`
	Quantity  int64 `json:"quantity"`
}

type orderAnswer struct {
	OrderID int64 `json:"orderId"`
	Total   int64 `json:"totalAmount"`
}

const (
	maxItems    = 100
	maxQuantity = 1000
)

// placeOrder places an order. A client that sends the request again, because it has got no answer for example, sends
// the same Idempotency-Key, and gets the answer to the first request. Clients choose the keys, so those of two users
// have nothing to do with one another. (A shop takes the user from what has authenticated the request, and not from
// its body.)
func (s *service) placeOrder(r *http.Request) (any, error) {
	body, err := readBody(r)
	if err != nil {
		return nil, err
	}
	var asked orderRequest
	if err := decode(body, &asked); err != nil {
		return nil, err
	}
	o := Order{UserID: asked.UserID}
	for _, item := range asked.Items {
		if item.Quantity < 1 || item.Quantity > maxQuantity {
			return nil, fmt.Errorf("%w: %d pieces", errMalformed, item.Quantity)
		}
		o.Items = append(o.Items, Item{ProductID: item.ProductID, Quantity: item.Quantity})
	}
	byProduct := func(a, b Item) int { return cmp.Compare(a.ProductID, b.ProductID) }
	slices.SortFunc(o.Items, byProduct)
	unique := slices.CompactFunc(slices.Clone(o.Items), func(a, b Item) bool { return a.ProductID == b.ProductID })
	if len(o.Items) == 0 || len(o.Items) > maxItems || len(unique) < len(o.Items) {
		return nil, fmt.Errorf("%w: an order has 1 to %d items, each of another product", errMalformed, maxItems)
	}
	keys := r.Header["Idempotency-Key"]
	if len(keys) == 0 {
		return s.shop.place(r.Context(), &o)
	}
	return s.shop.placeOnce(r.Context(), outbox.InboxMessage{
		Source:  fmt.Sprintf("user %d", asked.UserID),
		ID:      keys[0],
		Action:  "ORDER_PLACED",
		Request: body,
	}, &o)
}

func (s *service) payOrder(r *http.Request) (any, error)     { return withID(r, s.shop.pay) }
func (s *service) declineOrder(r *http.Request) (any, error) { return withID(r, s.shop.decline) }

// viewProduct returns the page of a product, and counts the view. A page that is not in the cache
// is made and not put there: it might be made before the product is sold out, come to the cache
// after the deletion, and stay.
func (s *service) viewProduct(r *http.Request) (any, error) {
	product, err := parseID(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	page, err := s.pages.get(r.Context(), product)
	if err != nil || page == "" { // without Redis the shop is slower, and sells
		if page, err = s.makePage(r.Context(), product); err != nil {
			return nil, err
		}
	}
	user, err := parseID(cmp.Or(r.URL.Query().Get("user"), "0"))
	if err != nil {
		return nil, err
	}
	return map[string]string{"page": page}, s.shop.view(r.Context(), user, product)
}

func (s *service) makePage(ctx context.Context, product int64) (string, error) {
	var stock int64
	err := s.db.QueryRow(ctx, `SELECT stock FROM products WHERE id = $1`, product).Scan(&stock)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("product %d: %w", product, errNotFound)
	}
	return pageOf(product, stock), err
}

func (s *service) likeProduct(r *http.Request) (any, error) {
	var who struct {
		UserID int64 `json:"userId"`
	}
	if err := read(r, &who); err != nil {
		return nil, err
	}
	return withID(r, func(ctx context.Context, product int64) error { return s.shop.like(ctx, who.UserID, product) })
}

// statistic is a row of product_statistic.
type statistic struct {
	Likes int64 `json:"likes"`
	Sales int64 `json:"sales"`
	Views int64 `json:"views"`
}

const sqlStatistic = `SELECT like_count, sales_count, view_count FROM product_statistic WHERE product_id = $1`

func (s *service) readStatistic(r *http.Request) (any, error) {
	product, err := parseID(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	var row statistic
	err = s.db.QueryRow(r.Context(), sqlStatistic, product).Scan(&row.Likes, &row.Sales, &row.Views)
	if errors.Is(err, pgx.ErrNoRows) { // the product has no view yet
		err = nil
	}
	return row, err
}

// withID calls f with the id in the path.
func withID(r *http.Request, f func(ctx context.Context, id int64) error) (any, error) {
	id, err := parseID(r.PathValue("id"))
	if err != nil {
		return nil, err
	}
	return struct{}{}, f(r.Context(), id)
}

func parseID(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%w: %.40q is no number", errMalformed, text)
	}
	return n, nil
}

const maxBody = 64 << 10

func read(r *http.Request, into any) error {
	body, err := readBody(r)
	if err != nil {
		return err
	}
	return decode(body, into)
}

func readBody(r *http.Request) ([]byte, error) {
	body, err := io.ReadAll(http.MaxBytesReader(nil, r.Body, maxBody))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errMalformed, err)
	}
	return body, nil
}

func decode(body []byte, into any) error {
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %w", errMalformed, err)
	}
	return nil
}
