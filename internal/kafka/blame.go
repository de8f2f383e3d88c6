package kafka

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
)

// ValidateOpts is [kgo.ValidateOpts] for the options of the host with those that add puts
// around them. It names the options of the host that are wrong, each with the error: kgo says
// that "idempotency requires acks=all", and not that it is RequiredAcks that was given.
func ValidateOpts(host []kgo.Opt, add func(host []kgo.Opt) []kgo.Opt) error {
	_, err := validOpts(host, add)
	return err
}

// validOpts returns the options of the host without the wrong ones, which the error names.
func validOpts(host []kgo.Opt, add func(host []kgo.Opt) []kgo.Opt) (valid []kgo.Opt, _ error) {
	var errs []error
	for valid = host; ; {
		err := validate(add(valid))
		if err == nil {
			return valid, errors.Join(errs...)
		}
		wrong := wrongOpts(valid, err, add)
		errs = append(errs, optsError(valid, wrong, err))
		if len(wrong) == 0 {
			return valid, errors.Join(errs...)
		}
		valid = without(valid, wrong...)
	}
}

// validate is [kgo.ValidateOpts] for options that several clients may share.
func validate(opts []kgo.Opt) error {
	making.Lock()
	defer making.Unlock()
	return kgo.ValidateOpts(opts...)
}

// wrongOpts returns the places of the fewest options with which there is the same error. It
// leaves out one option after the other, as long as the error stays the same.
func wrongOpts(host []kgo.Opt, err error, add func([]kgo.Opt) []kgo.Opt) (wrong []int) {
	var innocent []int
	for i := range host {
		rest := without(host, append(innocent, i)...)
		if other := validate(add(rest)); other != nil && other.Error() == err.Error() {
			innocent = append(innocent, i)
		} else {
			wrong = append(wrong, i)
		}
	}
	return wrong
}

// without returns the options that are not at the given places.
func without(opts []kgo.Opt, places ...int) (rest []kgo.Opt) {
	for i, o := range opts {
		if !slices.Contains(places, i) {
			rest = append(rest, o)
		}
	}
	return rest
}

// optsOfMembers are options that kgo takes only together with ConsumerGroup.
var optsOfMembers = []string{
	"DisableAutoCommit", "GreedyAutoCommit", "AutoCommitMarks", "AutoCommitCallback",
	"OnPartitionsAssigned", "OnPartitionsRevoked", "OnPartitionsLost",
}

var errOfMembers = errors.New("only a consumer is a member of a group, and it commits offsets and gives up partitions by itself")

func optsError(host []kgo.Opt, wrong []int, err error) error {
	var names []string
	for _, i := range wrong {
		if name := optName(host[i]); name != "" {
			names = append(names, name)
		}
	}
	switch {
	case len(names) == 0 || len(names) < len(wrong):
		return fmt.Errorf("kafka options: %w", err)
	case len(names) > 1:
		return fmt.Errorf("kafka options %s: %w", strings.Join(names, " and "), err)
	case slices.Contains(optsOfMembers, names[0]):
		err = errOfMembers
	}
	return fmt.Errorf("kafka option %s: %w", names[0], err)
}

// optFunc finds the name of an option in the name of its function literal, also if the compiler has
// put the function of kgo into its caller: kgo.RequiredAcks.func1, main.main.RequiredAcks.func1.
var optFunc = regexp.MustCompile(`\.([A-Z]\w*)\.func[\d.]+$`)

// optName returns the name of the function of kgo that has made an option, or "".
func optName(opt kgo.Opt) string {
	v := reflect.ValueOf(opt)
	if v.Kind() != reflect.Struct || v.NumField() == 0 || v.Field(0).Kind() != reflect.Func {
		return ""
	}
	f := runtime.FuncForPC(v.Field(0).Pointer())
	if f == nil {
		return ""
	}
	if found := optFunc.FindStringSubmatch(f.Name()); found != nil {
		return strings.TrimSuffix(found[1], "Fn") // with which kgo makes the option of the same name without
	}
	return ""
}
