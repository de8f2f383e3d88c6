package oracle

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Topics reads a topic that stays and one that comes and goes, [Topics.Fleeting]. All
// events of a key must go to the same one. It is safe for concurrent use.
type Topics struct {
	cfg   TopicsConfig
	admin *kgo.Client

	mu      sync.Mutex
	readers []*Reader // of the topic that stays, then of each that came
}

// TopicsConfig configures [NewTopics].
type TopicsConfig struct {
	Brokers    []string
	Topic      string // the one that stays; who calls creates it
	Partitions int32  // of the one that comes and goes
	Settings   []string
}

// NewTopics reads the topic that stays, and creates the other one. Settings are that one's,
// in pairs of name and value. [Topics.Close] ends what it starts.
func NewTopics(ctx context.Context, cfg TopicsConfig) (*Topics, error) {
	admin, err := kgo.NewClient(kgo.SeedBrokers(cfg.Brokers...))
	if err != nil {
		return nil, fmt.Errorf("oracle: topics: %w", err)
	}
	t := &Topics{cfg: cfg, admin: admin}
	err = t.follow(cfg.Topic)
	if err == nil {
		err = t.Create(ctx)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// follow reads a topic until it is deleted.
func (t *Topics) follow(topic string) error {
	reader, err := Follow(t.cfg.Brokers, topic, nil)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.readers = append(t.readers, reader)
	return nil
}

// Close ends the reading.
func (t *Topics) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, reader := range t.readers {
		reader.Close()
	}
	t.admin.Close()
}

// Fleeting returns the name of the topic that comes and goes.
func (t *Topics) Fleeting() string { return t.cfg.Topic + "-fleeting" }

// Create creates the topic that was missing, and reads it until it is deleted.
func (t *Topics) Create(ctx context.Context) error {
	topic := kmsg.NewCreateTopicsRequestTopic()
	topic.Topic, topic.NumPartitions, topic.ReplicationFactor = t.Fleeting(), t.cfg.Partitions, 1
	for i := 0; i+1 < len(t.cfg.Settings); i += 2 {
		topic.Configs = append(topic.Configs, kmsg.CreateTopicsRequestTopicConfig{Name: t.cfg.Settings[i], Value: &t.cfg.Settings[i+1]})
	}
	request := kmsg.NewPtrCreateTopicsRequest()
	request.Topics = append(request.Topics, topic)
	response, err := request.RequestWith(ctx, t.admin)
	if err == nil {
		err = kerr.ErrorForCode(response.Topics[0].ErrorCode)
	}
	if err != nil {
		return fmt.Errorf("oracle: create %s: %w", t.Fleeting(), err)
	}
	return t.follow(t.Fleeting())
}

const (
	// denyTime is what a broker takes at most for requests that it has permitted before.
	denyTime  = 300 * time.Millisecond
	drainLook = 10 * time.Millisecond
	drainTime = time.Minute
)

// Delete deletes the topic once everything is read that it has taken. Meanwhile every client is
// forbidden to write to it; the brokers need an authorizer.
func (t *Topics) Delete(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, drainTime, errors.New("it is not read to its end"))
	defer cancel()
	for _, step := range []func(context.Context) error{t.deny, t.drain, t.remove, t.allow} {
		if err := step(ctx); err != nil {
			return fmt.Errorf("oracle: delete %s: %w", t.Fleeting(), err)
		}
	}
	return nil
}

// drain waits until the topic is read, and ends the reading.
func (t *Topics) drain(ctx context.Context) error {
	ends, err := Ends(ctx, t.cfg.Brokers, t.Fleeting())
	if err != nil {
		return err
	}
	for reader := t.newest(); !reader.CaughtUp(ends); {
		if err := sleep(ctx, drainLook); err != nil {
			return err
		}
	}
	t.newest().Close()
	return nil
}

// deny forbids everybody to write the topic, and returns when the broker heeds that. All
// else has to be allowed: where there are rules, nothing else is.
func (t *Topics) deny(ctx context.Context) error {
	allow, deny := t.rule(kmsg.ACLOperationAll, kmsg.ACLPermissionTypeAllow), t.rule(kmsg.ACLOperationWrite, kmsg.ACLPermissionTypeDeny)
	request := kmsg.NewPtrCreateACLsRequest()
	request.Creations = []kmsg.CreateACLsRequestCreation{allow, deny}
	response, err := request.RequestWith(ctx, t.admin)
	if err != nil {
		return err
	}
	for _, r := range response.Results {
		if err := kerr.ErrorForCode(r.ErrorCode); err != nil {
			return err
		}
	}
	for {
		denied, err := t.denied(ctx)
		if err != nil {
			return err
		}
		if denied {
			return sleep(ctx, denyTime)
		}
		if err := sleep(ctx, drainLook); err != nil {
			return err
		}
	}
}

func (t *Topics) rule(op kmsg.ACLOperation, permission kmsg.ACLPermissionType) kmsg.CreateACLsRequestCreation {
	r := kmsg.NewCreateACLsRequestCreation()
	r.ResourceType, r.ResourceName, r.ResourcePatternType = kmsg.ACLResourceTypeTopic, t.Fleeting(), kmsg.ACLResourcePatternTypeLiteral
	r.Principal, r.Host, r.Operation, r.PermissionType = "User:*", "*", op, permission
	return r
}

// denied reports whether the broker knows that the topic is not to be written.
func (t *Topics) denied(ctx context.Context) (bool, error) {
	name := t.Fleeting()
	request := kmsg.NewPtrDescribeACLsRequest()
	request.ResourceType, request.ResourceName, request.ResourcePatternType = kmsg.ACLResourceTypeTopic, &name, kmsg.ACLResourcePatternTypeLiteral
	request.Operation, request.PermissionType = kmsg.ACLOperationWrite, kmsg.ACLPermissionTypeDeny
	response, err := request.RequestWith(ctx, t.admin)
	if err == nil {
		err = kerr.ErrorForCode(response.ErrorCode)
	}
	if err != nil {
		return false, err
	}
	return len(response.Resources) > 0, nil
}

// allow removes the rules of the topic.
func (t *Topics) allow(ctx context.Context) error {
	name := t.Fleeting()
	all := kmsg.NewDeleteACLsRequestFilter()
	all.ResourceType, all.ResourceName, all.ResourcePatternType = kmsg.ACLResourceTypeTopic, &name, kmsg.ACLResourcePatternTypeLiteral
	all.Operation, all.PermissionType = kmsg.ACLOperationAny, kmsg.ACLPermissionTypeAny
	request := kmsg.NewPtrDeleteACLsRequest()
	request.Filters = append(request.Filters, all)
	response, err := request.RequestWith(ctx, t.admin)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.Results[0].ErrorCode)
}

// remove deletes the topic.
func (t *Topics) remove(ctx context.Context) error {
	name := t.Fleeting()
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = &name
	request := kmsg.NewPtrDeleteTopicsRequest()
	request.Topics, request.TopicNames = []kmsg.DeleteTopicsRequestTopic{topic}, []string{name}
	response, err := request.RequestWith(ctx, t.admin)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(response.Topics[0].ErrorCode)
}

// ComeAndGo deletes the topic and creates it again, again and again until ctx ends. It is
// there for up to stays, and missing for up to gone. When ComeAndGo returns, it is there.
func (t *Topics) ComeAndGo(ctx context.Context, rng *rand.Rand, stays, gone time.Duration) error {
	whole := context.WithoutCancel(ctx)
	for sleep(ctx, time.Duration(rng.Int64N(int64(stays)))) == nil {
		if err := t.Delete(whole); err != nil {
			return err
		}
		_ = sleep(ctx, time.Duration(rng.Int64N(int64(gone)))) // its end is no reason to leave without a topic
		if err := t.Create(whole); err != nil {
			return err
		}
	}
	return nil
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *Topics) all() []*Reader {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.readers[:len(t.readers):len(t.readers)]
}

func (t *Topics) newest() *Reader {
	all := t.all()
	return all[len(all)-1]
}

// Missing returns how many of the committed events have arrived in neither topic.
func (t *Topics) Missing(committed map[string]struct{}) (missing int) {
	readers := t.all()
	for id := range committed {
		if !has(readers, id) {
			missing++
		}
	}
	return missing
}

// Has reports whether an event has arrived in either topic.
func (t *Topics) Has(id string) bool { return has(t.all(), id) }

func has(readers []*Reader, id string) bool {
	for _, r := range readers {
		if r.Has(id) {
			return true
		}
	}
	return false
}

// CaughtUp reports whether everything is read that is in the topics now.
func (t *Topics) CaughtUp(ctx context.Context) (bool, error) {
	for topic, reader := range map[string]*Reader{t.cfg.Topic: t.all()[0], t.Fleeting(): t.newest()} {
		ends, err := Ends(ctx, t.cfg.Brokers, topic)
		if err != nil || !reader.CaughtUp(ends) {
			return false, err
		}
	}
	return true, nil
}

// Arrived returns what has arrived, as [Reader.Arrived] does, each key in its order.
func (t *Topics) Arrived() (arrived []Event, err error) {
	for _, r := range t.all() {
		events, failed := r.Arrived()
		arrived, err = append(arrived, events...), errors.Join(err, failed)
	}
	return arrived, err
}

// Places returns where the records are whose events [Topics.Arrived] returns. Offsets of a topic that came again go on
// behind those that it had before.
func (t *Topics) Places() (places []Place) {
	ends := map[Place]int64{} // by topic and partition
	for _, r := range t.all() {
		before := maps.Clone(ends)
		for _, p := range r.Places() {
			of := Place{Topic: p.Topic, Partition: p.Partition}
			p.Offset += before[of]
			ends[of] = max(ends[of], p.Offset+1)
			places = append(places, p)
		}
	}
	return places
}

// Comings returns how often the topic came.
func (t *Topics) Comings() int { return len(t.all()) - 1 }

// GoesToFleeting chooses the topic of an event by its key: every eighth key's comes and goes.
func GoesToFleeting(e Event) bool {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(e.Key)) // never fails
	return hash.Sum32()%8 == 0
}
