package outboxtest_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/outboxgo/outbox/outboxtest/testdata/shop"
)

const (
	shopPath  = "github.com/outboxgo/outbox/outboxtest/testdata/shop"
	pointPath = "github.com/outboxgo/outbox/outboxtest/testdata/pointer"
)

func TestRequireAllRegistered(t *testing.T) {
	t.Parallel()
	events, err := shop.Registry()
	require.NoError(t, err)
	for _, patterns := range [][]string{{"./testdata/shop"}, {shopPath}, {shopPath, "./testdata/none"}, {shopPath, "./testdata/base"}} {
		outboxtest.RequireAllRegistered(t, events, patterns...)
	}
}

var unregisteredTests = []struct {
	name             string
	lacking, pattern string // words
	says             string
}{
	{"one", "Shipped", "./testdata/shop", "not in the registry:\n  " + shopPath + ".Shipped\n"},
	{"one that is not exported", "liked", "./testdata/shop", "not in the registry:\n  " + shopPath + ".liked\n"},
	{"one that is no struct", "Tick", "./testdata/shop", "not in the registry:\n  " + shopPath + ".Tick\n"},
	{"one that another event embeds", "Paid", "./testdata/shop", "not in the registry:\n  " + shopPath + ".Paid\n"},
	{"the same name in another package", "", "./testdata/shop/...", "not in the registry:\n  " + shopPath + "/orders.Paid\n"},
	{"several", "liked PaidV2", "./testdata/shop/... ./testdata/pointer", "not in the registry:\n" +
		"  " + pointPath + ".Counted (its methods have to have value receivers)\n" +
		"  " + shopPath + ".PaidV2\n  " + shopPath + ".liked\n  " + shopPath + "/orders.Paid\n"},
	{"no event types", "", "./testdata/none", "no event types in ./testdata/none: "},
	{"no packages", "", "example.com/nowhere/...", "no event types in example.com/nowhere/...: "},
	{"no such package", "", "./testdata/nowhere", "load package "},
	{"a package that does not compile", "", "./testdata/broken", "load package github.com/outboxgo/outbox/outboxtest/testdata/broken: "},
	{"no patterns", "", "", "no packages are named"},
}

func TestRequireAllRegisteredFails(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for _, tt := range unregisteredTests {
		t.Run(tt.name, func(t *testing.T) {
			events, err := shop.Registry(strings.Fields(tt.lacking)...)
			require.NoError(t, err)
			says := failure(t, func(f *fakeT) { outboxtest.RequireAllRegistered(f, events, strings.Fields(tt.pattern)...) })
			require.Contains(t, says, tt.says)
		})
	}
}
