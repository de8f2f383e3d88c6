package outbox

import (
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"
)

// making is held while franz-go reads options: it sorts out the codecs of
// ProducerBatchCompression where the host has put them, and the two clients of a
// relay, or those of a relay and a consumer, may be made of the same options.
var making sync.Mutex

func newClient(opts []kgo.Opt) (*kgo.Client, error) {
	making.Lock()
	defer making.Unlock()
	return kgo.NewClient(opts...)
}

func validateOpts(opts []kgo.Opt) error {
	making.Lock()
	defer making.Unlock()
	return kgo.ValidateOpts(opts...)
}

// hostOpts looks at the Kafka options of the host, for those that are not the
// host's to choose.
type hostOpts struct {
	client *kgo.Client // made of the options alone; never used
	errs   *[]error
}

// checkOpts returns what look refuses.
func checkOpts(opts []kgo.Opt, look func(hostOpts)) error {
	client, err := newClient(opts)
	if err != nil {
		return fmt.Errorf("kafka options: %w", err)
	}
	defer client.Close()
	var errs []error
	look(hostOpts{client, &errs})
	return errors.Join(errs...)
}

// largestWrite returns the size of the largest request that a client writes. Who sends
// what others have sent cannot have a lower limit for records than they had.
func largestWrite(opts []kgo.Opt) (bytes int32, err error) {
	err = checkOpts(opts, func(o hostOpts) { bytes, _ = o.client.OptValue(kgo.BrokerMaxWriteBytes).(int32) })
	return bytes, err
}

func (o hostOpts) refuse(set bool, option, why string) {
	if set {
		*o.errs = append(*o.errs, fmt.Errorf("kafka option %s: %s", option, why))
	}
}

// names reports whether an option holds a name.
func (o hostOpts) names(option any) bool {
	name, _ := o.client.OptValue(option).(string)
	return name != ""
}

// sets reports whether a switch is on, or a function given.
func (o hostOpts) sets(option any) bool {
	v := reflect.ValueOf(o.client.OptValue(option))
	return v.IsValid() && !v.IsZero()
}
