package testenv

// PoisonedMembers are changes of a row of event_member that a role may make to the rows of its own group. Views of all
// groups have to stay readable.
var PoisonedMembers = []string{
	`skipped = '{"a": "x"}'`, `skipped = '[1]'`, `skipped = '"x"'`, `skipped = 'null'`, `skipped = '{"a": 1e300}'`, `skipped = '{"a": 9223372036854775807}'`,
	`state = '[1]'`, `state = '"x"'`, `state = 'null'`, `state = '{"works": 7}'`, `state = '{"outages": [{"since": "yesterday"}]}'`,
	`state = '{"outages": [{"what": "<b>\n", "class": "<script>alert(1)</script>", "since": "9999-12-31T23:59:59Z", "error": "\u202e"}]}'`,
	`state = '{"breakers": [{"action": "<b>", "state": "<i>", "since": "0001-01-01T00:00:00Z"}]}'`,
	`state = '{"outages": [{"since": "-0001-01-01T00:00:00Z"}], "more": -9}'`,
	`state = '{"outages": [{"since": "9999-12-31T23:59:59-12:00"}], "breakers": [{"since": "0001-01-01T00:00:00+12:00"}]}'`,
	`reasons = '{NULL}'`, `reasons = '{{a,b},{c,d}}'`, `reasons = '[5:6]={a,b}'`, `reasons = ARRAY['<script>alert(1)</script>']`,
	`routes = '{NULL}'`, `routes = '{{a,b},{c,d}}'`,
	`renewed_at = 'infinity'`, `renewed_at = '-infinity'`, `started_at = 'infinity'`, `kafka_at = 'infinity'`, `kafka_at = '-infinity'`, `kafka_at = '20000-01-01'`,
	`renewed_every = '90 years'`,
}
