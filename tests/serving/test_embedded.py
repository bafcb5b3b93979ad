import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from serving.embedded import EmbeddedServer
from serving.embedded.tiny_model import PRESETS, TinyShape, cached_gguf, write_gguf, write_hf
from serving.errors import ConfigError, TargetError

TINY = PRESETS["tiny"]
DENSE = replace(TINY, experts=0)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


# --- the model's files -----------------------------------------------------------------------------------------------


def read_gguf(path):
    """An independent reader of what the writer may produce: facts, and tensors as (shape outermost first, floats)."""
    data = path.read_bytes()
    offset = 0

    def take(layout):
        nonlocal offset
        values = struct.unpack_from("<" + layout, data, offset)
        offset += struct.calcsize("<" + layout)
        return values[0] if len(values) == 1 else values

    def text():
        nonlocal offset
        size = take("Q")
        offset += size
        return data[offset - size : offset].decode()

    def value(kind):
        if kind == 9:
            inner, count = take("IQ")
            return [value(inner) for _ in range(count)]
        return text() if kind == 8 else take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])

    assert data[:4] == b"GGUF"
    offset = 4
    version, tensor_count, fact_count = take("IQQ")
    assert version == 3
    facts = {text(): value(take("I")) for _ in range(fact_count)}
    heads = []
    for _ in range(tensor_count):
        name, dimensions = text(), take("I")
        sizes = [take("Q") for _ in range(dimensions)]
        heads.append((name, tuple(reversed(sizes)), *take("IQ")))
    start = (offset + 31) // 32 * 32
    tensors = {}
    for name, shape, kind, at in heads:
        count = 1
        for size in shape:
            count *= size
        assert at % 32 == 0
        tensors[name] = shape, struct.unpack_from(f"<{count}{'fe'[kind]}", data, start + at)
    return facts, tensors


def read_safetensors(path):
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    index = json.loads(data[8 : 8 + size])
    index.pop("__metadata__")
    tensors = {}
    for name, entry in index.items():
        begin, end = entry["data_offsets"]
        upper_halves = struct.unpack(f"<{(end - begin) // 2}H", data[8 + size + begin : 8 + size + end])
        floats = struct.unpack(
            f"<{len(upper_halves)}f", struct.pack(f"<{len(upper_halves)}I", *(half << 16 for half in upper_halves))
        )
        tensors[name] = tuple(entry["shape"]), floats
    assert end == len(data) - 8 - size
    return tensors


@pytest.fixture(scope="module")
def both_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    write_gguf(folder / "moe.gguf", TINY)
    write_hf(folder / "moe", TINY)
    return *read_gguf(folder / "moe.gguf"), read_safetensors(folder / "moe" / "model.safetensors"), folder / "moe"


def test_both_files_hold_the_same_number_of_weights(both_files):
    _, gguf, hf, _ = both_files
    assert sum(len(floats) for _, floats in gguf.values()) == sum(len(floats) for _, floats in hf.values())


@pytest.mark.parametrize(
    ("gguf_name", "hf_name"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output.weight", "lm_head.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.1.attn_norm.weight", "model.layers.1.input_layernorm.weight"),
        ("blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("blk.1.ffn_gate_inp.weight", "model.layers.1.block_sparse_moe.gate.weight"),
    ],
)
def test_plain_tensors_are_equal_in_both_files(both_files, gguf_name, hf_name):
    _, gguf, hf, _ = both_files
    assert gguf[gguf_name] == hf[hf_name]


@pytest.mark.parametrize(("kind", "number"), [("gate", 1), ("up", 3), ("down", 2)])
def test_experts_are_stacked_in_order_in_the_gguf(both_files, kind, number):
    _, gguf, hf, _ = both_files
    shape, floats = gguf[f"blk.1.ffn_{kind}_exps.weight"]
    parts = [hf[f"model.layers.1.block_sparse_moe.experts.{expert}.w{number}.weight"] for expert in range(8)]
    assert shape == (8, *parts[0][0])
    assert floats == tuple(value for _, part in parts for value in part)


@pytest.mark.parametrize(("gguf_name", "hf_name", "heads"), [("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)])
def test_rotary_rows_are_pairs_in_the_gguf_and_halves_in_the_folder(both_files, gguf_name, hf_name, heads):
    _, gguf, hf, _ = both_files
    (rows, columns), ours = gguf[f"blk.0.{gguf_name}.weight"]
    _, theirs = hf[f"model.layers.0.self_attn.{hf_name}.weight"]
    head_dim = rows // heads
    for row in range(rows):
        head, place = divmod(row, head_dim)
        pair, side = divmod(place, 2)
        source = head * head_dim + side * head_dim // 2 + pair
        assert ours[row * columns : (row + 1) * columns] == theirs[source * columns : (source + 1) * columns]


def test_tokenizers_agree_and_every_merge_makes_a_known_token(both_files):
    facts, _, _, folder = both_files
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokens = facts["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == TINY.vocab
    assert list(vocabulary) == tokens[:-3]
    assert [" ".join(pair) for pair in tokenizer["model"]["merges"]] == facts["tokenizer.ggml.merges"]
    assert all(
        left in vocabulary and right in vocabulary and left + right in vocabulary
        for left, right in tokenizer["model"]["merges"]
    )
    assert {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]} == dict(
        enumerate(tokens[-3:], TINY.vocab - 3)
    )


def test_config_names_mixtral_with_experts_and_llama_without(both_files, tmp_path):
    facts, _, _, folder = both_files
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"], config["num_experts_per_tok"]) == ("mixtral", 8, 2)
    assert (facts["llama.expert_count"], facts["llama.expert_used_count"]) == (8, 2)
    write_hf(tmp_path / "dense", DENSE)
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["model_type"] == "llama"


def test_the_same_shape_gives_the_same_bytes_and_another_seed_gives_others(tmp_path):
    digests = []
    for number, shape in enumerate([TINY, TINY, replace(TINY, seed=2)]):
        write_gguf(tmp_path / str(number), shape)
        digests.append(hashlib.sha256((tmp_path / str(number)).read_bytes()).digest())
    assert digests[0] == digests[1] != digests[2]


def test_a_cached_model_is_made_once_and_each_shape_has_its_own_file(tmp_path):
    first = cached_gguf(tmp_path / "new" / "cache", TINY)
    made = first.stat().st_mtime_ns
    assert cached_gguf(first.parent, TINY) == first
    assert first.stat().st_mtime_ns == made
    assert cached_gguf(first.parent, DENSE) != first
    assert [path.suffix for path in first.parent.iterdir()] == [".gguf", ".gguf"]


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_gguf(tmp_path / "model.gguf", TINY)
    with pytest.raises(ConfigError, match="No space left on device"):
        write_hf(tmp_path / "model", TINY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    with pytest.raises(ConfigError, match="exists"):
        write_hf(tmp_path, TINY)


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(vocab=300),
        TinyShape(hidden=16),
        TinyShape(heads=4, kv_heads=3),
        TinyShape(head_dim=31),
        TinyShape(experts=8, experts_used=9),
        TinyShape(experts=2, experts_used=0),
    ],
)
def test_an_impossible_shape_is_refused(tmp_path, shape):
    with pytest.raises(ConfigError, match="impossible"):
        write_gguf(tmp_path / "x.gguf", shape)


# --- starting, without an engine -------------------------------------------------------------------------------------


def test_without_the_wheel_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install 'plimsoll\[demo\]'"):
        EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "huge"}, "unknown model shape 'huge'; known are tiny, demo, small"),
        ({"slots": 0}, "0 slots"),
        ({"total_context_tokens": 4}, "8 slots with a context of 4 tokens"),
    ],
)
def test_unusable_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match=message):
        EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=tmp_path, **arguments)


def test_a_missing_model_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match=r"none\.gguf does not exist"):
        EmbeddedServer.start(tmp_path / "none.gguf", log_path=tmp_path / "log", cache_dir=tmp_path)


# --- the real engine -------------------------------------------------------------------------------------------------


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def gone(pid):
    """True once no such process is left, waiting briefly for the kernel to end it."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


@pytest.fixture(scope="module")
def server(cache_dir, tmp_path_factory):
    log_path = tmp_path_factory.mktemp("log") / "engine.log"
    with EmbeddedServer.start(log_path=log_path, cache_dir=cache_dir, shape="tiny", slots=4) as running:
        yield running


@pytest.mark.engine
def test_the_engine_is_healthy_and_serves_slots_metrics_and_props(server):
    assert json.loads(get(server.url + "/health")) == {"status": "ok"}
    assert "llamacpp:requests_processing 0" in get(server.url + "/metrics")
    slots = json.loads(get(server.url + "/slots"))
    assert [slot["n_ctx"] for slot in slots] == [2048] * 4
    assert json.loads(get(server.url + "/props"))["total_slots"] == 4
    assert json.loads(get(server.url + "/v1/models"))["data"][0]["id"] == "tiny-moe"


@pytest.mark.engine
def test_a_completion_is_printable_and_as_long_as_asked(server):
    body = {"prompt": "the server said", "max_tokens": 32, "ignore_eos": True}
    answer = json.loads(post(server.url + "/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"].isprintable()


@pytest.mark.engine
def test_answers_end_by_themselves(server):
    answer = json.loads(post(server.url + "/v1/completions", {"prompt": "the", "max_tokens": 2000, "seed": 1}))
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.engine
def test_the_log_goes_to_the_file(server):
    assert "listening on" in server.log_path.read_text()


@pytest.mark.engine
def test_a_dense_model_is_served_too(cache_dir, tmp_path):
    arguments = {"log_path": tmp_path / "log", "cache_dir": cache_dir, "shape": "tiny", "experts": 0}
    with EmbeddedServer.start(**arguments) as running:
        assert json.loads(post(running.url + "/v1/completions", {"prompt": "the", "max_tokens": 1}))["usage"]


@pytest.mark.engine
def test_the_engine_is_gone_after_stop_even_with_a_stream_in_progress(cache_dir, tmp_path):
    running = EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=cache_dir, shape="tiny")
    body = {"prompt": "the", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        running.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as stream:
        assert stream.readline().startswith(b"data: ")
        assert running.running()
        running.stop()
        assert not running.running()
    assert gone(running.pid)
    with pytest.raises(urllib.error.URLError):
        get(running.url + "/health")
    running.stop()


@pytest.mark.engine
def test_the_engine_is_gone_after_its_parent_is_killed(cache_dir, tmp_path):
    script = (
        "import sys, pathlib; from serving.embedded import EmbeddedServer\n"
        "log, cache = map(pathlib.Path, sys.argv[1:])\n"
        "server = EmbeddedServer.start(log_path=log, cache_dir=cache, shape='tiny')\n"
        "print(server.pid, flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "log"), str(cache_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.send_signal(signal.SIGKILL)
    assert gone(pid)


@pytest.mark.engine
def test_an_interrupt_does_not_end_the_engine(server):
    os.kill(server.pid, signal.SIGINT)
    assert json.loads(get(server.url + "/health")) == {"status": "ok"}


@pytest.mark.engine
def test_a_file_that_is_no_model_is_an_error_that_gives_the_cause_and_the_log(cache_dir, tmp_path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF, but not really")
    with pytest.raises(TargetError, match=r"did not start: .*this GGUF file is version .*engine\.log"):
        EmbeddedServer.start(bad, log_path=tmp_path / "engine.log", cache_dir=cache_dir)


@pytest.mark.engine
def test_a_shared_cache_that_is_too_small_breaks_answers_off_with_an_error_event(cache_dir, tmp_path):
    arguments = {"kv_unified": True, "total_context_tokens": 512, "slots": 8, "shape": "tiny"}
    bodies = []
    with EmbeddedServer.start(log_path=tmp_path / "log", cache_dir=cache_dir, **arguments) as running:

        def ask(number):
            body = {"prompt": f"the {number}", "max_tokens": 300, "ignore_eos": True, "stream": True}
            bodies.append(post(running.url + "/v1/completions", body))

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    broken = [body for body in bodies if "Context size has been exceeded" in body]
    assert len(bodies) == 8
    assert broken
    assert all("[DONE]" not in body for body in broken)
