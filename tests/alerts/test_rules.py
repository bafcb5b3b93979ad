import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from alerts.rules import RULES, DecodeSpeedDown, MemoryOnlyGrows, RestartCuredIt, make_rule
from alerts.state import AlertState, Sight, State, advance
from alerts.testing import RememberedPast, series
from serving.clock import NS
from serving.errors import ConfigError
from serving.records import Event

MIB = 2**20
GIB = 2**30
HOUR = 3600 * NS
MINUTE = 60 * NS
GPU = "gpu_memory_used_bytes"
PROCESS = "process_anonymous_memory_bytes"


def running(text, **more):
    return series("requests_running", text, interval_s=15, **more)


def memory(text, signal=PROCESS, labels=(("pid", "7"),), start_ns=0):
    """A series in MiB, one point a minute."""
    one = series(signal, text, labels=labels, start_ns=start_ns)
    return dataclasses.replace(one, values=tuple(value * MIB for value in one.values))


def tokens(per_second_and_points):
    """A counter sampled every 15 s; each pair is a rate and for how many samples it holds."""
    values, total = [0.0], 0.0
    for per_second, points in per_second_and_points:
        for _ in range(points):
            total += per_second * 15
            values.append(total)
    one = series("generation_tokens_total", f"0x{len(values) - 1}", interval_s=15)
    return dataclasses.replace(one, values=tuple(values))


class TestMemoryOnlyGrows:
    rule = MemoryOnlyGrows()

    @pytest.mark.parametrize(
        ("fact", "mib", "load", "sight"),
        [
            ("a steady rise at steady load", "1000+2x120", "4x480", Sight.PRESENT),
            ("a steady rise at falling load", "1000+2x120", "4x240 2x240", Sight.PRESENT),
            ("a steady rise while nothing runs", "1000+2x120", "0x480", Sight.PRESENT),
            ("a staircase", "1000x29 1080x29 1160x29 1240x29 1320", "4x480", Sight.PRESENT),
            (
                "a rise under peaks of single requests",
                "1000 3000 " + " ".join(f"{1000 + 2 * i} 4000" for i in range(60)),
                "4x480",
                Sight.PRESENT,
            ),
            ("a rise with a few points missing", "1000+2x40 _x8 1098+2x71", "4x480", Sight.PRESENT),
            ("a flat line", "1000x120", "4x480", Sight.ABSENT),
            ("a fall", "1000-2x120", "4x480", Sight.ABSENT),
            ("a rise below 64 MiB", "1000+0.5x120", "4x480", Sight.ABSENT),
            ("a rise below 5 % of a large process", "20000+2x120", "4x480", Sight.ABSENT),
            ("a warm-up that reaches a plateau", "1000+10x30 1300x90", "4x480", Sight.ABSENT),
            ("one jump", "1000x60 1300x60", "4x480", Sight.ABSENT),
            (
                "a sawtooth that gives everything back",
                "1000+10x30 1000+10x30 1000+10x30 1000+10x26",
                "4x480",
                Sight.ABSENT,
            ),
            ("a rise that the load explains", "1000+2x120", "4x240 8x240", Sight.NO_DATA),
            ("a rise at unknown load", "1000+2x120", "_x481", Sight.NO_DATA),
            ("a series with a hole of a third", "1000+2x40 _x45 1170+2x36", "4x480", Sight.NO_DATA),
        ],
    )
    def test_after_two_hours(self, fact, mib, load, sight):
        past = RememberedPast([memory(mib), running(load)])
        assert self.rule.look(past, 2 * HOUR).sight is sight, fact

    def test_a_finding_carries_the_numbers(self):
        past = RememberedPast([memory("1000+2x120", GPU, (("gpu", "0"),)), running("4x480")])
        (finding,) = self.rule.look(past, 2 * HOUR).findings
        figures = dict(finding.figures)
        assert (finding.signal, finding.labels, finding.t_ns) == (GPU, (("gpu", "0"),), 2 * HOUR)
        assert figures["growth_bytes_per_second"] == pytest.approx(2 * MIB / 60, rel=0.01)
        assert figures["window_seconds"] == 6900
        assert figures["running_second_half"] == 4
        assert finding.title == "GPU memory gpu 0 only grows"
        assert "MiB/h" in finding.evidence

    def test_each_gpu_is_judged_by_itself(self):
        past = RememberedPast(
            [
                memory("70000x120", GPU, (("gpu", "0"),)),
                memory("1000+2x120", GPU, (("gpu", "1"),)),
                running("4x480"),
            ]
        )
        (finding,) = self.rule.look(past, 2 * HOUR).findings
        assert finding.labels == (("gpu", "1"),)

    @pytest.mark.parametrize(("minute", "sight"), [(34, Sight.NO_DATA), (35, Sight.PRESENT)])
    def test_half_an_hour_after_the_warm_up_is_needed(self, minute, sight):
        past = RememberedPast([memory("1000+5x120"), running("4x480")])
        assert self.rule.look(past, minute * MINUTE).sight is sight

    def test_a_restart_begins_anew(self):
        past = RememberedPast([memory("1000+5x120"), running("4x480")], [Event(100 * MINUTE, "restart", "")])
        assert self.rule.look(past, 99 * MINUTE).sight is Sight.PRESENT
        look = self.rule.look(past, 120 * MINUTE)
        assert (look.sight, look.why) == (Sight.NO_DATA, "15 min since the warm-up, 30 min needed")

    @pytest.mark.parametrize(
        ("past", "why"),
        [
            (RememberedPast(), "nothing is recorded yet"),
            (RememberedPast([running("4x480")]), "no process or GPU memory"),
        ],
    )
    def test_missing_signals_are_named(self, past, why):
        look = self.rule.look(past, 2 * HOUR)
        assert look.sight is Sight.NO_DATA
        assert why in look.why


class TestDecodeSpeedDown:
    rule = DecodeSpeedDown()

    @pytest.mark.parametrize(
        ("fact", "rates", "load", "sight"),
        [
            ("30 % slower for the last 10 minutes", [(200, 200), (140, 40)], "4x240", Sight.PRESENT),
            ("stalled for the last 10 minutes", [(200, 200), (0, 40)], "4x240", Sight.PRESENT),
            ("15 % slower", [(200, 200), (170, 40)], "4x240", Sight.ABSENT),
            ("30 % slower for 4 minutes", [(200, 224), (140, 16)], "4x240", Sight.ABSENT),
            ("faster", [(200, 200), (260, 40)], "4x240", Sight.ABSENT),
            ("half the tokens at half the load", [(200, 200), (100, 40)], "4x199 2x40", Sight.NO_DATA),
            ("half the tokens at a load seen before", [(200, 60), (100, 180)], "4x59 2x180", Sight.ABSENT),
            ("idle now", [(200, 200), (0, 40)], "4x199 0x40", Sight.NO_DATA),
            ("idle in the first half hour", [(0, 120), (200, 120)], "0x119 4x120", Sight.NO_DATA),
            ("the target down now", [(200, 200)], "4x199", Sight.NO_DATA),
            ("no token counted at first", [(0, 120), (200, 120)], "4x240", Sight.NO_DATA),
        ],
    )
    def test_after_an_hour(self, fact, rates, load, sight):
        past = RememberedPast([tokens(rates), running(load)])
        assert self.rule.look(past, HOUR).sight is sight, fact

    def test_a_counter_that_is_not_sampled_is_not_a_stall(self):
        past = RememberedPast([tokens([(200, 200)]), running("4x240")])
        assert self.rule.look(past, HOUR).sight is Sight.NO_DATA

    def test_a_finding_carries_both_speeds_and_loads(self):
        past = RememberedPast([tokens([(200, 200), (140, 40)]), running("4x240")])
        (finding,) = self.rule.look(past, HOUR).findings
        figures = dict(finding.figures)
        assert figures["baseline_tokens_per_second"] == pytest.approx(50)
        assert figures["recent_tokens_per_second"] == pytest.approx(35)
        assert figures["change_ratio"] == pytest.approx(-0.3)
        assert "35.0 tokens/s per running request over the last 10 min, 50.0 in the first 30 min" in finding.evidence

    @pytest.mark.parametrize(("minute", "sight"), [(39, Sight.NO_DATA), (40, Sight.ABSENT)])
    def test_baseline_and_recent_stretch_must_not_overlap(self, minute, sight):
        past = RememberedPast([tokens([(200, 240)]), running("4x240")])
        assert self.rule.look(past, minute * MINUTE).sight is sight

    def test_the_counter_is_read_through_a_reset(self):
        one = tokens([(200, 240)])
        halfway = one.values[210]
        reset = tuple(value if turn <= 210 else value - halfway for turn, value in enumerate(one.values))
        past = RememberedPast([dataclasses.replace(one, values=reset), running("4x240")])
        assert self.rule.look(past, HOUR).sight is Sight.ABSENT

    @pytest.mark.parametrize(("slow", "latest"), [(0, 52), (100, 54), (159, 56)])
    def test_it_fires_after_ten_to_fifteen_minutes_of_slowness(self, slow, latest):
        past = RememberedPast([tokens([(200, 160), (slow, 160)]), running("4x320")])
        alert = AlertState()
        for minute in range(79):
            alert, changes = advance(
                alert, self.rule.look(past, minute * MINUTE).sight, minute * MINUTE, self.rule.patience
            )
            if any(change.state is State.FIRING for change in changes):
                assert 50 <= minute <= latest
                return
        pytest.fail("never fired")


class TestRestartCuredIt:
    rule = RestartCuredIt()
    restart = Event(HOUR, "restart", "counters began again")

    def past(self, mib_before, mib_after, load="4x480", rates=((200, 480),), events=()):
        return RememberedPast(
            [
                memory(f"{mib_before}x59", labels=(("pid", "7"),)),
                memory(f"{mib_after}x59", labels=(("pid", "8"),), start_ns=HOUR + MINUTE),
                running(load),
                tokens(rates),
            ],
            [self.restart, *events],
        )

    @pytest.mark.parametrize(
        ("fact", "mib", "load", "rates", "signals"),
        [
            ("memory fell by 30 %", (1000, 700), "4x480", [(200, 480)], [PROCESS]),
            ("memory fell by 10 %", (1000, 900), "4x480", [(200, 480)], []),
            ("memory rose", (1000, 1400), "4x480", [(200, 480)], []),
            ("a small process lost half", (100, 50), "4x480", [(200, 480)], []),
            ("memory fell with the load", (1000, 700), "4x239 1x240", [(200, 240), (50, 240)], []),
            ("decoding 30 % faster", (1000, 1000), "4x480", [(200, 240), (260, 240)], ["generation_tokens_total"]),
            ("decoding 10 % faster", (1000, 1000), "4x480", [(200, 240), (220, 240)], []),
            ("decoding began again", (1000, 1000), "4x480", [(0, 240), (220, 240)], ["generation_tokens_total"]),
            ("it stands still before and after", (1000, 1000), "4x480", [(0, 480)], []),
            ("faster because alone", (1000, 1000), "4x239 1x240", [(200, 240), (80, 240)], []),
        ],
    )
    def test_an_hour_later(self, fact, mib, load, rates, signals):
        look = self.rule.look(self.past(*mib, load, rates), 2 * HOUR)
        assert [finding.signal for finding in look.findings] == signals, fact
        assert look.sight is (Sight.PRESENT if signals else Sight.ABSENT), fact

    def test_a_finding_compares_before_and_after_and_names_a_deploy_beside_it(self):
        away = [Event(HOUR - MINUTE, "down", "refused"), Event(HOUR, "up", "answers")]
        past = self.past(1000, 700, events=[Event(HOUR - MINUTE, "deploy", "v2"), *away])
        (finding,) = self.rule.look(past, 2 * HOUR).findings
        assert dict(finding.figures)["before"] == 1000 * MIB
        assert dict(finding.figures)["after"] == 700 * MIB
        assert "(-30%)" in finding.evidence
        assert "deploy 'v2' fell into the same time" in finding.evidence
        assert finding.evidence.count("fell into") == 1

    def test_it_waits_for_the_half_hour_after(self):
        look = self.rule.look(self.past(1000, 700), HOUR + 34 * MINUTE)
        assert (look.sight, look.why) == (Sight.NO_DATA, "1 min until the last restart can be judged")
        assert self.rule.look(self.past(1000, 700), HOUR + 35 * MINUTE).sight is Sight.PRESENT

    def test_without_a_restart_there_is_nothing_to_see(self):
        assert self.rule.look(RememberedPast([running("4x480")]), 2 * HOUR).sight is Sight.ABSENT

    def test_it_is_told_for_a_day(self):
        past = self.past(1000, 700)
        assert self.rule.look(past, 25 * HOUR).sight is Sight.PRESENT
        assert self.rule.look(past, 25 * HOUR + 1).sight is Sight.ABSENT

    def test_two_restarts_close_together_judge_nothing(self):
        past = self.past(1000, 700, events=[Event(HOUR + 10 * MINUTE, "restart", "")])
        look = self.rule.look(past, 2 * HOUR)
        assert (look.sight, look.why) == (Sight.NO_DATA, "two restarts lie too close together to judge either")

    def test_a_restart_nobody_watched_judges_nothing(self):
        past = RememberedPast([running("4x20", start_ns=110 * MINUTE)], [self.restart])
        assert self.rule.look(past, 2 * HOUR).why == "too little was sampled around the restart"


def test_a_rule_is_made_from_its_name_and_parameters():
    assert make_rule("memory_only_grows", {"window_s": 7200, "for_s": 0}) == MemoryOnlyGrows(window_s=7200, for_s=0)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("memory_shrinks", {}, "there is no rule 'memory_shrinks'; the rules are memory_only_grows, "),
        ("memory_only_grows", {"windows_s": 1}, "no parameter 'windows_s'; its parameters are window_s, "),
        ("memory_only_grows", {"window_s": 0}, "window_s is 0; it must be a number above 0"),
        ("memory_only_grows", {"for_s": -1}, "for_s is -1; it must be a number 0 or more"),
        ("decode_speed_down", {"slower_ratio": float("nan")}, "slower_ratio is nan"),
    ],
)
def test_a_mistake_in_a_rule_is_named(name, parameters, said):
    with pytest.raises(ConfigError, match=said):
        make_rule(name, parameters)


@pytest.mark.parametrize("rule", RULES.values())
def test_every_rule_documents_its_method_and_every_parameter(rule):
    text = inspect.getdoc(rule)
    for heading in ("Method:", "Assumptions:", "Fooled by:", "Minimum data:", "Attributes:"):
        assert heading in text
    for item in dataclasses.fields(rule):
        assert f"{item.name}: " in text


@pytest.mark.parametrize("rule", RULES.values())
def test_the_documentation_gives_the_default_of_every_parameter(rule):
    text = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {rule.name}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| ([0-9.]+) \|", section, re.MULTILINE)
    assert [(name, float(value)) for name, value in rows] == [
        (item.name, item.default) for item in dataclasses.fields(rule)
    ]
