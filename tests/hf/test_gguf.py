"""GGUF files by their headers."""

import struct

import pytest

import kvexp
from kvexp import weights
from kvexp.errors import InvalidValue
from kvexp.hf import read_model
from kvexp.hf.gguf import BLOCKS, bits_of
from kvexp.validate.request import Known

F32, Q4_K, Q6_K = 0, 12, 14


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key, value):
    if isinstance(value, str):
        return text(key) + struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return text(key) + struct.pack("<If", 6, value)
    if isinstance(value, list):
        items = b"".join(text(item) for item in value)
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + items
    return text(key) + struct.pack("<II", 4, value)


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "b", "c", "d"] * 64,
}


def tensors():
    yield "token_embd.weight", [256, 256], Q6_K
    yield "output_norm.weight", [256], F32
    for index in range(2):
        for name, shape in (
            ("attn_q", [256, 256]),
            ("attn_k", [256, 128]),
            ("attn_v", [256, 128]),
            ("attn_output", [256, 256]),
            ("ffn_gate", [256, 512]),
            ("ffn_up", [256, 512]),
            ("ffn_down", [512, 256]),
        ):
            yield f"blk.{index}.{name}.weight", shape, Q4_K
        yield f"blk.{index}.attn_norm.weight", [256], F32
        yield f"blk.{index}.ffn_norm.weight", [256], F32


def gguf(metadata=METADATA, version=3):
    listed = list(tensors())
    out = b"GGUF" + struct.pack("<IQQ", version, len(listed), len(metadata))
    out += b"".join(entry(key, value) for key, value in metadata.items())
    for name, shape, kind in listed:
        out += text(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", count) for count in shape) + struct.pack("<IQ", kind, 0)
    return out


def stored_bytes():
    total = 0
    for _, shape, kind in tensors():
        _, elements, size = BLOCKS[kind]
        count = 1
        for number in shape:
            count *= number
        total += count // elements * size
    return total


def test_facts_and_bytes_come_from_the_header(tmp_path):
    path = tmp_path / "small-Q4_K_M.gguf"
    path.write_bytes(gguf())
    model = read_model(path)

    assert (model.num_hidden_layers, model.kv_heads, model.head_size) == (2, 2, 64)
    assert (model.vocab_size, model.tie_word_embeddings) == (256, True)
    assert model.checkpoint_bytes == stored_bytes()


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_weights_are_the_files_not_16_bits(engine, dtype, tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf())
    asked = [f"engine={engine}", f"dtype={dtype}", "gpu=h200"]
    result = kvexp.run(["model=hf", f"model.path={path}", *asked])

    assert result.ok
    assert result.profile.weights_bytes < 3 * stored_bytes() + 4096 * 64 * 2


def test_what_only_the_file_tells_of_the_weights_is_said(tmp_path):
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf())
    result = kvexp.run(["model=hf", f"model.path={path}", "gpu=h200"])

    assert "scaled to the checkpoint" in result.profile.weights.reason


@pytest.mark.parametrize(
    ("name", "size_gb"),
    [  # files of Llama-3.1-8B-Instruct as published
        ("Q8_0", 8.54),
        ("q6_k", 6.60),
        ("Q4_K_M", 4.92),
        ("F16", 16.07),
    ],
)
def test_a_type_says_what_a_file_takes(name, size_gb):
    llama = Known.here().model("llama31_8b")

    assert weights.bytes_at(llama, bits_of(name)) == pytest.approx(size_gb * 1e9, rel=0.005)


def test_of_a_mixture_without_a_figure_its_main_type_counts():
    assert bits_of("Q4_K_XL") == bits_of("Q4_K") == 4.5
    assert bits_of("Q9_9") is None


@pytest.mark.parametrize("engine", ["vllm", "sglang", "nano_vllm", "tensorrt_llm", "lmdeploy"])
def test_the_line_to_paste_is_of_engines_that_open_gguf(tmp_path, engine):
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf())
    for given in (path, tmp_path):
        asked = ["model=hf", f"model.path={given}", "gpu=h200", f"engine={engine}"]
        result = kvexp.run(asked)
        flags, opens = result.effective["flags"], engine in ("vllm", "sglang")
        assert f" {path} " in flags if opens else flags == ""
        assert any("opens no GGUF file" in note for note in result.notes) is not opens


def test_a_folder_of_one_gguf_is_that_file(tmp_path):
    (tmp_path / "only.gguf").write_bytes(gguf())
    assert read_model(tmp_path).name == "only"

    (tmp_path / "second.gguf").write_bytes(gguf())
    with pytest.raises(InvalidValue, match="several GGUF files"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no GGUF file"),
        (b"GGML" + bytes(100), "no GGUF file"),
        (gguf(version=9), "version 9"),
        (gguf()[:200], "cut off"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "damaged"),
        (gguf({**METADATA, "general.architecture": "wavelet"}), "general.architecture must be"),
        (gguf({**METADATA, "llama.block_count": "two"}), "num_hidden_layers must be"),
    ],
)
def test_damaged_and_foreign_files_are_one_line(data, message, tmp_path):
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(InvalidValue, match=message) as caught:
        read_model(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)
