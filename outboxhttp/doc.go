// Package outboxhttp is what outbox has to do with HTTP: answers for the probes of a
// scheduler ([Live], [Ready]), and alerts for Slack ([Slack]).
package outboxhttp
