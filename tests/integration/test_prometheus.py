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
from pathlib import Path

import pytest

import grafana
from serving.embedded import EmbeddedServer

pytestmark = [pytest.mark.prometheus, pytest.mark.engine]

GRAFANA = Path(grafana.__file__).parent
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


@pytest.fixture(scope="module")
def watch(engine, traffic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch")
    config = folder / "watch.yaml"
    config.write_text(
        f"targets:\n  - url: {engine.url}\n    name: demo\n    pid: {engine.pid}\n"
        f"listen: 127.0.0.1:0\nhistory: {folder / 'watch.db'}\nevaluate_every: 2\n"
    )
    child = Child([sys.executable, "-m", "plimsoll", "watch", str(config)], folder / "watch.log")
    try:
        found = wait_for(
            lambda: child.process.poll() is not None or re.search(r"http://(127\.0\.0\.1:\d+)/metrics", child.log()),
            "the watch's address",
        )
        assert child.process.poll() is None, child.log()
        child.address = found[1]
        yield child
    finally:
        code = child.stop()
    assert code == 0, child.log()


@pytest.fixture(scope="module")
def prometheus(watch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    config = (GRAFANA / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:9464", watch.address)
    config = config.replace("scrape_interval: 5s", "scrape_interval: 1s").replace("timeout: 4s", "timeout: 1s")
    config = config.replace("alerts/", f"{GRAFANA / 'alerts'}/").replace(
        "evaluation_interval: 15s", "evaluation_interval: 1s"
    )
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


def query(prometheus, expr):
    answer = get(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
    document = json.loads(answer) if answer else {"status": "error", "error": "no answer"}
    assert document["status"] == "success", (expr, document)
    return [
        (series["metric"], float(series["value"][1]))
        for series in document["data"]["result"]
        if math.isfinite(float(series["value"][1]))
    ]


def panel_queries():
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "30s")
                yield f"{path.stem} / {panel['title']} / {target['refId']}", re.sub(r"\$(job|instance)\b", ".+", expr)


def test_every_panel_query_of_the_dashboards_returns_data(prometheus):
    wanted = dict(panel_queries())
    assert len(wanted) > 10
    empty = dict(wanted)

    def all_have_data():
        for name, expr in list(empty.items()):
            if query(prometheus, expr):
                del empty[name]
        return not empty

    until = time.monotonic() + DEADLINE_S
    while not all_have_data() and time.monotonic() < until:
        time.sleep(1)
    assert empty == {}


def test_what_was_generated_is_what_the_dashboard_shows(prometheus):
    speed = wait_for(
        lambda: [value for _, value in query(prometheus, "rate(plimsoll_generation_tokens_total[30s])") if value > 0],
        "tokens generated according to Prometheus",
    )
    assert speed[0] > 0
    assert [value for _, value in query(prometheus, "plimsoll_up")] == [1]


def test_no_alert_fires_beside_a_healthy_server(prometheus):
    document = json.loads(get(f"{prometheus}/api/v1/alerts"))
    assert document["data"]["alerts"] == []
    rules = json.loads(get(f"{prometheus}/api/v1/rules"))["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


def test_promtool_finds_nothing_to_say_about_the_metrics(watch):
    page = wait_for(
        lambda: (text := get(f"http://{watch.address}/metrics")) and "plimsoll_up" in text and text, "a page"
    )
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_promtool_accepts_the_shipped_configuration(programs):
    checked = subprocess.run(
        ["promtool", "check", "config", str(GRAFANA / "prometheus.yml")],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
