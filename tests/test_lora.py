"""Room for LoRA adapters: vLLM's own classes on small models, worked figures, splits."""

import json

import pytest

import kvexp
from kvexp import weights
from kvexp.deployment import LoraRoom
from kvexp.hf import read_model
from kvexp.request import Gpu, Knobs, Lora
from kvexp_vllm import Vllm, lora
from kvexp_vllm.rules import version_rules

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts_per_tok": 2}
TYPES = ["sliding_attention", "full_attention"]

GEMMA3N = {
    "model_type": "gemma3n_text",
    "intermediate_size": [128] * 10,
    "num_hidden_layers": 10,
    "head_dim": 16,
    "vocab_size_per_layer_input": 900,
    "hidden_size_per_layer_input": 32,
    "laurel_rank": 8,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 5,
    "sliding_window": 32,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    "tie_word_embeddings": True,
}
# bytes of all A and B by LoRAModelManager of vLLM 0.26.0, two adapters of rank 8
OWN_CLASSES = {
    "LlamaForCausalLM": ({"model_type": "llama"}, 133632),
    "Qwen3ForCausalLM": ({"model_type": "qwen3", "head_dim": 32}, 145920),
    "Phi3ForCausalLM": ({"model_type": "phi3"}, 121344),
    "Gemma3ForCausalLM": (
        {
            "model_type": "gemma3_text",
            "head_dim": 32,
            "sliding_window": 32,
            "tie_word_embeddings": True,
            "layer_types": TYPES,
        },
        77824,
    ),
    "Gemma3nForCausalLM": (GEMMA3N, 502784),
    "Qwen3MoeForCausalLM": (
        {
            "model_type": "qwen3_moe",
            "head_dim": 32,
            "num_experts": 8,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **EXPERTS,
        },
        261120,
    ),
    "MixtralForCausalLM": ({"model_type": "mixtral", "num_local_experts": 4, **EXPERTS}, 248576),
    "GptOssForCausalLM": (
        {
            "model_type": "gpt_oss",
            "head_dim": 32,
            "num_local_experts": 4,
            "sliding_window": 32,
            "layer_types": TYPES,
            "attention_bias": True,
            **EXPERTS,
        },
        176384,
    ),
    "GraniteMoeHybridForCausalLM": (
        {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 128,
        },
        146432,
    ),
}


def small_deployment(tmp_path, architecture, facts, tp=1):
    config = {**SMALL, **facts, "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = Gpu(name="card", source="test", total_bytes=10**11, context_bytes=0)
    room = Lora(max_loras=2, max_rank=8)
    knobs = Knobs(model=read_model(tmp_path), gpu=card, tp=tp, lora=room)
    return Vllm().resolve(knobs, "vllm")


def stacks(deployment, version="0.26.0", fully_sharded=False):
    """All that is allocated but the indices of tokens and requests."""
    share = weights.Slice(
        tp=deployment.tp, num_layers=2, first_stage=True, last_stage=True, expert_tp=deployment.tp
    )
    model, dtype = deployment.model, deployment.dtype
    tensors = list(weights.embedding(model, share, dtype))
    tensors += [
        tensor
        for index in range(model.num_hidden_layers)
        for part in (
            weights.attention(model, share, dtype, None, index),
            weights.mlp(model, share, dtype, None, index),
        )
        for tensor in part
    ]
    found = lora.buffers(
        deployment,
        tensors,
        version_rules(version),
        first_stage=True,
        last_stage=True,
        fully_sharded=fully_sharded,
    )
    adapters, experts = deployment.lora.max_loras, 2 if model.moe else 0
    tokens, seqs = deployment.max_num_batched_tokens, deployment.max_num_seqs
    indices = 56 * tokens + 24 * seqs + 2 * 4 * (3 * adapters + 4)
    return sum(found) - indices - experts * 4 * (adapters + 1)


@pytest.mark.parametrize("architecture", OWN_CLASSES)
def test_matrices_are_those_of_vllms_own_classes(tmp_path, architecture):
    facts, expected = OWN_CLASSES[architecture]

    assert stacks(small_deployment(tmp_path, architecture, facts)) == expected


def test_half_of_a_matrix_pair_is_split_over_the_ranks(tmp_path):
    architecture = "Gemma3ForCausalLM"  # without adapters of the embedding
    facts = OWN_CLASSES[architecture][0]
    one = stacks(small_deployment(tmp_path, architecture, facts))
    two = stacks(small_deployment(tmp_path, architecture, facts, tp=2))
    sharded = stacks(small_deployment(tmp_path, architecture, facts, tp=2), fully_sharded=True)

    unit = 2 * 8 * 2 * 2  # adapters, rank, bytes, layers
    whole = unit * (3 * 64 + 64 + 2 * 64 + 64)  # A of q, k, v, gate, up; B of o and down
    assert two - whole == (one - whole) / 2
    assert sharded == one / 2


def test_weights_grow_by_the_room_and_say_so():
    plain = kvexp.run(["model=llama31_8b", "gpu=h200"])
    asked = ["model=llama31_8b", "gpu=h200", "lora.max_loras=4", "lora.max_rank=64"]
    result = kvexp.run(asked)
    (part,) = result.profile.weights.includes
    layer = 3 * 4096 + 6144 + 2 * 4096 + 2 * 4096 + 2 * 14336 + 14336 + 4096
    tables = 2 * (128256 + 4096)
    indices = 56 * 8192 + 24 * 1024

    assert part.name == "lora"
    matrices = 4 * 64 * 2 * (32 * layer + tables)
    assert matrices + indices <= part.size_bytes < 1.03 * matrices  # what the allocator rounds up
    assert result.profile.weights_bytes - plain.profile.weights_bytes == part.size_bytes
    assert "--enable-lora --max-loras 4 --max-lora-rank 64" in result.effective["flags"]
    assert result.effective["lora_max_loras"] == 4
    assert sum(each.size_bytes for each in result.budget.parts) == result.budget.requested_bytes


@pytest.mark.parametrize(("loras", "rank"), [(1, 16), (2, 16), (8, 16), (1, 128), (1, 256)])
def test_room_is_proportional_to_adapters_and_rank(loras, rank):
    def room(loras, rank):
        asked = ["model=qwen25_7b", "gpu=h200", f"lora.max_loras={loras}", f"lora.max_rank={rank}"]
        return kvexp.run(asked).profile.weights.includes[0].size_bytes

    assert room(loras, rank) == pytest.approx(loras * rank / 16 * room(1, 16), rel=0.02)


def test_stages_hold_the_room_of_their_layers():
    asked = ["model=llama31_8b", "gpu=h200", "lora.max_rank=16"]
    (one,) = kvexp.run(asked).ranks
    stages = kvexp.run([*asked, "pp=2"]).ranks
    sizes = [rank.profile.weights.includes[0].size_bytes for rank in stages]

    indices = 56 * 8192 + 24 * 1024
    whole = one.profile.weights.includes[0].size_bytes
    assert sum(sizes) - indices == pytest.approx(whole, rel=1e-3)


def test_older_versions_keep_rows_for_added_tokens_and_no_experts(tmp_path):
    facts = OWN_CLASSES["LlamaForCausalLM"][0]
    deployment = small_deployment(tmp_path, "LlamaForCausalLM", facts)
    added = 2 * 2 * 256 * 64 * 2  # tensors of the embedding and the head
    more_rows = (256 + 1280 - 1000) * 8 * 2 * 2  # 1256 rows rounded up to 1280 at the head

    assert lora.added_vocabulary(deployment, version_rules("0.11.0")) == (512, 1280 - 1024)
    assert lora.added_vocabulary(deployment, version_rules("0.26.0")) == (0, 0)
    new, old = stacks(deployment), stacks(deployment, version="0.11.0")
    assert old - new == added + more_rows
    assert LoraRoom(max_loras=2, max_rank=8) == deployment.lora
