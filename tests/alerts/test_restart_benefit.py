"""Does a restart help: what is claimed and what is not, of series whose truth is known.

Per cent of 1,000 series (seeds 0 to 999) of N restarts and a closing measurement, 4 h apart, 12 prompts each, of which
2 % have five times the noise. "Claimed" is CONFIRMED, LIKELY, PARTIAL or HARMFUL; "cure" is the first two. "The same"
are series in which it gets worse by 10.5 % with each ageing and restarts take nothing back; a lottery of 10 % fixes each
start at 1 +- up to that.

    claimed                                N=2      N=3      N=5      N=8
    nothing                                0.0      0.0      0.0      0.0
    lottery of 10 %                        0.0      0.0      0.1      0.0
    lottery of 30 %                        0.0      0.3      0.1      0.0
    lottery of 10 %, heavy noise           0.1      0.1      0.2      0.6
    slow noise                             0.0      0.0      0.0      0.0
    slow noise, lottery of 10 %            0.0      0.0      0.0      0.0
    random walk, lottery of 10 %           0.0      0.0      0.0      0.0
    noisy neighbour of 30 %                0.0      0.1      0.0      0.0
    daily wave of 10 %, lottery of 10 %    0.0      0.0      0.0      0.0
    begun at a bad time                    0.0      0.0      0.0      0.0
    gets worse, restarts do not help       0.0      0.0      0.0      0.0
    the same, lottery of 10 %              0.3      1.4      1.9      0.3
    the same, lottery of 30 %              1.4      2.5      2.5      1.9

    cure                                   N=2      N=3      N=5      N=8
    6 % an ageing                          5.9      21.4     62.9     96.4
    10 %                                   78.0     75.7     100.0    100.0
    10 %, lottery of 10 %                  13.9     31.8     89.6     99.6
    20 %, lottery of 10 %                  50.1     81.3     99.9     100.0
    20 %, lottery of 30 %                  7.4      21.6     77.9     94.0
    20 %, lottery of 10 %, noise 4 %       9.5      26.7     88.2     100.0
    20 %, slow noise, lottery of 10 %      36.7     70.0     97.3     100.0
    20 %, noisy neighbour of 30 %          25.1     36.2     32.7     69.8
"""

import json
import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alerts.restart_benefit import (
    METRICS,
    Cycle,
    Doubt,
    RestartBenefit,
    RestartVerdict,
    Sitting,
    judge_restarts,
    t_quantile,
)
from alerts.verdict import Ruling
from serving.errors import ConfigError

HOUR = 3600.0
MIB = 2**20
DECODE = "decode_seconds_per_token@8"
MEMORY = "process_memory_bytes"
SHM = "shared_memory_bytes"
CLAIMED = {RestartVerdict.CONFIRMED, RestartVerdict.LIKELY, RestartVerdict.PARTIAL, RestartVerdict.HARMFUL}
CURE = {RestartVerdict.CONFIRMED, RestartVerdict.LIKELY}


def sitting(level: float, *, age_s: float | None = 4 * HOUR, noise: float = 0.0, rng=None, **seen) -> Sitting:
    """Twelve prompts, the longer ones slower, all `exp(level)` times as slow as they can be."""
    rng = rng or random.Random(0)
    values = {}
    for prompt in range(12):
        sd = noise * (5 if rng.random() < 0.02 else 1)
        values[f"p{prompt}"] = 0.02 * (1 + prompt / 20) * math.exp(level + rng.gauss(0, sd))
    return Sitting({DECODE: values}, age_seconds=age_s, **seen)


def judge(aged, fresh, *, noise=0.0, rng=None, age_s=4 * HOUR, first_age_s=None, **options) -> RestartBenefit:
    """Judge levels A1, B1, A2, ...; `aged` has one more than `fresh` where there is a closing measurement."""
    ages = [age_s if first_age_s is None else first_age_s] + [age_s] * len(fresh)
    before = [sitting(level, age_s=age, noise=noise, rng=rng) for level, age in zip(aged, ages, strict=False)]
    after = [sitting(level, age_s=300, noise=noise, rng=rng) for level in fresh]
    cycles = [Cycle(*pair) for pair in zip(before, after, strict=False)]
    return judge_restarts(cycles, closing=before[len(fresh)] if len(before) > len(fresh) else None, **options)


def of_memory(aged, fresh, name=MEMORY, **seen) -> RestartBenefit:
    def look(mib, age_s, peak):
        return Sitting({name: {"": mib * MIB}}, age_seconds=age_s, peak_running=peak)

    peaks = seen.get("peaks", (8.0, 8.0))
    before = [look(level, 4 * HOUR, peaks[1]) for level in aged]
    cycles = [Cycle(old, look(new, 300, peaks[0])) for old, new in zip(before, fresh, strict=False)]
    return judge_restarts(cycles, closing=before[len(fresh)], room_bytes={name: 8192.0 * MIB})


@dataclass(frozen=True)
class World:
    """What happens to levels. Amounts are logarithms.

    Attributes:
        decline: gained in one ageing and lost with the restart.
        survives: gained in one ageing and kept.
        lottery: each start is fixed at 1 +- up to this.
        noise: of one whole measurement, standard deviation.
        prompts: of one prompt.
        host: what else the host does: nothing, or a name below.
    """

    decline: float = 0.0
    survives: float = 0.0
    lottery: float = 0.0
    noise: float = 0.005
    prompts: float = 0.03
    host: str = ""

    def levels(self, restarts: int, rng: random.Random) -> tuple[list[float], list[float]]:
        t_h, slow, walk, neighbour = 0.0, rng.gauss(0, 0.05), 0.0, rng.random() < 0.3
        phase = rng.uniform(0, 24)
        aged, fresh = [], []

        def look(start: float) -> float:
            host = {
                "slow": slow,
                "walk": walk,
                "neighbour": 0.3 * neighbour,
                "daily": 0.1 * math.sin(2 * math.pi * (t_h + phase) / 24),
            }.get(self.host, 0.0)
            return start + host + self.survives * t_h / 4 + rng.gauss(0, self.noise)

        def draw() -> float:
            return math.log1p(self.lottery * rng.uniform(-1, 1))

        # "bad": somebody began because it was slow just then.
        aged.append(look(draw()) + self.decline + (0.3 if self.host == "bad" else 0.0))
        for _ in range(restarts):
            start = draw()
            fresh.append(look(start))
            t_h += 4.0
            keeps = math.exp(-4 / 16)
            slow = keeps * slow + rng.gauss(0, 0.05 * math.sqrt(1 - keeps * keeps))
            walk += rng.gauss(0, 0.05)
            neighbour = rng.random() < 0.3 if rng.random() < 0.6 else neighbour
            aged.append(look(start) + self.decline)
        return aged, fresh


NOTHING = {
    "nothing": World(),
    "lottery of 10 %": World(lottery=0.1),
    "lottery of 30 %": World(lottery=0.3),
    "lottery of 10 %, heavy noise": World(lottery=0.1, noise=0.06, prompts=0.15),
    "slow noise": World(host="slow"),
    "slow noise, lottery of 10 %": World(host="slow", lottery=0.1),
    "random walk, lottery of 10 %": World(host="walk", lottery=0.1),
    "noisy neighbour of 30 %": World(host="neighbour", lottery=0.1),
    "daily wave of 10 %, lottery of 10 %": World(host="daily", lottery=0.1),
    "begun at a bad time": World(host="bad", lottery=0.1),
    "gets worse, restarts do not help": World(survives=0.1),
    "the same, lottery of 10 %": World(survives=0.1, lottery=0.1),
    "the same, lottery of 30 %": World(survives=0.1, lottery=0.3),
}
DECAY = {
    "6 % an ageing": World(decline=math.log(1.06)),
    "10 %": World(decline=math.log(1.1)),
    "10 %, lottery of 10 %": World(decline=math.log(1.1), lottery=0.1),
    "20 %, lottery of 10 %": World(decline=math.log(1.2), lottery=0.1),
    "20 %, lottery of 30 %": World(decline=math.log(1.2), lottery=0.3),
    "20 %, lottery of 10 %, noise 4 %": World(decline=math.log(1.2), lottery=0.1, noise=0.04, prompts=0.1),
    "20 %, slow noise, lottery of 10 %": World(decline=math.log(1.2), lottery=0.1, host="slow"),
    "20 %, noisy neighbour of 30 %": World(decline=math.log(1.2), lottery=0.1, host="neighbour"),
}


def count_verdicts(world: World, name: str, restarts: int, series: int) -> Counter[RestartVerdict]:
    verdicts: Counter[RestartVerdict] = Counter()
    for seed in range(series):
        rng = random.Random(f"{name}/{restarts}/{seed}")
        aged, fresh = world.levels(restarts, rng)
        verdicts[judge(aged, fresh, noise=world.prompts, rng=rng).verdict] += 1
    return verdicts


def share(verdicts: Counter[RestartVerdict], wanted: set[RestartVerdict]) -> float:
    return sum(verdicts[one] for one in wanted) / verdicts.total()


@pytest.mark.parametrize("restarts", [2, 5])
@pytest.mark.parametrize("name", NOTHING)
def test_of_200_series_without_a_cure_hardly_any_is_claimed(name, restarts):
    verdicts = count_verdicts(NOTHING[name], name, restarts, 200)
    # Where it does get worse, "restarts do not help" is the only thing left to err about: once in forty by design.
    assert share(verdicts, CLAIMED) <= (0.04 if NOTHING[name].survives else 0.01), verdicts


@pytest.mark.parametrize(
    ("name", "power"),
    [
        ("10 %", 0.99),
        ("10 %, lottery of 10 %", 0.85),
        ("20 %, lottery of 10 %", 0.99),
        ("20 %, lottery of 30 %", 0.7),
        ("20 %, lottery of 10 %, noise 4 %", 0.85),
        ("20 %, slow noise, lottery of 10 %", 0.95),
    ],
)
def test_of_200_series_with_a_decay_worth_finding_five_restarts_find_most(name, power):
    verdicts = count_verdicts(DECAY[name], name, 5, 200)
    assert share(verdicts, CURE) >= power, verdicts


# ---- what follows exactly


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-0.5, 0.5), min_size=5, max_size=5),
    st.floats(-3, 3),
    st.lists(st.floats(-0.05, 0.05), min_size=9, max_size=9),
)
def test_luck_of_starts_and_the_scale_of_figures_change_nothing_about_the_decline(luck, scale, noise):
    plain = judge(noise[:5], noise[5:])
    lucky = judge(
        [level + scale + start for level, start in zip(noise[:5], luck, strict=True)],
        [level + scale + start for level, start in zip(noise[5:], luck[1:], strict=True)],
    )
    wanted, got = plain.metrics[0].decline, lucky.metrics[0].decline
    assert (got.estimate, got.low, got.high) == pytest.approx((wanted.estimate, wanted.low, wanted.high), abs=1e-9)


def test_a_cure_is_said_with_its_size_and_a_schedule():
    result = judge([0.2, 0.21, 0.19, 0.2, 0.2], [0.0, 0.01, 0.0, -0.01], restart_cost_seconds=360.0)
    (one,) = result.metrics
    assert (result.verdict, result.ruling) == (RestartVerdict.CONFIRMED, Ruling.FAIL)
    assert one.gets_worse
    assert one.doubt is None
    assert one.decline.estimate == pytest.approx(math.expm1(0.2), abs=0.01)
    assert one.decline.low < one.decline.estimate < one.decline.high
    assert one.restored_ratio == pytest.approx(1.0, abs=0.1)
    assert [row.better.change for row in one.rows][:2] == pytest.approx([math.expm1(0.2), math.expm1(0.2)])
    rate = one.decline.estimate / (4 * HOUR)
    assert one.schedule.cheapest == pytest.approx(math.sqrt(2 * 360 / rate))
    assert one.schedule.advised == pytest.approx(0.8 * one.schedule.earliest)
    assert one.schedule.earliest < 0.1 / rate < one.schedule.latest
    assert "4 starts" in result.sentence
    assert "keeps the loss under 10%" in result.next_step


def test_age_may_be_counted_in_requests():
    fresh = [Sitting(sitting(0.001 * start).figures, age_requests=10) for start in range(4)]
    aged = [Sitting(sitting(0.1 + 0.001 * start).figures, age_requests=2000) for start in range(5)]
    cycles = [Cycle(old, new) for old, new in zip(aged, fresh, strict=False)]
    result = judge_restarts(cycles, closing=aged[4], clock="requests")
    assert result.metrics[0].schedule.unit == "requests"
    assert 1000 < result.metrics[0].schedule.earliest < 2000
    assert "2,000 requests" in result.sentence


def test_one_restart_proves_nothing_however_large_its_effect():
    assert judge([0.7, 0.7], [0.0]).verdict is RestartVerdict.CONSISTENT_WITH
    assert judge([0.7], [0.0]).metrics[0].doubt is Doubt.FEW
    assert judge([0.0, 0.0], [0.7]).verdict is RestartVerdict.INCONCLUSIVE


def test_two_cycles_that_agree_are_likely_and_need_the_relapse_too():
    assert judge([0.3, 0.3, 0.3], [0.0, 0.02]).verdict is RestartVerdict.LIKELY
    assert judge([0.3, 0.3], [0.0, 0.02]).verdict is RestartVerdict.CONSISTENT_WITH
    assert judge([0.3, 0.3, 0.03], [0.0, 0.02]).verdict is RestartVerdict.CONSISTENT_WITH


def test_restarts_that_take_back_a_third_are_a_partial_cure():
    # Each start gains 0.2 and each restart takes back 0.07.
    fresh = [0.13 * start for start in range(6)]
    result = judge([0.2 - 0.13 + level for level in fresh] + [fresh[-1] + 0.2], fresh)
    assert result.verdict is RestartVerdict.PARTIAL
    assert result.metrics[0].restored_ratio == pytest.approx(0.35, abs=0.03)
    assert "outside the process" in result.next_step


def test_what_gets_worse_whatever_is_restarted_is_said_to_be_elsewhere():
    fresh = [0.1 * start for start in range(6)]
    result = judge([*fresh, 0.6], fresh)
    assert (result.verdict, result.ruling) == (RestartVerdict.NO_EFFECT, Ruling.FAIL)
    assert result.metrics[0].gets_worse
    assert "host" in result.next_step


def test_a_healthy_server_needs_no_restarts():
    result = judge([0.0, 0.002, 0.001, 0.0], [0.001, 0.0, 0.002])
    assert (result.verdict, result.ruling) == (RestartVerdict.NO_EFFECT, Ruling.PASS)
    assert not result.metrics[0].gets_worse


def test_a_server_that_warms_up_for_hours_is_harmed_by_restarts():
    result = judge([0.0, 0.01, 0.0, 0.0], [0.15, 0.14, 0.15])
    assert (result.verdict, result.ruling) == (RestartVerdict.HARMFUL, Ruling.FAIL)
    assert "schedule" in result.next_step


def test_what_each_restart_leaves_behind_is_harm_and_what_leaks_in_spite_of_restarts_is_not_cured():
    left = of_memory([0, 101, 201, 299, 400], [100, 200, 300, 401], SHM)
    assert left.verdict is RestartVerdict.HARMFUL
    assert "+100 MiB" in left.sentence
    leaks = of_memory([100, 201, 300, 400, 500], [100, 200, 300, 401], SHM)
    assert (leaks.verdict, leaks.metrics[0].gets_worse) == (RestartVerdict.NO_EFFECT, True)


def test_memory_that_restarts_give_back_is_said_in_bytes_with_the_time_to_the_limit():
    result = of_memory([2200, 2201, 2199, 2200], [2000, 2001, 1999])
    assert result.verdict is RestartVerdict.CONFIRMED
    assert result.metrics[0].decline.estimate == pytest.approx(200 * MIB, rel=0.02)
    assert result.metrics[0].schedule.earliest == pytest.approx(8192 / 200 * 4 * HOUR, rel=0.1)
    assert "twice as much" in result.next_step


def test_memory_after_a_load_peak_may_just_be_kept():
    result = of_memory([2200, 2201, 2199, 2200], [2000, 2001, 1999], peaks=(8.0, 40.0))
    assert (result.verdict, result.metrics[0].doubt) == (RestartVerdict.CONSISTENT_WITH, Doubt.PEAKS)
    assert result.ruling is Ruling.INCONCLUSIVE


def test_a_first_start_that_was_far_older_is_seen_and_not_called_a_cure():
    result = judge([0.4, 0.0, 0.01, 0.0, 0.0], [0.0, 0.01, 0.0, 0.01], first_age_s=5 * 24 * HOUR)
    assert (result.verdict, result.metrics[0].doubt) == (RestartVerdict.CONSISTENT_WITH, Doubt.FIRST_START)
    assert "age as long" in result.next_step


def test_measurements_at_other_loads_are_not_compared():
    aged = [sitting(0.3, running=12.0)] * 5
    cycles = [Cycle(old, sitting(0.0, age_s=300, running=8.0)) for old in aged[:4]]
    result = judge_restarts(cycles, closing=aged[4])
    assert result.verdict is RestartVerdict.INCONCLUSIVE
    assert "same load" in " ".join([result.sentence, *result.notes])
    alike = [Cycle(sitting(0.3, running=8.4), cycle.after) for cycle in cycles]
    assert judge_restarts(alike, closing=sitting(0.3, running=8.4)).verdict is RestartVerdict.CONFIRMED


def test_prompts_that_failed_once_are_left_out_everywhere():
    whole = judge([0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0])
    aged, fresh = sitting(0.2), sitting(0.0, age_s=300)
    torn = {name: value for name, value in fresh.figures[DECODE].items() if name != "p3"}
    cycles = [Cycle(aged, Sitting({DECODE: torn}, 300)), Cycle(aged, fresh), Cycle(aged, fresh)]
    got = judge_restarts(cycles, closing=aged)
    assert got.verdict is whole.verdict is RestartVerdict.CONFIRMED
    assert got.metrics[0].rows[1].better.prompts == 11
    cycles[1] = Cycle(aged, Sitting({DECODE: dict(list(torn.items())[:5])}, 300))
    assert "1 of 7 measurements left out" in " ".join(judge_restarts(cycles, closing=aged).notes)


def test_it_says_how_many_more_restarts_would_decide_and_they_do():
    declines = [0.12, 0.01, 0.09]
    first = judge([0.0, *declines], [0.0, 0.0, 0.0])
    assert first.verdict is RestartVerdict.INCONCLUSIVE
    more = first.metrics[0].more_cycles
    assert f"about {more} more restarts" in first.next_step
    count = 3 + more
    longer = (declines * count)[:count]
    assert judge([0.0, *longer], [0.0] * count).verdict is RestartVerdict.CONFIRMED


def test_noise_that_no_number_of_restarts_outweighs_is_said():
    result = judge([0.0, 0.9, -0.8, 0.75, -0.9], [0.0, 0.0, 0.0, 0.0])
    assert result.metrics[0].more_cycles is None
    assert "longer" in result.next_step


def test_the_strongest_claim_decides_and_the_others_are_told():
    def look(level, mib, age_s):
        return Sitting(sitting(level).figures | {SHM: {"": mib * MIB}}, age_seconds=age_s)

    cycles = [Cycle(look(0.2, 100 * turn, 4 * HOUR), look(0.0, 100 * turn + 100, 300)) for turn in range(4)]
    result = judge_restarts(cycles, closing=look(0.2, 401, 4 * HOUR))
    assert (result.verdict, result.metric) == (RestartVerdict.CONFIRMED, DECODE)
    assert any("HARMFUL" in note and "shared memory" in note for note in result.notes)


def test_the_document_is_plain_json():
    text = json.dumps(judge([0.2, 0.2, 0.2, 0.2], [0.0, 0.0, 0.0]).to_json(), allow_nan=False)
    document = json.loads(text)
    assert document["verdict"] == "CONFIRMED"
    assert document["metrics"][0]["rows"][0]["better"]["prompts"] == 12
    json.dumps(judge([0.2], [0.0]).to_json(), allow_nan=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_a_figure_that_is_none_is_refused(value):
    bad = Sitting({DECODE: {"p": value}})
    with pytest.raises(ConfigError, match="leave out what was not measured"):
        judge_restarts([Cycle(bad, bad)])


def test_unknown_metrics_and_nothing_at_all_are_refused():
    with pytest.raises(ConfigError, match="no metric 'speed'"):
        judge_restarts([], metrics=["speed"])
    with pytest.raises(ConfigError, match="nothing was measured"):
        judge_restarts([Cycle(Sitting({}), Sitting({}))])


def test_nothing_measured_of_an_asked_metric_is_inconclusive():
    cycle = Cycle(sitting(0.1), sitting(0.0))
    assert judge_restarts([cycle], metrics=["ttft_seconds@8"]).verdict is RestartVerdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.95, 4, 2.13185),
        (0.995, 5, 4.03214),
        (0.975, 10, 2.22814),
        (0.99, 30, 2.45726),
        (0.975, 1000, 1.96234),
        (0.5, 7, 0.0),
        (0.05, 4, -2.13185),
    ],
)
def test_quantiles_are_those_of_the_tables(probability, freedom, quantile):
    assert t_quantile(probability, freedom) == pytest.approx(quantile, abs=2e-5)


def test_intervals_of_one_pair_hold_the_truth_as_often_as_they_say():
    rng = random.Random(5)
    held = 0
    for _ in range(600):
        result = judge([0.1], [0.0], noise=0.05, rng=rng)
        shift = result.metrics[0].rows[0].better
        held += shift.low <= math.expm1(0.1) <= shift.high
    assert 0.94 <= held / 600 <= 0.995


def test_every_metric_has_words_and_a_size_that_matters():
    assert all(metric.words and metric.material > 0 for metric in METRICS.values())
