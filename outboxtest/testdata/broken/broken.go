// Package broken does not compile.
package broken

var n int = "text"
