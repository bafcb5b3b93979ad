"""The serving file is read under every engine's names, and a slip in it is refused with file and line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving import settings
from serving.errors import ConfigError
from serving.settings import SETTING_ALIASES, Settings, read_settings

DOCS = Path(__file__).parent.parent.parent / "docs" / "settings.md"

WHOLE = """\
# what the server is meant to run with
model: /models/hy3
engine: vLLM
max_batch_size: 48
max_model_len: 32_768
max_num_batched_tokens: 8192
kv_cache_capacity_tokens: 1000000
kv_cache_dtype: fp8
gpu_memory_utilization: 0.9
tensor_parallel_size: 8
pipeline_parallel_size: 1
data_parallel_size: 2
expert_parallel_size: 16
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
        max_batch_size=48,
        max_model_len=32768,
        max_num_batched_tokens=8192,
        kv_cache_capacity_tokens=1_000_000,
        kv_cache_dtype="fp8",
        gpu_memory_utilization=0.9,
        tensor_parallel_size=8,
        pipeline_parallel_size=1,
        data_parallel_size=2,
        expert_parallel_size=16,
    )
    assert read.where("max_batch_size") == f"{path}:4"


def test_what_the_file_does_not_say_is_absent(write):
    path = write("max_batch_size: 8\n")
    assert read_settings(path) == Settings(path=str(path), lines={"max_batch_size": 1}, max_batch_size=8)
    assert read_settings(path).where("model") == str(path)


@pytest.mark.parametrize("alias", SETTING_ALIASES)
@pytest.mark.parametrize("dashes", [False, True])
def test_engines_own_names_are_accepted(write, alias, dashes):
    key = SETTING_ALIASES[alias]
    text = {"model": "m", "gpu_memory_utilization": "0.5"}.get(key, "4")
    read = read_settings(write(f"\n{alias.replace('_', '-') if dashes else alias}: {text}\n"))
    assert str(getattr(read, key)) == text
    assert read.lines == {key: 2}


@pytest.mark.parametrize("name", ["llama.cpp", "llamacpp", "LLAMA-CPP", "llama_cpp"])
def test_an_engine_may_be_spelt_as_people_spell_it(write, name):
    assert read_settings(write(f"engine: {name}")).engine == "llamacpp"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model: m\nmax_batchsize: 8\n", ":2: unknown key 'max_batchsize'; did you mean 'max_batch_size'?"),
        ("max-num-seq: 8\n", ":1: unknown key 'max-num-seq'; did you mean 'max_num_seqs'?"),
        ("Max_Batch_Size: 8\n", "did you mean 'max_batch_size'?"),
        ("colour: blue\n", ":1: unknown key 'colour'; known keys: model, engine, max_batch_size"),
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


def test_every_key_and_alias_is_documented():
    text = DOCS.read_text()
    assert [key for key in settings._READERS if f"| `{key}`" not in text] == []
    assert [alias for alias in SETTING_ALIASES if f"`{alias}`" not in text] == []
