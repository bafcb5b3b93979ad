"""`plimsoll simulate` as a process of its own, for tests that talk to it from outside."""

import http.client
import json
import subprocess
import sys

QUICK = ("--port", "0", "--json", "--speed", "50")


class Child:
    """A simulated server in a process of its own."""

    def __init__(self, *arguments, **options):
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "plimsoll", "simulate", *QUICK, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )
        line = self.process.stdout.readline()
        self.document = json.loads(line) if line else {}

    def request(self, method, path, document=None):
        connection = http.client.HTTPConnection(self.document["url"].removeprefix("http://"), timeout=10)
        try:
            connection.request(method, path, None if document is None else json.dumps(document))
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        finally:
            connection.close()

    def ends(self):
        """(exit code, what it said to people) once it has ended."""
        out, err = self.process.communicate(timeout=20)
        assert out == b"", "one document, and nothing else, is on stdout"
        return self.process.returncode, err.decode()
