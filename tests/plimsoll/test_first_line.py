"""The page that leads from config.json to a proved batch size is run as it stands."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

from serving.settings import read_settings

PAGE = (Path(__file__).parents[2] / "docs" / "first-line.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"<!-- (run|background) -->\n```sh\n(.*?)```", PAGE, re.DOTALL)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_the_page_can_be_followed_to_the_letter(tmp_path):
    port = free_port()
    folder = os.fspath(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    said = []
    background = []
    try:
        for kind, block in BLOCKS:
            script = block.replace(":8000", f":{port}").replace("--port 8000", f"--port {port}")
            if kind == "background":
                background.append(
                    subprocess.Popen(
                        ["/bin/sh", "-c", f"exec {script}"],
                        cwd=tmp_path,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
                wait_for(port, background[-1])
                continue
            done = subprocess.run(
                ["/bin/sh", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            said.append(done.stdout)
    finally:
        for process in background:
            process.terminate()
            process.wait(timeout=30)
    words = "\n".join(said)
    limit = read_settings(tmp_path / "serving.yaml").max_batch_size
    assert 20 <= limit <= 40, "the page says about 30"
    assert re.search(r"weights +14\.19", words)
    assert re.search(r"KV cache +2\.8", words), "as the page says"
    assert re.search(rf"load line +{limit} \(configured {limit}\), bound by batch_slots", words)
    assert re.search(r"reached the model +yes", words)
    assert (tmp_path / "run.db").exists()


def wait_for(port, process):
    """Until the server listens."""
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert process.poll() is None, "the simulated server did not start"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_every_command_of_the_page_is_run_but_those_that_need_a_real_server():
    shown = set(re.findall(r"^\s*plimsoll (\w+)", PAGE, re.MULTILINE))
    run = {word for _, block in BLOCKS for word in re.findall(r"plimsoll (\w+)", block)}
    assert shown - run == {"experiment"}
