package consumer

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// stepPatience is the part of StopTimeout that the client has for a step before it is
// done past the client.
const stepPatience = 5

// close ends the work within StopTimeout, whatever handlers, PostgreSQL and Kafka do:
// what is in flight is finished and committed, the group left and the client closed. What
// does not end in time goes on in the background, without the client and its connections
// to PostgreSQL. Polling is closed when nothing is polled any more.
func (m *membership) close(polling <-chan struct{}) {
	clock := handling.StopClock{Began: time.Now(), Timeout: m.cfg.StopTimeout}
	m.mu.Lock()
	m.closing = true
	workers := make([]*partitionWorker, 0, len(m.running))
	for w := range m.running {
		workers = append(workers, w)
	}
	m.mu.Unlock()
	m.finish(workers, clock.Part(handling.FinishBy), clock.Part(handling.AbandonBy-handling.FinishBy))
	m.lastCommit(clock)
	var saving sync.WaitGroup
	saving.Go(func() {
		ctx, cancel := clock.By(handling.LeftBy)
		defer cancel()
		m.starts.SavePositions(ctx)
	})
	m.leaveGroup(clock)
	m.closeClient(clock, polling)
	saving.Wait()
}

// finish ends workers. They have patience to finish what they are at. Then their contexts
// end, and what they have not finished is rolled back. Those that go on nevertheless are
// cut off after another grace.
func (m *membership) finish(workers []*partitionWorker, patience, grace time.Duration) {
	for _, w := range workers {
		w.finish()
	}
	if !haveEnded(workers, patience) {
		m.abandon(workers, grace)
	}
	for _, w := range workers {
		w.abandon()
	}
}

// abandon ends workers without patience.
func (m *membership) abandon(workers []*partitionWorker, grace time.Duration) {
	for _, w := range workers {
		w.abandon()
	}
	if !haveEnded(workers, grace) {
		for _, w := range workers {
			w.cutOff()
		}
	}
}

// cutOff gives up a worker that does not end although its context has.
func (w *partitionWorker) cutOff() {
	select {
	case <-w.ended:
		return
	default:
	}
	w.activity.CutOff()
	w.releaseSlots()
	w.end()
	call, ok := w.activity.Current()
	if !ok {
		w.log.Error("outbox: what a worker waits for does not return although its context has ended; its partition is given up", "partition", w.partition.Name())
		return
	}
	w.log.ErrorContext(call.Context, "outbox: "+call.FunctionName()+" does not return although its context has ended; its partition is given up", call.Attrs()...)
}

// haveEnded waits for workers, and reports whether all have ended in time.
func haveEnded(workers []*partitionWorker, patience time.Duration) bool {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for _, w := range workers {
		select {
		case <-w.ended:
		case <-timer.C:
			return false
		}
	}
	return true
}

// lastCommit commits what the workers have done. The client holds commits back while it
// joins the group, which may take minutes, but Kafka accepts them until all members have
// joined; so then they are sent past the client.
func (m *membership) lastCommit(clock handling.StopClock) {
	ctx, cancel := clock.By(handling.CommitBy)
	defer cancel()
	patient, cancel := context.WithTimeout(ctx, clock.Timeout/stepPatience)
	defer cancel()
	var err error
	if m.lockCommits(patient) {
		err = m.commit(patient, m.all())
		m.committing.Unlock()
	}
	for ctx.Err() == nil {
		if err = m.commitDirectly(ctx, m.all()); err == nil {
			return
		}
		wait.Sleep(ctx, commitPause)
	}
	if err != nil {
		m.log.Warn("outbox: offsets not committed before the stop, what they cover is repeated", "error", err)
	}
}

// lockCommits locks committing, unless ctx ends before.
func (m *membership) lockCommits(ctx context.Context) bool {
	for !m.committing.TryLock() {
		if wait.Sleep(ctx, 5*time.Millisecond); ctx.Err() != nil {
			return false
		}
	}
	return true
}

// commitDirectly commits how far workers have come, past the client.
func (m *membership) commitDirectly(ctx context.Context, workers []*partitionWorker) error {
	offsets, covered := uncommitted(workers)
	if len(offsets) == 0 {
		return nil
	}
	request := kmsg.NewPtrOffsetCommitRequest()
	request.Group = m.cfg.Group
	request.MemberID, request.Generation = m.client.GroupMetadata()
	request.InstanceID = m.instanceID()
	for w, next := range covered {
		p := kmsg.NewOffsetCommitRequestTopicPartition()
		p.Partition, p.Offset, p.LeaderEpoch, p.Metadata = w.partition.Number, next.Offset, next.Epoch, &request.MemberID
		t := kmsg.NewOffsetCommitRequestTopic()
		t.Topic, t.TopicID = w.partition.Topic, m.starts.TopicID(w.partition.Topic)
		t.Partitions = append(t.Partitions, p)
		request.Topics = append(request.Topics, t)
	}
	if err := m.checkMember(request); err != nil {
		return err
	}
	began := time.Now()
	response, err := request.RequestWith(ctx, m.client)
	if err != nil {
		return err
	}
	rejected, err := commitResult(request, response)
	if err != nil {
		return err
	}
	m.noteCommitted(began, covered, rejected)
	return nil
}

// instanceID returns the id of a static member, or nil.
func (m *membership) instanceID() *string {
	values := m.client.OptValues(kgo.InstanceID)
	id, _ := values[0].(string)
	if set, _ := values[1].(bool); !set {
		return nil
	}
	return &id
}

// leaveGroup leaves the group. While the group is in motion the client would wait for its
// own join before: then it is closed, which ends the join, and another one says that this
// member leaves. A static member keeps its partitions until its session ends.
func (m *membership) leaveGroup(clock handling.StopClock) {
	ctx, cancel := clock.By(handling.LeftBy)
	defer cancel()
	patient, cancel := context.WithTimeout(ctx, clock.Timeout/stepPatience)
	defer cancel()
	member, _ := m.client.GroupMetadata()
	err := m.client.LeaveGroupContext(patient)
	if patient.Err() != nil && m.instanceID() == nil && member != "" {
		m.hangUp()
		err = leaveGroupAs(ctx, m.hostOpts, m.cfg.Group, member)
	}
	if err != nil && !errors.Is(err, kerr.UnknownMemberID) {
		m.log.Warn("outbox: group not left, others wait until the session ends", "error", err)
	}
}

// leaveGroupAs says that a member leaves a group, by a client of its own.
func leaveGroupAs(ctx context.Context, opts []kgo.Opt, group, member string) error {
	client, err := kafka.NewClient(opts)
	if err != nil {
		return err
	}
	defer client.Close()
	request := kmsg.NewPtrLeaveGroupRequest()
	request.Group, request.MemberID = group, member
	one := kmsg.NewLeaveGroupRequestMember()
	one.MemberID = member
	request.Members = append(request.Members, one)
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return err
	}
	for _, m := range response.Members {
		if err := kerr.ErrorForCode(m.ErrorCode); err != nil {
			return err
		}
	}
	return kerr.ErrorForCode(response.ErrorCode)
}

// closeClient closes the client, which ends every request that is still under way.
func (m *membership) closeClient(clock handling.StopClock, polling <-chan struct{}) {
	last, cancel := clock.By(handling.CloseBy)
	defer cancel()
	patient, cancel := context.WithTimeout(last, clock.Timeout/stepPatience)
	defer cancel()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		m.client.CloseAllowingRebalance()
		<-polling
	}()
	select {
	case <-closed:
	case <-patient.Done():
	}
	m.hangUp()
	select {
	case <-closed:
	case <-last.Done():
	}
}
