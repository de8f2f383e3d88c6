// Package contract compares contracts of event types: AsyncAPI documents of the module outboxcontract. It knows no Go
// types and no registry.
package contract

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// Document is a contract as [Read] has read it.
type Document struct {
	source  string
	events  map[string]event // by event type
	schemas map[string]any   // by the reference
}

// event is what a contract says about an event type.
type event struct {
	topic, contentType string
	version            int
	aggregateType, key string
	upcasts            []string
	attributes         map[string]bool // names of the headers of the type
	payload            any             // a schema; nil for none
}

// asyncAPI is the part of a document that is compared.
type asyncAPI struct {
	AsyncAPI string `json:"asyncapi"`
	Info     struct {
		Title string `json:"title"`
	} `json:"info"`
	Channels map[string]struct {
		Address  string                     `json:"address"`
		Messages map[string]json.RawMessage `json:"messages"`
	} `json:"channels"`
	Components struct {
		Messages map[string]message `json:"messages"`
		Schemas  map[string]any     `json:"schemas"`
	} `json:"components"`
}

type message struct {
	ContentType string `json:"contentType"`
	Headers     struct {
		AllOf []struct {
			Properties map[string]any `json:"properties"`
		} `json:"allOf"`
	} `json:"headers"`
	Payload any `json:"payload"`
	Outbox  *struct {
		Version       int      `json:"version"`
		AggregateType string   `json:"aggregateType"`
		Key           string   `json:"key"`
		Upcasts       []string `json:"upcasts"`
	} `json:"x-outbox"`
}

var errNoContract = errors.New("it is no contract of outbox contract export")

// refPrefix precedes the name of a schema in a reference.
const refPrefix = "#/components/schemas/"

// Read reads a contract.
func Read(text []byte) (*Document, error) {
	var raw asyncAPI
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoContract, err)
	}
	if !strings.HasPrefix(raw.AsyncAPI, "3.") {
		return nil, fmt.Errorf("%w: want a document of AsyncAPI 3", errNoContract)
	}
	d := &Document{source: raw.Info.Title, events: map[string]event{}, schemas: map[string]any{}}
	for name, schema := range raw.Components.Schemas {
		d.schemas[refPrefix+name] = schema
	}
	for name, m := range raw.Components.Messages {
		if m.Outbox == nil {
			return nil, fmt.Errorf("%w: message %s has no x-outbox", errNoContract, name)
		}
		e := event{contentType: m.ContentType, version: m.Outbox.Version, aggregateType: m.Outbox.AggregateType, key: m.Outbox.Key,
			upcasts: m.Outbox.Upcasts, attributes: map[string]bool{}, payload: m.Payload}
		for _, part := range m.Headers.AllOf {
			for header := range part.Properties {
				e.attributes[header] = true
			}
		}
		d.events[name] = e
	}
	for _, c := range raw.Channels {
		for name := range c.Messages {
			e, has := d.events[name]
			if !has {
				return nil, fmt.Errorf("%w: channel %s has a message that is missing: %s", errNoContract, c.Address, name)
			}
			e.topic = c.Address
			d.events[name] = e
		}
	}
	return d, nil
}
