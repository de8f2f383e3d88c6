package maven

import "time"

func init() { firstPause = time.Millisecond } // the attempts count, not the time between them
