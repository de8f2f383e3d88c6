// Package schema says what ent generates.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/edge"
	"entgo.io/ent/schema/field"
)

// Order is a row of orders.
type Order struct{ ent.Schema }

// Fields of an order.
func (Order) Fields() []ent.Field {
	return []ent.Field{field.String("id"), field.String("product"), field.Int("quantity")}
}

// Edges of an order.
func (Order) Edges() []ent.Edge {
	return []ent.Edge{edge.To("shipments", Shipment.Type)}
}

// Shipment is a row of shipments.
type Shipment struct{ ent.Schema }

// Fields of a shipment.
func (Shipment) Fields() []ent.Field {
	return []ent.Field{field.String("order_id").Optional(), field.Int("quantity")}
}

// Edges of a shipment.
func (Shipment) Edges() []ent.Edge {
	return []ent.Edge{edge.From("order", Order.Type).Ref("shipments").Field("order_id").Unique()}
}
