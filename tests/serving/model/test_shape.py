"""A model's sizes follow from its configuration, and come out as published and as engines report them."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.embedded.tiny_model import PRESETS, write_hf
from serving.errors import ConfigError
from serving.model import BUILT_IN_MODELS, ModelShape, Split, read_model

GIB = 2**30

# The keys of the published config.json of Qwen/Qwen3-14B, Qwen/Qwen1.5-MoE-A2.7B and Qwen/Qwen2-57B-A14B-Instruct.
QWEN3_14B = {
    "model_type": "qwen3",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 17408,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "sliding_window": 32768,
}
QWEN2_57B = QWEN15_MOE | {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2560,
    "shared_expert_intermediate_size": 20480,
    "max_position_embeddings": 32768,
}
MISTRAL = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}


def written(folder: Path, config: object) -> Path:
    path = folder / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def of(tmp_path: Path, config: object) -> ModelShape:
    return read_model(written(tmp_path, config))


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("hy3", 295e9, 20.7e9),
        ("hy3", 295e9, 21e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("llama-3.1-8b", 8.03e9, 8.03e9),
        ("qwen2.5-7b", 7.62e9, 7.62e9),
    ],
)
def test_parameters_come_out_as_published(name, total, active):
    shape = read_model(name)
    assert shape.total_parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN3_14B, 14.8e9, 14.8e9), (QWEN15_MOE, 14.3e9, 2.7e9), (QWEN2_57B, 57.4e9, 14e9), (MISTRAL, 7.25e9, 7.25e9)],
)
def test_parameters_of_files_come_out_as_published(tmp_path, config, total, active):
    shape = of(tmp_path, config)
    assert shape.total_parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.03)


def test_the_layer_for_multi_token_prediction_of_hy3_counts_apart():
    shape = read_model("hy3")
    assert shape.mtp_parameters == pytest.approx(3.8e9, rel=0.02)
    assert shape.kv_bytes_per_token(mtp_layers=1) - shape.kv_bytes_per_token() == 4096


@pytest.mark.parametrize("preset", ["tiny", "small"])
@pytest.mark.parametrize("experts", [0, 8])
def test_parameters_are_exactly_those_in_a_weights_file(tmp_path, preset, experts):
    folder = tmp_path / "model"
    write_hf(folder, replace(PRESETS[preset], experts=experts))
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    stored = sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    shape = read_model(folder)
    assert shape.total_parameters == stored
    assert shape.name == "model"
    assert shape.weight_bytes(shape.parameters) == 2 * stored


@pytest.mark.parametrize(
    ("name", "cards", "expected"),
    [
        ("llama-3.1-8b", 1, 131_072),
        ("llama-3.1-8b", 8, 16_384),
        ("llama-3.1-8b", 16, 16_384),
        ("hy3", 1, 327_680),
        ("hy3", 8, 40_960),
        ("hy3", 16, 40_960),
        ("qwen3-30b-a3b", 1, 98_304),
        ("qwen3-30b-a3b", 4, 24_576),
        ("qwen3-30b-a3b", 8, 24_576),
    ],
)
def test_kv_bytes_per_token_divide_by_heads_until_one_is_left(name, cards, expected):
    assert read_model(name).kv_bytes_per_token(split=Split(tensor=cards)) == expected


def test_kv_bytes_follow_the_cache_type_and_the_stages(tmp_path):
    shape = of(tmp_path, QWEN3_14B)
    assert shape.kv_bytes_per_token() == 163_840
    assert shape.kv_bytes_per_token(8) == 81_920
    assert shape.kv_bytes_per_token(8.5) == 87_040
    assert shape.kv_bytes_per_token(split=Split(pipeline=2)) == 81_920


@pytest.mark.parametrize(
    ("config", "reported_gib", "reported_tokens"),
    [
        # vLLM start-up reports: 3.81 GiB -> 1,952 blocks of 16, 6.51 GiB -> 42,656 tokens, 24.0 GiB for 262,144.
        ("llama-3.1-8b", 3.81, 1952 * 16),
        (QWEN3_14B, 6.51, 42_656),
        ("qwen3-30b-a3b", 24.0, 262_144),
    ],
)
def test_reported_pools_hold_the_reported_tokens(tmp_path, config, reported_gib, reported_tokens):
    shape = of(tmp_path, config) if isinstance(config, dict) else read_model(config)
    # Reports are rounded to 0.01 GiB.
    assert reported_gib * GIB / shape.kv_bytes_per_token() == pytest.approx(reported_tokens, rel=0.002)


@given(
    name=st.sampled_from(["hy3", "llama-3.1-8b", "mixtral-8x7b"]),
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.integers(1, 4),
)
def test_the_fullest_card_holds_at_least_its_share_and_never_the_whole(name, tensor, pipeline):
    shape = read_model(name)
    part = shape.on_card(Split(tensor, pipeline)).total
    cards = tensor * pipeline
    assert part >= shape.total_parameters / cards
    assert part <= shape.total_parameters / cards * 1.25 + shape.vocabulary * shape.hidden


def test_expert_parallelism_divides_nothing_but_experts():
    shape = read_model("hy3")
    whole, spread = shape.on_card(Split()), shape.on_card(Split(expert=8))
    assert spread.experts * 8 == whole.experts
    assert replace(spread, experts=whole.experts) == whole


def test_expert_parallelism_inside_a_tensor_split_holds_as_much_as_without():
    shape = read_model("hy3")
    assert shape.on_card(Split(8, 1, 8)) == shape.on_card(Split(8)) == shape.on_card(Split(8, 1, 4))


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        ("qwen2.5-7b", Split(8), "28 attention heads"),
        ("hy3", Split(1, 81), "80 layers"),
        ("hy3", Split(1, 1, 5), "192 experts"),
        ("llama-3.1-8b", Split(1, 1, 2), "no experts"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(name, split, said):
    with pytest.raises(ConfigError, match=said):
        read_model(name).on_card(split)


def test_a_split_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        Split(tensor=0)


def test_key_value_heads_that_neither_divide_nor_are_divided_are_refused(tmp_path):
    shape = of(tmp_path, MISTRAL | {"num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128})
    with pytest.raises(ConfigError, match="8 key-value heads"):
        shape.check_split(Split(12))


def test_hy3_reads_alike_in_both_spellings(tmp_path):
    shape = read_model("hy3")
    config = {
        "model_type": "hy_v3",
        "num_hidden_layers": 80,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 120832,
        "max_position_embeddings": 262144,
        "intermediate_size": 13312,
        "mlp_layer_types": ["dense"] + ["sparse"] * 79,
        "num_local_experts": 192,
        "num_experts_per_tok": 8,
        "expert_hidden_dim": 1536,
        "num_nextn_predict_layers": 1,
    }
    assert replace(of(tmp_path, config), name="hy3") == shape
    assert (shape.layers, shape.dense_layers, shape.expert_layers, shape.mtp_layers) == (80, 1, 79, 1)
    with pytest.raises(ConfigError, match="each of the 80 layers"):
        of(tmp_path, config | {"mlp_layer_types": ["dense"]})


def test_layers_without_experts_between_those_with_them_are_counted(tmp_path):
    config = QWEN15_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}
    shape = of(tmp_path, config)
    assert shape.dense_layers == 13
    assert shape.intermediate == 5632


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.15625),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4.0),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.1875),
    ],
)
def test_quantisation_narrows_layers_and_leaves_the_embedding(tmp_path, quantisation, bits):
    shape = of(tmp_path, QWEN3_14B | {"quantization_config": quantisation})
    assert (shape.weight_bits, shape.embedding_bits) == (bits, 16.0)
    parts = shape.parameters
    layers = parts.always_read + parts.experts - parts.other
    assert shape.weight_bytes(parts) == pytest.approx(
        layers * bits / 8 + 2 * (parts.embedding + parts.head + parts.other), abs=1
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not known; known: llama"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "5120"}, "hidden_size is '5120'"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 7}, "cannot share 7"),
        ({"use_sliding_window": True}, "sliding-window attention of qwen3 is not known"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "group_size is missing"),
        ({"quantization_config": []}, "must be an object"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_with_the_file(tmp_path, change, said):
    path = written(tmp_path, QWEN3_14B | change)
    with pytest.raises(ConfigError) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_experts_per_tok": 61}, "num_experts_per_tok is 61"),
        ({"mlp_only_layers": 3}, "must be a list"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ],
)
def test_impossible_experts_are_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        of(tmp_path, QWEN15_MOE | change)


def test_mistral_with_a_window_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="sliding_window is set"):
        of(tmp_path, MISTRAL | {"sliding_window": 4096})


@pytest.mark.parametrize("body", ["{", "[1]", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, body):
    path = tmp_path / "config.json"
    path.write_text(body, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_model(path)


def test_a_file_of_weights_is_not_read_whole(tmp_path):
    path = tmp_path / "model.json"
    path.write_bytes(b" " * (2**20 + 1))
    with pytest.raises(ConfigError, match="larger than"):
        read_model(path)


def test_a_name_that_is_not_known_gets_the_nearest(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'qwen3-30b-a3b'"):
        read_model("qwen3-30b-a3")
    with pytest.raises(ConfigError, match="built-in models: hy3, "):
        read_model(str(tmp_path / "nothing"))


def test_a_folder_a_file_and_a_name_are_all_taken(tmp_path):
    path = written(tmp_path, QWEN3_14B)
    assert read_model(path) == read_model(path.parent) == read_model(str(path))
    assert read_model(path).name == "some-model"
    assert [read_model(name.upper()).name for name in BUILT_IN_MODELS] == list(BUILT_IN_MODELS)
    other = path.rename(path.with_name("qwen3-14b.json"))
    assert read_model(other).name == "qwen3-14b"


def test_biases_are_counted(tmp_path):
    plain = of(tmp_path, MISTRAL)
    biased = of(tmp_path, MISTRAL | {"attention_bias": True, "mlp_bias": True})
    per_layer = (32 + 2 * 8) * 128 + 4096 + 2 * 14336 + 4096
    assert biased.total_parameters - plain.total_parameters == 32 * per_layer
