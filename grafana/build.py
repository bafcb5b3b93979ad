"""Writes the dashboards: `python -m grafana.build` writes them, `python -m grafana.build --check` only compares.

The JSON is committed, so that Grafana needs nothing but the files; this is where it is edited. Output is the same to
the byte on every run.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["DASHBOARDS", "build", "main", "render"]

FOLDER = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WHERE = 'job=~"$job", instance=~"$instance"'


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and how its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. `width` is in the 24 columns of Grafana's grid."""

    kind: Literal["stat", "timeseries", "state-timeline", "table"]
    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    width: int = 12
    height: int = 8
    maximum: float | None = None
    thresholds: tuple[tuple[float | None, str], ...] = ((None, "green"),)
    words: Mapping[str, tuple[str, str]] | None = None
    """Text and colour shown for a value."""


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A dashboard: rows of panels under a title each."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def _metric(name: str, more: str = "") -> str:
    return f"plimsoll_{name}{{{WHERE}{', ' + more if more else ''}}}"


def _rate(name: str, more: str = "") -> str:
    return f"sum by (job, instance, target) (rate({_metric(name, more)}[$__rate_interval]))"


def _in_state(state: str) -> str:
    return _metric("alert_state", f'state="{state}"')


def _quantile(name: str, share: str) -> str:
    return (
        f"histogram_quantile({share}, sum by (job, instance, target, le) "
        f"(rate({_metric(name + '_bucket')}[$__rate_interval])))"
    )


def _percentiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(_quantile(name, share), f"p{share[2:]:0<2} {{{{target}}}}") for share in ("0.5", "0.95", "0.99"))


_RUNNING = f"avg_over_time({_metric('requests_running')}[$__rate_interval])"

TARGET = Dashboard(
    uid="plimsoll-target",
    title="Plimsoll / Target",
    description="An inference server as plimsoll watch sees it. All panels work for every engine, with or without GPU.",
    rows=(
        (
            "Health",
            (
                Panel(
                    "stat",
                    "Target",
                    "Whether the last sample of the server succeeded. While it is down the other panels have gaps: "
                    "values are never repeated.",
                    "bool_on_off",
                    (Query(_metric("up"), "{{target}}"),),
                    width=4,
                    height=5,
                    thresholds=((None, "red"), (1, "green")),
                    words={"0": ("down", "red"), "1": ("up", "green")},
                ),
                Panel(
                    "stat",
                    "Rules firing",
                    "How many rules are in state firing. The last row says which, and why.",
                    "none",
                    (Query(f"sum by (job, instance, target) ({_in_state('firing')})", "{{target}}"),),
                    width=4,
                    height=5,
                    thresholds=((None, "green"), (1, "orange")),
                ),
                Panel(
                    "stat",
                    "Requests running",
                    "Requests in the engine's running batch now.",
                    "none",
                    (Query(_metric("requests_running"), "{{target}}"),),
                    width=4,
                    height=5,
                ),
                Panel(
                    "stat",
                    "Sample age",
                    "Time since the watch last tried to sample the server. Grows when the watch itself is stuck.",
                    "s",
                    (Query(f"time() - {_metric('last_sample_timestamp_seconds')}", "{{target}}"),),
                    width=4,
                    height=5,
                    thresholds=((None, "green"), (15, "orange"), (60, "red")),
                ),
                Panel(
                    "timeseries",
                    "Time to sample the server",
                    "How long one read of the server took. It rises when the engine answers only between its steps.",
                    "s",
                    (Query(_metric("scrape_duration_seconds"), "{{target}}"),),
                    width=8,
                    height=5,
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "timeseries",
                    "Requests running and waiting",
                    "Requests in the batch, and accepted but not yet in it. Waiting that does not return to 0 means "
                    "that the load line is passed. The limit is shown where the server tells it.",
                    "none",
                    (
                        Query(_metric("requests_running"), "running {{target}}"),
                        Query(_metric("requests_waiting"), "waiting {{target}}"),
                        Query(_metric("config_max_running_requests"), "limit {{target}}"),
                    ),
                ),
                Panel(
                    "timeseries",
                    "KV cache in use",
                    "Share of the KV cache that live requests hold. Near 100 % requests are preempted or kept waiting. "
                    "On engines that do not report it this is worked out from their slots.",
                    "percentunit",
                    (Query(_metric("kv_cache_usage_ratio"), "{{target}}"),),
                    maximum=1,
                    thresholds=((None, "green"), (0.9, "orange"), (0.98, "red")),
                ),
            ),
        ),
        (
            "Throughput",
            (
                Panel(
                    "timeseries",
                    "Tokens per second",
                    "Prompt tokens taken in and tokens generated. Some engines count tokens only when a request ends; "
                    "short ranges are then jagged.",
                    "none",
                    (
                        Query(_rate("prompt_tokens_total"), "prompt {{target}}"),
                        Query(_rate("generation_tokens_total"), "generated {{target}}"),
                    ),
                ),
                Panel(
                    "timeseries",
                    "Decode speed of one request",
                    "Tokens generated per second, divided by requests running (at least one). The rule "
                    "decode_speed_down compares this with the first half hour after the start.",
                    "none",
                    (
                        Query(
                            f"{_rate('generation_tokens_total')} / on (job, instance, target) "
                            f"clamp_min(sum by (job, instance, target) ({_RUNNING}), 1)",
                            "{{target}}",
                        ),
                    ),
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel(
                    "timeseries",
                    "GPU memory, or the server's own where it has no GPU",
                    "GPU memory in use per card. For a server without a visible GPU, resident memory of its processes.",
                    "bytes",
                    (
                        Query(
                            f"{_metric('gpu_memory_used_bytes')} or on (job, instance, target) "
                            f"{_metric('process_resident_memory_bytes')}",
                            "{{gpu}}{{role}} {{target}}",
                        ),
                    ),
                ),
                Panel(
                    "timeseries",
                    "Anonymous memory of the server",
                    "Memory that no file backs, in RAM or in swap: what a leak on the host grows, even when its pages "
                    "are swapped out and resident memory looks flat.",
                    "bytes",
                    (Query(_metric("process_anonymous_memory_bytes"), "{{role}} {{target}}"),),
                ),
                Panel(
                    "timeseries",
                    "Swap",
                    "Swap in use on the host and by the server. A server that lives on swap has no load line.",
                    "bytes",
                    (
                        Query(_metric("host_swap_used_bytes"), "host {{target}}"),
                        Query(_metric("process_swap_bytes"), "{{role}} {{target}}"),
                    ),
                    height=6,
                ),
                Panel(
                    "timeseries",
                    "Memory the host can still give out",
                    "Available memory of the host on which the watch runs. Near 0 the kernel ends the largest process, "
                    "which is the server.",
                    "bytes",
                    (Query(_metric("host_memory_available_bytes"), "{{target}}"),),
                    height=6,
                ),
            ),
        ),
        (
            "Rules",
            (
                Panel(
                    "state-timeline",
                    "State of each rule",
                    "inactive, pending (seen, not yet for long enough), firing, resolved (ended a short while ago).",
                    "none",
                    (
                        Query(
                            f"{_in_state('pending')} + on (job, instance, target, rule) 2 * {_in_state('firing')} "
                            f"+ on (job, instance, target, rule) 3 * {_in_state('resolved')}",
                            "{{rule}} {{target}}",
                        ),
                    ),
                    width=16,
                    words={
                        "0": ("inactive", "green"),
                        "1": ("pending", "yellow"),
                        "2": ("firing", "red"),
                        "3": ("resolved", "blue"),
                    },
                ),
                Panel(
                    "table",
                    "Findings now",
                    "How many findings each rule has at this moment. The watch writes their evidence to its log and "
                    "history.",
                    "none",
                    (Query(f"sum by (job, instance, target, rule) ({_metric('findings')})", "{{rule}}"),),
                    width=8,
                ),
            ),
        ),
    ),
)

LATENCY = Dashboard(
    uid="plimsoll-latency",
    title="Plimsoll / Latency by the engine",
    description=(
        "Latency and trouble as the engine itself counts them. vLLM and SGLang have these histograms; llama.cpp has "
        "none, and this dashboard stays empty for it."
    ),
    rows=(
        (
            "Latency",
            (
                Panel(
                    "timeseries",
                    "Time to first token",
                    "From the arrival of a request in the engine to its first token. Percentiles are interpolated in "
                    "the engine's own buckets.",
                    "s",
                    _percentiles("time_to_first_token_seconds"),
                ),
                Panel(
                    "timeseries",
                    "Time between tokens",
                    "Between one token of a request and the next: what a reader of a stream feels.",
                    "s",
                    _percentiles("inter_token_latency_seconds"),
                ),
                Panel(
                    "timeseries",
                    "Request duration",
                    "From arrival to the last token. vLLM's lowest bucket ends at 0.3 s: shorter requests look alike.",
                    "s",
                    _percentiles("request_duration_seconds"),
                ),
                Panel(
                    "timeseries",
                    "Time in the queue",
                    "From arrival until the request joined the batch. vLLM's lowest bucket ends at 0.3 s.",
                    "s",
                    _percentiles("request_queue_seconds"),
                ),
            ),
        ),
        (
            "Work and trouble",
            (
                Panel(
                    "timeseries",
                    "Requests finished",
                    "Requests that ended, for any reason, per second.",
                    "reqps",
                    (Query(_rate("requests_finished_total"), "{{target}}"),),
                ),
                Panel(
                    "timeseries",
                    "Preemptions and errors",
                    "Requests thrown out of the batch because the KV cache was full, and requests that ended in a "
                    "server error, per second. Both should be 0.",
                    "reqps",
                    (
                        Query(_rate("request_preemptions_total"), "preempted {{target}}"),
                        Query(_rate("request_errors_total"), "errors {{target}}"),
                    ),
                ),
            ),
        ),
    ),
)

DASHBOARDS: Mapping[str, Dashboard] = {f"{board.uid}.json": board for board in (TARGET, LATENCY)}


def build(board: Dashboard) -> dict[str, Any]:
    """The dashboard in Grafana's JSON model (schema 39, Grafana 10.4 and later)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in board.rows:
        panels.append(_row(title, len(panels) + 1, top))
        top += 1
        left = tallest = 0
        for panel in row:
            if left + panel.width > 24:
                top, left, tallest = top + tallest, 0, 0
            panels.append(_panel(panel, len(panels) + 1, left, top))
            left, tallest = left + panel.width, max(tallest, panel.height)
        top += tallest
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": ["plimsoll", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def render(board: Dashboard) -> str:
    """The text of the dashboard's file."""
    return json.dumps(build(board), indent=2, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the dashboards, or with `--check` return 1 when a committed one is not what would be written."""
    parser = argparse.ArgumentParser(prog="python -m grafana.build", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file differs")
    arguments = parser.parse_args(argv)
    stale = False
    for name, board in DASHBOARDS.items():
        path, text = FOLDER / name, render(board)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments.check:
            print(f"{path} is not what grafana/build.py makes; run python -m grafana.build", file=sys.stderr)
            stale = True
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return int(stale)


def _variables() -> list[dict[str, Any]]:
    def of_label(label: str, query: str) -> dict[str, Any]:
        return {
            "name": label,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "query": {"query": query, "refId": f"variable-{label}"},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "hide": 0,
            "options": [],
            "regex": "",
        }

    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "multi": False,
            "includeAll": False,
            "current": {},
            "hide": 0,
            "options": [],
            "regex": "",
        },
        of_label("job", "label_values(plimsoll_up, job)"),
        of_label("instance", 'label_values(plimsoll_up{job=~"$job"}, instance)'),
    ]


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": 24, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"color": color, "value": value} for value, color in panel.thresholds],
        },
        "mappings": [],
    }
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.words:
        named = {
            value: {"text": text, "color": color, "index": turn}
            for turn, (value, (text, color)) in enumerate(panel.words.items())
        }
        defaults["mappings"] = [{"type": "value", "options": named}]
    if panel.kind == "timeseries":
        defaults["custom"] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [
            {
                "refId": chr(ord("A") + turn),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend,
                "instant": panel.kind == "table",
                "range": panel.kind != "table",
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for turn, query in enumerate(panel.queries)
        ],
    }


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "stat": {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "auto",
    },
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "state-timeline": {
        "mergeValues": True,
        "showValue": "auto",
        "rowHeight": 0.8,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "single", "sort": "none"},
    },
    "table": {"showHeader": True, "cellHeight": "sm"},
}


if __name__ == "__main__":
    sys.exit(main())
