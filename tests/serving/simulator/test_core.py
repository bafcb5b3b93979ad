"""What must hold of every step, whatever arrives and leaves; and the patterns that real engines show."""

import copy
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.clock import NS
from serving.simulator.core import BlockPool, Flight, State, begin, cancel, complete, enqueue, fail_all
from serving.simulator.spec import Arrival, Finish, OnFull, Policy, ServerSpec, Step, Work


class Linear:
    def seconds(self, work: Work) -> float:
        return 0.01 + 1e-4 * work.prefill_tokens + 1e-3 * work.decode_sequences + 1e-6 * work.decode_context_tokens


SPEC = ServerSpec(
    engine="vllm",
    release="0.32.0",
    model="m",
    max_batch=4,
    context_tokens=256,
    token_budget=64,
    block_tokens=16,
    kv_blocks=64,
    cost=Linear(),
)

policies = st.sampled_from(
    [
        Policy(),
        Policy(prefill_first=True, reserved_output_ratio=0.7),
        Policy(prefill_first=True),
        Policy(on_full=OnFull.FAIL, counts_at_finish=True),
    ]
)
specs = st.builds(
    lambda max_batch, budget, size, blocks, policy, cache: replace(
        SPEC,
        max_batch=max_batch,
        token_budget=budget,
        block_tokens=size,
        # Every single request fits, as a real engine makes sure of.
        kv_blocks=max(blocks, -(-SPEC.context_tokens // size)),
        policy=policy,
        prefix_cache=cache,
    ),
    st.integers(1, 6),
    st.integers(1, 100),
    st.sampled_from([1, 4, 16]),
    st.integers(16, 200),
    policies,
    st.booleans(),
)
requests = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 120), st.integers(1, 60), st.sampled_from(["", "a", "b"]), st.booleans()
    ),
    min_size=1,
    max_size=25,
)


def prefix_of(family: str, tokens: int, size: int) -> tuple[int, ...]:
    return tuple(hash((family, block)) for block in range(tokens // size)) if family else ()


def check_blocks(state: State) -> None:
    pool = state.pool
    assert pool.free + pool.private + len(pool.held) + len(pool.idle) + pool.leaked == pool.total
    assert min(pool.free, pool.private, pool.leaked) >= 0
    assert pool.private == sum(flight.private for flight in state.running)
    assert sum(pool.held.values()) == sum(len(flight.shared) for flight in state.running)
    for flight in state.running:
        assert flight.blocks * state.spec.block_tokens >= flight.computed
    for flight in state.waiting:
        assert flight.blocks == flight.computed == 0


def play(spec: ServerSpec, plan: list[tuple[int, int, int, str, bool]]) -> tuple[list[Step], dict[int, Flight], State]:
    """Request number i comes before the step whose number is the sum of the delays so far; some leave soon after."""
    state = State.fresh(spec, 0)
    flights: dict[int, Flight] = {}
    due, number = [], 0
    for index, (delay, prompt, output, family, leaves) in enumerate(plan):
        number += delay
        due.append((number, index, prompt, output, family, leaves))
    leaving: list[tuple[int, Flight]] = []
    steps: list[Step] = []
    for turn in range(20_000):
        while due and due[0][0] <= turn:
            _, index, prompt, output, family, leaves = due.pop(0)
            arrival = Arrival(index, state.t_ns, prompt, output, prefix_of(family, prompt, spec.block_tokens))
            flights[index] = enqueue(state, arrival)
            if leaves:
                leaving.append((turn + 5, flights[index]))
        scheduled = begin(state)
        check_blocks(state)
        for when, flight in leaving[:]:
            if when <= turn:
                cancel(state, flight)
                leaving.remove((when, flight))
        if scheduled is not None:
            steps.append(complete(state))
            check_blocks(state)
        elif not due and not state.inside:
            return steps, flights, state
    raise AssertionError("the server never became idle")


@settings(max_examples=200, deadline=None)
@given(specs, requests)
def test_nothing_is_lost_made_up_or_out_of_order(spec, plan):
    steps, flights, state = play(spec, plan)
    emitted = dict.fromkeys(flights, 0)
    ended: dict[int, Finish] = {}
    before_ns = 0
    for step in steps:
        assert step.t_ns >= before_ns
        assert step.t_end_ns > step.t_ns
        before_ns = step.t_end_ns
        assert step.running <= spec.max_batch
        assert step.prefill_tokens + len(step.emitted) <= 2 * spec.token_budget
        assert len(set(step.emitted)) == len(step.emitted)
        for request_id in step.emitted:
            assert request_id not in ended
            emitted[request_id] += 1
        for request_id, why in step.finished:
            assert request_id not in ended
            ended[request_id] = why
    for index, (_, _, output, _, leaves) in enumerate(plan):
        if ended.get(index) is Finish.LENGTH:
            assert emitted[index] == output == flights[index].generated
        elif ended.get(index) is None:
            assert leaves
            assert emitted[index] <= output
        else:
            assert ended[index] is Finish.KV_FULL
            assert spec.policy.on_full is OnFull.FAIL
    assert not state.inside
    assert state.pool.used == 0


@settings(max_examples=100, deadline=None)
@given(specs, requests)
def test_requests_are_first_admitted_in_the_order_in_which_they_came(spec, plan):
    steps, flights, _ = play(spec, plan)
    first_admissions: list[int] = []
    for step in steps:
        first_admissions += [request_id for request_id in step.admitted if request_id not in first_admissions]
    assert first_admissions == sorted(first_admissions)
    assert all(
        flight.t_admitted_ns is None or flight.t_admitted_ns >= flight.t_received_ns for flight in flights.values()
    )


@settings(max_examples=50, deadline=None)
@given(specs, requests)
def test_the_same_calls_give_the_same_steps(spec, plan):
    assert play(spec, plan)[0] == play(spec, plan)[0]


def test_a_copied_state_goes_on_as_the_original_does():
    state = State.fresh(SPEC, 0)
    for index in range(8):
        enqueue(state, Arrival(index, 0, 100, 30))
    for _ in range(10):
        begin(state)
        complete(state)
    twin = copy.deepcopy(state)

    def rest(of: State) -> list[Step]:
        return [complete(of) for _ in range(50) if begin(of) is not None]

    assert rest(state) == rest(twin) != []


def run(state: State, steps: int = 10_000) -> list[Step]:
    taken: list[Step] = []
    while len(taken) < steps and begin(state) is not None:
        taken.append(complete(state))
    return taken


def test_a_prompt_longer_than_the_budget_is_processed_in_chunks_beside_decoding():
    state = State.fresh(SPEC, 0)
    enqueue(state, Arrival(0, 0, 10, 50))
    run(state, 3)
    enqueue(state, Arrival(1, state.t_ns, 150, 5))
    chunks = []
    while state.running[-1].id == 0 or state.running[-1].generated == 0:
        begin(state)
        step = complete(state)
        assert 0 in step.emitted
        chunks.append(step.prefill_tokens)
    assert chunks == [63, 63, 24]


def test_prompts_pause_decoding_where_the_engine_does_not_mix_them():
    state = State.fresh(replace(SPEC, policy=Policy(prefill_first=True)), 0)
    enqueue(state, Arrival(0, 0, 10, 50))
    run(state, 3)
    enqueue(state, Arrival(1, state.t_ns, 150, 5))
    steps = run(state, 4)
    assert [step.prefill_tokens for step in steps] == [64, 64, 22, 0]
    assert [step.emitted for step in steps] == [(), (), (1,), (0, 1)]


def test_the_youngest_request_gives_up_its_blocks_and_comes_back_first():
    state = State.fresh(replace(SPEC, kv_blocks=16, max_batch=8, prefix_cache=False), 0)
    for index in range(4):
        enqueue(state, Arrival(index, 0, 48, 100))
    steps = run(state)
    preempted = [request_id for step in steps for request_id in step.preempted]
    assert preempted[:2] == [3, 2]
    ends = [request_id for step in steps for request_id, _ in step.finished]
    assert ends == [0, 1, 2, 3]
    assert sum(len(step.emitted) for step in steps) == 400


def test_with_a_shared_cache_that_fails_everything_running_ends_in_an_error():
    spec = replace(SPEC, kv_blocks=256, block_tokens=1, policy=Policy(on_full=OnFull.FAIL))
    state = State.fresh(spec, 0)
    for index in range(5):
        enqueue(state, Arrival(index, 0, 40, 100))
    steps = run(state)
    failed = [why for step in steps for _, why in step.finished]
    assert failed == [Finish.KV_FULL] * 4 + [Finish.LENGTH]


def test_a_prompt_seen_before_is_not_computed_again():
    state = State.fresh(SPEC, 0)
    prefix = prefix_of("a", 100, 16)
    first = enqueue(state, Arrival(0, 0, 100, 1, prefix))
    alone = sum(step.prefill_tokens for step in run(state))
    second = enqueue(state, Arrival(1, state.t_ns, 100, 1, prefix))
    again = sum(step.prefill_tokens for step in run(state))
    assert (first.cached_tokens, alone) == (0, 100)
    assert (second.cached_tokens, again) == (96, 4)


def test_a_prompt_of_full_blocks_still_computes_its_last_block():
    state = State.fresh(SPEC, 0)
    prefix = prefix_of("a", 64, 16)
    enqueue(state, Arrival(0, 0, 64, 1, prefix))
    run(state)
    second = enqueue(state, Arrival(1, state.t_ns, 64, 1, prefix))
    run(state)
    assert second.cached_tokens == 48


def test_kept_blocks_are_given_out_least_recently_used_first():
    pool = BlockPool(4, keep=True)
    for content in (1, 2):
        assert pool.take(1)
        assert pool.publish(content)
        pool.release(0, [content])
    assert pool.used == 0
    assert pool.take(3)
    assert list(pool.idle) == [2]
    assert not pool.take(2)


def test_leaked_blocks_are_used_until_they_are_recovered():
    pool = BlockPool(10, keep=True)
    assert pool.leak(4) == 4
    assert (pool.used, pool.available) == (4, 6)
    assert pool.leak(9) == 6
    pool.recover()
    assert pool.used == 0


def test_a_stuck_request_keeps_its_place_and_says_nothing_more():
    state = State.fresh(SPEC, 0)
    stuck = enqueue(state, Arrival(0, 0, 16, 20), stuck_at=5)
    enqueue(state, Arrival(1, 0, 16, 20))
    steps = run(state)
    assert stuck.generated == 5
    assert [ended for step in steps for ended in step.finished] == [(1, Finish.LENGTH)]
    assert begin(state) is None
    assert [flight.id for flight in state.running] == [0]
    cancel(state, stuck)
    assert state.pool.used == 0


def test_a_request_cancelled_while_a_step_computes_leaves_with_the_step():
    state = State.fresh(SPEC, 0)
    flight = enqueue(state, Arrival(0, 0, 16, 20))
    run(state, 3)
    begin(state)
    cancel(state, flight)
    assert state.running == [flight]
    step = complete(state)
    assert step.emitted == step.finished == ()
    assert not state.running
    assert state.pool.used == 0


def test_death_takes_everything():
    state = State.fresh(SPEC, 0)
    for index in range(6):
        enqueue(state, Arrival(index, 0, 16, 20))
    run(state, 2)
    begin(state)
    assert [flight.id for flight in fail_all(state)] == [0, 1, 2, 3, 4, 5]
    assert state.inside == state.pool.used == 0


def test_only_decoding_is_slowed_by_a_decode_factor():
    def seconds(prompt_step: bool, **factors: float) -> float:
        state = State.fresh(SPEC, 0)
        enqueue(state, Arrival(0, 0, 40, 20))
        if not prompt_step:
            run(state, 1)
        scheduled = begin(state, **factors)
        assert scheduled is not None
        return (scheduled.t_end_ns - scheduled.t_ns) / NS

    assert seconds(True, decode_factor=2.0) == pytest.approx(seconds(True))
    assert seconds(False, decode_factor=2.0) == pytest.approx(2 * seconds(False))
    assert seconds(True, factor=3.0) == pytest.approx(3 * seconds(True))


def test_completing_what_was_not_begun_is_refused():
    with pytest.raises(ValueError, match="call begin first"):
        complete(State.fresh(SPEC, 0))


def test_a_request_cancelled_while_its_failure_is_on_its_way_is_not_failed_too():
    spec = replace(SPEC, kv_blocks=64, block_tokens=1, policy=Policy(on_full=OnFull.FAIL))
    state = State.fresh(spec, 0)
    flights = [enqueue(state, Arrival(index, 0, 30, 100)) for index in range(2)]
    scheduled = begin(state)
    while scheduled is not None and not scheduled.failed:
        complete(state)
        scheduled = begin(state)
    cancel(state, flights[0])
    assert complete(state).finished == ((1, Finish.KV_FULL),)
    assert state.inside == state.pool.used == 0


def test_what_is_stuck_stays_stuck_when_it_is_thrown_out_and_recomputed():
    spec = replace(SPEC, kv_blocks=16, prefix_cache=False)
    state = State.fresh(spec, 0)
    enqueue(state, Arrival(0, 0, 16, 200))
    stuck = enqueue(state, Arrival(1, 0, 48, 20), stuck_at=5)
    run(state, 190)
    assert stuck.preemptions > 0
    assert stuck.generated == 5
    steps = run(state)
    assert [ended for step in steps for ended in step.finished] == [(0, Finish.LENGTH)]
    assert stuck.generated == 5
    assert stuck.computed == 53


def test_prompts_that_are_processed_a_token_at_a_time_can_be_found_again():
    state = State.fresh(replace(SPEC, token_budget=1), 0)
    prefix = prefix_of("a", 100, 16)
    enqueue(state, Arrival(0, 0, 100, 1, prefix))
    run(state)
    second = enqueue(state, Arrival(1, state.t_ns, 100, 1, prefix))
    run(state)
    assert second.cached_tokens == 96


def test_recomputing_a_token_at_a_time_is_no_decoding():
    state = State.fresh(replace(SPEC, kv_blocks=16, prefix_cache=False), 0)
    enqueue(state, Arrival(0, 0, 16, 200))
    other = enqueue(state, Arrival(1, 0, 48, 100))
    while not other.preemptions:
        run(state, 1)
    cancel(state, state.running[0])
    state.spec = replace(state.spec, token_budget=1)
    scheduled = begin(state)
    assert scheduled is not None
    assert (scheduled.work.prefill_tokens, scheduled.work.decode_sequences) == (1, 0)
