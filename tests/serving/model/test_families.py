"""Configurations stand for the shapes that engines build of them, and what is not known is refused."""

import json
import math
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serving.embedded.tiny_model import PRESETS, write_hf
from serving.errors import ConfigError
from serving.model import (
    BUILT_IN_MODELS,
    Attention,
    Dense,
    Experts,
    LatentAttention,
    ModelShape,
    RecurrentState,
    read_model,
)
from serving.model.families import FAMILIES, shape_of

SAMPLES = Path(__file__).parents[2] / "samples"
CONFIGS = SAMPLES / "configs"
SOURCES = yaml.safe_load((CONFIGS / "sources.yaml").read_text(encoding="utf-8"))["configs"]
BUILT = json.loads((SAMPLES / "shapes" / "transformers-5.19.json").read_text(encoding="utf-8"))

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
DEEPSEEK = json.loads((CONFIGS / "deepseek-v3.json").read_text(encoding="utf-8"))
NEMOTRON = json.loads((CONFIGS / "nemotron-3-nano-30b-a3b.json").read_text(encoding="utf-8"))


def of(config: dict) -> ModelShape:
    return shape_of(config, name="a-model", where="config.json")


def sample(name: str) -> ModelShape:
    return read_model(CONFIGS / f"{name}.json")


def written(folder: Path, config: object) -> Path:
    path = folder / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


# ---- as built by others


@pytest.mark.parametrize("name", BUILT["samples"])
def test_published_configurations_have_exactly_the_parameters_that_transformers_builds(name):
    assert read_model(CONFIGS / name).total_parameters == BUILT["samples"][name]


@pytest.mark.parametrize("name", BUILT["small"])
def test_every_variant_has_exactly_the_parameters_that_transformers_builds(name):
    case = BUILT["small"][name]
    assert of(case["config"]).total_parameters == case["parameters"]


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
    assert shape.weight_bytes().total == 2 * stored


# ---- as published

ROUNDED = {
    "devstral-small-2-24b.json": "23.57 B, in the name 24",
    "kimi-linear-48b-a3b.json": "49.12 B, in the name and the report 48",
    "nemotron-super-49b-v1.json": "49.87 B, in the name 49",
    "nemotron-h-8b.json": "8.10 B, in the name 8",
    "nemotron-nano-9b-v2.json": "8.89 B, in the name 9",
    "falcon-7b.json": "6.92 B with the output matrix tied; the file has it twice",
    "falcon-40b.json": "41.30 B with the output matrix tied; the file has it twice",
    "llama-4-scout.json": "107.77 B, and about 0.9 B of vision part",
}
VISION_BILLION = {"ministral-3-3b.json": 0.420, "gemma-3-27b.json": 0.423}
UNREADABLE = {"phi-2-old-keys.json": "model_type 'phi-msft' is not known"}
BOTH, HEAD_ONLY, NEITHER = "with both matrices", "without the input embedding", "without both matrices"
CONVENTIONS = {
    "deepseek-v2-lite.json": HEAD_ONLY,
    "deepseek-v3.2.json": HEAD_ONLY,  # published for V3, which has no indexer
    "minimax-m2.5.json": HEAD_ONLY,
    "gpt-oss-20b.json": HEAD_ONLY,
    "gpt-oss-120b.json": HEAD_ONLY,
    "qwen3.5-35b-a3b.json": HEAD_ONLY,
    "kimi-linear-48b-a3b.json": HEAD_ONLY,
    "qwen3-next-80b-a3b.json": NEITHER,
    "glm-4.5.json": NEITHER,
    "glm-4.5-air.json": NEITHER,
}
ACTIVE_ROUNDED = {
    "qwen3-next-80b-a3b.json": "3.25 B without both matrices, in the name 3",
    "kimi-linear-48b-a3b.json": "3.11 B without the input embedding, in the name 3",
}


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in UNREADABLE])
def test_published_figures_are_met(name):
    source, shape = SOURCES[name], read_model(CONFIGS / name)
    total, active = source["total_parameters_billion"], source["active_parameters_billion"]
    if total is not None:
        found = shape.total_parameters / 1e9 + VISION_BILLION.get(name, 0)
        assert found == pytest.approx(total, rel=0.035 if name in ROUNDED else 0.01), ROUNDED.get(name)
    if active is not None and not (shape.experts == 0 and name in ROUNDED):
        matrix = shape.vocabulary * shape.hidden / 1e9
        found = {
            BOTH: shape.active_parameters / 1e9,
            HEAD_ONLY: shape.active_without_embedding / 1e9,
            NEITHER: shape.active_without_embedding / 1e9 - matrix,
        }[CONVENTIONS.get(name, BOTH)]
        found += VISION_BILLION.get(name, 0)
        assert round(found) == active if name in ACTIVE_ROUNDED else found == pytest.approx(active, rel=0.03)


def test_the_exceptions_are_no_more_than_needed():
    for name in ROUNDED:
        found = read_model(CONFIGS / name).total_parameters / 1e9
        assert found != pytest.approx(SOURCES[name]["total_parameters_billion"], rel=0.01), name
    for name in CONVENTIONS:
        found = read_model(CONFIGS / name).active_parameters / 1e9
        assert found != pytest.approx(SOURCES[name]["active_parameters_billion"], rel=0.03), name


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("hy3", 295e9, 20.7e9),
        ("hy3", 295e9, 21e9),
        ("deepseek-v3", 671e9, 37e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("llama-3.1-8b", 8.03e9, 8.03e9),
        ("qwen2.5-7b", 7.62e9, 7.62e9),
        ("hunyuan-large", 389e9, 52e9),
    ],
)
def test_parameters_come_out_as_published(name, total, active):
    shape = sample(name)
    assert shape.total_parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(QWEN3_14B, 14.8e9, 14.8e9), (QWEN15_MOE, 14.3e9, 2.7e9), (QWEN2_57B, 57.4e9, 14e9)],
)
def test_parameters_of_further_models_come_out_as_published(config, total, active):
    shape = of(config)
    assert shape.total_parameters == pytest.approx(total, rel=0.01)
    assert shape.active_parameters == pytest.approx(active, rel=0.03)


def test_layers_for_multi_token_prediction_count_apart():
    assert read_model("hy3").mtp_parameters == pytest.approx(3.8e9, rel=0.02)
    # DeepSeek's file has 14 B for it, of which embedding and output matrix are the model's own.
    shape = sample("deepseek-v3")
    assert shape.mtp_parameters + 2 * shape.vocabulary * shape.hidden == pytest.approx(14e9, rel=0.05)
    assert [len(sample(name).mtp) for name in ("qwen3-next-80b-a3b", "qwen3.5-27b", "minimax-m2.5", "qwen3-8b")] == [
        1,
        1,
        3,
        0,
    ]


# ---- what layers are


def kinds(shape: ModelShape) -> str:
    letters = {Attention: "a", LatentAttention: "l", RecurrentState: "s", type(None): "."}
    windows = [isinstance(layer.mixer, Attention) and layer.mixer.window is not None for layer in shape.layers]
    return "".join(
        "w" if windowed else letters[type(layer.mixer)] for layer, windowed in zip(shape.layers, windows, strict=True)
    )


def parts(shape: ModelShape) -> str:
    letters = {Dense: "d", Experts: "e", type(None): "."}
    return "".join(letters[type(layer.feed_forward)] for layer in shape.layers)


@pytest.mark.parametrize(
    ("name", "mixers", "feed_forwards"),
    [
        ("llama-3.1-8b", "a" * 32, "d" * 32),
        ("mistral-7b-v0.1", "w" * 32, "d" * 32),
        ("mistral-7b-v0.3", "a" * 32, "d" * 32),
        ("phi-3.5-mini", "a" * 32, "d" * 32),  # its window is longer than its context
        ("hy3", "a" * 80, "d" + "e" * 79),
        ("deepseek-v3", "l" * 61, "ddd" + "e" * 58),
        ("glm-4.5", "a" * 92, "ddd" + "e" * 89),
        ("gpt-oss-20b", "wa" * 12, "e" * 24),
        ("gemma-2-9b", "wa" * 21, "d" * 42),
        ("gemma-3-27b", ("wwwwwa" * 11)[:62], "d" * 62),
        ("gemma-4-26b-a4b", "wwwwwa" * 5, "e" * 30),
        ("llama-4-scout", "wwwa" * 12, "e" * 48),
        ("llama-4-maverick", "wwwa" * 12, "de" * 24),
        ("mimo-v2-flash", "a" + "wwwwa" + "wwwwwa" * 7, "d" + "e" * 47),
        ("qwen3-next-80b-a3b", "sssa" * 12, "e" * 48),
        ("qwen3.5-27b", "sssa" * 16, "d" * 64),
        ("kimi-linear-48b-a3b", "sssl" * 6 + "ssl", "d" + "e" * 26),
        ("jamba-1.5-mini", "ssssasss" * 4, "de" * 16),
        (
            "nemotron-3-nano-30b-a3b",
            NEMOTRON["hybrid_override_pattern"].translate(str.maketrans("M*E-", "sa..")),
            NEMOTRON["hybrid_override_pattern"].translate(str.maketrans("M*E-", "..ed")),
        ),
    ],
)
def test_layers_are_of_the_published_kinds(name, mixers, feed_forwards):
    shape = sample(name)
    assert kinds(shape) == mixers
    assert parts(shape) == feed_forwards


def test_llama_4_sees_stretches_and_gemma_and_gpt_oss_see_the_latest():
    chunked, windowed = sample("llama-4-scout").layers[0].mixer, sample("gpt-oss-120b").layers[0].mixer
    assert (chunked.window, chunked.chunked) == (8192, True)
    assert (windowed.window, windowed.chunked) == (128, False)
    assert sample("gemma-3-27b").layers[0].mixer.window == 1024


def test_every_second_layer_of_hunyuan_large_reads_the_cache_of_the_one_before():
    assert [layer.mixer.shares_kv for layer in sample("hunyuan-large").layers] == [False, True] * 32
    assert not any(layer.mixer.shares_kv for layer in sample("hunyuan-a13b").layers)


def test_blocks_of_deci_are_read_one_by_one():
    shape = sample("nemotron-super-49b-v1")
    assert kinds(shape).count("a") == 49
    assert kinds(shape).count(".") == 31
    assert {layer.mixer.kv_heads for layer in shape.layers if layer.mixer} == {8}
    assert shape.kv_bytes_per_token() == 49 * 2 * 8 * 128 * 2


def test_layers_alike_are_one_object():
    assert len({id(layer) for layer in sample("deepseek-v3").layers}) == 2
    assert len({id(layer) for layer in sample("gpt-oss-120b").layers}) == 2


def test_of_a_multimodal_model_the_text_part_is_read_and_the_rest_is_named():
    shape = sample("qwen3-vl-8b")
    assert shape.not_counted == ("vision_config",)
    assert shape.architecture == "Qwen3VLForConditionalGeneration"
    assert shape.total_parameters == sample("qwen3-8b").total_parameters
    # Of LLaVA's text part the file leaves out what Llama's class has by itself.
    assert sample("llava-1.5-7b").total_parameters == pytest.approx(6.74e9, rel=0.001)


@pytest.mark.parametrize(
    ("base", "rope", "context"),
    [
        # Qwen's model cards give YaRN so, and vLLM serves 131,072 tokens with it.
        ("qwen3-8b", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        ("qwen2.5-7b", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131_072),
        ("qwen2.5-7b", {"type": "linear", "factor": 2.0}, 65_536),
        ("qwen2.5-7b", {"type": "dynamic", "factor": None}, 32_768),
        ("qwen2.5-7b", {"type": "llama3", "factor": 8.0}, 32_768),
        ("qwen2.5-7b", {"type": "longrope", "factor": 32.0}, 32_768),
        ("qwen2.5-7b", {"full_attention": {"rope_type": "yarn", "factor": 8.0}}, 32_768),
    ],
)
def test_scaled_positions_make_the_context_longer_than_its_key_says(tmp_path, base, rope, context):
    body = json.loads((CONFIGS / f"{base}.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**body, "rope_scaling": rope}))
    assert read_model(path).context_tokens == context


@pytest.mark.parametrize(
    ("name", "context"),
    [("deepseek-v3", 163_840), ("kimi-k2", 131_072), ("gpt-oss-120b", 131_072), ("gemma-3-27b", 131_072),
     ("llama-3.1-8b", 131_072), ("devstral-small-2-24b", 393_216), ("phi-3.5-mini", 131_072)],
)  # fmt: skip
def test_published_contexts_hold_with_their_scaling(name, context):
    assert sample(name).context_tokens == context


@pytest.mark.parametrize("rope", ["yarn", {"type": "yarn", "factor": -1}, {"type": "linear", "factor": 1e-9}])
def test_a_scaling_that_makes_no_sense_is_refused(tmp_path, rope):
    body = json.loads((CONFIGS / "qwen2.5-7b.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**body, "rope_scaling": rope}))
    with pytest.raises(ConfigError, match="rope_scaling"):
        read_model(path)


def test_a_name_longer_than_any_file_is_refused():
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        read_model("x" * 5000)


def test_whether_the_matrices_are_tied_is_said_outside_of_the_text_part():
    config = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": QWEN3_14B | {"vision_config": {}}}
    assert of(config).tied_embeddings
    assert not of(config | {"tie_word_embeddings": None}).tied_embeddings


def test_hy3_reads_alike_in_both_spellings():
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
    assert replace(of(config), name="hy3") == shape
    assert (len(shape.layers), shape.expert_layers, len(shape.mtp)) == (80, 79, 1)
    with pytest.raises(ConfigError, match="each of the 80 layers"):
        of(config | {"mlp_layer_types": ["dense"]})


def test_layers_without_experts_between_those_with_them_are_told_apart():
    shape = of(QWEN15_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert parts(shape) == "ddde" + "de" * 10
    assert shape.layers[0].feed_forward.width == 5632


def test_later_layers_of_qwen_see_a_window_where_it_is_turned_on():
    config = QWEN3_14B | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 30}
    assert kinds(of(config)) == "a" * 30 + "w" * 10
    listed = {"layer_types": ["full_attention", "sliding_attention"] * 20}
    assert kinds(of(config | listed)) == "aw" * 20


# ---- files


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.15625),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.1875),
    ],
)
def test_quantisation_narrows_layers_and_leaves_the_ends(quantisation, bits):
    shape = of(QWEN3_14B | {"quantization_config": quantisation})
    count, stored = shape.parameters, shape.weight_bytes()
    assert (stored.dense * 8 / count.dense, stored.query * 8 / count.query) == (bits, bits)
    assert (stored.embedding, stored.head, stored.other) == (2 * count.embedding, 2 * count.head, 2 * count.other)


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        # Sizes of the published files.
        ("gpt-oss-120b", 65.2),
        ("gpt-oss-20b", 13.8),
        ("qwen3-30b-a3b-fp8", 31.2),
        ("kimi-k2.5-int4", 594),
    ],
)
def test_quantised_models_are_as_large_as_their_files(name, gigabytes):
    assert sample(name).weight_bytes().total / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2' is not known; the nearest known is "),
        ({"model_type": "qwen3_mega"}, "the nearest known is 'qwen3_m"),
        ({"model_type": "zzzzzzzz"}, "model_type 'zzzzzzzz' is not known; known: llama, "),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3']"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "5120"}, "hidden_size is '5120'"),
        ({"hidden_size": True}, "hidden_size is 'True'"),
        ({"hidden_size": 10**30}, "hidden_size is '1000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is '0'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is '1000000000'"),
        ({"num_key_value_heads": 7}, "cannot share 7"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "each of the 40 layers"),
        ({"layer_types": ["linear_attention"] * 40}, "'linear_attention'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype 'float8_e4m3fn'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm' is not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "group_size is missing"),
        ({"quantization_config": []}, "must be an object"),
        ({"text_config": []}, "text_config must be an object"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_with_the_file(tmp_path, change, said):
    path = written(tmp_path, QWEN3_14B | change)
    with pytest.raises(ConfigError) as caught:
        read_model(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (QWEN15_MOE | {"num_experts_per_tok": 61}, "num_experts_per_tok is 61"),
        (QWEN15_MOE | {"mlp_only_layers": 3}, "must be a list"),
        (QWEN15_MOE | {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (QWEN15_MOE | {"use_sliding_window": True}, "use_sliding_window is set"),
        (DEEPSEEK | {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (DEEPSEEK | {"model_type": "glm_moe_dsa", "index_topk_pattern": "FS"}, "index_topk_pattern is not known"),
        (DEEPSEEK | {"model_type": "deepseek_v32"}, "index_n_heads is missing"),
        (NEMOTRON | {"hybrid_override_pattern": "MX"}, "made of the letters M, *, -, E"),
        (NEMOTRON | {"hybrid_override_pattern": "M*"}, "each of the num_hidden_layers"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "each of the num_hidden_layers"),
        (NEMOTRON | {"mamba_ssm_cache_dtype": "fp64"}, "mamba_ssm_cache_dtype 'fp64'"),
        ({"model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 8}, "embeddings for each layer"),
    ],
)
def test_impossible_parts_are_refused(config, said):
    with pytest.raises(ConfigError, match=said.replace("*", r"\*")):
        of(config)


@pytest.mark.parametrize("name", UNREADABLE)
def test_samples_that_are_not_known_are_refused_by_name(name):
    with pytest.raises(ConfigError, match=UNREADABLE[name]):
        read_model(CONFIGS / name)


words = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 300),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-3, 5), st.text(max_size=4)), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@given(data=st.data(), kind=st.sampled_from(sorted(BUILT["small"])))
def test_a_configuration_is_read_or_refused_whatever_is_in_it(data, kind):
    config = dict(BUILT["small"][kind]["config"])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3, unique=True)):
        config[key] = data.draw(words)
    try:
        shape = of(config)
    except ConfigError as error:
        assert str(error).startswith("config.json: ")  # noqa: PT017 # both outcomes are right
        return
    assert shape.total_parameters >= shape.active_parameters > 0
    assert shape.sequence_bytes(100) >= shape.state_bytes() >= 0


@pytest.mark.parametrize("body", ["{", "[1]", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path, body):
    path = tmp_path / "config.json"
    path.write_text(body, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json: "):
        read_model(path)


def test_a_file_of_weights_is_not_read_whole(tmp_path):
    path = tmp_path / "model.json"
    path.write_bytes(b" " * (2**22 + 1))
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


def test_built_in_models_are_those_of_the_samples():
    for name in BUILT_IN_MODELS:
        built, read = read_model(name), sample(name)
        assert (built.layers, built.vocabulary, built.context_tokens) == (
            read.layers,
            read.vocabulary,
            read.context_tokens,
        )


def test_every_family_is_held_against_what_others_build():
    tested = {case["config"]["model_type"] for case in BUILT["small"].values()}
    for name in (*BUILT["samples"], "hunyuan-large.json", "nemotron-super-49b-v1.json", "qwen2.5-vl-7b.json"):
        config = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
        tested |= {config.get("model_type"), (config.get("text_config") or {}).get("model_type")}
    same = {"qwen2_vl", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
    assert set(FAMILIES) - tested <= same
