"""Checkpoints by their headers: bytes, duplicates, and files that are refused in one line."""

import json
import struct

import pytest

import kvexp
from kvexp import weights
from kvexp.dtypes import Quantization
from kvexp.errors import InvalidValue
from kvexp.hf import read_model
from kvexp.hf.safetensors import BITS, read_header

from .shapes import dense

CONFIG = dense("llama", 2, 4, 2, 16, hidden_size=64, intermediate_size=96, vocab_size=128)
HIDDEN, KV, MLP, VOCAB = 64, 32, 96, 128


def tensors(layers=2, head=True):
    """The tensors of CONFIG, bf16."""
    found = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
    for index in range(layers):
        layer = f"model.layers.{index}."
        for name, shape in (
            ("self_attn.q_proj", [HIDDEN, HIDDEN]),
            ("self_attn.k_proj", [KV, HIDDEN]),
            ("self_attn.v_proj", [KV, HIDDEN]),
            ("self_attn.o_proj", [HIDDEN, HIDDEN]),
            ("mlp.gate_proj", [MLP, HIDDEN]),
            ("mlp.up_proj", [MLP, HIDDEN]),
            ("mlp.down_proj", [HIDDEN, MLP]),
            ("input_layernorm", [HIDDEN]),
            ("post_attention_layernorm", [HIDDEN]),
        ):
            found[f"{layer}{name}.weight"] = shape
    if head:
        found["lm_head.weight"] = [VOCAB, HIDDEN]
    return {name: ("BF16", shape) for name, shape in found.items()}


def header(stored):
    entries, position = {}, 0
    for name, (dtype, shape) in stored.items():
        size = BITS[dtype] // 8
        for count in shape:
            size *= count
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(text)) + text, position


def write(path, stored, *, data=True):
    """A safetensors file; the tensors are a hole in it."""
    head, size = header(stored)
    with path.open("wb") as file:
        file.write(head)
        if data:
            file.truncate(len(head) + size)
    return size


def folder(path, config=CONFIG):
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("data", [True, False])
def test_a_file_gives_the_bytes_of_its_tensors(data, tmp_path):
    size = write(folder(tmp_path) / "model.safetensors", tensors(), data=data)
    model = read_model(tmp_path)

    assert model.checkpoint_bytes == size == 2 * weights.parameters(model)
    assert not any("beyond the formula" in note for note in model.notes)


def test_the_safetensors_library_writes_what_is_read(tmp_path):
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(
        {"a.weight": numpy.zeros((3, 5), "float16"), "b": numpy.zeros(7, "int8")},
        tmp_path / "x.safetensors",
    )

    assert {t.name: t.size_bytes for t in read_header(tmp_path / "x.safetensors")} == {
        "a.weight": 30,
        "b": 7,
    }


def test_shards_of_the_index_count_once_and_the_rest_is_listed(tmp_path):
    everything = list(tensors().items())
    halves = dict(everything[:8]), dict(everything[8:])
    weight_map, size = {}, 0
    for number, half in enumerate(halves, start=1):
        name = f"model-0000{number}-of-00002.safetensors"
        size += write(folder(tmp_path) / name, half)
        weight_map |= dict.fromkeys(half, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write(tmp_path / "consolidated.safetensors", tensors())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1000)
    model = read_model(tmp_path)
    by_index = read_model(tmp_path / "model.safetensors.index.json")

    assert model.checkpoint_bytes == by_index.checkpoint_bytes == size
    assert "not counted: consolidated.safetensors, pytorch_model.bin" in model.notes


def test_a_complete_set_of_shards_needs_no_index(tmp_path):
    everything = list(tensors().items())
    for number, half in enumerate((dict(everything[:8]), dict(everything[8:])), start=1):
        write(folder(tmp_path) / f"model-0000{number}-of-00002.safetensors", half)
    assert read_model(tmp_path).checkpoint_bytes == header(tensors())[1]

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidValue, match="1 of 2 shards"):
        read_model(tmp_path)


def test_a_tied_head_that_is_stored_anyway_counts_once(tmp_path):
    write(
        folder(tmp_path, {**CONFIG, "tie_word_embeddings": True}) / "model.safetensors", tensors()
    )
    model = read_model(tmp_path)

    assert model.checkpoint_bytes == header(tensors(head=False))[1]
    assert any("the head is the embedding" in note for note in model.notes)


def test_draft_layers_and_buffers_are_left_out(tmp_path):
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", [8])}
    write(folder(tmp_path) / "model.safetensors", {**tensors(layers=3), **more})
    model = read_model(tmp_path)

    assert model.checkpoint_bytes == header(tensors())[1]
    assert any("speculative decoding" in note for note in model.notes)


def test_what_the_formula_does_not_know_is_shown_by_module_and_charged(tmp_path):
    extra = {"model.layers.0.mlp.extra.weight": ("BF16", [512, 512])}
    write(folder(tmp_path) / "model.safetensors", {**tensors(), **extra})
    model = read_model(tmp_path)
    result = kvexp.run(["model=hf", f"model.path={tmp_path}", "gpu=h200", "max_model_len=64"])

    assert "bytes beyond the formula's, by module: mlp +524,288" in model.notes
    assert result.profile.weights_bytes > model.checkpoint_bytes
    assert "scaled to the checkpoint" in result.profile.weights.reason


def test_a_vision_tower_is_exact_with_a_checkpoint(tmp_path):
    config = {"model_type": "vlm", "text_config": CONFIG, "vision_config": {"hidden_size": 8}}
    tower = {"vision_tower.blocks.0.attn.qkv.weight": ("BF16", [24, 8])}
    write(folder(tmp_path, config) / "model.safetensors", {**tensors(), **tower})
    model = read_model(tmp_path)

    assert model.tower_parameters == 24 * 8
    assert not any("beyond the formula" in note for note in model.notes)


def test_packed_elements_are_stored_bytes(tmp_path):
    stored = {
        "qweight": ("I32", [512, 4096]),
        "scales": ("F16", [32, 4096]),
        "qzeros": ("I32", [32, 512]),
        "g_idx": ("I32", [4096]),
    }
    size = write(tmp_path / "x.safetensors", stored)

    assert sum(t.size_bytes for t in read_header(tmp_path / "x.safetensors")) == size
    assert size == 4 * 512 * 4096 + 2 * 32 * 4096 + 4 * 32 * 512 + 4 * 4096


def test_the_dtype_is_the_tensors_where_the_config_has_none(tmp_path):
    stored = {name: ("F16", shape) for name, (_, shape) in tensors().items()}
    write(folder(tmp_path, {**CONFIG, "dtype": None}) / "model.safetensors", stored)

    assert read_model(tmp_path).torch_dtype.name == "fp16"


def damaged(kind):
    """A file's bytes, wrong in one way."""
    head, size = header(tensors())
    good = head + bytes(size)
    text = json.loads(head[8:])
    name = "model.norm.weight"

    def with_header(entry):
        changed = json.dumps({**text, name: entry}).encode()
        return struct.pack("<Q", len(changed)) + changed + bytes(size)

    return {
        "empty": b"",
        "short": good[:5],
        "cut in the header": good[:100],
        "cut in the data": good[: len(head) + size // 2],
        "huge header": struct.pack("<Q", 2**60) + good[8:],
        "header of 200 MB": struct.pack("<Q", 200_000_000) + good[8:],
        "zip": b"PK\x03\x04" + bytes(1000),
        "pickle": b"\x80\x02" + bytes(1000),
        "html": b"<!DOCTYPE html><html>" + bytes(1000),
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "not json": struct.pack("<Q", 4) + b"abcd" + bytes(size),
        "list": struct.pack("<Q", 2) + b"[]",
        "too long": good + b"more",
        "no offsets": with_header({"dtype": "BF16", "shape": [64]}),
        "unknown dtype": with_header({**text[name], "dtype": "Q9"}),
        "wrong shape": with_header({**text[name], "shape": [65]}),
        "negative shape": with_header({**text[name], "shape": [-64]}),
        "overlap": with_header({**text[name], "data_offsets": [0, 128]}),
        "nested": struct.pack("<Q", 60000) + b"[" * 60000,
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("empty", "short", "cut in the header", "cut in the data", "huge header", "zip", "pickle"),
        *("header of 200 MB", "html", "lfs pointer", "not json", "list", "too long", "no offsets"),
        *("unknown dtype", "wrong shape", "negative shape", "overlap", "nested"),
    ],
)
def test_damaged_and_foreign_files_are_refused_in_one_line(kind, tmp_path):
    (folder(tmp_path) / "model.safetensors").write_bytes(damaged(kind))
    with pytest.raises(InvalidValue) as caught:
        model = read_model(tmp_path)
        assert kind == "list", model
        raise InvalidValue("an empty file has no tensors")

    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "no file of this folder"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing, the index names it"),
        ({"weight_map": {"a": "model.safetensors"}}, "has no tensor 'a'"),
        ({"weight_map": {"a": 3}}, "no file of this folder"),
    ],
)
def test_a_wrong_index_is_one_line(index, message, tmp_path):
    write(folder(tmp_path) / "model.safetensors", tensors())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidValue, match=message):
        read_model(tmp_path)


def test_several_files_without_an_index_are_not_guessed(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        write(folder(tmp_path) / name, tensors())

    with pytest.raises(InvalidValue, match="several safetensors files"):
        read_model(tmp_path)
    assert read_model(tmp_path / "b.safetensors").checkpoint_bytes == header(tensors())[1]


def test_a_folder_of_pickles_alone_is_read_by_its_config(tmp_path):
    (folder(tmp_path) / "pytorch_model.bin").write_bytes(b"\x80\x02")

    assert read_model(tmp_path).checkpoint_bytes is None


@pytest.mark.parametrize("name", ["weights.safetensors", "model.bin", "."])
def test_tensors_without_a_config_are_refused(name, tmp_path):
    write(tmp_path / "weights.safetensors", tensors())
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(InvalidValue, match=r"config\.json|must be a folder"):
        read_model(tmp_path / name)


def test_a_modelopt_file_beside_the_config_is_its_quantisation(tmp_path):
    folder(tmp_path)
    quantization = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    model = read_model(tmp_path)

    assert model.quantization_config.method is Quantization.fp8
    assert model.kv_cache_scheme.name == "fp8"
