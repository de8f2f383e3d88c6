// Package outboxhttp is what outbox has to do with HTTP: trace ids from requests to
// events and log lines ([Trace]), answers for the probes of a scheduler ([Live],
// [Ready]), and alerts for Slack ([Slack]).
package outboxhttp
