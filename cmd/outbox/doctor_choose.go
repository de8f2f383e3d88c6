package main

import (
	"slices"
	"strings"
)

// allChecks returns the checks in the order in which they are made.
func allChecks() []check {
	return slices.Concat([]check{connectCheck, firstCheck}, databaseChecks, []check{migrationsCheck}, tableChecks,
		[]check{kafkaCheck, autoCreateCheck, topicsCheck, gapsCheck, exactlyCheck})
}

// findingIDs returns the ids of all that the doctor can find.
func findingIDs() (all []string) {
	for _, c := range allChecks() {
		all = append(all, c.ids...)
	}
	for _, c := range allChecks() {
		if c.name != connectCheck.name && c.name != kafkaCheck.name { // their failure is itself a finding
			all = append(all, c.failedID())
		}
	}
	return all
}

// failedID is the id of the finding that the check could not be made.
func (c check) failedID() string { return "doctor." + c.name }

// checkIDs refuses unknown ids of findings. With a mistyped id, the doctor would seem to find no problem.
func (d *doctor) checkIDs() error {
	known := findingIDs()
	for _, f := range [][2]string{{"--only", d.only}, {"--skip", d.skip}} {
		for _, id := range splitIDs(f[1]) {
			if !slices.ContainsFunc(known, func(k string) bool { return beginsWith(k, id) }) {
				return usagef("%s %q: want ids or their beginnings: %s%s", f[0], id, strings.Join(known, ", "), suggest(id, withBeginnings(known)))
			}
		}
	}
	if !d.wants(allChecks()...) {
		return usagef("--only and --skip leave nothing to look at")
	}
	for _, id := range splitIDs(d.only) {
		if beginsWith(id, "kafka") && d.e.brokers() == "" {
			return usagef("--only %s: which Kafka? --kafka HOST:PORT, or $KAFKA_BROKERS", id)
		}
	}
	return nil
}

func splitIDs(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

func beginsWith(id, prefix string) bool { return id == prefix || strings.HasPrefix(id, prefix+".") }

func beginsWithAny(id string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return beginsWith(id, prefix) })
}

// withBeginnings adds the beginnings of ids: server for server.slot.
func withBeginnings(ids []string) (all []string) {
	for _, id := range ids {
		first, _, _ := strings.Cut(id, ".")
		all = append(all, first)
	}
	return append(all, ids...)
}

// wants reports whether one of the checks can have a wanted finding.
func (d *doctor) wants(checks ...check) bool {
	for _, c := range checks {
		if slices.ContainsFunc(c.ids, d.asksFor) || d.only != "" && d.asksFor(c.failedID()) {
			return true
		}
	}
	return false
}

// asksFor reports whether --only and --skip leave an id.
func (d *doctor) asksFor(id string) bool {
	return (d.only == "" || beginsWithAny(id, splitIDs(d.only))) && !beginsWithAny(id, splitIDs(d.skip))
}

// chosen returns the findings that --only and --skip leave. It includes findings that kept a wanted check
// from being made, even if --only names something else. Without them, the doctor would seem to find no
// problem.
func (d *doctor) chosen() (all []finding) {
	for _, f := range d.findings {
		if d.asksFor(f.ID) || isObstacle(f.ID) && !beginsWithAny(f.ID, splitIDs(d.skip)) {
			all = append(all, f)
		}
	}
	return all
}

// isObstacle reports whether a finding prevents checks.
func isObstacle(id string) bool {
	return beginsWithAny(id, []string{"database.connect", "migrations", "kafka.connect", "doctor"})
}
