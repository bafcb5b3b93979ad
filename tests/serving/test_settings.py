"""The serving file is read under every engine's names, and a slip in it is refused with file and line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engines import ENGINES
from serving.errors import ConfigError
from serving.settings import (
    DERIVED_KEYS,
    ENGINE_ALIASES,
    SETTING_ALIASES,
    SETTING_KEYS,
    Settings,
    StaleInput,
    engine_arguments,
    keys,
    parse_settings,
    read_assignment,
    read_settings,
    stale_inputs,
    stale_warning,
)

DOCS = Path(__file__).parent.parent.parent / "docs" / "settings.md"

WHOLE = """\
# what the server is meant to run with
model: /models/hy3
engine: vLLM
gpu: h200
gpus: 16
max_batch_size: 48
max_model_len: 32_768
max_num_batched_tokens: 8192
physical_batch_tokens: 512
kv_cache_capacity_tokens: 1000000
kv_cache_dtype: fp8
kv_cache_dtype_k: q8_0
kv_cache_dtype_v: q4_0
kv_unified: false
enable_prefix_cache: true
quantization: awq
dtype: bfloat16
gpu_memory_utilization: 0.9
tensor_parallel_size: 8
pipeline_parallel_size: 1
data_parallel_size: 2
expert_parallel_size: 16
enable_expert_parallel: true
mtp_layers: 1
num_speculative_tokens: 2
gpu_layers: 40
cpu_moe_layers: 12
cpu_offload_gb: 10
swap_space_gb: 4.5
"""


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "settings.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path):
    with pytest.raises(ConfigError) as error:
        read_settings(path)
    return str(error.value)


def test_every_key_is_read_with_its_line(write):
    path = write(WHOLE)
    read = read_settings(path)
    assert read == Settings(
        path=str(path),
        lines={line.partition(":")[0]: number for number, line in enumerate(WHOLE.splitlines(), 1) if number > 1},
        model="/models/hy3",
        engine="vllm",
        gpu="h200",
        gpus=16,
        max_batch_size=48,
        max_model_len=32768,
        max_num_batched_tokens=8192,
        physical_batch_tokens=512,
        kv_cache_capacity_tokens=1_000_000,
        kv_cache_dtype="fp8",
        kv_cache_dtype_k="q8_0",
        kv_cache_dtype_v="q4_0",
        kv_unified=False,
        enable_prefix_cache=True,
        quantization="awq",
        dtype="bfloat16",
        gpu_memory_utilization=0.9,
        tensor_parallel_size=8,
        pipeline_parallel_size=1,
        data_parallel_size=2,
        expert_parallel_size=16,
        enable_expert_parallel=True,
        mtp_layers=1,
        num_speculative_tokens=2,
        gpu_layers=40,
        cpu_moe_layers=12,
        cpu_offload_gb=10.0,
        swap_space_gb=4.5,
    )
    assert read.where("max_batch_size") == f"{path}:6"
    assert tuple(read.values()) == SETTING_KEYS == tuple(line.partition(":")[0] for line in WHOLE.splitlines()[1:])


def test_what_the_file_does_not_say_is_absent(write):
    path = write("max_batch_size: 8\n")
    assert read_settings(path) == Settings(path=str(path), lines={"max_batch_size": 1}, max_batch_size=8)
    assert read_settings(path).where("model") == str(path)


SAMPLES = {
    "model": "m",
    "gpu_memory_utilization": "0.5",
    "kv_cache_dtype": "fp8",
    "kv_cache_dtype_k": "q8_0",
    "kv_cache_dtype_v": "q8_0",
    "kv_unified": "true",
    "enable_prefix_cache": "true",
    "quantization": "awq",
    "swap_space_gb": "4.0",
}


@pytest.mark.parametrize("alias", SETTING_ALIASES)
@pytest.mark.parametrize("style", ["{}", "--{}"])
@pytest.mark.parametrize("dashes", [False, True])
def test_engines_own_names_are_accepted(write, alias, style, dashes):
    key = SETTING_ALIASES[alias]
    text = SAMPLES.get(key, "4")
    name = style.format(alias.replace("_", "-") if dashes else alias)
    read = read_settings(write(f"\n{name}: {text}\n"))
    expected = "false" if alias == "disable_radix_cache" else text
    assert str(getattr(read, key)).lower() == expected
    assert (read.lines, read.spelt) == ({key: 2}, {key: name})


@pytest.mark.parametrize("alias", ENGINE_ALIASES)
def test_a_name_that_engines_understand_differently_needs_its_engine(write, alias):
    engine, key, advice = ENGINE_ALIASES[alias]
    assert getattr(read_settings(write(f"{alias}: 4096\nengine: {engine}\n")), key) == 4096
    for other in ("", *(f"engine: {name}\n" for name in ENGINES if name != engine)):
        message = refusal(write(f"{other}{alias}: 4096\n"))
        assert advice in message
        assert f"engine: {engine}" in message


@pytest.mark.parametrize("alias", keys._NEAR_MISSES)
def test_a_name_that_only_looks_like_a_setting_is_refused_with_what_it_means(write, alias):
    assert f":1: {alias}: {keys._NEAR_MISSES[alias]}" in refusal(write(f"{alias}: 4\n"))
    assert alias not in SETTING_ALIASES


def test_the_names_of_the_tables_lead_to_keys_and_to_one_only():
    targets = {*SETTING_ALIASES.values(), *(key for _, key, _ in ENGINE_ALIASES.values())}
    assert targets <= set(SETTING_KEYS)
    names = [*SETTING_KEYS, *SETTING_ALIASES, *ENGINE_ALIASES, *keys._NEAR_MISSES, *keys._DERIVED_ONLY, "derived_from"]
    assert sorted(names) == sorted(set(names))


def test_a_limit_of_one_copy_is_not_taken_for_the_whole_targets(write):
    message = refusal(write("max_num_seqs: 48\ndata_parallel_size: 2\n"))
    assert ":1: max_num_seqs: vLLM counts it for each data-parallel copy" in message
    message = refusal(write("max_running_requests: 48\ndp: 2\n"))
    assert ":1: max_running_requests: SGLang counts it for each data-parallel copy" in message
    assert read_settings(write("max_num_seqs: 48\ndata_parallel_size: 1\n")).max_batch_size == 48
    assert read_settings(write("max_running_requests: 96\ndp_size: 1\n")).max_batch_size == 96
    assert read_settings(write("max_batch_size: 96\ndp_size: 2\n")).max_batch_size == 96


@pytest.mark.parametrize("word", ["off", "Off", "no", "none", "'false'", "false", "关闭", "无"])
def test_words_for_off_are_read_as_none_and_as_the_models_own(write, word):
    read = read_settings(write(f"kv_cache_quant: {word}\nquantization: {word}\n"))
    assert (read.kv_cache_dtype, read.quantization) == ("auto", "none")


@pytest.mark.parametrize("word", ["on", "true", "开启", "'yes'"])
def test_on_is_no_element_type(write, word):
    assert "says that it is on, and not which: name it, as in kv_cache_dtype: fp8" in refusal(
        write(f"kv_cache_quant: {word}\n")
    )


@pytest.mark.parametrize(
    ("text", "gpu_layers", "cpu_moe_layers"),
    [
        ("ngl: all\ncpu_moe: true\n", "all", "all"),
        ("gpu_layers: Auto\ncpu_moe_layers: all\n", "auto", "all"),
        ("n_gpu_layers: 0\ncmoe: false\n", 0, 0),
        ("n-gpu-layers: 99\nn-cpu-moe: 12\n", 99, 12),
    ],
)
def test_layers_are_a_number_or_a_word(write, text, gpu_layers, cpu_moe_layers):
    read = read_settings(write(text))
    assert (read.gpu_layers, read.cpu_moe_layers) == (gpu_layers, cpu_moe_layers)


def test_a_file_as_engineers_pass_it_on_is_read(write):
    read = read_settings(
        write(
            "# hy3-serving.yaml\nexpert_parallel_size: 8 # fixed first\nmax_model_len: 8192\nmax_batch_size: 48\n"
            "gpu_memory_utilization: 0.90\nkv_cache_quant: 关闭\nenable_prefix_cache: true\n"
        )
    )
    assert read.values() == {
        "max_batch_size": 48,
        "max_model_len": 8192,
        "kv_cache_dtype": "auto",
        "enable_prefix_cache": True,
        "gpu_memory_utilization": 0.9,
        "expert_parallel_size": 8,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: m\n", None),
        ("expert_parallel_size: 4\n", 4),
        ("enable_expert_parallel: true\ntensor_parallel_size: 8\ndata_parallel_size: 2\n", 16),
        ("enable_expert_parallel: true\n", 1),
        ("enable_expert_parallel: false\ntensor_parallel_size: 8\n", None),
    ],
)
def test_expert_parallelism_is_one_figure_however_it_is_written(write, text, expected):
    assert read_settings(write(text)).expert_parallel == expected


DERIVED = """\
max_batch_size: 48
max_model_len: 32768
tensor_parallel_size: 8
expert_parallel_size: 8
kv_cache_dtype: fp8
derived_from:
  tensor_parallel_size: 8
  expert_parallel_size: 8
  max_model_len: 32768
  kv_cache_dtype: fp8_e4m3
  gpu: H200
  gpus: 8
  mean_tokens: 3000
  gpu_memory_utilization: 0.9
"""


def test_what_a_batch_size_was_derived_from_is_remembered_with_its_lines(write):
    read = read_settings(write(DERIVED))
    assert read.derived_from["mean_tokens"] == 3000
    assert read.lines["derived_from"] == 6
    assert read.lines["derived_from.mean_tokens"] == 13
    assert (read.stale, stale_warning(read)) == ((), None)


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ("\ntensor_parallel_size: 8", "\ntensor_parallel_size: 4", ("tensor_parallel_size", 8, 4, 7, 3)),
        ("\nexpert_parallel_size: 8", "\nep_size: 4", ("expert_parallel_size", 8, 4, 8, 4)),
        # A parallel size that is left out is 1 to an engine, on both sides.
        ("\nexpert_parallel_size: 8", "", ("expert_parallel_size", 8, 1, 7, None)),
        ("max_batch", "pipeline_parallel_size: 2\nmax_batch", ("pipeline_parallel_size", 1, 2, None, 1)),
        ("max_batch", "data_parallel_size: 1\nmax_batch", None),
        ("\nexpert_parallel_size: 8", "\nenable_expert_parallel: true", None),
        ("max_batch", "engine: llamacpp\nmax_batch", None),
        ("\ntensor_parallel_size: 8", "\nengine: llamacpp", None),
        ("kv_cache_dtype: fp8\n", "kv_cache_dtype: auto\n", ("kv_cache_dtype", "fp8_e4m3", "auto", 10, 5)),
        # Of other settings, what the file leaves out is what it was.
        ("kv_cache_dtype: fp8\n", "", None),
        ("\nmax_model_len: 32768", "\nmax_model_len: 65536", ("max_model_len", 32768, 65536, 9, 2)),
        ("max_batch", "gpu: h-200\nmax_batch", None),
        ("max_batch", "gpu: h100\nmax_batch", ("gpu", "H200", "h100", 12, 1)),
        ("max_batch", "gpu_memory_utilization: 0.90\nmax_batch", None),
        ("max_batch", "gpu_memory_utilization: 0.95\nmax_batch", ("gpu_memory_utilization", 0.9, 0.95, 15, 1)),
        ("max_batch", "quantization: awq\nmax_batch", None),
        ("max_batch_size: 48", "model: m", None),
    ],
)
def test_a_changed_memory_input_makes_the_batch_size_stale(write, old, new, stale):
    text = DERIVED.replace(old, new, 1)
    assert text != DERIVED
    read = read_settings(write(text))
    assert read.stale == (() if stale is None else (StaleInput(*stale),))
    assert (stale_warning(read) is None) == (stale is None)


def test_what_is_known_from_elsewhere_stands_before_the_file(write):
    read = read_settings(write(DERIVED))
    assert stale_inputs(read, {"mean_tokens": 3000, "gpu": "h200"}) == ()
    assert stale_inputs(read, {"tensor_parallel_size": 4}) == (StaleInput("tensor_parallel_size", 8, 4, 7, 3),)


def test_staleness_is_one_sentence_with_every_change_and_its_lines(write):
    path = write(DERIVED.replace("\ntensor_parallel_size: 8", "\ntensor_parallel_size: 4"))
    assert stale_warning(read_settings(path), {"mean_tokens": 6000}) == (
        f"{path}:1: max_batch_size 48 is stale: it was derived from tensor_parallel_size 8 (line 7), now 4 (line 3), "
        "mean_tokens 3000 (line 13), now 6000; work it out again with `plimsoll budget`"
    )


@pytest.mark.parametrize("name", ["llama.cpp", "llamacpp", "LLAMA-CPP", "llama_cpp"])
def test_an_engine_may_be_spelt_as_people_spell_it(write, name):
    assert read_settings(write(f"engine: {name}")).engine == "llamacpp"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model: m\nmax_batchsize: 8\n", ":2: unknown key 'max_batchsize'; did you mean 'max_batch_size'?"),
        ("max-num-seq: 8\n", ":1: unknown key 'max-num-seq'; did you mean 'max_num_seqs'?"),
        ("Max_Batch_Size: 8\n", "did you mean 'max_batch_size'?"),
        ("colour: blue\n", ":1: unknown key 'colour'; known keys: model, engine, gpu, gpus, max_batch_size"),
        ("<<: {a: 1}\n", ":1: a key must be plain text"),
        ("3: 4\n", ":1: a key must be plain text"),
        ("? [a]\n: b\n", ":1: a key must be plain text"),
        (
            "max_batch_size: 8\nmodel: m\nmax_batch_size: 9\n",
            ":3: key 'max_batch_size' is written a second time; keep one",
        ),
        (
            "max_batch_size: 8\n\nmax-num-seqs: 8\n",
            ":3: max-num-seqs: is given twice: line 1 has it as 'max_batch_size'; keep one",
        ),
        ("max_batch_size: 0\n", ":1: max_batch_size: is 0; it must be 1 to 65536"),
        ("max_batch_size: -4\n", "is -4; it must be 1 to 65536"),
        ("max_batch_size: 65537\n", "is 65537; it must be 1 to 65536"),
        (
            f"max_batch_size: {'9' * 6000}\n",
            ":1: max_batch_size: must be a whole number, without quotes or fraction, not '999",
        ),
        ("max_batch_size: '8'\n", "must be a whole number, without quotes"),
        ("max_batch_size: 8.0\n", "must be a whole number"),
        ("max_batch_size: true\n", "must be a whole number"),
        ("max_batch_size: many\n", "must be a whole number"),
        ("max_batch_size: 010\n", "'010' is 8 to YAML; write plain digits"),
        ("max_batch_size: 1:30\n", "'1:30' is 90 to YAML; write plain digits"),
        ("max_batch_size:\n", ":1: max_batch_size: must be a whole number, without quotes or fraction, not nothing"),
        ("max_batch_size: [8]\n", "without quotes or fraction, not a list"),
        ("max_batch_size: {a: 8}\n", "without quotes or fraction, not a mapping"),
        ("max_batch_size: !!int ''\n", "must be a whole number"),
        ("max_batch_size: !!bool x\n", "must be a whole number"),
        ("max_batch_size: !!timestamp x\n", "must be a whole number"),
        ("model: !!python/object:os.system x\n", ":1: model: must be text, not 'x'"),
        ("model: 2026-99-99\n", ":1: model: must be text, not '2026-99-99' (put quotes around it"),
        ("model: 2026-01-01\n", "must be text, not '2026-01-01' (put quotes around it"),
        ("model: ''\n", "must be text"),
        ("model: 7\n", "must be text"),
        ("engine: tgi\n", "must be one of vllm, sglang, llamacpp"),
        ("gpu_memory_utilization: 90\n", "a ratio, not percent"),
        ("gpu_memory_utilization: 0\n", "above 0"),
        ("gpu_memory_utilization: .nan\n", "must be a number"),
        ("gpu_memory_utilization: yes\n", "must be a number"),
        ("tensor_parallel_size: 0\n", "is 0; it must be 1 to 65536"),
        ("ngl: some\n", ":1: ngl: is 'some'; it must be a number of layers or all or auto"),
        ("gpu_layers: -2\n", "is -2; it must be 0 to 100000"),
        ("kv_unified: 1\n", "must be true or false"),
        ("cpu_offload_gb: -1\n", "is -1; it must be 0 to 1e+06"),
        (
            "enable_expert_parallel: false\nexpert_parallel_size: 8\n",
            ":2: expert_parallel_size: is above 1, and enable_expert_parallel is false",
        ),
        ("derived_from: 8\n", ":1: derived_from: must be a mapping"),
        ("derived_from:\n  gpu_s: 8\n", ":2: unknown key 'gpu_s' in derived_from; did you mean 'gpus'?"),
        ("derived_from:\n  max_batch_size: 8\n", ":2: unknown key 'max_batch_size' in derived_from"),
        ("derived_from:\n  tp: 8\n  tp-size: 8\n", ":3: derived_from.tp-size: is given twice: line 2 has it as 'tp'"),
        ("derived-from:\n  tp: 8\n", "unknown key 'derived-from'"),
        ("", ": the file is empty"),
        ("# nothing yet\n", ": the file is empty"),
        ("- max_batch_size\n", ":1: must be a mapping of keys to values, not a list"),
        ("\nmax_batch_size\n", ":2: must be a mapping of keys to values"),
        ("a: [1\nb: 2\n", ":2: not valid YAML"),
        ("model: m\nmax_batch_size:\t8\n: :\n", ":2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: but found another document"),
        ("model: *nobody\n", ":1: not valid YAML: found undefined alias"),
        ("[" * 20_000, ": nested too deeply"),
        ("model: \x00\n", "special characters are not allowed"),
        (b"model: m\nengine: \xff\n", ":2: not UTF-8 text"),
        (b"x" * (2**20 + 1), ": larger than 1 MiB"),
    ],
)
def test_a_slip_is_refused_with_file_and_line(write, content, says):
    path = write(content)
    message = refusal(path)
    assert message.startswith(f"{path}:")
    assert says in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert "No such file" in refusal(tmp_path / "absent.yaml")
    assert "directory" in refusal(tmp_path)


def test_a_byte_order_mark_is_no_slip(write):
    assert read_settings(write("\ufeffmax_batch_size: 8\n")).max_batch_size == 8


@given(
    st.one_of(
        st.binary(max_size=120), st.text(alphabet="max_btchsize: 89-\n[]{}&*!|>'\"#\t", max_size=80).map(str.encode)
    )
)
def test_any_file_gives_settings_or_one_kind_of_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content)
    try:
        read = read_settings(path)
    except ConfigError as error:
        told = str(error)
    else:
        told = read.path
    assert told.startswith(str(path))


@pytest.mark.parametrize(
    ("text", "engine", "expected"),
    [
        ("max_batch_size=48", None, ("max_batch_size", 48)),
        ("--max-num-seqs = 48", "vllm", ("max_batch_size", 48)),
        ("disable_radix_cache=true", None, ("enable_prefix_cache", False)),
        ("batch_size=512", "llamacpp", ("max_num_batched_tokens", 512)),
        ("kv_cache_quant=off", None, ("kv_cache_dtype", "auto")),
        ("model=/models/a=b", None, ("model", "/models/a=b")),
    ],
)
def test_a_setting_is_read_from_a_command_line(text, engine, expected):
    assert read_assignment(text, engine) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_batch_size", "is no setting: write NAME=VALUE"),
        ("max_batch_size=8\nmodel: m", "is no setting"),
        ("max_batch_size=0", "max_batch_size: is 0; it must be 1 to 65536"),
        ("max_batch_size=", "must be a whole number"),
        ("batch_size=512", "is llama.cpp's logical batch in tokens"),
        ("max_batchsize=8", "did you mean 'max_batch_size'?"),
        ("derived_from={gpus: 8}", "is no setting"),
        ("=8", "not valid YAML"),
        ("model={", "not valid YAML"),
    ],
)
def test_what_is_no_setting_on_a_command_line_is_refused(text, says):
    with pytest.raises(ConfigError) as error:
        read_assignment(text)
    assert says in str(error.value)


def flags(text, engine):
    told = engine_arguments(parse_settings(text.encode(), "f.yaml"), engine)
    return " ".join(told.words), dict(told.left_out)


def test_the_same_file_in_the_words_of_three_engines():
    text = (
        "model: /m\ngpu: h200\ngpus: 8\nmax_batch_size: 48\nmax_model_len: 32768\nmax_num_batched_tokens: 8192\n"
        "kv_cache_dtype: fp8\nenable_prefix_cache: false\ngpu_memory_utilization: 0.90\ntensor_parallel_size: 8\n"
        "expert_parallel_size: 8\nquantization: none\n"
    )
    assert flags(text, "vllm") == (
        (
            "/m --max-num-seqs 48 --max-model-len 32768 --max-num-batched-tokens 8192 --kv-cache-dtype fp8 "
            "--no-enable-prefix-caching --gpu-memory-utilization 0.9 --tensor-parallel-size 8 --enable-expert-parallel"
        ),
        {},
    )
    assert flags(text, "sglang") == (
        (
            "--model-path /m --max-running-requests 48 --context-length 32768 --chunked-prefill-size 8192 "
            "--kv-cache-dtype fp8_e4m3 --disable-radix-cache --mem-fraction-static 0.9 --tp-size 8 --ep-size 8"
        ),
        {},
    )
    words, left_out = flags(text, "llamacpp")
    assert words == "--model /m --parallel 48 --ctx-size 1572864 --batch-size 8192 --no-cache-prompt"
    assert set(left_out) == {
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "expert_parallel_size",
    }


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("key", [key for key in SETTING_KEYS if key not in ("engine", "gpu", "gpus")])
def test_every_setting_is_said_or_named_with_the_reason(engine, key):
    settings = parse_settings(WHOLE.encode(), "f.yaml")
    told = engine_arguments(Settings(path="f.yaml", **{key: getattr(settings, key)}), engine)
    unasked = (engine, key) == ("sglang", "enable_prefix_cache")
    assert bool(told.words) + bool(told.left_out.get(key)) == (0 if unasked else 1)


@pytest.mark.parametrize(
    ("text", "engine", "words", "left_out"),
    [
        # llama.cpp's context is the whole cache: as often the length as slots have parts of it.
        ("max_model_len: 4096\nmax_batch_size: 4\n", "llamacpp", "--parallel 4 --ctx-size 16384", ()),
        (
            "max_model_len: 4096\nmax_batch_size: 4\nkv_unified: false\n",
            "llamacpp",
            "--parallel 4 --ctx-size 16384 --no-kv-unified",
            (),
        ),
        (
            "max_model_len: 4096\nmax_batch_size: 4\nkv_unified: true\n",
            "llamacpp",
            "--parallel 4 --ctx-size 4096 --kv-unified",
            (),
        ),
        ("max_model_len: 4096\n", "llamacpp", "--ctx-size 4096", ()),
        ("max_model_len: 4096\nkv_unified: false\n", "llamacpp", "--no-kv-unified", ("max_model_len",)),
        (
            "max_model_len: 4096\nmax_batch_size: 4\nctx_size: 16384\n",
            "llamacpp",
            "--parallel 4 --ctx-size 16384",
            (),
        ),
        (
            "max_model_len: 4096\nmax_batch_size: 4\nctx_size: 8192\n",
            "llamacpp",
            "--parallel 4 --ctx-size 8192",
            ("max_model_len",),
        ),
        ("ctx_size: 8192\nmax_model_len: 4096\n", "llamacpp", "--ctx-size 8192", ("max_model_len",)),
        ("ctx_size: 8192\nmax_model_len: 8192\n", "llamacpp", "--ctx-size 8192", ()),
        ("kv_cache_dtype: q8_0\n", "llamacpp", "--cache-type-k q8_0 --cache-type-v q8_0", ()),
        ("kv_cache_dtype: bfloat16\nctv: q4_0\n", "llamacpp", "--cache-type-k bf16 --cache-type-v q4_0", ()),
        ("ctk: q8_0\n", "llamacpp", "--cache-type-k q8_0", ()),
        ("kv_cache_quant: off\n", "llamacpp", "", ()),
        ("ngl: 99\nn_cpu_moe: 12\nub: 256\n", "llamacpp", "--ubatch-size 256 --n-gpu-layers 99 --n-cpu-moe 12", ()),
        ("ngl: all\ncpu_moe: true\n", "llamacpp", "--n-gpu-layers all --cpu-moe", ()),
        ("dp: 2\n", "llamacpp", "", ("data_parallel_size",)),
        ("dp: 1\n", "llamacpp", "", ()),
        # What counts for each copy, and what over all.
        ("max_batch_size: 96\ndp: 2\n", "vllm", "--max-num-seqs 48 --data-parallel-size 2", ()),
        ("max_batch_size: 97\ndp: 2\n", "vllm", "--max-num-seqs 48 --data-parallel-size 2", ()),
        ("max_batch_size: 1\ndp: 2\n", "vllm", "--data-parallel-size 2", ("max_batch_size",)),
        # Without --enable-dp-attention each copy of SGLang runs what the flag says.
        ("max_batch_size: 96\ndp: 2\n", "sglang", "--max-running-requests 48 --dp-size 2", ()),
        (
            "engine: sglang\nmax_total_tokens: 90000\ndp: 2\n",
            "sglang",
            "--max-total-tokens 45000 --dp-size 2",
            (),
        ),
        ("kv_cache_capacity_tokens: 90000\n", "vllm", "", ("kv_cache_capacity_tokens",)),
        # Experts.
        (
            "ep: 16\ntp: 8\ndp: 2\n",
            "vllm",
            "--tensor-parallel-size 8 --data-parallel-size 2 --enable-expert-parallel",
            (),
        ),
        ("ep: 4\ntp: 8\n", "vllm", "--tensor-parallel-size 8", ("expert_parallel_size",)),
        ("ep: 1\ntp: 8\n", "vllm", "--tensor-parallel-size 8", ()),
        (
            "ep: 8\ntp: 8\nenable_expert_parallel: true\n",
            "vllm",
            "--tensor-parallel-size 8 --enable-expert-parallel",
            (),
        ),
        ("enable_expert_parallel: true\n", "sglang", "", ("enable_expert_parallel",)),
        # Drafting.
        (
            "mtp_layers: 1\nnum_speculative_tokens: 2\n",
            "vllm",
            '--speculative-config {"method": "mtp", "num_speculative_tokens": 2}',
            (),
        ),
        (
            "mtp_layers: 1\nnum_speculative_tokens: 3\n",
            "sglang",
            (
                "--speculative-algorithm NEXTN --speculative-eagle-topk 1 --speculative-num-steps 3 "
                "--speculative-num-draft-tokens 4"
            ),
            (),
        ),
        ("num_speculative_tokens: 3\n", "vllm", "", ("num_speculative_tokens",)),
        ("mtp_layers: 1\n", "sglang", "", ("mtp_layers",)),
        ("mtp_layers: 0\nnum_speculative_tokens: 0\n", "vllm", "", ()),
        ("kv_cache_dtype: bf16\n", "vllm", "--kv-cache-dtype bfloat16", ()),
        ("kv_cache_dtype: half\n", "vllm", "--kv-cache-dtype float16", ()),
        ("kv_cache_dtype: half\n", "sglang", "", ("kv_cache_dtype",)),
        ("kv_cache_dtype: q8_0\n", "vllm", "", ("kv_cache_dtype",)),
        ("kv_cache_dtype: q8_0\n", "sglang", "", ("kv_cache_dtype",)),
        ("kv_cache_dtype: bf16\n", "sglang", "--kv-cache-dtype bf16", ()),
        ("kv_cache_dtype: fp8_e5m2\n", "sglang", "--kv-cache-dtype fp8_e5m2", ()),
        ("kv_cache_dtype: fp8_ds_mla\n", "vllm", "--kv-cache-dtype fp8_ds_mla", ()),
        # Neither takes the short names of element types.
        ("dtype: bf16\n", "vllm", "--dtype bfloat16", ()),
        ("dtype: FP16\n", "sglang", "--dtype float16", ()),
        ("dtype: half\n", "vllm", "--dtype half", ()),
        ("cpu_offload_gb: 10\n", "vllm", "--cpu-offload-gb 10", ()),
        ("cpu_offload_gb: 10\n", "sglang", "--cpu-offload-gb 10", ()),
        ("cpu_offload_gb: 0.5\n", "sglang", "", ("cpu_offload_gb",)),
        ("quantization: awq\n", "sglang", "--quantization awq", ()),
        ("quantization: awq\n", "llamacpp", "", ("quantization",)),
        ("enable_prefix_cache: true\n", "sglang", "", ()),
    ],
)
def test_each_engine_is_told_in_its_own_way(text, engine, words, left_out):
    said, unsaid = flags(text, engine)
    assert (said, tuple(unsaid)) == (words, left_out)


def test_arguments_need_an_engine_and_one_only(write):
    with pytest.raises(ConfigError, match="says no engine"):
        flags("model: m\n", None)
    with pytest.raises(ConfigError, match=r"f\.yaml:1: engine is vllm, but sglang was asked for"):
        flags("engine: vllm\n", "sglang")
    with pytest.raises(ConfigError, match="engine 'tgi' is not known; known: vllm, sglang, llamacpp"):
        flags("model: m\n", "tgi")
    assert flags("engine: vllm\nmax_model_len: 8\n", None)[0] == "--max-model-len 8"


def test_every_key_and_alias_is_documented():
    text = DOCS.read_text()
    assert [key for key in (*SETTING_KEYS, *keys._DERIVED_ONLY) if f"| `{key}`" not in text] == []
    assert [alias for alias in (*SETTING_ALIASES, *ENGINE_ALIASES) if f"`{alias}`" not in text] == []
    assert set(DERIVED_KEYS) <= {*SETTING_KEYS, *keys._DERIVED_ONLY}


def test_without_a_batch_size_nothing_is_stale(write):
    text = "tp: 4\nderived_from:\n  tp: 8\n"
    assert read_settings(write(text)).stale == ()
    assert [one.key for one in read_settings(write("np: 8\n" + text)).stale] == ["tensor_parallel_size"]
