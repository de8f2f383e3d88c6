package outboxalert

import "github.com/outboxgo/outbox"

// BeginWithTLS lets an alerter that [Mail] has returned begin its connections with TLS, whatever the port is.
func BeginWithTLS(a outbox.Alerter) { a.(*mailer).tlsPort = a.(*mailer).port }
