import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alerts.verdict import Check, Finding, Ruling, Severity, Verdict, compare, judge
from serving.errors import ConfigError

PASS, FAIL, UNSURE = Ruling.PASS, Ruling.FAIL, Ruling.INCONCLUSIVE


def check_of(outcome: Ruling, name: str = "queue_drains") -> Check:
    return Check(name, outcome, 0, "==", 0, "requests", 30)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((), UNSURE),
        ((PASS,), PASS),
        ((FAIL,), FAIL),
        ((UNSURE,), UNSURE),
        ((PASS, PASS), PASS),
        ((PASS, FAIL), FAIL),
        ((PASS, UNSURE), UNSURE),
        ((FAIL, FAIL), FAIL),
        ((FAIL, UNSURE), FAIL),
        ((UNSURE, UNSURE), UNSURE),
        ((PASS, UNSURE, FAIL), FAIL),
    ],
)
def test_a_verdict_is_the_worst_of_its_checks_in_any_order(outcomes, expected):
    for order in itertools.permutations(outcomes):
        assert judge(check_of(outcome) for outcome in order).ruling is expected


@given(st.lists(st.sampled_from(list(Ruling)), min_size=1), st.lists(st.sampled_from(list(Ruling)), min_size=1))
def test_judging_parts_and_then_the_parts_verdicts_is_judging_all(left, right):
    def verdict_of(outcomes):
        return judge(check_of(outcome) for outcome in outcomes).ruling

    assert verdict_of(left + right) is verdict_of([verdict_of(left), verdict_of(right)])


@pytest.mark.parametrize(("ruling", "code"), [(PASS, 0), (FAIL, 1), (UNSURE, 3)])
def test_exit_codes_are_those_of_the_contract(ruling, code):
    assert ruling.exit_code == code
    assert Verdict(ruling, "because").exit_code == code


@pytest.mark.parametrize(
    ("value", "op", "limit", "expected"),
    [
        (0, "==", 0, PASS),
        (1, "==", 0, FAIL),
        (1, "!=", 0, PASS),
        (0, "!=", 0, FAIL),
        (1.5, "<=", 1.5, PASS),
        (1.6, "<=", 1.5, FAIL),
        (1.5, "<", 1.5, FAIL),
        (1.4, "<", 1.5, PASS),
        (48, ">=", 48, PASS),
        (47, ">=", 48, FAIL),
        (48, ">", 48, FAIL),
        (49, ">", 48, PASS),
        (None, "==", 0, UNSURE),
        (0, "==", None, UNSURE),
        (None, "==", None, UNSURE),
    ],
)
def test_a_comparison_passes_fails_or_stays_open(value, op, limit, expected):
    assert compare("c", value, op, limit, "requests", samples=30).outcome is expected


@pytest.mark.parametrize(("samples", "expected"), [(0, UNSURE), (29, UNSURE), (30, PASS)])
def test_too_few_samples_decide_nothing(samples, expected):
    assert compare("c", 0, "==", 0, "requests", samples=samples, minimum_samples=30).outcome is expected


@pytest.mark.parametrize(
    ("value", "op", "limit", "said"),
    [(1, "=<", 2, "=<"), (float("nan"), "==", 0, "the value is nan"), (0, "==", float("inf"), "the limit is inf")],
)
def test_a_check_that_cannot_be_asked_is_the_callers_mistake(value, op, limit, said):
    with pytest.raises(ConfigError, match=said):
        compare("c", value, op, limit, "requests", samples=1)


def test_the_reason_names_what_decided_and_nothing_else():
    verdict = judge(
        [
            compare("load_line", 40, ">=", 48, "requests", samples=120),
            compare("queue_drains", 0, "==", 0, "requests", samples=30),
            compare("ttft_p99", None, "<=", 1.5, "seconds", samples=3),
            compare("memory", 131_000_000_000, "<=", 120_000_000_000, "bytes", samples=9),
        ]
    )
    assert verdict.reason == (
        "load_line is 40 requests, wanted >= 48 requests; memory is 131,000,000,000 bytes, wanted <= 120,000,000,000 bytes"
    )


def test_an_open_check_says_what_is_missing():
    assert judge([compare("ttft_p99", None, "<=", 1.5, "seconds", samples=3)]).reason == (
        "ttft_p99 was not measured (wanted <= 1.5 seconds)"
    )
    assert judge([compare("ttft_p99", 1.0, "<=", 1.5, "seconds", samples=3, minimum_samples=9)]).reason.endswith(
        "3 samples do not decide it"
    )
    assert "no limit is known" in judge([compare("load_line", 40, ">=", None, "requests", samples=3)]).reason


def test_json_has_the_contracts_fields():
    check = compare("queue_drains", 0, "==", 0, "requests", samples=30)
    assert check.to_json() == {
        "name": "queue_drains",
        "outcome": "pass",
        "value": 0,
        "op": "==",
        "limit": 0,
        "unit": "requests",
        "samples": 30,
    }
    assert judge([check]).to_json() == {"verdict": "pass", "reason": "the only check passed"}


def test_a_finding_is_plain_json():
    finding = Finding(
        "memory_only_grows",
        Severity.WARNING,
        "GPU memory only grows",
        "+ 2 GiB in 6 h",
        "restart it tonight",
        7,
        "gpu_memory_used_bytes",
        (("gpu", "0"),),
        (("growth_bytes", 2.0),),
    )
    read = json.loads(json.dumps(finding.to_json(), allow_nan=False))
    assert read["severity"] == "warning"
    assert read["labels"] == {"gpu": "0"}
    assert read["figures"] == {"growth_bytes": 2.0}
