package main

import (
	"strconv"
	"time"

	"github.com/outboxgo/outbox"
)

// What happens in the shop. These are plain structs: that they become CloudEvents
// in Kafka is said once, in registry.

// OrderCreatedEventV1 says that a customer placed an order.
type OrderCreatedEventV1 struct {
	OrderID     int64 `json:"orderId"`
	UserID      int64 `json:"userId"`
	TotalAmount int64 `json:"totalAmount"` // cents
	happened
}

// OrderPaidEventV1 says that an order is paid, and so what was sold.
type OrderPaidEventV1 struct {
	OrderID int64  `json:"orderId"`
	Items   []Item `json:"items"`
	happened
}

// OrderCanceledEventV1 says that nothing comes of an order.
type OrderCanceledEventV1 struct {
	OrderID int64 `json:"orderId"`
	happened
}

// PaymentCreatedEventV1 says that money is asked for.
type PaymentCreatedEventV1 struct {
	PaymentID int64 `json:"paymentId"`
	OrderID   int64 `json:"orderId"`
	Amount    int64 `json:"amount"` // cents
	happened
}

// PaymentPaidEventV1 says that the money for an order came in.
type PaymentPaidEventV1 struct {
	PaymentID int64 `json:"paymentId"`
	OrderID   int64 `json:"orderId"`
	Amount    int64 `json:"amount"` // cents
	happened
}

// PaymentFailedEventV1 says that the money for an order does not come.
type PaymentFailedEventV1 struct {
	PaymentID int64 `json:"paymentId"`
	OrderID   int64 `json:"orderId"`
	happened
}

// LikeCreatedEventV1 says that a customer likes a product.
type LikeCreatedEventV1 struct {
	LikeID    int64 `json:"likeId"`
	UserID    int64 `json:"userId"`
	ProductID int64 `json:"productId"`
	happened
}

// LikeCanceledEventV1 says that a customer likes a product no longer. If the customer likes it
// again, that is a new like.
type LikeCanceledEventV1 struct {
	LikeID    int64 `json:"likeId"`
	UserID    int64 `json:"userId"`
	ProductID int64 `json:"productId"`
	happened
}

// ProductViewedEventV1 says that a customer looked at a product.
type ProductViewedEventV1 struct {
	ProductID int64 `json:"productId"`
	UserID    int64 `json:"userId"`
	happened
}

// StockDepletedEventV1 says that the last piece of a product is sold.
type StockDepletedEventV1 struct {
	ProductID int64 `json:"productId"`
	happened
}

// happened is what all events have.
type happened struct {
	At time.Time `json:"occurredAt"`
}

// OccurredAt makes every struct that embeds it an outbox.DomainEvent.
func (h happened) OccurredAt() time.Time { return h.At }

func now() happened { return happened{time.Now()} }

const (
	orderCreated   = "loopers.order.created.v1"
	orderPaid      = "loopers.order.paid.v1"
	orderCanceled  = "loopers.order.canceled.v1"
	paymentCreated = "loopers.payment.created.v1"
	paymentPaid    = "loopers.payment.paid.v1"
	paymentFailed  = "loopers.payment.failed.v1"
	likeCreated    = "loopers.like.created.v1"
	likeCanceled   = "loopers.like.canceled.v1"
	productViewed  = "loopers.product.viewed.v1"
	stockDepleted  = "loopers.stock.depleted.v1"
)

func (e OrderCreatedEventV1) order() string        { return number(e.OrderID) }
func (e OrderPaidEventV1) order() string           { return number(e.OrderID) }
func (e OrderCanceledEventV1) order() string       { return number(e.OrderID) }
func (e PaymentCreatedEventV1) payment() string    { return number(e.PaymentID) }
func (e PaymentPaidEventV1) payment() string       { return number(e.PaymentID) }
func (e PaymentFailedEventV1) payment() string     { return number(e.PaymentID) }
func (e LikeCreatedEventV1) like() string          { return number(e.LikeID) }
func (e LikeCanceledEventV1) like() string         { return number(e.LikeID) }
func (e LikeCreatedEventV1) likedProduct() string  { return number(e.ProductID) }
func (e LikeCanceledEventV1) likedProduct() string { return number(e.ProductID) }
func (e ProductViewedEventV1) product() string     { return number(e.ProductID) }
func (e StockDepletedEventV1) product() string     { return number(e.ProductID) }

func number(n int64) string { return strconv.FormatInt(n, 10) }

// registry says how events travel. By the convention, orders go to order-events and
// payments to payment-events, each under its own id. Likes are kept in order per
// product, and views have a topic of their own.
func registry(source string) (*outbox.Registry, error) {
	return outbox.NewRegistry(source,
		outbox.Event(orderCreated, "Order", OrderCreatedEventV1.order),
		outbox.Event(orderPaid, "Order", OrderPaidEventV1.order),
		outbox.Event(orderCanceled, "Order", OrderCanceledEventV1.order),
		outbox.Event(paymentCreated, "Payment", PaymentCreatedEventV1.payment),
		outbox.Event(paymentPaid, "Payment", PaymentPaidEventV1.payment),
		outbox.Event(paymentFailed, "Payment", PaymentFailedEventV1.payment),
		outbox.Event(likeCreated, "Like", LikeCreatedEventV1.like).Key(LikeCreatedEventV1.likedProduct),
		outbox.Event(likeCanceled, "Like", LikeCanceledEventV1.like).Key(LikeCanceledEventV1.likedProduct),
		outbox.Event(productViewed, "Product", ProductViewedEventV1.product).Topic("product-view-events"),
		outbox.Event(stockDepleted, "Stock", StockDepletedEventV1.product),
	)
}
