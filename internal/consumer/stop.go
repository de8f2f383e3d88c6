package consumer

import (
	"cmp"
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

// stepPatience is the divisor of StopTimeout for the time that the client has for a step. After that
// the step is done without the client.
const stepPatience = 5

// close ends the membership within StopTimeout, whatever handlers, PostgreSQL and Kafka do. It ends
// the workers, commits their offsets, leaves the group and closes the client. A handler that does not
// return goes on in the background; its connection to PostgreSQL is closed. polling is closed when the
// poll loop has returned.
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
	noted := inBackground(m.starts.End)
	m.lastCommit(clock)
	noted()
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

// finish ends workers. For patience they may complete their transactions. Then their contexts end and
// open transactions are rolled back. Workers that have not returned after grace are cut off.
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

// abandon ends the contexts of workers, and cuts off those that have not returned after grace.
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

// cutOff stops waiting for a worker whose context has ended and that does not return. It closes the
// worker's connection to PostgreSQL, so that the transaction is rolled back.
func (w *partitionWorker) cutOff() {
	select {
	case <-w.ended:
		return
	default:
	}
	w.activity.CutOff()
	w.slots.Release()
	w.place.release(w.limits.alone)
	go w.forgetSuspect() // nothing waits for it: PostgreSQL may not answer
	w.releaseTrials()
	w.end()
	call, ok := w.activity.Current()
	if !ok {
		w.log.Error("outbox: a worker does not return although its context has ended; its partition is given up", "partition", w.partition.Name())
		return
	}
	w.log.ErrorContext(call.Context, "outbox: "+call.FunctionName()+" does not return although its context has ended; its partition is given up", call.Attrs()...)
}

// haveEnded waits for workers. It returns false if some have not ended after patience.
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

// lastCommit commits the offsets of the workers. During a rebalance, which may take minutes, the client
// holds back commits, but Kafka accepts them until all members have joined. So after a while
// lastCommit sends the request itself.
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
		m.log.Warn("outbox: offsets not committed before the stop; their events arrive again", "error", err)
	}
}

// lockCommits locks committing. It returns false if ctx ends first.
func (m *membership) lockCommits(ctx context.Context) bool {
	for !m.committing.TryLock() {
		if wait.Sleep(ctx, 5*time.Millisecond); ctx.Err() != nil {
			return false
		}
	}
	return true
}

// commitDirectly commits the offsets of workers by a request that the client does not hold back.
func (m *membership) commitDirectly(ctx context.Context, workers []*partitionWorker) error {
	offsets, covered := m.uncommitted(workers)
	if len(offsets) == 0 {
		return nil
	}
	request := kmsg.NewPtrOffsetCommitRequest()
	request.Group = m.cfg.Group
	request.MemberID, request.Generation = m.client.GroupMetadata()
	request.InstanceID = m.instanceID()
	for w, next := range covered {
		p := kmsg.NewOffsetCommitRequestTopicPartition()
		p.Partition, p.Offset, p.LeaderEpoch = w.partition.Number, next.Offset, next.Epoch
		t := kmsg.NewOffsetCommitRequestTopic()
		t.Topic, t.TopicID = w.partition.Topic, m.starts.TopicID(w.partition.Topic)
		t.Partitions = append(t.Partitions, p)
		request.Topics = append(request.Topics, t)
	}
	if err := m.beforeCommit(request); err != nil {
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

// instanceID returns the instance id of a static member, nil for a dynamic one.
func (m *membership) instanceID() *string {
	values := m.client.OptValues(kgo.InstanceID)
	id, _ := values[0].(string)
	if set, _ := values[1].(bool); !set {
		return nil
	}
	return &id
}

// leaveGroup leaves the group. During a rebalance the client would complete its own join first. Then
// leaveGroup ends the client's requests and sends the request by another client. A static member does
// not leave: it keeps its partitions until its session ends.
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
		m.log.Warn("outbox: group not left; other members get its partitions when the session ends", "error", err)
	}
}

// leaveGroupAs leaves a group for a member, with a new client.
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
	err = kerr.ErrorForCode(response.ErrorCode)
	for _, m := range response.Members {
		err = cmp.Or(err, kerr.ErrorForCode(m.ErrorCode))
	}
	if errors.Is(err, kerr.UnknownMemberID) {
		return leaveGroupKIP848(ctx, client, group, member)
	}
	return err
}

// leaveGroupKIP848 leaves a group of the protocol of KIP-848, in which the other request knows no member.
func leaveGroupKIP848(ctx context.Context, client *kgo.Client, group, member string) error {
	const departing = -1
	request := kmsg.NewPtrConsumerGroupHeartbeatRequest()
	request.Group, request.MemberID, request.MemberEpoch = group, member, departing
	response, err := request.RequestWith(ctx, client)
	if err != nil && (ctx.Err() != nil || kgo.IsRetryableBrokerErr(err)) {
		return err
	} else if err != nil {
		return kerr.UnknownMemberID // the broker knows no such groups
	}
	if err = kerr.ErrorForCode(response.ErrorCode); errors.Is(err, kerr.GroupIDNotFound) {
		return kerr.UnknownMemberID // the group has the other protocol
	}
	return err
}

// closeClient closes the client and ends its requests.
func (m *membership) closeClient(clock handling.StopClock, polling <-chan struct{}) {
	last, cancel := clock.By(handling.CloseBy)
	defer cancel()
	patient, cancel := context.WithTimeout(last, clock.Timeout/stepPatience)
	defer cancel()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		m.client.CloseAllowingRebalance()
		m.second.close()
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
