"""Faults mean what their text says, begin and end exactly when it says so, and hit the same requests every time."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import ConfigError
from serving.simulator.faults import (
    FAULT_KINDS,
    Conditions,
    Fault,
    FaultPlan,
    LifeKind,
    Switch,
    Unit,
    Where,
    format_fault,
    parse_fault,
)

HOUR = 3600.0
MIB = 2**20


def plan(*texts, seed=0):
    return FaultPlan((parse_fault(text) for text in texts), seed=seed)


def at(text, t_s, started_s=0.0):
    return plan(text).conditions(t_s, started_s)


def values_of(unit):
    return {
        Unit.FLAG: st.just(1.0),
        Unit.SHARE: st.floats(0, 1),
        Unit.FACTOR: st.floats(1, 1e6),
        Unit.WHOLE: st.integers(1, 10**6).map(float),
        Unit.RATIO: st.floats(0, 0.99),
    }.get(unit, st.floats(1, 1e15) | st.integers(1, 10**12).map(float))


@st.composite
def faults(draw):
    kind = FAULT_KINDS[draw(st.sampled_from(sorted(FAULT_KINDS)))]
    share = draw(st.floats(0, 1)) if kind.has_share and kind.unit is not Unit.SHARE else 1.0
    start = draw(st.floats(0, 1e8))
    end = draw(st.just(math.inf) | st.floats(1e-3, 1e8).map(lambda length: start + length))
    options = {
        name: draw(values_of(option.unit))
        for name, option in kind.options.items()
        if option.required or draw(st.booleans())
    }
    value = draw(values_of(kind.unit))
    if "every" in options:
        options["every"] += value
    return Fault(kind.name, value, share, start, end if end > start else math.inf, options)


@given(faults(), st.floats(0, 1e6))
def test_a_fault_written_and_read_again_is_the_same_whenever_it_is_read(fault, now_s):
    assert parse_fault(format_fault(fault), now_s=now_s) == fault


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("gpu_leak_per_request=1MiB", Fault("gpu_leak_per_request", MIB)),
        ("host_leak_per_hour=1.5GiB/h", Fault("host_leak_per_hour", 1.5 * 2**30)),
        ("host_leak_per_hour=200MB,start=2h,end=1d", Fault("host_leak_per_hour", 2e8, 1.0, 2 * HOUR, 24 * HOUR)),
        ("host_leak_per_token=64", Fault("host_leak_per_token", 64)),
        ("kv_leak_per_disconnect=0.5, share=20%", Fault("kv_leak_per_disconnect", 0.5, 0.2)),
        (
            "cache_fill_per_hour=1GiB,cap=8GiB",
            Fault("cache_fill_per_hour", 2**30, options={"cap": float(8 * 2**30)}),
        ),
        ("decode_slows_per_hour=2%/h", Fault("decode_slows_per_hour", 0.02)),
        (
            "decode_slows_per_hour=0.02,survives_restart",
            Fault("decode_slows_per_hour", 0.02, options={"survives_restart": 1.0}),
        ),
        ("decode_slows_per_hour=0.02,survives_restart=false", Fault("decode_slows_per_hour", 0.02)),
        ("step_slowdown=1.3x", Fault("step_slowdown", 1.3)),
        (
            "noisy_neighbour=3,period=5m,duty=10%",
            Fault("noisy_neighbour", 3, options={"period": 300.0, "duty": 0.1}),
        ),
        ("frozen_gauges,start=90s", Fault("frozen_gauges", 1.0, 1.0, 90.0)),
        ("clamp_max_batch=16", Fault("clamp_max_batch", 16)),
        ("http_500", Fault("http_500", 1.0)),
        ("http_500=5%", Fault("http_500", 0.05)),
        ("http_500,share=5%", Fault("http_500", 0.05)),
        ("stall=500ms,share=0.1,after=3", Fault("stall", 0.5, 0.1, options={"after": 3.0})),
        (
            "crash=30s,start=1h,every=2h,keeps_leaks,spawn_lottery=10%",
            Fault("crash", 30, 1.0, HOUR, options={"every": 2 * HOUR, "keeps_leaks": 1.0, "spawn_lottery": 0.1}),
        ),
        (
            "deploy=1m,memory=-64MiB,speed=-5%",
            Fault("deploy", 60, options={"memory": -64.0 * MIB, "speed": -0.05}),
        ),
    ],
)
def test_values_are_read_in_base_units(text, fault):
    assert parse_fault(text) == fault


def test_a_fault_without_a_start_begins_now():
    assert parse_fault("http_500", now_s=12.5).start_s == 12.5
    assert parse_fault("http_500,start=0s", now_s=12.5).start_s == 0.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "unknown fault ''; known: gpu_leak_per_request"),
        ("http_501", "did you mean http_50"),
        ("host_leak_per_hours=1MiB", "did you mean host_leak_per_hour?"),
        ("host_leak_per_hour", "needs a value in bytes per hour"),
        ("host_leak_per_hour=", "cannot read ''"),
        ("host_leak_per_hour=5 apples", "cannot read '5 apples' as bytes per hour; write 64MiB or 64MiB/h"),
        ("host_leak_per_hour=5%", "cannot read '5%'"),
        ("host_leak_per_hour=-1MiB", "must be 0 or more"),
        ("host_leak_per_hour=1e999", "is inf"),
        ("crash=1e300", "no more than 1e+18"),
        ("crash=5s,start=1e300", "no more than 1e+18"),
        ("http_500,end=1e300", "no more than 1e+18"),
        ("host_leak_per_hour=1MiB,share=0.5", "has no share"),
        ("host_leak_per_token=5/h", "cannot read '5/h' as bytes"),
        ("http_500=120%", "is 1.2; it must be 0 to 1 (share)"),
        ("http_500=10%,share=20%", "its value is its share"),
        ("http_500,strat=5s", "unknown option 'strat'; did you mean start?"),
        ("http_500,colour=red", "known here: share, start, end"),
        ("http_500,start=5s,start=6s", "written a second time"),
        ("http_500,start=5s,end=5s", "end 5s must come after start 5s"),
        ("http_500,start=-1s", "start is -1"),
        ("http_500,start=soon", "cannot read 'soon' as seconds"),
        ("http_500,", "unknown option ''"),
        ("step_slowdown=0.5", "must be 1 or more"),
        ("clamp_max_batch=0", "must be 1 or more"),
        ("clamp_max_batch=1.5", "must be a whole number"),
        ("high_water=5", "leave out the value"),
        ("high_water=false", "it is on, or left out"),
        ("cache_fill_per_hour=1GiB", "needs cap=..."),
        ("crash=5s,every=1ms", "every is 0.001"),
        ("deploy=5s,every=5s", "never come back; make every longer"),
        ("crash=5s,keeps_leaks=perhaps", "on or off"),
        ("deploy,speed=-100%", "speed is -1"),
    ],
)
def test_a_mistake_is_named(text, complaint):
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert complaint in str(caught.value)


def test_a_fault_that_its_kind_does_not_allow_cannot_be_made_in_code_either():
    with pytest.raises(ConfigError, match="beside its value"):
        Fault("http_500", 0.5, share=0.5)
    with pytest.raises(ConfigError, match="nan"):
        Fault("host_leak_per_hour", math.nan)


WINDOW = ",start=10s,end=20s"


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("gpu_leak_per_request=100,share=25%", "gpu_leak_bytes_per_request", 25.0),
        ("gpu_leak_per_hour=3600", "gpu_leak_bytes_per_second", 1.0),
        ("kv_leak_per_disconnect=4,share=25%", "kv_leak_blocks_per_disconnect", 1.0),
        ("host_leak_per_hour=7200", "host_leak_bytes_per_second", 2.0),
        ("host_leak_per_token=64", "host_leak_bytes_per_token", 64.0),
        ("cache_fill_per_hour=3600,cap=10", "cache_fill_bytes_per_second", 1.0),
        ("cache_fill_per_hour=3600,cap=10", "cache_cap_bytes", 10.0),
        ("high_water", "high_water", True),
        ("fd_leak_per_hour=3600", "fd_leak_per_second", 1.0),
        ("shm_leak_per_hour=3600", "shm_leak_bytes_per_second", 1.0),
        ("decode_slows_per_hour=360%", "decode_per_second", 0.001),
        ("step_slowdown=1.5", "step_factor", 1.5),
        ("noisy_neighbour=2,period=1h,duty=100%", "step_factor", 2.0),
        ("stuck_request=10%", "stuck_share", 0.1),
        ("zombie=10%", "zombie_share", 0.1),
        ("frozen_gauges", "gauges_frozen", True),
        ("limit_ignored", "limit_ignored", True),
        ("oom_at_bytes=5GiB", "oom_at_bytes", 5.0 * 2**30),
        ("slow_metrics=3s", "metrics_delay_seconds", 3.0),
        ("renamed_metrics", "metrics_renamed", True),
    ],
)
def test_a_condition_holds_from_its_start_to_just_before_its_end(text, field, value):
    healthy = getattr(Conditions(), field)
    assert value != healthy
    for t_s, expected in [
        (0.0, healthy),
        (math.nextafter(10, 0), healthy),
        (10.0, value),
        (15.0, value),
        (math.nextafter(20, 0), value),
        (20.0, healthy),
        (1e9, healthy),
    ]:
        assert getattr(at(text + WINDOW, t_s), field) == pytest.approx(expected), t_s


def test_every_kind_acts_somewhere():
    """A kind that is in the table and that no query knows would be a flag that does nothing."""
    for kind in FAULT_KINDS.values():
        value = kind.default if kind.default is not None else 7.0
        options = {name: 5.0 for name, option in kind.options.items() if option.required}
        one = FaultPlan([Fault(kind.name, value, options=options)])
        acts = {
            Where.ANSWER: lambda p: p.answer_fault(1, 0.0) is not None,
            Where.LIFE: lambda p: len(p.life_events(0.0, 1.0)) == 1,
        }.get(kind.where, lambda p: p.conditions(0.0, 0.0) != FaultPlan().conditions(0.0, 0.0))
        assert acts(one), kind.name
        assert not acts(FaultPlan()), kind.name


def test_several_of_one_kind_add_up_multiply_or_the_strictest_binds():
    seen = plan(
        "host_leak_per_hour=3600",
        "host_leak_per_hour=7200",
        "step_slowdown=2",
        "step_slowdown=3",
        "oom_at_bytes=9",
        "oom_at_bytes=8",
        "clamp_max_batch=5",
        "clamp_max_batch=4",
        "slow_metrics=1s",
        "slow_metrics=2s",
        "zombie=10%",
        "zombie=20%",
        "decode_slows_per_hour=100%",
        "decode_slows_per_hour=50%,start=1h",
    ).conditions(2 * HOUR, 0.0)
    assert (seen.host_leak_bytes_per_second, seen.step_factor, seen.oom_at_bytes) == (3.0, 6.0, 8.0)
    assert (seen.max_batch_clamp, seen.metrics_delay_seconds, seen.zombie_share) == (4, 3.0, 0.2)
    assert seen.decode_factor(2 * HOUR) == pytest.approx(1 + 2 + 0.5)


@pytest.mark.parametrize(
    ("option", "t_h", "started_h", "factor"),
    [
        ("", 0.0, 0.0, 1.0),
        ("", 2.0, 0.0, 1.0),  # it begins at 2 h
        ("", 3.0, 0.0, 1.1),
        ("", 7.0, 0.0, 1.5),
        ("", 9.0, 0.0, 1.5),  # it ended at 7 h, and what it did stays
        ("", 5.0, 4.0, 1.1),  # a restart at 4 h cured it
        ("", 9.0, 8.0, 1.0),
        (",survives_restart", 5.0, 4.0, 1.3),
        (",survives_restart", 9.0, 8.0, 1.5),
    ],
)
def test_decoding_slows_since_the_later_of_its_start_and_the_servers_and_stops_at_its_end(
    option, t_h, started_h, factor
):
    text = f"decode_slows_per_hour=10%,start=2h,end=7h{option}"
    assert at(text, t_h * HOUR, started_h * HOUR).decode_factor(t_h * HOUR) == pytest.approx(factor)


def test_a_clamp_counts_for_the_start_that_it_met_until_the_next():
    text = "clamp_max_batch=16,start=10s,end=20s"
    for started_s, clamp in [(9.9, None), (10.0, 16), (19.9, 16), (20.0, None)]:
        assert at(text, 1000.0, started_s).max_batch_clamp == clamp


def test_a_noisy_neighbour_comes_at_the_start_of_each_period_and_goes_when_its_share_is_over():
    text = "noisy_neighbour=2,period=10s,duty=30%,start=100s,end=125s"
    for t_s, factor in [
        (99.9, 1),
        (100.0, 2),
        (102.9, 2),
        (103.0, 1),
        (109.9, 1),
        (110.0, 2),
        (113.0, 1),
        (120.0, 2),
        (123.0, 1),
        (130.0, 1),
    ]:
        assert at(text, t_s).step_factor == factor, t_s


def test_a_cache_fills_to_its_cap_and_a_smaller_cap_never_shrinks_it():
    filling = at("cache_fill_per_hour=3600,cap=10", 0.0)
    assert filling.cache_after(0.0, 4.0) == 4.0
    assert filling.cache_after(4.0, 100.0) == 10.0
    assert filling.cache_after(50.0, 1.0) == 50.0
    assert Conditions().cache_after(4.0, 100.0) == 4.0


@given(st.lists(faults(), max_size=6), st.floats(0, 2e8), st.floats(0, 2e8), st.floats(0, 1))
def test_conditions_hold_as_long_as_they_say(some, t_s, started_s, part):
    first = FaultPlan(some).conditions(t_s, started_s)
    assert first.valid_from_s <= t_s < first.valid_until_s
    until_s = min(first.valid_until_s, t_s + 1e9)
    later_s = t_s + part * (until_s - t_s)
    if t_s <= later_s < first.valid_until_s:
        again = FaultPlan(some)
        assert again.conditions(later_s, started_s) == first
        assert again.conditions(t_s, started_s) == first, "asked in another order"
    assert first.decode_factor(t_s) >= 1.0 - 1e-9


@given(st.lists(faults(), max_size=5), st.floats(0, 1e6))
def test_decoding_slows_without_jumps_where_conditions_change(some, started_s):
    one = FaultPlan(fault for fault in some if fault.name == "decode_slows_per_hour")
    seen = one.conditions(started_s, started_s)
    for _ in range(20):
        edge_s = seen.valid_until_s
        if edge_s == math.inf:
            break
        after = one.conditions(edge_s, started_s)
        assert after.decode_factor(edge_s) == pytest.approx(seen.decode_factor(edge_s), rel=1e-6)
        seen = after


def test_conditions_are_kept_until_something_changes():
    one = plan("step_slowdown=2,start=10s")
    first = one.conditions(0.0, 0.0)
    assert one.conditions(9.9, 0.0) is first
    assert one.conditions(10.0, 0.0).step_factor == 2.0
    version = one.version
    added = one.add(parse_fault("step_slowdown=3"))
    assert one.version != version
    assert one.conditions(10.0, 0.0).step_factor == 6.0
    assert one.remove(added).value == 3.0
    assert one.conditions(10.0, 0.0).step_factor == 2.0
    assert one.conditions(10.0, 5.0).valid_from_s == 10.0


def test_ids_are_never_given_twice_and_an_unknown_one_is_refused():
    one = plan("http_500", "zombie")
    one.remove(2)
    assert one.add(parse_fault("zombie")) == 3
    assert list(one.faults) == [1, 3]
    with pytest.raises(ConfigError, match="fault 2 is not in the plan; there: 1, 3"):
        one.remove(2)


def hit(one, t_s=0.0, requests=20_000):
    return {request for request in range(requests) if one.answer_fault(request, t_s) is not None}


def test_a_share_of_the_requests_is_hit_and_a_larger_share_hits_the_same_and_more():
    few, many = hit(plan("http_500=5%")), hit(plan("http_500=20%"))
    assert len(few) / 20_000 == pytest.approx(0.05, abs=0.005)
    assert len(many) / 20_000 == pytest.approx(0.2, abs=0.01)
    assert few < many
    assert hit(plan("http_500=5%", seed=1)) != few
    assert hit(plan("http_429=5%")) != few, "kinds choose independently"
    assert hit(plan("http_500=0")) == set()
    assert len(hit(plan("http_500"))) == 20_000


def test_which_requests_are_hit_does_not_depend_on_what_else_was_in_the_plan_or_asked():
    alone = plan("http_500=10%")
    other = plan("zombie=50%", "stall=1s,share=1%")
    other.add(parse_fault("http_500=10%"))
    backwards = [request for request in reversed(range(1000)) if _name(other.answer_fault(request, 0.0)) == "http_500"]
    assert backwards == sorted((request for request in hit(alone, requests=1000)), reverse=True)


def _name(fault):
    return None if fault is None else fault.name


def test_one_answer_fault_is_chosen_refusals_first_and_the_rarest_of_a_kind():
    one = plan("stall=1s", "stall=60s,share=10%", "cut_reset=50%", "http_429=10%")
    names = [_name(one.answer_fault(request, 0.0)) for request in range(5000)]
    assert names.count("http_429") / 5000 == pytest.approx(0.1, abs=0.02)
    assert names.count("cut_reset") / 5000 == pytest.approx(0.45, abs=0.03)
    stalls = [fault.value for request in range(5000) if _name(fault := one.answer_fault(request, 0.0)) == "stall"]
    assert stalls.count(60.0) / len(stalls) == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("name", sorted(kind.name for kind in FAULT_KINDS.values() if kind.where is Where.ANSWER))
def test_an_answer_fault_begins_at_its_start_and_is_over_at_its_end(name):
    text = f"{name}{'=1s' if name == 'stall' else ''}{WINDOW}"
    seen = [_name(plan(text).answer_fault(1, t_s)) for t_s in (9.99, 10.0, 19.99, 20.0)]
    assert seen == [None, name, name, None]


def test_answer_faults_that_come_in_the_middle_say_after_how_many_tokens():
    assert parse_fault("cut_reset,after=7").option("after") == 7.0
    assert parse_fault("cut_reset").option("after") == 1.0


@pytest.mark.parametrize(
    ("text", "ask"),
    [
        ("stuck_request=30%", lambda p, request, t_s: p.is_stuck(request, t_s)),
        ("zombie=30%", lambda p, request, t_s: p.is_zombie(request, t_s)),
        ("kv_leak_per_disconnect=0.3", lambda p, request, t_s: p.kv_leak_blocks(request, t_s)),
        ("kv_leak_per_disconnect=1,share=30%", lambda p, request, t_s: p.kv_leak_blocks(request, t_s)),
    ],
)
def test_a_share_of_requests_is_stuck_goes_on_or_leaks_in_the_window_only(text, ask):
    one = plan(text + WINDOW)
    for t_s, share in [(9.99, 0.0), (10.0, 0.3), (19.99, 0.3), (20.0, 0.0)]:
        assert sum(ask(one, request, t_s) for request in range(5000)) / 5000 == pytest.approx(share, abs=0.03)


def test_kv_blocks_lost_by_disconnects_have_the_mean_of_the_conditions():
    one = plan("kv_leak_per_disconnect=2.5,share=40%", "kv_leak_per_disconnect=1")
    mean = sum(one.kv_leak_blocks(request, 0.0) for request in range(10_000)) / 10_000
    assert mean == pytest.approx(one.conditions(0.0, 0.0).kv_leak_blocks_per_disconnect, rel=0.03)


def test_crashes_and_deploys_come_in_order_at_their_start_and_repeat_before_their_end():
    one = plan(
        "crash=30s,start=100s,every=50s,end=250s,keeps_leaks", "deploy=60s,start=150s", "crash,start=40s", "http_500"
    )
    events = one.life_events(0.0, 1000.0)
    assert [(e.t_s, e.kind, e.down_seconds, e.keeps_leaks, e.fault_id) for e in events] == [
        (40.0, "crash", 0.0, False, 3),
        (100.0, "crash", 30.0, True, 1),
        (150.0, "crash", 30.0, True, 1),
        (150.0, "deploy", 60.0, False, 2),
        (200.0, "crash", 30.0, True, 1),
    ]
    assert [e.t_s for e in one.life_events(100.0, 150.0)] == [100.0]
    with pytest.raises(ValueError, match="need an end"):
        one.life_events(0.0, math.inf)


@given(
    st.floats(0, 1e5),
    st.floats(100, 1e4),
    st.lists(st.floats(0, 2e5), min_size=2, max_size=8).map(sorted),
)
def test_life_events_of_adjoining_spans_are_those_of_the_whole(start_s, every, cuts):
    one = FaultPlan([Fault("crash", 1.0, start_s=start_s, end_s=start_s + 1e5, options={"every": every})])
    pieces = [e for a, b in pairwise(cuts) for e in one.life_events(a, b)]
    assert pieces == one.life_events(cuts[0], cuts[-1])


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(2, 300)), min_size=1, max_size=3),
    st.floats(0, 2e3),
    st.floats(0, 500),
)
def test_the_next_life_event_is_the_first_of_all(crashes, from_s, length):
    one = FaultPlan(
        [Fault("crash", 1.0, start_s=start_s, end_s=1500.0, options={"every": every}) for start_s, every in crashes]
    )
    events = one.life_events(from_s, from_s + length)
    assert one.next_life_event(from_s, from_s + length) == (events[0] if events else None)


def test_a_deploy_says_what_the_new_release_needs_and_how_fast_it_is():
    event = plan("deploy=30s,memory=64MiB,speed=-5%").life_events(0.0, 1.0)[0]
    assert (event.kind, event.memory_bytes, event.speed_ratio) == (LifeKind.DEPLOY, 64.0 * MIB, -0.05)
    assert event.fault.name == "deploy"


def test_the_spawn_lottery_fixes_the_speed_of_each_start_within_its_ratio():
    one = plan("crash=5s,start=1h,spawn_lottery=20%")
    factors = [one.spawn_factor(number) for number in range(1000)]
    assert factors == [one.spawn_factor(number) for number in range(1000)]
    assert 0.8 <= min(factors) < 0.82
    assert 1.18 < max(factors) <= 1.2
    assert plan("crash=5s,start=1h").spawn_factor(3) == 1.0
    assert plan("crash=5s,start=1h,spawn_lottery=20%", seed=5).spawn_factor(3) != factors[3]


def test_switches_tell_when_faults_begin_and_end():
    one = plan("zombie,start=10s,end=20s", "http_500,start=20s", "crash,start=15s")
    assert one.switches(0.0, 100.0) == [
        Switch(10.0, True, 1, one.faults[1]),
        Switch(20.0, False, 1, one.faults[1]),
        Switch(20.0, True, 2, one.faults[2]),
    ]
    assert [switch.t_s for switch in one.switches(10.0, 20.0)] == [10.0]
