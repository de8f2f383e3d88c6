package report

import "slices"

// Results returns what was added, in that order.
func (r *Report) Results() []Result { return slices.Clone(r.results) }
