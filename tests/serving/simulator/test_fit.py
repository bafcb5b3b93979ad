"""A step cost is found again in what clients saw of a server that has it."""

import heapq
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.clock import NS
from serving.errors import ConfigError
from serving.records import Outcome, RequestRecord
from serving.simulator import core
from serving.simulator.fit import StepTable, fit_affine, fit_table
from serving.simulator.roofline import Affine
from serving.simulator.spec import Arrival, ServerSpec, Work

TURNAROUND_NS = 1_000_000
SLOTS = 4

AFFINE = Affine(
    fixed_seconds=0.008,
    prefill_token_seconds=0.0004,
    prefill_context_seconds=2e-7,
    decode_sequence_seconds=0.0008,
    decode_context_seconds=2e-6,
)
TABLE = StepTable((0.006, 0.020, 0.050, 0.082, 0.064), 0.0037, 0.0, 0.0)
"""As fitted on a real llama.cpp: three sequences cost more than four."""

DECODING = Work(decode_sequences=4, decode_context_tokens=4 * 200)
PROMPT = Work(300, 300 * 301 // 2, 1, 100)


def record(number, sent_ns, first_ns, last_ns, prompt, output, outcome=Outcome.OK):
    return RequestRecord(
        request_id=number,
        stage="",
        user=0,
        outcome=outcome,
        t_plan_ns=sent_ns,
        t_send_ns=sent_ns,
        t_headers_ns=None,
        t_first_ns=first_ns,
        t_first_content_ns=first_ns,
        t_last_ns=last_ns,
        t_end_ns=last_ns,
        frames=output,
        frame_gaps_us=(),
        planned_prompt_tokens=prompt,
        planned_output_tokens=output,
        prompt_tokens=prompt,
        cached_tokens=0,
        completion_tokens=output,
        finish_reason="length",
        http_status=200,
        error=None,
        arrival_source="kernel",
        arrival_lag_us=None,
    )


def run_of(cost, users=(1, 2, 3, 4, 6), *, per_user=15, front_end_ns=0, seed=1):
    """Requests of a closed loop in front of the simulator's core, one number of users after another."""
    spec = ServerSpec("vllm", "", "m", SLOTS, 4096, 2048, 16, 4096, cost)
    draw = random.Random(seed)
    numbers = itertools.count()
    state = core.State.fresh(spec, 0)
    records = []
    for count in users:
        sends = [(state.t_ns + user, user) for user in range(count)]
        left = per_user * count
        open_, arrivals = {}, []
        while sends or arrivals or state.inside:
            while sends and sends[0][0] + front_end_ns <= state.t_ns:
                sent_ns, user = heapq.heappop(sends)
                if left:
                    left -= 1
                    number = next(numbers)
                    prompt, output = draw.randint(50, 400), draw.randint(20, 120)
                    open_[number] = (user, sent_ns, prompt, output)
                    core.enqueue(state, Arrival(number, sent_ns + front_end_ns, prompt, output))
            if core.begin(state) is None:
                if not sends:
                    break
                state.t_ns = sends[0][0] + front_end_ns
                continue
            flights = {flight.id: flight for flight in state.running}
            step = core.complete(state)
            for number, _ in step.finished:
                user, sent_ns, prompt, output = open_.pop(number)
                records.append(record(number, sent_ns, flights[number].t_first_ns, step.t_end_ns, prompt, output))
                heapq.heappush(sends, (step.t_end_ns + TURNAROUND_NS, user))
    return records


def misses(cost, truth, work):
    return abs(cost.seconds(work) / truth.seconds(work) - 1)


def test_an_affine_cost_is_found_again():
    fit = fit_affine(run_of(AFFINE), slots=SLOTS)
    for sequences in range(1, SLOTS + 1):
        work = Work(decode_sequences=sequences, decode_context_tokens=sequences * 250)
        assert misses(fit.cost, AFFINE, work) < 0.03
    for tokens in (60, 200, 400):
        assert misses(fit.cost, AFFINE, Work(tokens, tokens * (tokens + 1) // 2)) < 0.06
    assert fit.median_error_ratio < 0.03
    assert fit.equations > 240


def test_a_cost_that_batch_sizes_differ_in_is_found_again():
    fit = fit_table(run_of(TABLE, per_user=25), slots=SLOTS)
    for sequences in range(1, SLOTS + 1):
        assert misses(fit.cost, TABLE, Work(decode_sequences=sequences, decode_context_tokens=100)) < 0.08
    assert misses(fit.cost, TABLE, PROMPT) < 0.05


def test_a_straight_line_cannot_be_what_a_table_is():
    records = run_of(TABLE, per_user=25)
    three = Work(decode_sequences=3, decode_context_tokens=300)
    assert misses(fit_affine(records, slots=SLOTS).cost, TABLE, three) > 0.1
    assert fit_affine(records, slots=SLOTS).median_error_ratio > 2 * fit_table(records, slots=SLOTS).median_error_ratio


def test_what_the_front_end_adds_is_told_from_the_prompt():
    fit = fit_affine(run_of(AFFINE, users=(1, 2, 4), per_user=30, front_end_ns=6_000_000), slots=SLOTS)
    assert fit.front_end_seconds == pytest.approx(0.006, abs=0.002)
    assert misses(fit.cost, AFFINE, PROMPT) < 0.06


def test_a_server_without_a_front_end_is_not_given_one():
    assert fit_affine(run_of(AFFINE), slots=SLOTS).front_end_seconds < 0.001


def test_moments_at_which_the_machine_was_elsewhere_are_left_out():
    records = run_of(AFFINE)
    late = [
        record(
            each.request_id,
            each.t_send_ns,
            each.t_first_ns + (NS // 5 if each.request_id % 10 == 0 else 0),
            each.t_last_ns + (NS // 5 if each.request_id % 10 == 0 else 0),
            each.prompt_tokens,
            each.completion_tokens,
        )
        for each in records
    ]
    cost = fit_affine(late, slots=SLOTS).cost
    assert misses(cost, AFFINE, DECODING) < 0.04
    assert misses(cost, AFFINE, PROMPT) < 0.08


def test_prompt_tokens_found_in_the_cache_cost_nothing():
    records = run_of(AFFINE)
    cached = [
        RequestRecord(
            **{name: getattr(each, name) for name in RequestRecord.__slots__}
            | {"prompt_tokens": each.prompt_tokens + 64, "cached_tokens": 64}
        )
        for each in records
    ]
    whole, rest = fit_affine(records, slots=SLOTS).cost, fit_affine(cached, slots=SLOTS).cost
    assert rest.prefill_token_seconds == pytest.approx(whole.prefill_token_seconds, rel=0.05)


def test_a_prompt_that_takes_two_steps_is_not_taken_for_a_slow_front_end():
    # With nobody beside it a request's first token comes one empty step later than the core has it.
    second_ns = round(AFFINE.fixed_seconds * NS)
    shifts = itertools.count()
    alone = [
        record(
            each.request_id,
            each.t_send_ns + (shift := next(shifts)) * second_ns,
            each.t_first_ns + (shift + 1) * second_ns,
            each.t_last_ns + (shift + 1) * second_ns,
            each.prompt_tokens,
            each.completion_tokens,
        )
        for each in run_of(AFFINE, users=(1,), per_user=30)
    ]
    beside = [
        record(
            each.request_id,
            each.t_send_ns + 1000 * NS,
            each.t_first_ns + 1000 * NS,
            each.t_last_ns + 1000 * NS,
            each.prompt_tokens,
            each.completion_tokens,
        )
        for each in run_of(AFFINE, users=(6,), per_user=10)
    ]
    one, two = (fit_affine([*alone, *beside], slots=SLOTS, prompt_steps=steps) for steps in (1, 2))
    assert one.front_end_seconds == pytest.approx(AFFINE.fixed_seconds, rel=0.2)
    assert two.front_end_seconds < 0.1 * AFFINE.fixed_seconds


def test_requests_that_failed_count_for_nothing():
    records = run_of(AFFINE)
    failed = [record(10_000 + n, n * NS, n * NS + 1, n * NS + 2, 100, 50, Outcome.STREAM_ERROR) for n in range(50)]
    assert fit_affine([*records, *failed], slots=SLOTS) == fit_affine(records, slots=SLOTS)


def test_the_order_of_the_records_does_not_matter():
    records = run_of(AFFINE)
    shuffled = random.Random(3).sample(records, len(records))
    assert fit_affine(shuffled, slots=SLOTS) == fit_affine(records, slots=SLOTS)


def test_too_few_requests_are_refused():
    with pytest.raises(ConfigError, match="19 answered requests are too few"):
        fit_affine(run_of(AFFINE, users=(1,), per_user=19), slots=SLOTS)


def test_a_run_of_one_load_is_refused():
    with pytest.raises(ConfigError, match="the same number of sequences"):
        fit_affine(run_of(AFFINE, users=(1,), per_user=40), slots=SLOTS)


def test_a_batch_size_that_was_hardly_seen_lies_between_its_neighbours():
    spread = run_of(AFFINE, users=(1, 2), per_user=30)
    table = fit_table(spread, slots=SLOTS).cost.sequences_seconds
    assert len(table) == SLOTS + 1
    assert table[3] == table[4] == table[2], "nothing is known beyond two"
    cost = StepTable((0.001, 0.010, 0.020), 0.0, 0.0, 0.0)
    assert cost.seconds(Work(decode_sequences=4)) == pytest.approx(0.020 + 2 * 0.0095)


@given(
    st.integers(0, 20), st.integers(0, 5000), st.integers(0, 5000), st.lists(st.floats(0, 0.1), min_size=2, max_size=9)
)
def test_a_table_never_gives_less_time_for_more_prompt(sequences, tokens, more, entries):
    cost = StepTable(tuple(sorted(entries)), 1e-4, 1e-8, 1e-6)
    short = cost.seconds(Work(tokens, tokens * (tokens + 1) // 2, sequences, sequences * 100))
    longer = tokens + more
    assert 0 <= short <= cost.seconds(Work(longer, longer * (longer + 1) // 2, sequences, sequences * 100))
