"""What users reported of reading configs, each as a case."""

import json

import pytest

import kvexp
from kvexp import weights
from kvexp.api import compose_points
from kvexp.dtypes import DType, KvDtype, Quantization
from kvexp.errors import InvalidValue
from kvexp.hf import config_json, read_model

from .shapes import BASE, dense, without

SIZES = {"vocab_size": 32000, "intermediate_size": 2048, "max_position_embeddings": 8192}


def token_bytes(cached, model):
    return cached(model)[1]


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_read_under_both_names(key, read):
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = read(
        dense("qwen2", 4, 8, 8, 64, max_position_embeddings=32768, rope_scaling=scaling, extra=1)
    )

    assert model.rope_scaling["rope_type"] == "yarn"
    assert model.rope_scaling["original_max_position_embeddings"] == 32768


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0}, 131072),
        (None, 32768),
    ],
)
def test_the_longest_context_follows_the_scaling(scaling, length, tmp_path):
    config = dense(
        "qwen2", 4, 8, 8, 64, max_position_embeddings=32768, rope_scaling=scaling, eos_token_id=1
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = kvexp.run(["model=hf", f"model.path={tmp_path}", "gpu=h200"])

    assert result.effective["max_model_len"] == length


def test_a_scaling_without_its_kind_is_an_error(read):
    with pytest.raises(InvalidValue, match=r"rope_scaling\.rope_type"):
        read(dense("llama", 4, 8, 8, 64, rope_scaling={"factor": 4.0}))


def test_a_language_section_is_read_and_the_vision_section_caches_nothing(read, cached):
    text = dense(
        "gemma3_text", 34, 8, 4, 256, hidden_size=2560, layer_types=["full_attention"] * 34
    )
    model = read({"model_type": "vlm", "text_config": text, "vision_config": {"num_layers": 27}})

    assert token_bytes(cached, model) == 139264
    assert any("config_path=text_config" in note for note in model.notes)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "llm_config": {
                    "num_hidden_layers": 28,
                    "num_attention_heads": 16,
                    "num_key_value_heads": 8,
                    "hidden_size": 2048,
                    **SIZES,
                }
            },
            114688,
        ),
        (
            {
                "thinker_config": {
                    "text_config": {
                        "num_hidden_layers": 28,
                        "num_attention_heads": 28,
                        "num_key_value_heads": 4,
                        "hidden_size": 3584,
                        **SIZES,
                    }
                }
            },
            57344,
        ),
    ],
)
def test_a_section_is_found_by_its_keys(config, expected, read, cached):
    assert token_bytes(cached, read(config)) == expected


def test_two_equal_sections_are_listed_with_the_key_that_chooses(tmp_path):
    section = dense("llama", 4, 8, 8, 64)
    (tmp_path / "config.json").write_text(json.dumps({"first": section, "second": section}))

    with pytest.raises(InvalidValue, match=r"first, second.*model\.config_path=first"):
        read_model(tmp_path)
    assert read_model(tmp_path, config_path="second").num_hidden_layers == 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": None, "dtype": "bfloat16"}, DType.bf16),
        ({"torch_dtype": "float16", "dtype": None}, DType.fp16),
        ({"torch_dtype": "torch.float16"}, DType.fp16),
        ({"torch_dtype": "float16", "dtype": "bfloat16"}, DType.bf16),
        ({}, DType.bf16),
        ({"torch_dtype": "float32"}, DType.fp32),
    ],
)
def test_both_dtype_keys_are_read(keys, expected, read):
    model = read({**without(dense("llama", 4, 8, 8, 64), "dtype"), **keys})

    assert model.torch_dtype is expected
    if keys.get("torch_dtype") in (None, "float32") and keys.get("dtype") is None:
        assert any("dtype" in note for note in model.notes)


@pytest.mark.parametrize(
    ("flag", "first", "full"),
    [(False, 28, 28), (None, 28, 28), (True, 0, 0), (True, 14, 14), (True, 28, 28)],
)
def test_the_windows_flag_wins(flag, first, full, read):
    config = dense("qwen2", 28, 8, 8, 64, sliding_window=131072, use_sliding_window=flag)
    model = read({**config, "max_window_layers": first})

    kinds = [model.layer_type(index) for index in range(28)]
    assert kinds.count("full_attention") == full


@pytest.mark.parametrize("window", [{"sliding_window": None}, {}, {"sliding_window": -1}])
def test_null_missing_and_negative_windows_are_none(window, read):
    assert read(dense("llama", 4, 8, 8, 64, **window)).layer_types is None


def test_no_code_of_a_repository_runs(tmp_path):
    marker = tmp_path / "marker"
    config = dense("llama", 2, 8, 8, 64, auto_map={"AutoConfig": "evil.EvilConfig"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()")
    read_model(tmp_path)

    assert not marker.exists()


def test_eight_bit_doubles_dense_tokens_only(read, cached):
    dense_model = read(dense("llama", 4, 8, 8, 64))

    assert cached(dense_model)[1] == 2 * cached(dense_model, kv_dtype=KvDtype.fp8)[1]


def test_a_mixture_counts_all_experts_and_both_vocabularies(read):
    config = {
        **dense("mixtral", 32, 32, 8, 128, hidden_size=4096, sliding_window=None),
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }

    assert weights.parameters(read(config)) == 46_702_792_704
    assert weights.parameters(read({**config, "num_experts_per_tok": 1})) == 46_702_792_704


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "layers", "hidden", "expected"),
    [
        (32, 8, None, 32, 4096, 131072),
        (32, None, None, 32, 4096, 524288),
        (32, 1, None, 32, 4096, 16384),
        (32, 8, 128, 40, 5120, 163840),
        (64, 8, 64, 24, 2880, 49152),
    ],
)
def test_kv_heads_and_head_size(heads, kv_heads, head_dim, layers, hidden, expected, read, cached):
    model = read(dense("llama", layers, heads, kv_heads, head_dim, hidden_size=hidden))

    assert token_bytes(cached, model) == expected
    if kv_heads is None:
        assert any("num_key_value_heads" in note for note in model.notes)


def test_a_width_that_is_no_multiple_of_the_heads_needs_head_dim(read):
    with pytest.raises(InvalidValue, match="head_dim is missing"):
        read(dense("llama", 4, 64, 8, None, hidden_size=2900))


def test_unknown_latent_caches_are_refused_with_the_key(read):
    config = dense("llama", 43, 64, 1, 512, q_lora_rank=1024, o_lora_rank=1024)
    with pytest.raises(InvalidValue, match="compress_ratios"):
        read({**config, "compress_ratios": [4, 128]})
    with pytest.raises(InvalidValue, match="kv_lora_rank"):
        read(config)


def test_unknown_layer_kinds_are_refused_with_what_is_known(read):
    with pytest.raises(InvalidValue, match="'retention', a cache that is not known; known: att"):
        read(dense("llama", 2, 8, 8, 64, layer_types=["retention", "full_attention"]))


@pytest.mark.parametrize(("shared", "layers"), [(0, 35), (15, 20)])
def test_shared_layers_own_no_cache(shared, layers, read, cached):
    model = read(dense("llama", 35, 8, 2, 256, num_kv_shared_layers=shared))

    assert token_bytes(cached, model) == layers * 2048


def test_more_shared_layers_than_layers_are_refused(read):
    with pytest.raises(InvalidValue, match="num_kv_shared_layers"):
        read(dense("llama", 35, 8, 2, 256, num_kv_shared_layers=35))


def compressed(kv_cache_scheme):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": scheme, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": kv_cache_scheme,
    }


@pytest.mark.parametrize(
    ("scheme", "expected"), [(None, None), ({"num_bits": 8, "type": "float"}, KvDtype.fp8)]
)
def test_the_cache_follows_its_own_scheme_never_the_weights(scheme, expected, read, cached):
    model = read(dense("llama", 4, 8, 8, 64, quantization_config=compressed(scheme)))

    assert model.kv_cache_scheme is expected
    assert model.quantization_config.method is Quantization.fp8
    assert token_bytes(cached, model) == 4 * 2 * 8 * 64 * (1 if expected else 2)


@pytest.mark.parametrize("scheme", [{"num_bits": 8, "type": "int"}, {"num_bits": 3, "type": "x"}])
def test_unknown_cache_schemes_are_named(scheme, read):
    with pytest.raises(InvalidValue, match=r"quantization_config\.kv_cache_scheme"):
        read(dense("llama", 4, 8, 8, 64, quantization_config=compressed(scheme)))


def test_no_section_of_the_cache_means_the_models_dtype(read):
    model = read(
        dense("llama", 4, 8, 8, 64, quantization_config={"quant_method": "compressed-tensors"})
    )

    assert (model.kv_cache_scheme, model.quantization_config) == (None, None)


@pytest.mark.parametrize("key", ["vocab_size", "intermediate_size", "hidden_size"])
def test_sizes_have_no_silent_default(key, read):
    with pytest.raises(InvalidValue, match=key):
        read(without(dense("llama", 4, 8, 8, 64), key))


def test_a_complete_config_assumes_nothing(read):
    assert read(dense("llama", 4, 8, 8, 64)).notes == []


def test_a_shared_head_is_one_table(read):
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    tied, untied = (
        read({**BASE, **gpt2, "vocab_size": 50257, "tie_word_embeddings": flag})
        for flag in (True, False)
    )

    assert weights.parameters(tied) == 124_439_808
    assert weights.parameters(untied) - weights.parameters(tied) == 50257 * 768


def test_a_given_fact_completes_a_config(read):
    config = without(dense("llama", 4, 8, 8, 64), "vocab_size")

    assert read(config, vocab_size=1000).vocab_size == 1000


def test_the_point_is_the_same_wherever_the_folder_lies(tmp_path, command_line):
    seen = []
    for place in ("a/model", "b/model"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(dense("llama", 4, 8, 8, 64)))
        status, _, err = command_line(
            *("model=hf", f"model.path={folder}", "gpu=h200", "tracking=off"),
            f"hydra.run.dir={folder}/out",
        )
        assert status == 0, err
        seen.append(json.loads((folder / "out" / "result.json").read_text())["identity"])

    assert seen[0] == seen[1]


def test_texts_of_a_file_are_no_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")
    config = dense("llama", 4, 8, 8, 64, architectures=["${oc.env:SECRET}"])
    folder = tmp_path / "${oc.env:SECRET}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "${oc.env:SECRET}"}))
    monkeypatch.chdir(folder)
    result = kvexp.run(["model=hf", "model.path=.", "gpu=h200"])

    assert result.ok, result.reason
    assert not any("leaked" in note for note in result.notes)


@pytest.mark.parametrize("layers", [10**5, 10**12])
def test_absurd_depths_are_refused_at_once(layers, read):
    with pytest.raises(InvalidValue, match="num_hidden_layers must be"):
        read(dense("llama", layers, 8, 8, 64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model=hf"], "model.path must be given"),
        (["model=hf", "model.path=/nowhere"], "does not exist"),
        (["model=llama3_8b", "model.path=/nowhere"], "model.path must be given with model=hf"),
    ],
)
def test_paths_that_cannot_be_read_are_one_line(arguments, message, command_line):
    status, _, err = command_line(*arguments, "tracking=off")

    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_facts_on_the_line_win_over_the_file(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(dense("mistral", 4, 8, 8, 64, sliding_window=64))
    )
    base = ["model=hf", f"model.path={tmp_path}", "gpu=h200"]

    assert kvexp.run(base).layout == "1 group of 4 layers: sliding"
    assert kvexp.run([*base, "model.sliding_window=null"]).layout == "1 group of 4 layers: full"
    longer = kvexp.run([*base, "model.max_position_embeddings=1024"])
    assert longer.effective["max_model_len"] == 1024


@pytest.mark.parametrize("profiler", ["torch_allocator", "nvml", "simulated", "vllm"])
def test_profilers_that_build_the_model_have_its_config(tmp_path, profiler):
    config = dense("olmo2", 4, 8, 8, 64, architectures=["Olmo2ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))

    (point,) = compose_points(
        ["model=hf", f"model.path={tmp_path}", "gpu=h200", f"profiler={profiler}"]
    )

    assert point.problem == ""
    assert config_json(point.run.model) == config


def test_what_was_changed_after_it_was_read_is_not_built(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dense("olmo2", 4, 8, 8, 64)))
    asked = ["model=hf", f"model.path={tmp_path}", "model.num_hidden_layers=2", "gpu=h200"]

    (vllm,) = compose_points([*asked, "profiler=vllm"])
    simulated = kvexp.run([*asked, "profiler=simulated", "max_model_len=64"])

    changed = "model.num_hidden_layers=2 is not what "
    assert vllm.problem.startswith(changed)
    assert changed in simulated.readings["simulation"]["refused"]


def test_a_path_is_no_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "leaked")
    folder = tmp_path / "${oc.env:SECRET}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dense("llama", 4, 8, 8, 64)))
    monkeypatch.chdir(folder)

    (point,) = compose_points(["model=hf", "model.path=.", "gpu=h200"])

    assert point.run.model.path == str(folder)


@pytest.mark.parametrize("given", [(), ("model.path=''",), ("model.path='  '",), ("model.path=",)])
def test_a_path_that_is_missing_or_empty_is_one_clear_line(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # an empty path is not this folder
    (tmp_path / "config.json").write_text(json.dumps(dense("qwen2", 4, 8, 8, 64)))
    result = kvexp.run(["model=hf", "gpu=h200", *given])

    assert result.status == "invalid"
    assert result.reason.startswith("model.path must be given with model=hf: a folder with")
    empty = kvexp.run(["model=llama3_8b", "gpu=h200", "speculative.model=''"])
    assert empty.reason == "speculative.model must name a model, a Hugging Face id or a folder"
