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

// PaymentPaidEventV1 says that the money for an order came in.
type PaymentPaidEventV1 struct {
	PaymentID int64 `json:"paymentId"`
	OrderID   int64 `json:"orderId"`
	Amount    int64 `json:"amount"` // cents
	happened
}

// LikeCreatedEventV1 says that a customer likes a product.
type LikeCreatedEventV1 struct {
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

// ProductDescribedEventV1 says how a product is described from now on.
type ProductDescribedEventV1 struct {
	ProductID int64  `json:"productId"`
	Text      string `json:"text"`
	happened
}

// happened is what all events have. The time travels as the attribute time of
// the CloudEvent, so the payload does not repeat it.
type happened struct{ at time.Time }

// OccurredAt makes every struct that embeds it an outbox.DomainEvent.
func (h happened) OccurredAt() time.Time { return h.at }

const (
	orderCreated  = "loopers.order.created.v1"
	paymentPaid   = "loopers.payment.paid.v1"
	likeCreated   = "loopers.like.created.v1"
	productViewed = "loopers.product.viewed.v1"

	productDescribed = "loopers.product.described.v1"
)

// descriptions is the topic of descriptions.
const descriptions = "product-description-events"

func (e OrderCreatedEventV1) order() string    { return number(e.OrderID) }
func (e PaymentPaidEventV1) payment() string   { return number(e.PaymentID) }
func (e LikeCreatedEventV1) like() string      { return number(e.ProductID) + "_" + number(e.UserID) }
func (e LikeCreatedEventV1) product() string   { return number(e.ProductID) }
func (e ProductViewedEventV1) product() string { return number(e.ProductID) }

func (e ProductDescribedEventV1) product() string { return number(e.ProductID) }

func number(n int64) string { return strconv.FormatInt(n, 10) }

// registry says how events travel. The convention sends orders to order-events
// by order and payments to payment-events by payment. Likes are kept in order per
// product, not per like, and views and descriptions have topics of their own.
func registry() (*outbox.Registry, error) {
	return outbox.NewRegistry("demo-shop",
		outbox.Event(orderCreated, "Order", OrderCreatedEventV1.order),
		outbox.Event(paymentPaid, "Payment", PaymentPaidEventV1.payment),
		outbox.Event(likeCreated, "Like", LikeCreatedEventV1.like).Key(LikeCreatedEventV1.product),
		outbox.Event(productViewed, "Product", ProductViewedEventV1.product).Topic("product-view-events"),
		outbox.Event(productDescribed, "Product", ProductDescribedEventV1.product).Topic(descriptions),
	)
}
