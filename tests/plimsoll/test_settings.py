"""The command over a serving file: what it says, said before, and would say to an engine; stale is said every time."""

import argparse
import json

import pytest

from plimsoll import settings
from serving.errors import ConfigError

FILE = """\
# hy3
model: /models/hy3 chat
engine: vllm
max-num-seqs:   48     # from the budget
tp: 4
kv_cache_quant: off
derived_from:
  tensor_parallel_size: 8
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hy3.yaml").write_text(FILE)
    return tmp_path / "hy3.yaml"


@pytest.fixture
def run(capsys):
    def run(*words):
        parser = argparse.ArgumentParser()
        settings.add_arguments(parser)
        code = settings.run(parser.parse_args(words))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def document(run, *words):
    code, out, _ = run(*words, "--json")
    assert out.count("\n") == 1
    read = json.loads(out, parse_constant=pytest.fail)
    assert (read["schema"], read["action"]) == ("plimsoll.settings/1", words[0])
    return code, read


@pytest.mark.usefixtures("file")
def test_a_file_is_shown_under_canonical_keys_with_lines_and_spelling(run):
    code, out, _ = run("show", "hy3.yaml")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["setting", "value", "line", "as"],
        ["model", "/models/hy3", "chat", "2"],
        ["engine", "vllm", "3"],
        ["max_batch_size", "48", "4", "max-num-seqs"],
        ["kv_cache_dtype", "auto", "6", "kv_cache_quant"],
        ["tensor_parallel_size", "4", "5", "tp"],
        ["derived", "from", "7"],
        ["tensor_parallel_size", "8", "8"],
    ]


@pytest.mark.usefixtures("file")
def test_a_program_is_told_the_same(run):
    code, told = document(run, "show", "hy3.yaml")
    assert code == 0
    assert told["settings"]["max_batch_size"] == 48
    assert told["lines"]["derived_from.tensor_parallel_size"] == 8
    assert told["derived_from"] == {"tensor_parallel_size": 8}
    assert told["stale"] == [{"key": "tensor_parallel_size", "was": 8, "now": 4, "was_line": 8, "now_line": 5}]


@pytest.mark.parametrize("style", [(), ("--json",)])
@pytest.mark.parametrize("words", [("show",), ("arguments",), ("backup",), ("diff",), ("restore", "1")])
def test_every_action_that_reads_the_file_says_that_its_batch_size_is_stale(file, run, words, style):
    run("backup", "hy3.yaml")
    action, *rest = words
    _, _, err = run(action, "hy3.yaml", *rest, *style)
    assert err == (
        "warning: hy3.yaml:4: max_batch_size 48 is stale: it was derived from tensor_parallel_size 8 (line 8), now 4 "
        "(line 5); work it out again with `plimsoll budget`\n"
    )
    file.write_text(FILE.replace("tp: 4", "tp: 8"))
    assert run("show", "hy3.yaml", *style)[2] == ""


def test_the_arguments_can_be_pasted_and_what_they_leave_out_is_named(file, run):
    assert run("arguments", "hy3.yaml")[1] == (
        "'/models/hy3 chat' --max-num-seqs 48 --kv-cache-dtype auto --tensor-parallel-size 4\n"
    )
    file.write_text(FILE.replace("engine: vllm", "swap_space: 4").replace("max-num-seqs", "np"))
    code, out, _ = run("arguments", "hy3.yaml", "--engine", "llamacpp")
    assert code == 0
    assert out.splitlines()[0] == "--model '/models/hy3 chat' --parallel 48"
    assert "# not said: swap_space_gb: llama.cpp has none" in out
    _, told = document(run, "arguments", "hy3.yaml", "--engine", "sglang")
    assert told["engine"] == "sglang"
    assert told["arguments"][:2] == ["--model-path", "/models/hy3 chat"]
    assert told["left_out"] == {"swap_space_gb": "SGLang has none"}


def test_a_change_is_seen_and_taken_back(file, run):
    code, told = document(run, "backup", "hy3.yaml", "--reason", "as found")
    assert code == 0
    assert told["version"]["version"] == 1
    assert told["version"]["uses"][0]["reason"] == "as found"
    assert run("diff", "hy3.yaml")[0] == 0
    file.write_text(FILE.replace("48", "64"))
    code, out, _ = run("diff", "hy3.yaml")
    assert code == 1
    assert out.splitlines()[1].split() == ["max_batch_size", "48", "(line", "4)", "64", "(line", "4)"]
    code, told = document(run, "diff", "hy3.yaml", "1")
    assert (code, told["differences"]) == (
        1,
        [{"key": "max_batch_size", "was": 48, "now": 64, "was_line": 4, "now_line": 4}],
    )
    assert run("restore", "hy3.yaml", "1")[:2] == (0, "hy3.yaml: version 1 is back\n")
    assert file.read_text() == FILE
    out = run("versions", "hy3.yaml")[1]
    assert [line.split()[0] for line in out.splitlines()] == ["version", "1", "2"]
    assert "as found" in out
    assert "before version 1 was restored" in out
    assert len(document(run, "versions", "hy3.yaml")[1]["versions"]) == 2


def test_two_files_are_compared(file, run):
    file.with_name("other.yaml").write_text("model: m\n")
    code, told = document(run, "diff", "hy3.yaml", "other.yaml")
    assert code == 1
    assert (told["was"], told["now"]) == ("other.yaml", "hy3.yaml")
    assert {one["key"] for one in told["differences"]} >= {"model", "max_batch_size"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "absent.yaml"), "absent.yaml: cannot be read: No such file"),
        (("show", "."), "directory"),
        (("show", "hy3.yaml", "2"), "show takes one FILE, and '2' is another"),
        (("restore", "hy3.yaml"), "restore needs the number of a version"),
        (("restore", "hy3.yaml", "one"), "restore needs the number of a version"),
        (("restore", "hy3.yaml", "7"), "hy3.yaml: has no stored version 7; stored: none"),
        (("diff", "hy3.yaml"), "no version of it is stored"),
        (("diff", "hy3.yaml", "absent.yaml"), "absent.yaml: cannot be read"),
        (("versions", "absent.yaml"), "there is no such file, and no stored version of one"),
        (("arguments", "hy3.yaml", "--engine", "sglang"), "hy3.yaml:3: engine is vllm, but sglang was asked for"),
        (("backup", "binary.yaml"), "binary.yaml:1: not UTF-8 text"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(file, run, words, says):
    file.with_name("binary.yaml").write_bytes(b"\xff\x00")
    with pytest.raises(ConfigError) as error:
        run(*words)
    assert says in str(error.value)


def test_nothing_stored_is_no_mistake(file, run):
    assert run("versions", str(file))[:2] == (0, "no version is stored\n")
