package show

import (
	"errors"
	"flag"
	"fmt"
	"io"
)

// Parse reads the arguments of a program. It prints the usage and the flags where they ask for help, and returns flag.ErrHelp
// then. Other errors it leaves to the caller to print, once.
func Parse(flags *flag.FlagSet, args []string, usage string, help io.Writer) error {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		_, _ = fmt.Fprint(help, usage)
		flags.SetOutput(help)
		flags.PrintDefaults()
		return err
	}
	if err != nil {
		return fmt.Errorf("%w; see %s -h", err, flags.Name())
	}
	return nil
}
