"""SGLang's buffers of adapters: A and B of every layer for each adapter of a batch."""

import pytest

from kvexp.errors import InvalidValue

HIDDEN, WIDE, KV = 4096, 14336, 1024  # of llama31_8b


def lora_bytes(deploy, *overrides):
    engine, deployment = deploy("sglang", *overrides)
    parts = {p.name: p for p in engine.charged(deployment, engine._predicted(deployment))}
    return parts["lora"].size_bytes


def close(expected):
    """torch's allocator keeps a rest of less than 1 MiB of a large block."""
    return pytest.approx(expected, rel=0.012)


def test_eight_adapters_in_every_matrix_of_attention_and_mlp(deploy):
    # A: rank x inputs for each fused matrix, B: outputs x rank
    qkv = 3 * HIDDEN + HIDDEN + 2 * KV
    rest = 2 * HIDDEN + 2 * HIDDEN + 2 * WIDE + WIDE + HIDDEN
    expected = 8 * 16 * 2 * 32 * (qkv + rest)

    assert lora_bytes(deploy, "model=llama31_8b", "lora.max_rank=16") == close(expected)


def test_ranks_split_outputs_or_inputs_and_keep_the_other_side_whole(deploy):
    qkv = 3 * HIDDEN + (HIDDEN + 2 * KV) // 4
    rest = HIDDEN // 4 + HIDDEN + 2 * HIDDEN + 2 * WIDE // 4 + WIDE // 4 + HIDDEN
    expected = 4 * 64 * 2 * 32 * (qkv + rest)
    asked = ("model=llama31_8b", "tp=4", "lora.max_rank=64", "lora.max_loras=4")

    assert lora_bytes(deploy, *asked) == close(expected)


def test_named_modules_alone_have_buffers(deploy):
    asked = ("model=llama31_8b", "lora.max_rank=16", "lora.max_loras=1")
    modules = "engine.lora_target_modules=[q_proj,v_proj]"

    assert lora_bytes(deploy, *asked, modules) == 16 * 2 * 32 * (3 * HIDDEN + HIDDEN + 2 * KV)


def test_tables_of_words_are_kept_twice_where_both_are_targeted(deploy):
    # init_embedding_buffer runs for both names in either of its two calls
    asked = ("model=llama31_8b", "lora.max_rank=16", "lora.max_loras=1")
    both = lora_bytes(deploy, *asked, "engine.lora_target_modules=[embed_tokens,lm_head]")
    one = lora_bytes(deploy, *asked, "engine.lora_target_modules=[lm_head]")

    assert one == 16 * 2 * (HIDDEN + 128256)
    assert both == 2 * 16 * 2 * 2 * (HIDDEN + 128256)


def test_every_expert_has_its_own(deploy):
    # 48 layers of 128 experts of width 768; heads of 128, 32 and 4 of them
    attention = 3 * 2048 + 4096 + 2 * 512 + 4096 + 2048
    expert = 2 * 2048 + 2 * 768 + 768 + 2048
    expected = 8 * 16 * 2 * 48 * (attention + 128 * expert)

    assert lora_bytes(deploy, "model=qwen3_30b_a3b", "lora.max_rank=16") == close(expected)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("lora.max_loras=4",), "lora.max_rank must be given for SGLang"),
        (("lora.max_rank=8", "model=deepseek_v3"), "it has latent attention"),
        (("lora.max_rank=8", "model=qwen35_27b"), "it has layers that keep states"),
        (
            ("lora.max_rank=8", "model=qwen3_30b_a3b", "engine.version='0.5.9'"),
            "not known for the experts of qwen3_30b_a3b before SGLang 0.5.10",
        ),
        (
            ("lora.max_rank=8", "engine.lora_target_modules=[router]"),
            "must be of all, q_proj, k_proj, v_proj, gate_proj, up_proj, qkv_proj, o_proj",
        ),
        (("engine.lora_target_modules=[]",), "got none"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(deploy, overrides, said):
    with pytest.raises(InvalidValue, match=said):
        deploy("sglang", *overrides)


def test_the_start_line_keeps_the_room(deploy):
    _, deployment = deploy("sglang", "lora.max_rank=16", "engine.lora_target_modules=[all]")

    assert deployment.flags.endswith(
        "--enable-lora --max-loras-per-batch 8 --max-lora-rank 16 --lora-target-modules all"
    )
