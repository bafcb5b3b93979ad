"""`plimsoll budget` says what fits and why, writes it down with its reasons, and is quick."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from monitor.gpu import GpuDevice, GpuProcess
from monitor.machine import HostMemory, Machine, Processor
from plimsoll import budget
from plimsoll.cli import main
from serving.model import Split, read_model
from serving.settings import read_settings, stale_warning, versions

CONFIGS = Path(__file__).parent.parent / "samples" / "configs"
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


def test_a_file_budgeted_anew_keeps_what_else_it_says(capsys, tmp_path):
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(
        "model: llama-3.1-8b\nengine: vllm\ngpu: h100\ngpus: 2\ntensor_parallel_size: 1\npipeline_parallel_size: 2\n"
        "max_model_len: 32768\nmax_batch_size: 64\nkv_cache_capacity_tokens: 9000\nkv_cache_dtype: fp8\n"
        "enable_prefix_cache: false\nswap_space_gb: 4\nderived_from: {mean_tokens: 2000}\n"
    )
    words = ("budget", "--settings", str(old), "--mean-tokens", "4000")
    _, first = document(capsys, *words, "--write", str(new))
    settings = read_settings(new)
    assert (settings.kv_cache_dtype, settings.enable_prefix_cache, settings.swap_space_gb) == ("fp8", False, 4)
    assert (settings.pipeline_parallel_size, settings.kv_cache_capacity_tokens) == (2, None)
    assert stale_warning(settings) is None
    _, again = document(capsys, "budget", "--settings", str(new), "--mean-tokens", "4000")
    assert again["max_batch_size"] == first["max_batch_size"] == settings.max_batch_size
    # What the command line says stands before the file.
    overruled = ("--pipeline-parallel", "1", "--tensor-parallel", "2", "--kv-bits", "16", "--force")
    document(capsys, *words, *overruled, "--write", str(new))
    settings = read_settings(new)
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (2, None)
    assert settings.kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("engine", "bits", "kind"),
    [("vllm", "8", "fp8_e4m3"), ("sglang", "8", "fp8_e4m3"), ("llamacpp", "8.5", "q8_0"), ("llamacpp", "4.5", "q4_0")],
)
def test_a_cache_given_in_bits_is_written_as_the_type_that_the_engine_is_to_run(capsys, tmp_path, engine, bits, kind):
    path = tmp_path / "serving.yaml"
    words = ("budget", "llama-3.1-8b", "--gpu", "h100", "--engine", engine, "--context", "8192", "--kv-bits", bits)
    code, first = document(capsys, *words, "--write", str(path))
    assert (code, read_settings(path).kv_cache_dtype) == (0, kind)
    _, again = document(capsys, "budget", "--settings", str(path))
    assert again["max_batch_size"] == first["max_batch_size"]
    code, _, err = told(capsys, *words[:-1], "7", "--write", str(tmp_path / "other.yaml"))
    assert (code, "no type of KV cache with 7 bits" in err) == (2, True)


def test_a_file_for_drafting_or_layers_in_main_memory_is_stale_when_these_change(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    words = ("budget", "llama-3.1-8b", "--gpu", "4090", "--engine", "llamacpp", "--context", "8192")
    document(capsys, *words, "--gpu-layers", "16", "--write", str(path))
    path.write_text(path.read_text().replace("gpu_layers: 16  #", "gpu_layers: 24  #"))
    assert "gpu_layers 16" in stale_warning(read_settings(path))
    document(capsys, *HY3, "--mtp", "1", "--write", str(path), "--force")
    path.write_text(path.read_text().replace("mtp_layers: 1  #", "mtp_layers: 0  #"))
    assert "mtp_layers 1" in stale_warning(read_settings(path))


def test_more_requests_than_fit_are_1_and_are_not_written(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    words = ("budget", "llama-3.1-8b", "--gpu", "h100", "--context", "8192", "--mean-tokens", "8000")
    code, found = document(capsys, *words, "--max-batch", "1000", "--write", str(path))
    assert (code, found["verdict"], found["written"], path.exists()) == (1, "fail", None, False)
    assert 0 < found["max_batch_size"] < 100
    assert "not the 1000 that were asked for" in found["reason"]
    code, out, _ = told(capsys, *words, "--max-batch", "1000", "--write", str(path))
    assert (code, "1000 requests at once do not fit" in out, "not written" in out) == (1, True, True)
    assert document(capsys, *words, "--max-batch", "8")[0] == 0


def test_of_several_copies_the_cache_is_told_as_that_of_one(capsys):
    words = ("budget", "llama-3.1-8b", "--gpu", "h100", "--context", "8192", "--mean-tokens", "8000")
    _, out, _ = told(capsys, *words, "--data-parallel", "4")
    assert "the KV cache of each copy holds" in out
    assert "requests of each copy at once" in out
    assert "of each copy" not in told(capsys, *words)[1]


@pytest.mark.parametrize(("flag", "tokens"), [("--mean-tokens", "9000"), ("--long-tokens", "9000")])
def test_requests_longer_than_the_context_are_refused(capsys, flag, tokens):
    words = ["budget", "llama-3.1-8b", "--gpu", "h100", "--context", "8192", flag, tokens]
    words += [] if flag == "--mean-tokens" else ["--mean-tokens", "1000"]
    code, _, err = told(capsys, *words)
    assert (code, f"{flag} {tokens}: longer than the context of 8192" in err) == (2, True)


def test_names_that_no_file_can_have_are_refused(capsys):
    for words in (("x" * 5000,), ("hy3", "--write", "x" * 5000)):
        code, _, err = told(capsys, "budget", *words, "--gpu", "h200", "--gpus", "8")
        assert (code, "File name too long" in err) == (2, True)


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


def stored(folder, config, size):
    """A folder with a model of one tensor of so many bytes, which take no place on the disk."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}
    head = json.dumps({"model.layers.0.mlp.up_proj.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)


@pytest.mark.parametrize("drafting", [0, 1])
def test_weights_count_as_their_files_are_large(capsys, tmp_path, drafting):
    # The files hold the module for multi-token prediction, too, which is loaded only when it is used.
    config = json.loads((CONFIGS / "glm-4.5-air.json").read_text())
    shape = read_model(CONFIGS / "glm-4.5-air.json")
    whole = shape.weight_bytes(mtp_layers=1).total
    stored(tmp_path, config, whole * 101 // 100 // 2 * 2)
    words = ("budget", str(tmp_path), "--gpu", "h200", "--gpus", "4", "--context", "8192", "--mtp", str(drafting))
    code, found = document(capsys, *words, "--weights")
    expected = 1.01 * shape.weight_bytes(Split(4), mtp_layers=drafting).total
    assert (code, found["weights_check"]["is_whole"]) == (0, True)
    assert found["per_card"]["weights"] == pytest.approx(expected, rel=1e-6)


def test_files_that_are_not_whole_say_nothing_of_the_size(capsys, tmp_path):
    config = json.loads((CONFIGS / "qwen3-0.6b.json").read_text())
    stored(tmp_path, config, 100_000_000)
    os.truncate(tmp_path / "model.safetensors", 50_000_000)
    words = ("budget", str(tmp_path), "--gpu", "l4", "--context", "8192")
    code, found = document(capsys, *words, "--weights")
    assert (code, found["weights_check"]["is_whole"]) == (1, False)
    assert found["per_card"]["weights"] == read_model(tmp_path).weight_bytes().total


@pytest.mark.parametrize("size", [0, 16, 500_000_000])
def test_files_that_are_too_few_for_the_model_are_told_and_not_budgeted(capsys, tmp_path, size):
    stored(tmp_path, json.loads((CONFIGS / "qwen3-0.6b.json").read_text()), size)
    code, found = document(capsys, "budget", str(tmp_path), "--gpu", "l4", "--context", "8192", "--weights")
    assert code == 1
    assert any("files are missing, or are another model's" in warning for warning in found["warnings"])
    assert found["per_card"]["weights"] == read_model(tmp_path).weight_bytes().total


def machine_of(*free_gib, available_gib=64, processes=()):
    cards = tuple(
        GpuDevice(
            uuid=f"GPU-{turn}",
            name="NVIDIA L4",
            memory_total_bytes=24.0 * 2**30,
            memory_free_bytes=free * 2.0**30,
            processes=processes,
        )
        for turn, free in enumerate(free_gib)
    )
    memory = HostMemory(None, None, 2**37, available_gib * 2**30, None, None)
    return Machine(cards, memory, Processor("a processor", 8, 16, 16.0), None, ("a note.",))


def test_of_cards_that_are_not_equally_free_the_fullest_counts(capsys, monkeypatch):
    monkeypatch.setattr(budget, "_machine", lambda: machine_of(23, 12))
    _, found = document(capsys, "budget", "qwen2.5-7b", "--local", "--context", "8192")
    assert found["card"]["free_bytes"] == 12 * 2**30
    assert found["machine"]["cards"][1]["memory_free_bytes"] == 12 * 2**30


def test_this_machine_is_told_with_who_holds_its_cards(capsys, monkeypatch):
    others = (GpuProcess(4711, 2 * 2**30, "trainer"),)
    monkeypatch.setattr(budget, "_machine", lambda: machine_of(20, processes=others))
    _, out, _ = told(capsys, "budget", "qwen2.5-7b", "--local", "--context", "8192")
    for words in (
        "20.0 of 24.0 GiB free",
        "in use by trainer (pid 4711), 2.0 GiB",
        "64.0 of 128.0 GiB free",
        "a note.",
    ):
        assert words in out


def test_weights_that_stay_in_main_memory_must_fit_there(capsys, monkeypatch):
    words = ("budget", "hy3", "--local", "--engine", "llamacpp", "--weight-bits", "4.85", "--context", "8192")
    for free, code in ((64, 1), (256, 0)):
        monkeypatch.setattr(budget, "_machine", lambda free=free: machine_of(23, available_gib=free))
        assert document(capsys, *words, "--cpu-moe-layers", "80")[0] == code
    monkeypatch.setattr(budget, "_machine", lambda: machine_of(23, available_gib=64))
    assert "64.0 GiB of it are free" in document(capsys, *words, "--cpu-moe-layers", "80")[1]["warnings"][-1]


def test_lengths_of_long_requests_are_remembered(capsys, tmp_path):
    path = tmp_path / "serving.yaml"
    document(capsys, *HY3, "--context", "65536", "--long-share", "0.1", "--write", str(path))
    assert read_settings(path).derived_from["long_tokens"] == 65_536
    document(capsys, *HY3, "--long-share", "0.1", "--long-tokens", "20000", "--write", str(path), "--force")
    derived = read_settings(path).derived_from
    assert (derived["long_tokens"], derived["long_share_ratio"]) == (20_000, 0.1)


def test_weights_are_checked_and_their_true_size_is_taken(capsys, tmp_path):
    config = Path(__file__).parent.parent / "samples" / "configs" / "qwen3-0.6b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    code, found = document(capsys, "budget", str(tmp_path), "--gpu", "l4", "--weights")
    assert code == 1, "there are no weights"
    assert found["weights_check"]["findings"]
