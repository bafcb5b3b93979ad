"""Turn a run file of `plimsoll stress` into a small recording: what was sent, when it was answered, what was seen.

    python tests/samples/runs/make.py RUN.db tests/samples/runs/ENGINE_WHAT.json --block-tokens 128 --kv-blocks 1023 ...

What the run file does not know about the server (block size, token budget, ...) is told by options. Times are
milliseconds since the first stage began, rounded to 0.1 ms. No text is in a run file, so none is in a recording.
What a request was told to have is kept where it failed and nothing else is known of it.
"""

import argparse
import json
import statistics
from pathlib import Path

from monitor.history import SqliteHistory
from serving.clock import NS
from serving.records import GOOD

SAMPLED = ("requests_running", "requests_waiting", "kv_cache_usage_ratio", "request_preemptions_total")
REQUEST_COLUMNS = (
    *("stage", "user", "send_ms", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("planned_prompt_tokens", "planned_output_tokens", "ttft_ms", "last_ms", "end_ms", "outcome"),
)
SAMPLE_COLUMNS = ("t_ms", "running", "waiting", "kv_ratio", "preemptions")


def recording(path, limits, source):
    with SqliteHistory.open(path) as history:
        manifest, stages, requests = history.manifest(), history.stages(), history.requests()
        series = {name: history.series(name) for name in SAMPLED}
    t_zero_ns = stages[0].t_start_ns

    def ms(t_ns):
        return None if t_ns is None else round((t_ns - t_zero_ns) / 1e6, 1)

    sampled = {name: dict(zip(found[0].t_ns, found[0].values, strict=True)) for name, found in series.items() if found}
    ticks = sorted({t_ns for values in sampled.values() for t_ns in values})
    samples = [[ms(t), *(rounded(sampled.get(name, {}).get(t)) for name in SAMPLED)] for t in ticks]
    rows = []
    for record in sorted(requests, key=lambda record: (record.t_send_ns or record.t_end_ns, record.request_id)):
        if record.t_send_ns is None:
            continue  # it never reached the server
        ttft_ms = None if record.t_first_ns is None else round((record.t_first_ns - record.t_send_ns) / 1e6, 1)
        row = [record.stage, record.user, ms(record.t_send_ns), record.prompt_tokens, record.cached_tokens]
        row += [record.completion_tokens, record.planned_prompt_tokens, record.planned_output_tokens, ttft_ms]
        row += [ms(record.t_last_ns), ms(record.t_end_ns), record.outcome.value]
        rows.append(row)
    target, workload = manifest["target"], manifest["workload"]
    limits = {
        "max_batch": target["max_running_requests"],
        "context_tokens": target["context_tokens"],
        "kv_capacity_tokens": target["kv_cache_capacity_tokens"],
    } | {name: value for name, value in limits.items() if value is not None}
    return {
        "schema": "plimsoll.recording/1",
        "source": {
            "engine": target["engine"],
            **source,
            "workload": {name: workload[name] for name in ("name", "prompt_tokens", "output_tokens")},
            "t_zero_ns": t_zero_ns,
        },
        "limits": limits,
        "stages": [
            {
                "name": stage.name,
                "offered": stage.offered,
                "counted": stage.counted,
                "start_ms": ms(stage.t_start_ns),
                "settled_ms": ms(stage.t_settled_ns),
                "end_ms": ms(stage.t_end_ns),
            }
            | seen_in(stage, requests)
            for stage in stages
        ],
        "sample_columns": SAMPLE_COLUMNS,
        "samples": samples,
        "request_columns": REQUEST_COLUMNS,
        "requests": rows,
    }


def seen_in(stage, requests):
    """For people who read the recording: requests that ended in the measured window."""
    if stage.t_settled_ns is None or stage.t_end_ns is None:
        return {}
    ended = [record for record in requests if stage.t_settled_ns <= record.t_end_ns < stage.t_end_ns]
    good = [record for record in ended if record.outcome in GOOD and record.t_first_ns and record.completion_tokens]
    if not good:
        return {"requests": len(ended)}
    tokens = sum(record.completion_tokens for record in good)
    return {
        "requests": len(ended),
        "failed": len(ended) - len(good),
        "tokens_per_second": round(tokens * NS / (stage.t_end_ns - stage.t_settled_ns), 1),
        "ttft_p50_ms": round(statistics.median((r.t_first_ns - r.t_send_ns) / 1e6 for r in good), 1),
    }


def rounded(value):
    return None if value is None else int(value) if value == int(value) else round(value, 4)


def write(path, content):
    """JSON with one line for each row, so that differences can be read."""
    parts = []
    for key, value in content.items():
        if key in ("samples", "requests", "stages"):
            lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    for name in ("release", "model", "started"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max-batch", "context-tokens", "kv-capacity-tokens", "kv-blocks", "block-tokens", "token-budget"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--partitioned", action="store_true", help="each slot has its own part of the KV cache")
    options = vars(parser.parse_args())
    source = {name: options.pop(name) for name in ("release", "model", "started")}
    run, out = options.pop("run"), options.pop("out")
    write(out, recording(run, options, source))


if __name__ == "__main__":
    main()
