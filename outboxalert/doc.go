// Package outboxalert passes alerts on: to [Slack], to [PagerDuty] and by [Mail]. [All] passes them to
// several of these, and [Only] some kinds of them.
//
// An alert names what happened to whom, so it travels encrypted, but on this machine itself. No
// error contains a secret.
package outboxalert
