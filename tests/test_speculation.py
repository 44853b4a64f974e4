"""Speculative decoding: drafts by vLLM's own classes, their caches, states and runners."""

import json

import pytest

import kvexp
from kvexp import drafts, weights
from kvexp.deployment import Deployment
from kvexp.dtypes import DType
from kvexp.hf import read_model
from kvexp.results import Status
from kvexp_vllm import speculation

DRAFT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "model_type": "llama",
}
EAGLE3_8B = {
    **DRAFT,
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
}
LLAMA = ("model=llama31_8b", "gpu=h200", "max_model_len=8192")


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*overrides):
    return kvexp.run([*LLAMA, *overrides])


@pytest.mark.parametrize(
    ("method", "config", "own_classes"),
    [
        # parameters and buffers of vLLM 0.26.0's class less its embedding, which is shared
        ("eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 500}, 184752),
        ("eagle", {"architectures": ["EagleLlamaForCausalLM"]}, 90256),
    ],
)
def test_drafts_take_what_vllms_own_classes_take(tmp_path, method, config, own_classes):
    draft = read_model(written(tmp_path, {**DRAFT, **config}))
    target = read_model(written(tmp_path, {**DRAFT, "architectures": ["LlamaForCausalLM"]}))
    share = weights.Slice(tp=1, num_layers=1, first_stage=True, last_stage=True)
    deployment = Deployment(model=target, dtype=DType.bf16, pp=1, **UNUSED)
    before, after = speculation.tensors(deployment, draft, share, method)
    tensors = [
        *before,
        *weights.attention(draft, share, DType.bf16, None, 0),
        *weights.mlp(draft, share, DType.bf16, None, 0),
        *drafts.norms(draft, DType.bf16, method, 0),
        *after,
    ]

    scales = 4 * 4
    assert sum(tensor.size_bytes for tensor in tensors) + scales == own_classes


UNUSED = {
    name: None
    for name in Deployment.__dataclass_fields__
    if name not in ("model", "dtype", "pp", "dp", "pp_partition", "lora", "speculation")
    and name not in ("mm_limits", "auto_fit", "notes", "flags")
}


def test_a_published_eagle3_head_is_its_file_and_one_layer_of_cache(tmp_path):
    folder = written(tmp_path, EAGLE3_8B)
    plain = run()
    result = run(f"speculative.model={folder}", "speculative.num_tokens=3")
    (part,) = result.profile.weights.includes
    hidden = 4096
    parameters = 3 * hidden * hidden + 6144 * 2 * hidden + hidden * hidden + 3 * hidden * 14336
    parameters += 32000 * hidden + 4 * hidden

    assert part.name == "draft"
    assert part.size_bytes == pytest.approx(2 * parameters + 8 * 32000, rel=0.01)
    assert result.profile.weights_bytes - plain.profile.weights_bytes == part.size_bytes
    assert result.block_bytes == plain.block_bytes // 32 * 33
    assert result.effective["speculative_method"] == "eagle3"
    assert '"method": "eagle3"' in result.effective["flags"]


def test_the_method_decides_where_the_class_does_not(tmp_path):
    folder = written(tmp_path, {**EAGLE3_8B, "architectures": ["LlamaForCausalLM"]})
    named = run(f"speculative.model={folder}", "speculative.num_tokens=3")
    chosen = run(
        f"speculative.model={folder}", "speculative.num_tokens=3", "speculative.method=eagle3"
    )

    assert named.effective["speculative_method"] == "draft_model"
    assert chosen.effective["speculative_method"] == "eagle3"
    sizes = [result.profile.weights.includes[0].size_bytes for result in (named, chosen)]
    assert sizes[0] > sizes[1]  # a whole model has both tables


def test_a_draft_model_is_counted_whole(tmp_path):
    plain, alone = run(), kvexp.run(["model=llama32_1b", "gpu=h200", "max_model_len=8192"])
    result = run("speculative.model=meta-llama/Llama-3.2-1B", "speculative.num_tokens=5")
    (part,) = result.profile.weights.includes

    assert part.size_bytes == pytest.approx(alone.profile.weights_bytes, rel=0.02)
    assert result.block_bytes == plain.block_bytes + alone.block_bytes
    assert result.effective["speculative_model"] == "llama32_1b"
    assert result.max_concurrency < plain.max_concurrency


def test_drafts_stand_on_the_last_stage_alone(tmp_path):
    folder = written(tmp_path, EAGLE3_8B)
    draft = [f"speculative.model={folder}", "speculative.num_tokens=3"]
    plain, result = run("pp=2").ranks, run("pp=2", *draft).ranks

    assert result[0].profile.weights_bytes == plain[0].profile.weights_bytes
    assert result[0].block_bytes == plain[0].block_bytes
    assert result[1].block_bytes == plain[1].block_bytes // 16 * 17
    more = result[1].profile.weights_bytes - plain[1].profile.weights_bytes
    assert more > 2 * 128256 * 4096  # over stages the embedding is the draft's own


def test_where_the_path_lies_is_not_part_of_a_point(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name, EAGLE3_8B)
        draft = run(f"speculative.model={tmp_path / name}", "speculative.num_tokens=3")
        flags = draft.effective.pop("flags")  # where vLLM finds the draft
        assert f'"model": "{tmp_path / name}"' in flags
        assert str(tmp_path) not in str(draft.effective)


def test_ngram_takes_no_weights_and_no_overlapped_steps():
    plain, result = run(), run("speculative.method=ngram", "speculative.num_tokens=4")

    assert result.profile.weights == plain.profile.weights
    assert result.effective["speculative_num_tokens"] == 4
    assert "V1 runner" in result.profile.cudagraph.reason
    gemma = ["model=gemma3_27b", "gpu=h200"]
    drafted = kvexp.run([*gemma, "speculative.method=ngram", "speculative.num_tokens=4"])
    sliding = [
        {g.blocks_per_request for g in each.groups if g.kind == "sliding"}
        for each in (kvexp.run(gemma), drafted)
    ]
    # blocks of a window of 1024 and two batches of 8192 in flight, or one
    assert sliding == [{(1023 + 2 * 8192) // 16 + 2}, {(1023 + 8192) // 16 + 2}]


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_each_drafted_token_has_a_state_of_its_own(tokens):
    asked = ["model=qwen3_next_80b_a3b", "gpu=h200", "tp=2"]
    plain = kvexp.run(asked)
    result = kvexp.run([*asked, "speculative.method=mtp", f"speculative.num_tokens={tokens}"])
    states = [g.blocks_per_request for g in result.groups if g.kind == "mamba"]

    assert {g.blocks_per_request for g in plain.groups if g.kind == "mamba"} == {1}
    assert set(states) == {1 + tokens}
    # the convolution keeps a row more for each, which may raise the block
    state = (3 + tokens) * 4096 * 2 + 16 * 128 * 128 * 2
    full = next(g for g in result.groups if g.kind == "full")
    assert full.block_size == 16 * -(-state // (16 * 1024))
    assert full.num_layers == 13


def test_layers_that_draft_for_deepseek_are_one_more_with_experts():
    asked = ["model=deepseek_v3", "gpu=h200", "tp=8", "model.num_nextn_predict_layers=1"]
    plain = kvexp.run(asked)
    result = kvexp.run([*asked, "speculative.method=mtp"])
    (part,) = result.profile.weights.includes
    experts = 256 * 3 * 7168 * 2048 // 8
    projection = 2 * 7168 * 7168 * 2  # bf16, whole on every rank

    assert result.effective["speculative_num_tokens"] == 1
    assert part.size_bytes == pytest.approx(experts + projection, rel=0.12)
    assert result.block_bytes == plain.block_bytes // 61 * 62


def test_a_multiple_of_the_drafting_layers_is_needed():
    asked = ["model=deepseek_v3", "gpu=h200", "tp=8", "model.num_nextn_predict_layers=2"]
    result = kvexp.run([*asked, "speculative.method=mtp", "speculative.num_tokens=3"])

    assert result.status is Status.invalid
    assert "must be a multiple of the 2 drafting layers" in result.reason
