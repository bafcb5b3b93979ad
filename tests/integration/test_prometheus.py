"""Real Prometheus scrapes a real `plimsoll watch` beside a real engine: every query of the dashboard returns data."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import grafana
from serving.embedded import EmbeddedServer

pytestmark = [pytest.mark.prometheus, pytest.mark.engine]

GRAFANA = Path(grafana.__file__).parent
SAMPLES = Path(__file__).parents[1] / "samples" / "vllm"
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def programs():
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    if missing:
        reason = f"{' and '.join(missing)} not installed (Debian package prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must run this: {reason}")
        pytest.skip(reason)


def wait_for(condition, what, deadline_s=DEADLINE_S):
    """The first true result of `condition`, asked every fifth of a second until the deadline."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        if result := condition():
            return result
        time.sleep(0.2)
    pytest.fail(f"{what} did not happen within {deadline_s:.0f} s")


def get(url, timeout_s=5.0):
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return answer.read().decode()
    except (urllib.error.URLError, OSError):
        return None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Child:
    """A program that the test started; its output is in a file and it is ended with the test."""

    def __init__(self, command, log_path, **more):
        self.log_path = log_path
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **more
            )

    def log(self):
        return self.log_path.read_text(errors="replace")

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@pytest.fixture(scope="module")
def engine(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    with EmbeddedServer.start(log_path=folder / "engine.log", cache_dir=folder, shape="tiny", slots=4) as server:
        yield server


@pytest.fixture(scope="module")
def traffic(engine):
    """Two users who ask for short answers, one after another, until the tests are over."""
    over = threading.Event()
    body = json.dumps({"prompt": "the sea is", "max_tokens": 48, "ignore_eos": True}).encode()

    def ask():
        while not over.is_set():
            request = urllib.request.Request(
                f"{engine.url}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
            )
            try:
                urllib.request.urlopen(request, timeout=30).read()
            except OSError:
                over.wait(0.5)
            over.wait(0.3)

    users = [threading.Thread(target=ask) for _ in range(2)]
    for user in users:
        user.start()
    yield
    over.set()
    for user in users:
        user.join()


class RecordedVllm(ThreadingHTTPServer):
    """Serves pages that a real vLLM gave; `metrics` is the name of the recording of its metrics page."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _RecordedPages)
        self.metrics = "metrics_idle"
        self.url = f"http://127.0.0.1:{self.server_port}"


class _RecordedPages(BaseHTTPRequestHandler):
    def do_GET(self):
        names = {"/metrics": self.server.metrics, "/v1/models": "models", "/version": "get_version"}
        if self.path not in names:
            self.send_error(404)
            return
        page = (SAMPLES / f"{names[self.path]}.txt").read_bytes()
        body = page.partition(b"\r\n\r\n")[2] if page.startswith(b"HTTP/") else page
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if body.startswith(b"{") else "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def recorded(programs):
    with RecordedVllm() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@contextmanager
def watching(folder, target):
    """`plimsoll watch` in a process of its own; gives the address of its metrics."""
    config = folder / "watch.yaml"
    config.write_text(f"targets:\n  - {target}\nlisten: 127.0.0.1:0\nevaluate_every: 2\n")
    child = Child([sys.executable, "-m", "plimsoll", "watch", str(config)], folder / "watch.log")
    try:
        found = wait_for(
            lambda: child.process.poll() is not None or re.search(r"http://(127\.0\.0\.1:\d+)/metrics", child.log()),
            "the watch's address",
        )
        assert child.process.poll() is None, child.log()
        yield found[1]
    finally:
        code = child.stop()
    assert code == 0, child.log()
    assert "Traceback" not in child.log()


@pytest.fixture(scope="module")
def watch(engine, traffic, tmp_path_factory):
    target = f"{{url: {engine.url}, name: demo, pid: {engine.pid}}}"
    with watching(tmp_path_factory.mktemp("watch"), target) as address:
        yield address


@pytest.fixture(scope="module")
def watch_of_recorded(recorded, tmp_path_factory):
    with watching(tmp_path_factory.mktemp("watch"), f"{{url: {recorded.url}, name: recorded}}") as address:
        yield address


@pytest.fixture(scope="module")
def prometheus(watch, watch_of_recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    config = (GRAFANA / "prometheus.yml").read_text()
    for shipped, ours in (
        ('"127.0.0.1:9464"', f'"{watch}", "{watch_of_recorded}"'),
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("scrape_timeout: 4s", "scrape_timeout: 1s"),
        ("evaluation_interval: 15s", "evaluation_interval: 1s"),
        ("alerts/", f"{GRAFANA / 'alerts'}/"),
    ):
        assert shipped in config
        config = config.replace(shipped, ours)
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    child = Child(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={address}",
        ],
        folder / "prometheus.log",
    )
    try:
        wait_for(
            lambda: child.process.poll() is not None or get(f"http://{address}/-/ready"), "Prometheus becoming ready"
        )
        assert child.process.poll() is None, child.log()
        yield f"http://{address}"
    finally:
        child.stop()


def promtool(*arguments, page=None):
    """Exit code, and all that it printed."""
    done = subprocess.run(
        ["promtool", *map(str, arguments)], input=page, capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stdout + done.stderr


def query(prometheus, expr):
    answer = get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
    document = json.loads(answer) if answer else {"status": "error", "error": "no answer"}
    assert document["status"] == "success", (expr, document)
    return [
        (series["metric"], float(series["value"][1]))
        for series in document["data"]["result"]
        if math.isfinite(float(series["value"][1]))
    ]


def panel_queries(board, instance):
    """Panel title and query letter -> the expression as Grafana would send it."""
    found = {}
    for panel in json.loads((GRAFANA / "dashboards" / board).read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expr = (
                target["expr"].replace("$__rate_interval", "30s").replace("$job", ".+").replace("$instance", instance)
            )
            assert "$" not in expr
            found[f"{panel['title']} / {target['refId']}"] = expr
    return found


def empty_after(prometheus, queries):
    """Those of `queries` that returned no finite value by the deadline."""
    empty = dict(queries)
    until = time.monotonic() + DEADLINE_S
    while empty and time.monotonic() < until:
        empty = {name: expr for name, expr in empty.items() if not query(prometheus, expr)}
        time.sleep(0.5)
    return empty


def test_every_panel_query_of_the_target_dashboard_returns_data_beside_llama_cpp(prometheus, watch):
    queries = panel_queries("plimsoll-target.json", watch)
    assert len(queries) > 15
    assert empty_after(prometheus, queries) == {}


def test_every_panel_query_of_the_latency_dashboard_returns_data_beside_vllm(prometheus, recorded, watch_of_recorded):
    where = f'{{instance="{watch_of_recorded}"}}'
    wait_for(
        lambda: query(prometheus, f"plimsoll_time_to_first_token_seconds_count{where} == 16"), "the idle page's arrival"
    )
    recorded.metrics = "metrics_under_load"
    assert empty_after(prometheus, panel_queries("plimsoll-latency.json", watch_of_recorded)) == {}
    assert empty_after(prometheus, {"count": f"plimsoll_time_to_first_token_seconds_count{where} == 80"}) == {}


def test_the_tokens_that_the_engine_generates_arrive(prometheus):
    wait_for(
        lambda: query(prometheus, 'rate(plimsoll_generation_tokens_total{target="demo"}[30s]) > 0'),
        "tokens generated, as Prometheus sees it,",
    )
    assert [value for _, value in query(prometheus, 'plimsoll_up{target="demo"}')] == [1]


def test_no_alert_fires_beside_a_healthy_server(prometheus):
    document = json.loads(get(f"{prometheus}/api/v1/alerts"))
    assert document["data"]["alerts"] == []
    rules = json.loads(get(f"{prometheus}/api/v1/rules"))["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


@pytest.mark.parametrize("which", ["watch", "watch_of_recorded"])
def test_promtool_finds_nothing_to_say_about_the_metrics(which, request):
    address = request.getfixturevalue(which)
    page = wait_for(
        lambda: "plimsoll_requests_running" in (text := get(f"http://{address}/metrics") or "") and text, "it"
    )
    assert promtool("check", "metrics", page=page) == (0, "")


def test_promtool_accepts_the_shipped_configuration(programs):
    code, told = promtool("check", "config", GRAFANA / "prometheus.yml")
    assert code == 0, told


def test_the_shipped_alerts_fire_when_they_should_and_only_then(programs, tmp_path):
    def state(firing):
        return f'{{series: \'plimsoll_alert_state{{target="hy3", rule="memory_only_grows", state="firing"}}\', values: "{firing}"}}'

    def expected(alert, minute, *labels):
        alerts = f"[{{exp_labels: {{{', '.join(labels)}}}}}]" if labels else "[]"
        return f"{{alertname: {alert}, eval_time: {minute}m, exp_alerts: {alerts}}}"

    rules = yaml.safe_load((GRAFANA / "alerts" / "plimsoll.rules.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        del rule["annotations"]  # promtool would want their whole text repeated here
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "cases.yml").write_text(
        f"""
rule_files: [rules.yml]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - {state("0x40 1x40 0x40")}
      - {{series: 'plimsoll_up{{target="hy3"}}', values: "1x40 0x40 1x40"}}
      - {{series: 'up{{job="plimsoll"}}', values: "1x40 0x40 1x40"}}
    alert_rule_test:
      - {expected("PlimsollRuleFiring", 9)}
      - {expected("PlimsollRuleFiring", 11, "severity: warning", "target: hy3", "rule: memory_only_grows", "state: firing")}
      - {expected("PlimsollRuleFiring", 25)}
      - {expected("PlimsollTargetDown", 11)}
      - {expected("PlimsollTargetDown", 12, "severity: critical", "target: hy3")}
      - {expected("PlimsollTargetDown", 25)}
      - {expected("PlimsollWatchDown", 12)}
      - {expected("PlimsollWatchDown", 13, "severity: warning", "job: plimsoll")}
"""
    )
    code, told = promtool("test", "rules", tmp_path / "cases.yml")
    assert code == 0, told


def test_gpu_memory_is_shown_where_there_is_a_gpu_and_process_memory_elsewhere(programs, tmp_path):
    (expr,) = [
        expr for name, expr in panel_queries("plimsoll-target.json", ".+").items() if name.startswith("GPU memory")
    ]
    gpu, process = "plimsoll_gpu_memory_used_bytes", "plimsoll_process_resident_memory_bytes"
    cases = {
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [
                    {"series": f'{gpu}{{job="j", instance="a", target="x", gpu="0"}}', "values": "70x9"},
                    {"series": f'{gpu}{{job="j", instance="a", target="x", gpu="1"}}', "values": "71x9"},
                    {"series": f'{process}{{job="j", instance="a", target="x", role="server"}}', "values": "3x9"},
                    {"series": f'{process}{{job="j", instance="b", target="y", role="server"}}', "values": "4x9"},
                ],
                "promql_expr_test": [
                    {
                        "expr": expr,
                        "eval_time": "1m",
                        "exp_samples": [
                            {"labels": f'{gpu}{{job="j", instance="a", target="x", gpu="0"}}', "value": 70},
                            {"labels": f'{gpu}{{job="j", instance="a", target="x", gpu="1"}}', "value": 71},
                            {"labels": f'{process}{{job="j", instance="b", target="y", role="server"}}', "value": 4},
                        ],
                    }
                ],
            }
        ],
    }
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    code, told = promtool("test", "rules", tmp_path / "cases.yml")
    assert code == 0, told
