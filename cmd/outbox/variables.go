package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// variablePrefix begins the variables that are only ours.
const variablePrefix = "OUTBOX_"

// The variables that no flag of relay has the name of.
const (
	schemaVariable    = "OUTBOX_SCHEMA"
	slackVariable     = "OUTBOX_SLACK_URL"
	pagerDutyVariable = "OUTBOX_PAGERDUTY_KEY"
)

// variableOf returns the variable of a flag of relay.
func variableOf(flag string) string {
	return variablePrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// ofTools matches variables that the services for development and the tests read.
var ofTools = regexp.MustCompile(`^OUTBOX_(POSTGRES|KAFKA|SERVICES|TEST)_`)

// ofServices matches variables that Kubernetes sets in each container for services named outbox or outbox-something.
var ofServices = regexp.MustCompile(`^OUTBOX_(.+_)?(SERVICE_(HOST|PORT)(_.+)?=|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=|PORT=(tcp|udp|sctp)://)`)

// unknownVariables returns the names of variables that look like ours and are not, sorted, each with a similar
// name. own are the flags of relay.
func unknownVariables(e *env, own []string) string {
	known := []string{schemaVariable, slackVariable, pagerDutyVariable}
	for _, flag := range own {
		known = append(known, variableOf(flag))
	}
	var unknown []string
	for _, name := range e.ourVariables() {
		if slices.Contains(known, name) {
			continue
		}
		similar := ""
		if best := nearest(strings.TrimPrefix(name, variablePrefix), known); best != "" {
			similar = fmt.Sprintf(" (did you mean %s?)", best)
		}
		unknown = append(unknown, visible(name)+similar)
	}
	return strings.Join(unknown, ", ")
}

// ourVariables returns the names that begin as ours do, sorted, without those of tools and Kubernetes.
func (e *env) ourVariables() (names []string) {
	if e.environ == nil {
		return nil
	}
	for _, variable := range e.environ() {
		name, value, _ := strings.Cut(variable, "=")
		if strings.HasPrefix(name, variablePrefix) && value != "" && !ofTools.MatchString(name) && !ofServices.MatchString(variable) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// nearest returns the variable whose name behind the prefix differs least, in at most a third of its letters.
func nearest(rest string, known []string) (best string) {
	least := len(rest)/3 + 1
	for _, name := range known {
		if d := edits(rest, strings.TrimPrefix(name, variablePrefix)); d < least {
			best, least = name, d
		}
	}
	return best
}

// warnOfSchema names variables that may be a mistyped OUTBOX_SCHEMA, the only variable of ours that all commands read.
func (e *env) warnOfSchema() {
	for _, name := range e.ourVariables() {
		if name != schemaVariable && nearest(strings.TrimPrefix(name, variablePrefix), []string{schemaVariable}) != "" {
			e.printError("warning: $" + name + " is not known and has no effect: did you mean $" + schemaVariable + "?")
		}
	}
}
