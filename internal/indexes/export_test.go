package indexes

// LockIdle is how long the lock outlives a process that does not go on.
var LockIdle = &lockIdle
