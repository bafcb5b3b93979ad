"""A stress run for people: the table at the end, from the same document that `--json` prints."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

__all__ = ["clean", "figure", "render_stress", "seconds"]

_COLOURS = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
_FAILURES = ("short", "truncated", "stream_error", "http_error", "timeout", "client_error", "cancelled", "unfinished")


def clean(text: str) -> str:
    """Text from a server, made safe for a terminal: one line, no control characters, nothing that cannot be encoded."""
    one_line = " ".join(text.split())
    printable = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in one_line)
    return printable.encode("utf-8", "replace").decode("utf-8")


def figure(value: float | None, *, digits: int = 3) -> str:
    """A number for people; a dash when it was not measured."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def seconds(value: float | None) -> str:
    """A duration for people, in the unit that fits."""
    if value is None:
        return "–"
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"
    return f"{value:.2f} s" if value < 100 else f"{value:.0f} s"


def percent(value: float | None) -> str:
    """A ratio as a percentage."""
    return "–" if value is None else f"{value:.0%}"


def render_stress(document: Mapping[str, Any], console: Console) -> None:
    """Print one stress run."""
    console.print(_stage_table(document))
    console.print(Panel(_summary(document), title=_title(document), title_align="left", box=box.ROUNDED))


def _title(document: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    if document.get("interrupted"):
        return "[yellow]interrupted: a partial result[/]"
    return f"[{_COLOURS[verdict]} bold]{verdict}[/]"


def _stage_table(document: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption = "TTFT and TPOT are medians; gap is the 99th percentile between frames"
    table.caption_justify = "left"
    names = "offered,runs,waits,KV,ok,fail,TTFT,TPOT,gap,tok/s"
    for name in names.split(","):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held", no_wrap=True)
    for stage in document["stages"]:
        requests = stage["requests"]
        failed = sum(requests[name] for name in _FAILURES)
        held = {True: "[green]yes[/]", False: "[red]no[/]", None: "–"}[stage["held"]]
        kv = stage["kv_cache_usage_ratio"]
        table.add_row(
            str(stage["offered"]),
            figure(stage["running"]["p50"]),
            figure(stage["waiting"]["mean"], digits=2),
            percent(kv["max"]),
            str(requests["ok"]),
            f"[red]{failed}[/]" if failed else "0",
            seconds(stage["ttft_seconds"]["p50"]),
            seconds(stage["tpot_seconds"]["p50"]),
            seconds(stage["frame_gap_seconds"]["p99"]),
            figure(stage["output_tokens_per_second"]),
            held,
        )
    return table


def _summary(document: Mapping[str, Any]) -> Group:
    line = document["load_line"]
    measured = "none" if line["measured"] is None else str(line["measured"])
    configured = "not configured" if line["configured"] is None else f"configured {line['configured']}"
    target = document["target"]
    engine = " ".join(str(part) for part in (target["engine"], target["version"]) if part)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column()

    def add(name: str, text: str) -> None:
        rows.add_row(name, escape(clean(text)))

    add("load line", f"{measured} ({configured}), bound by {line['bound_by']}")
    add("evidence", line["evidence"])
    add("next step", line["next_step"])
    add("reason", document["reason"])
    slo = document.get("slo_line")
    if slo is not None and slo["measured"] is not None:
        add("SLO line", f"{slo['measured']} ({slo['workload']})" + (f"; {slo['bound_by']}" if slo["bound_by"] else ""))
    tokens = document["tokens"]
    if tokens["server_completion"] is not None and tokens["client_completion"] is not None:
        same = "equal" if tokens["client_completion"] == tokens["server_completion"] else "differ"
        cut = sum(stage["requests"][name] for stage in document["stages"] for name in _FAILURES if name != "short")
        if same == "differ" and cut:
            same = f"differ, as they must: {cut} requests failed or were cut, and only the server knows their tokens"
        add(
            "output tokens",
            f"client {tokens['client_completion']:,}, server {tokens['server_completion']:,}: {same}"
            + (f"; {tokens['wasted']:,} wasted on failed requests" if tokens["wasted"] else ""),
        )
    if document["client"] is not None:
        add("client", _client_sentence(document["client"]))
    drain = document["drain"]
    if drain is not None and drain["seconds"] is not None:
        add(
            "drain",
            f"running {figure(drain['running'])}, waiting {figure(drain['waiting'])}, "
            f"KV cache {percent(drain['kv_cache_usage_ratio'])} after {seconds(drain['seconds'])}",
        )
    simulated = "  (simulated, not a real engine)" if target.get("simulated") else ""
    add("target", f"{target['url']}  {engine}  {target['model']}{simulated}")
    add("run file", str(document["run"]))
    for finding in document["findings"]:
        rows.add_row(f"[yellow]{finding['severity']}[/]", escape(clean(f"{finding['title']}: {finding['evidence']}")))
    return Group(rows)


def _client_sentence(client: Mapping[str, Any]) -> str:
    if not client["valid"]:
        return f"NOT VALID: {client['problem']}"
    lag = client["arrival_lag_seconds"]
    return (
        f"valid: requests left at most {seconds(client['send_lag_seconds']['max'])} late, frames were read at most "
        f"{seconds(lag['max'])} after they arrived ({lag['source']} stamps), CPU {percent(client['cpu_ratio'])}"
    )
