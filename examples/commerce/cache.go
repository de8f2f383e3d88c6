package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/redis/go-redis/v9"
)

// pageDeleted is the action of the group cache-invalidation.
const pageDeleted = "PAGE_DELETED"

// pages are the product pages that the shop keeps in Redis.
type pages struct {
	redis  *redis.Client
	prefix string // of the keys
}

func pageOf(product, stock int64) string {
	if stock <= 0 {
		return fmt.Sprintf("product %d, sold out", product)
	}
	return fmt.Sprintf("product %d, in stock", product)
}

func (p pages) key(product int64) string { return p.prefix + ":product:" + number(product) }

func (p pages) put(ctx context.Context, product int64, page string) error {
	return p.redis.Set(ctx, p.key(product), page, time.Hour).Err()
}

// get returns the page of a product, or nothing.
func (p pages) get(ctx context.Context, product int64) (string, error) {
	page, err := p.redis.Get(ctx, p.key(product)).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return page, err
}

// handlers are those of the group cache-invalidation. To delete twice does no harm,
// so the group needs neither event_handled nor a database.
func (p pages) handlers() []outbox.Handler {
	return []outbox.Handler{outbox.HandleNoTx(pageDeleted, p.stockDepleted)}
}

func (p pages) stockDepleted(ctx context.Context, e StockDepletedEventV1, _ outbox.Metadata) error {
	return p.redis.Del(ctx, p.key(e.ProductID)).Err()
}
