package rules

import (
	"go/types"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// mostFields is how many fields all configurations and hooks of this package have. A field that is
// added replaces another one.
const mostFields = 100

// A user has to read each field of a configuration: there are not more than there were.
func TestConfigFields(t *testing.T) {
	t.Parallel()
	pkg, err := checkPackage(".")
	require.NoError(t, err)
	named := regexp.MustCompile(`^[A-Z]\w*(Config|Hooks|Policy)$`)
	total := 0
	for _, name := range pkg.Scope().Names() {
		fields, ok := pkg.Scope().Lookup(name).Type().Underlying().(*types.Struct)
		if !ok || !named.MatchString(name) {
			continue
		}
		n := 0
		for field := range fields.Fields() {
			if field.Exported() && !field.Embedded() {
				n++
			}
		}
		t.Logf("%3d %s", n, name)
		total += n
	}
	t.Logf("%3d fields", total)
	require.LessOrEqual(t, total, mostFields)
}
