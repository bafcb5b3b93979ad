"""What a stress run amounts to: checks, findings, the verdict, and the document of `--json`. Pure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from alerts.verdict import Check, Finding, Ruling, Severity, Verdict, compare, judge
from loadgen.load_line import BoundBy, LoadLine, did_hold, is_judged
from loadgen.observation import Gauge
from loadgen.tally import Percentiles, TokenBook, summarize
from plimsoll.evidence import Ending, Evidence, StageRun
from serving.records import Outcome

__all__ = ["SCHEMA", "check", "document", "find", "interrupted_document", "rule"]

SCHEMA = "plimsoll.stress/1"
COULD_NOT_RUN = 4
INTERRUPTED = 130
SWAP_GROWTH_LIMIT_BYTES = 16 * 2**20
"""Swap that grows by more than this voids a run: a server that lives on swap has no load line."""
KV_DRAIN_TOLERANCE_RATIO = 0.01
SHORT_TOLERANCE_RATIO = 0.1
"""With more answers than this cut short, the KV cache never held what the workload means."""
CACHE_HIT_TOLERANCE_RATIO = 0.02
UNFINISHED_TOLERANCE_RATIO = 0.01
"""Requests that do not end although they are given three times the longest: one in a hundred is an incident."""


def check(evidence: Evidence, line: LoadLine) -> list[Check]:
    """The questions that the run answers, each with its limit."""
    views = [stage.view for stage in evidence.stages if stage.counted and stage.view is not None]
    samples = sum(view.running.samples for view in views)
    checks = []
    if line.configured is not None:
        # Where nothing held the line is 0; where nothing was seen it is not known.
        seen = bool(views) and not (line.measured is None and line.bound_by is BoundBy.UNKNOWN)
        measured = float(line.measured or 0) if seen else None
        checks.append(compare("load_line", measured, ">=", line.configured, "requests", samples=samples))
        if line.limit_in_effect is not None:
            most = max((view.running.p50 for view in views if view.running.p50 is not None), default=None)
            checks.append(compare("limit_in_effect", most, "<=", line.configured, "requests at once", samples=samples))
    deaths = 0 if evidence.ending.server_died is None else 1
    checks.append(compare("server_survived", deaths, "==", 0, "deaths", samples=1))
    memory_errors = sum(stage.ended.classes["out_of_memory"] for stage in evidence.stages)
    memory_errors += evidence.ending.out_of_memory is not None
    checks.append(compare("memory_suffices", memory_errors, "==", 0, "out-of-memory errors", samples=1))
    if evidence.ending.early:
        return checks
    issued = evidence.outcomes.total()
    unended = evidence.outcomes[Outcome.UNFINISHED] / issued if issued else None
    checks.append(compare("requests_end", unended, "<=", UNFINISHED_TOLERANCE_RATIO, "of requests cut", samples=issued))
    idle = evidence.drain
    left = None if idle.running is None or idle.waiting is None else idle.running + idle.waiting
    if left and evidence.still_gauges_seconds() is not None:
        checks.append(compare("queue_drains", None, "==", 0, "requests", samples=1))
        return checks
    checks.append(compare("queue_drains", left, "==", 0, "requests", samples=1))
    above = _kv_above_idle(evidence)
    if above is not None:
        checks.append(
            compare("kv_cache_drains", above, "<=", KV_DRAIN_TOLERANCE_RATIO, "of the cache above idle", samples=1)
        )
    return checks


def rule(evidence: Evidence, line: LoadLine, checks: list[Check]) -> Verdict:
    """The verdict: what voids the run comes first, then the worst of the checks."""
    ending = evidence.ending
    if ending.record_error:
        return Verdict(
            Ruling.INCONCLUSIVE,
            f"the run file could not be written to its end, what is in it is readable: {ending.record_error}",
        )
    if ending.driver_died:
        return Verdict(Ruling.INCONCLUSIVE, ending.driver_died)
    if ending.server_died:
        why = f"; {ending.out_of_memory}" if ending.out_of_memory else ""
        return Verdict(Ruling.FAIL, f"the server died under load: {ending.server_died}{why}")
    if ending.interrupted:
        return Verdict(Ruling.INCONCLUSIVE, "interrupted: a partial result")
    swap = evidence.swap_growth_bytes()
    if swap is not None and swap > SWAP_GROWTH_LIMIT_BYTES:
        return Verdict(
            Ruling.INCONCLUSIVE,
            f"swap grew by {swap / 2**20:.0f} MiB during the run: a server that lives on swap has no load line",
        )
    problem = evidence.client_problem()
    if problem is not None:
        return Verdict(Ruling.INCONCLUSIVE, f"the load generator was the bottleneck: {problem}")
    others = evidence.other_traffic()
    if others is not None:
        return Verdict(Ruling.INCONCLUSIVE, f"the server was not ours alone: {others}; measure on an idle server")
    verdict = judge(checks)
    if verdict.ruling is Ruling.FAIL:
        failed = [one.name for one in checks if one.outcome is Ruling.FAIL]
        if failed == ["load_line"] and line.bound_by is BoundBy.UNKNOWN:
            # Less ran at once than was offered, or nothing was seen, but nothing queued: that shows no limit.
            return Verdict(Ruling.INCONCLUSIVE, f"{line.evidence}: {line.next_step}")
        return Verdict(Ruling.FAIL, _failure(line, verdict.reason))
    if verdict.ruling is not Ruling.PASS:
        return verdict
    return _allow(evidence, line)


def _kv_above_idle(evidence: Evidence) -> float | None:
    """KV-cache usage after the run above that before it; rounded, so that 0.51 is 0.01 above 0.5."""
    before, after = evidence.idle_kv_ratio(), evidence.drain.kv_cache_usage_ratio
    return None if before is None or after is None else round(after - before, 6)


def _allow(evidence: Evidence, line: LoadLine) -> Verdict:
    """A pass must have been shown: every check passed, but did the run see what a pass claims?"""
    issued = evidence.outcomes.total()
    short = evidence.outcomes[Outcome.SHORT]
    if line.bound_by is BoundBy.UNKNOWN:
        return Verdict(Ruling.INCONCLUSIVE, f"what binds was not seen: {line.evidence}; {line.next_step}")
    if line.measured is None:
        return Verdict(Ruling.FAIL, f"not even one request at a time held: {line.evidence}")
    if short > SHORT_TOLERANCE_RATIO * issued:
        return Verdict(
            Ruling.INCONCLUSIVE,
            f"{short} of {issued} answers were shorter than asked: the server was not under the load that was meant",
        )
    if line.configured is None and line.bound_by is BoundBy.NOT_REACHED:
        return Verdict(Ruling.INCONCLUSIVE, f"nothing bound up to {line.measured} requests at once")
    if line.configured is not None and line.limit_in_effect is None:
        return Verdict(Ruling.INCONCLUSIVE, f"past the limit of {line.configured} nothing was measured")
    return Verdict(Ruling.PASS, _success(line))


def find(evidence: Evidence, line: LoadLine, t_ns: int) -> list[Finding]:
    """What somebody should look at, whatever the verdict."""
    found = []

    def add(name: str, severity: Severity, title: str, seen: str, next_step: str) -> None:
        found.append(Finding(name, severity, title, seen, next_step, t_ns))

    prepared, drain = evidence.prepared, evidence.drain
    told = prepared.facts.max_running_requests
    if prepared.limit is not None and told not in (None, prepared.limit):
        add(
            "limit_differs",
            Severity.WARNING,
            "the server's own limit is another one",
            f"{prepared.limit_source} says {prepared.limit}, {prepared.facts.max_running_source} says {told}",
            "start the server with the limit that you mean",
        )
    left = (drain.running or 0) + (drain.waiting or 0)
    still = evidence.still_gauges_seconds() if left else None
    if still is not None:
        add(
            "gauges_stand_still",
            Severity.WARNING,
            "the server's gauges stopped moving",
            f"{left:g} running or waiting in every sample from {still:.0f} s before the last answer to the end",
            "look at the server's metrics page: what it says of requests and KV cache is not of this load",
        )
    elif left:
        add(
            "queue_not_drained",
            Severity.CRITICAL,
            "requests stayed behind",
            f"{left:g} still running or waiting {drain.seconds or 0:.0f} s after the last answer",
            "look for stuck or zombie requests in the server's log",
        )
    above = _kv_above_idle(evidence)
    if above is not None and above > KV_DRAIN_TOLERANCE_RATIO and still is None:
        add(
            "kv_cache_not_drained",
            Severity.CRITICAL,
            "KV cache stayed in use",
            f"{drain.kv_cache_usage_ratio:.1%} after the run, {evidence.idle_kv_ratio():.1%} before it",
            "repeat the run: if it grows each time, the server leaks KV blocks",
        )
    for note in line.notes:
        add("unstable_stage", Severity.WARNING, "a stage contradicts a higher one", note, "run again for longer")
    unsettled = [stage.spec.name for stage in evidence.stages if stage.counted and stage.complete and not stage.settled]
    if unsettled:
        add(
            "not_settled",
            Severity.INFO,
            "stages that never settled",
            f"running requests kept changing at {', '.join(unsettled)} offered",
            "read their figures as means over an unsteady server",
        )
    _find_token_faults(evidence, add)
    return found


def _find_token_faults(evidence: Evidence, add: Any) -> None:
    client, server = evidence.client_tokens, evidence.server_tokens()
    all_ok = not any(count for outcome, count in evidence.outcomes.items() if outcome is not Outcome.OK)
    counted = not evidence.without_usage
    if server is not None and client != server and all_ok and counted and not evidence.ending.early:
        add(
            "tokens_differ",
            Severity.WARNING,
            "client and server count different tokens",
            f"client {client:,}, server {server:,}",
            "another client was using the server, its counter stood still, or its usage is wrong: trust neither yet",
        )
    for name, count, title, advice in (
        ("no_usage", evidence.without_usage, "answers without token counts", "have the server send usage in streams"),
        ("no_text", evidence.without_text, "answers without any text", "look at what the server sends"),
        ("long_answers", evidence.too_long, "answers longer than asked", "the server does not keep to max_tokens"),
    ):
        if count:
            seen = f"{count} of {evidence.outcomes.total()} answers"
            add(name, Severity.WARNING, title, seen, advice)
    unfinished = evidence.outcomes[Outcome.UNFINISHED]
    if unfinished and not evidence.ending.early:
        add(
            "requests_unfinished",
            Severity.WARNING,
            "requests did not end",
            f"{unfinished} were still running when the time for them was over, and were cut",
            "look for stuck requests in the server's log, or give long ones more time (--stage-seconds)",
        )
    short = evidence.outcomes[Outcome.SHORT]
    if short:
        add(
            "short_answers",
            Severity.WARNING,
            "answers shorter than asked",
            f"{short} ended before their length although the end token was to be ignored",
            "the server cuts at its context length, or does not know ignore_eos",
        )
    ratios = [stage.tally.cached_ratio() for stage in evidence.stages if stage.counted]
    hits = max((ratio for ratio in ratios if ratio is not None), default=0.0)
    # Every prompt begins with the same few tokens of the chat template; only what is beyond them is a hit.
    unavoidable = evidence.prepared.calibration.fixed_tokens / max(1, evidence.prepared.workload.prompt_tokens)
    if hits > CACHE_HIT_TOLERANCE_RATIO + unavoidable:
        add(
            "prefix_cache_hits",
            Severity.WARNING,
            "prompts hit the prefix cache",
            f"{hits:.0%} of prompt tokens came from a cache although every prompt begins with a nonce",
            "prefill looks too fast: turn the prefix cache off for this measurement",
        )


def document(evidence: Evidence, line: LoadLine, *, run: str, t_ns: int, slo_exact: bool) -> dict[str, Any]:
    """The whole result as `--json` prints it (schema `plimsoll.stress/1`)."""
    checks = check(evidence, line)
    verdict = rule(evidence, line, checks)
    prepared, facts = evidence.prepared, evidence.prepared.facts
    seen = [stage for stage in evidence.stages if stage.counted and stage.view is not None]
    return {
        "schema": SCHEMA,
        "run": run,
        "target": {
            "url": prepared.base.text,
            "engine": facts.engine,
            "version": facts.version,
            "model": facts.model,
            "context_tokens": facts.context_tokens,
        },
        "warnings": list(prepared.warnings),
        "workload": {
            "name": prepared.workload.name,
            "prompt_tokens": prepared.workload.prompt_tokens,
            "output_tokens": prepared.workload.output_tokens,
            "seed": evidence.seed,
        },
        **verdict.to_json(),
        "interrupted": evidence.ending.interrupted,
        "exit_code": _exit_code(evidence.ending, verdict),
        "load_line": {
            "configured": line.configured,
            "measured": line.measured,
            "bound_by": line.bound_by.value,
            "evidence": line.evidence,
            "next_step": line.next_step,
        },
        "slo_line": _slo_line(evidence, line, exact=slo_exact),
        "stages": [_stage(stage, evidence.book) for stage in seen],
        "client": _client(evidence),
        "tokens": {
            "client_completion": None if evidence.without_usage else evidence.client_tokens,
            "server_completion": evidence.server_tokens(),
            "wasted": evidence.wasted_tokens,
        },
        "drain": asdict(evidence.drain),
        "checks": [one.to_json() for one in checks],
        "findings": [finding.to_json() for finding in find(evidence, line, t_ns)],
    }


def interrupted_document(*, run: str, url: str, workload: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a run that was interrupted before its first request."""
    reason = "interrupted during the preflight"
    return {
        "schema": SCHEMA,
        "run": run,
        "target": {"url": url, "engine": None, "version": None, "model": None, "context_tokens": None},
        "warnings": [],
        "workload": dict(workload),
        "verdict": Ruling.INCONCLUSIVE.value,
        "reason": reason,
        "interrupted": True,
        "exit_code": INTERRUPTED,
        "load_line": {
            "configured": None,
            "measured": None,
            "bound_by": BoundBy.UNKNOWN.value,
            "evidence": reason,
            "next_step": "run again",
        },
        "slo_line": None,
        "stages": [],
        "client": None,
        "tokens": {"client_completion": 0, "server_completion": None, "wasted": 0},
        "drain": None,
        "checks": [],
        "findings": [],
    }


def _exit_code(ending: Ending, verdict: Verdict) -> int:
    if ending.record_error:
        return COULD_NOT_RUN
    return INTERRUPTED if ending.interrupted else verdict.exit_code


def _failure(line: LoadLine, checks: str) -> str:
    """A failed run in one sentence; what binds comes before what else failed."""
    if line.limit_in_effect is False:
        return f"the configured limit of {line.configured} is not in effect: more ran at once ({line.evidence})"
    if line.measured is None and line.configured is not None:
        return f"not even the smallest stage held: {line.evidence}"
    if line.configured is None or line.measured is None or line.measured >= line.configured:
        return checks
    holds = {
        BoundBy.KV_CACHE: f"the KV cache holds {line.measured} requests of this workload at once",
        BoundBy.BATCH_SLOTS: f"the server runs {line.measured} requests at once",
        BoundBy.TOKEN_BUDGET: f"prompts queue for the token budget above {line.measured} requests at once",
        BoundBy.GPU_MEMORY: f"GPU memory runs out above {line.measured} requests at once",
        BoundBy.ERRORS: f"requests fail above {line.measured} at once",
    }.get(line.bound_by, f"{line.measured} requests run at once")
    return f"{holds}, not the configured {line.configured}"


def _success(line: LoadLine) -> str:
    if line.configured is None:
        return f"a load line was found at {line.measured}; nothing was configured to compare it with"
    beyond = {
        BoundBy.BATCH_SLOTS: "a queue forms",
        BoundBy.KV_CACHE: "the KV cache is full",
        BoundBy.TOKEN_BUDGET: "prompts queue for the token budget",
        BoundBy.ERRORS: "requests are refused or fail",
    }.get(line.bound_by, "no more do")
    return f"all {line.configured} configured requests run at once; above {line.measured}, {beyond}"


def _slo_line(evidence: Evidence, line: LoadLine, *, exact: bool) -> dict[str, Any] | None:
    workload = evidence.prepared.workload
    if workload.slo.ttft_seconds is None and workload.slo.tpot_seconds is None:
        return None
    missed = [
        stage
        for stage in evidence.stages
        if stage.counted and stage.tally.slo_met() is False and stage.spec.offered > (line.slo_measured or 0)
    ]
    first = min(missed, key=lambda stage: stage.spec.offered, default=None)
    why = None if first is None else f"{first.tally.worst_slo() or 'requests failed'} at {first.spec.offered}"
    return {"measured": line.slo_measured, "bound_by": why, "workload": workload.name, "exact": exact}


def _client(evidence: Evidence) -> dict[str, Any]:
    loop_lags = sorted(health.loop_lag_p99_seconds for health in evidence.health)
    sources = evidence.arrival_sources
    problem = evidence.client_problem()
    return {
        "valid": problem is None,
        "problem": problem,
        "send_lag_seconds": _spread(summarize(evidence.send_lag)),
        "arrival_lag_seconds": {
            **_spread(summarize(evidence.arrival_lag)),
            "source": "kernel" if sources == {"kernel"} else "read" if sources else None,
        },
        "loop_lag_seconds": {"p99": _round(loop_lags[len(loop_lags) // 2], 6) if loop_lags else None},
        "cpu_ratio": _round(evidence.client_cpu_ratio()),
    }


def _stage(stage: StageRun, book: TokenBook) -> dict[str, Any]:
    view, tally = stage.view, stage.tally
    assert view is not None  # noqa: S101 - only stages that were seen are reported
    seen = view.observation
    return {
        "name": stage.spec.name,
        "purpose": stage.spec.purpose,
        "offered": stage.spec.offered,
        "held": did_hold(seen)[0] if stage.complete and is_judged(seen) else None,
        "settled": stage.settled,
        "complete": stage.complete,
        "seconds": round(view.seconds, 3),
        "running": _gauge(view.running),
        "waiting": _gauge(view.waiting),
        "kv_cache_usage_ratio": _gauge(view.kv_cache),
        "gpu_memory_used_bytes": {"max": view.gpu_memory_used_bytes},
        "preemptions": view.preemptions,
        "requests": {"issued": tally.issued, **{outcome.value: tally.outcomes[outcome] for outcome in Outcome}},
        "ttft_seconds": _percentiles(tally.ttft()),
        "tpot_seconds": _percentiles(tally.tpot()),
        "frame_gap_seconds": _percentiles(tally.frame_gap()),
        "e2e_seconds": _percentiles(tally.e2e()),
        "prefill_tokens_per_second": _round(tally.prefill().p50),
        "decode_tokens_per_second": _round(tally.decode().p50),
        "output_tokens_per_second": _round(view.output_tokens_per_second),
        "prompt_tokens_per_second": _round(book.prompt_rate(*stage.window)),
        "requests_per_second": _round(tally.request_rate(view.seconds)),
        "goodput_per_second": _round(tally.goodput_rate(view.seconds)),
        "first_error": tally.first_error,
    }


def _gauge(level: Gauge) -> dict[str, float | None]:
    return {"p50": _round(level.p50), "mean": _round(level.mean), "max": _round(level.max)}


def _percentiles(values: Percentiles) -> dict[str, float | int | None]:
    return {**_spread(values, 6), "p95": _round(values.p95, 6), "samples": values.samples}


def _spread(values: Percentiles, digits: int = 7) -> dict[str, float | None]:
    return {"p50": _round(values.p50, digits), "p99": _round(values.p99, digits), "max": _round(values.max, digits)}


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
