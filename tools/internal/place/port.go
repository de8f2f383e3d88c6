package place

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// Loopback is the only address that our servers listen on.
const Loopback = "127.0.0.1"

// Port returns a port of 127.0.0.1 that is free now. It lies below the range
// from which systems take the ports of outgoing connections. So none of those
// can grab it before the server listens, or while the server is down for a
// restart.
func Port() (int, error) {
	for range 200 {
		port := 15000 + rand.IntN(17000)
		if Free(port) {
			return port, nil
		}
	}
	return 0, errors.New("find a free port: 200 tries between 15000 and 32000 failed")
}

// Free reports whether a server could listen on the port now.
func Free(port int) bool {
	l, err := net.Listen("tcp", Address(port))
	if err != nil {
		return false
	}
	l.Close()
	return true
}

// Address returns 127.0.0.1:port.
func Address(port int) string {
	return net.JoinHostPort(Loopback, strconv.Itoa(port))
}
