package wakeup

// Waiting returns how many have joined the next statement.
func Waiting(g *Probes) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.next == nil {
		return 0
	}
	return len(g.next.sequences)
}
