"""`plimsoll budget` says what fits and why, writes it down with its reasons, and is quick."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll import budget
from plimsoll.cli import main
from serving.settings import read_settings, stale_warning, versions

HY3 = ("budget", "hy3", "--gpu", "h200", "--gpus", "8", "--expert-parallel", "8", "--mean-tokens", "6000")


def told(capsys, *words):
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys, *words):
    code, out, _ = told(capsys, *words, "--json")
    return code, json.loads(out)


def test_the_document_has_the_three_budgets_and_the_batch(capsys):
    code, found = document(capsys, *HY3)
    assert (code, found["schema"], found["verdict"]) == (0, "plimsoll.budget/1", "pass")
    assert found["kv_bytes_per_token"] == 40_960
    assert found["per_card"]["weights"] == pytest.approx(68.8 * 2**30, rel=0.01)
    assert sum(found["per_card"].values()) == found["card"]["memory_bytes"]
    low, high = found["max_batch_size_range"]
    assert low <= found["max_batch_size"] <= high
    assert [step["kind"] for step in found["steps"]] == ["quantization", "quantization", "context", "concurrency"]


def test_people_get_a_table_the_batch_and_what_binds(capsys):
    code, out, _ = told(capsys, *HY3)
    assert code == 0
    for words in ("weights", "KV cache", "max_batch_size", "kv cache binds", "quantization", "40,960 bytes a token"):
        assert words in out


def test_what_does_not_fit_is_1_and_still_an_answer(capsys):
    code, found = document(capsys, "budget", "hy3", "--gpu", "h200", "--gpus", "2")
    assert (code, found["verdict"], found["max_batch_size"], found["bound_by"]) == (1, "fail", None, "weights")
    code, out, _ = told(capsys, "budget", "hy3", "--gpu", "h200", "--gpus", "2")
    assert code == 1
    assert "does not fit" in out


def test_the_written_file_has_its_reasons_and_knows_when_it_is_stale(capsys, tmp_path):
    path = tmp_path / "hy3-serving.yaml"
    code, out, _ = told(capsys, *HY3, "--write", str(path))
    assert (code, str(path) in out.replace("\n", "")) == (0, True)
    settings = read_settings(path)
    assert settings.max_batch_size > 100
    assert settings.derived_from["expert_parallel_size"] == 8
    assert all("#" in line for line in path.read_text().splitlines() if line.startswith("tensor"))
    assert stale_warning(settings) is None
    text = path.read_text()
    for key in ("tensor", "expert"):
        text = text.replace(f"{key}_parallel_size: 8  #", f"{key}_parallel_size: 4  #")
    path.write_text(text)
    assert "stale" in stale_warning(read_settings(path))
    _, found = document(capsys, "budget", "--settings", str(path), "--mean-tokens", "6000")
    assert "tensor_parallel_size 8" in found["warnings"][0]


def test_the_written_file_budgets_to_the_same_batch(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    _, first = document(capsys, *HY3, "--context", "65536", "--utilization", "0.9", "--write", str(path))
    _, again = document(capsys, "budget", "--settings", str(path), "--mean-tokens", "6000")
    assert again["max_batch_size"] == first["max_batch_size"] == read_settings(path).max_batch_size


def test_a_file_that_is_there_is_replaced_only_when_told_and_kept_as_a_version(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text("max_batch_size: 3\n")
    code, _, err = told(capsys, *HY3, "--write", str(path))
    assert (code, path.read_text()) == (2, "max_batch_size: 3\n")
    assert "--force" in err
    assert told(capsys, *HY3, "--write", str(path), "--force")[0] == 0
    assert [backup.version for backup in versions(path)] == [1]


def test_nothing_is_written_where_nothing_fits(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    code, found = document(capsys, "budget", "hy3", "--gpu", "h200", "--write", str(path))
    assert (code, found["written"], path.exists()) == (1, None, False)


def test_offload_is_marked_as_no_tuning_result(capsys):
    words = ("budget", "llama-3.1-8b", "--gpu-memory", "24GiB", "--engine", "llamacpp", "--context", "8192")
    assert document(capsys, *words)[1]["is_tuning_result"] is True
    _, found = document(capsys, *words, "--gpu-layers", "16")
    assert found["is_tuning_result"] is False
    assert any("no tuning result" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["budget"], "no model"),
        (["budget", "hy3"], "no card"),
        (["budget", "hy33", "--gpu", "h200"], "did you mean 'hy3'"),
        (["budget", "hy3", "--gpu", "h2000"], "no card is known"),
        (["budget", "hy3", "--gpu-memory", "lots"], "is not a size"),
        (["budget", "hy3", "--gpu-memory", "80"], "no memory of a card"),
        (["budget", "hy3", "--gpu", "h200", "--gpus", "8", "--tensor-parallel", "16"], "are needed and 8 are there"),
        (["budget", "hy3", "--gpu", "h200", "--tensor-parallel", "7"], "cannot share evenly"),
        (["budget", "hy3", "--gpu", "h200", "--long-share", "0.5"], "--mean-tokens"),
        (["budget", "hy3", "--gpu", "h200", "--gpus", "8", "--gpu-layers", "3"], "llamacpp can"),
        (["budget", "hy3", "--gpu", "h200", "--gpus", "8", "--kv-dtype", "fp7"], "is not known"),
        (
            ["budget", "hy3", "--gpu", "h200", "--gpus", "8", "--mean-tokens", "6000", "--long-tokens", "50"],
            "shorter than",
        ),
        (["budget", "hy3", "--gpu", "h200", "--weights", "/no/such/folder"], "no such folder"),
        (["budget", "/dev/null", "--gpu", "h200"], "no such file"),
    ],
)
def test_what_cannot_be_meant_is_2_with_what_to_do(capsys, words, said):
    code, _, err = told(capsys, *words)
    assert code == 2
    assert said in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("80GB", 80 * 10**9), ("24g", 24 * 2**30), ("85899345920", 85899345920), ("0.5TiB", 2**39)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert budget._size(text) == size


def test_a_budget_imports_nothing_heavy():
    script = (
        "import sys; from plimsoll.cli import main; main(['budget', 'hy3', '--gpu', 'h200', '--gpus', '8', '--json']); "
        "print([m for m in ('numpy', 'scipy', 'locust', 'gevent', 'aiohttp', 'torch') if m in sys.modules], "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_weights_are_checked_and_their_true_size_is_taken(capsys, tmp_path):
    config = Path(__file__).parent.parent / "samples" / "configs" / "qwen3-0.6b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    code, found = document(capsys, "budget", str(tmp_path), "--gpu", "l4", "--weights")
    assert code == 1, "there are no weights"
    assert found["weights_check"]["findings"]
