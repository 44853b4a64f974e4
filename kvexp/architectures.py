"""Facts that belong to a model type, never to a model's name.

Read from the model classes of transformers (4.57 and 5) and vLLM 0.26; the sums of parameters are
compared with those of real models in the tests. A type that is not known has the common decoder
block: RMS norms, fused attention without norms of its own, gate, up and down.
"""

from dataclasses import dataclass, replace
from typing import Literal

from kvexp.request import Model


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What a model type adds to the common decoder block.

    `qk_norm`: norms on q and k, of one head's size (head), of each head's own (heads) or of all
    heads together (full). `norms`: norms of the hidden size a layer, `norm_bias`: with a bias each.
    `output_bias`: a bias on the output projection too, `mlp_bias` and `head_bias` on those.
    `sinks`: one number a head. `rotary`: the share of a head that is rotated, 0 without positions.
    `local_rotary`: the share of sliding layers with a rotary cache of their own, `whole_rotary`: it
    is as wide as a head, what is not rotated included. `normalizer`: one number scales
    the embeddings. `gated`: the MLP has a gate beside up and down. `positions`: rows of a learned
    position table beyond the longest context, None without a table. `query_gate`: the query
    projection holds a gate of the same size. `router_bias`: one number an expert. `fp32_router`:
    the router is kept in fp32. `shared_gate`: one row that weighs the shared experts.
    `attention_sub_norm`, `mlp_sub_norm`: norms before the output and the down projection. `single`:
    a layer is either a mixer or an MLP, with one norm. `embedding_norm`: a norm after the
    embedding. `output_gate`: a projection that gates the attention's output, each element of it or
    each head. `beside_dense`:
    experts stand beside a dense MLP. `layer_extra`: further numbers a layer. `own_projections`:
    layers that read an earlier cache project K and V still. `routed_norms`: further norms in a
    layer with experts, whose router then scales its inputs and its experts.
    """

    qk_norm: str = ""
    norms: int = 2
    norm_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    sinks: bool = False
    rotary: float = 1.0
    local_rotary: float = 0.0
    whole_rotary: bool = False
    normalizer: bool = False
    gated: bool = True
    positions: int | None = None
    query_gate: bool = False
    router_bias: bool = False
    fp32_router: bool = False
    shared_gate: bool = False
    attention_sub_norm: bool = False
    mlp_sub_norm: bool = False
    single: bool = False
    embedding_norm: bool = False
    output_gate: Literal["", "element", "head"] = ""
    beside_dense: bool = False
    layer_extra: int = 0
    own_projections: bool = False
    routed_norms: int = 0


_BART = Architecture(
    norm_bias=True,
    output_bias=True,
    mlp_bias=True,
    gated=False,
    rotary=0.0,
    positions=2,
    embedding_norm=True,
)

ARCHITECTURES = {
    "llama": Architecture(),
    "mistral": Architecture(),
    "ministral3": Architecture(),
    "mistral4": Architecture(),
    "mixtral": Architecture(),
    "mllama_text_model": Architecture(),
    "phimoe": Architecture(norm_bias=True, output_bias=True, head_bias=True),
    "dbrx": Architecture(),
    "grok-1": Architecture(norms=4),
    "grok2": Architecture(norms=4, beside_dense=True),
    "phi3": Architecture(),
    "qwen": Architecture(),
    "qwen2": Architecture(),
    "mimo": Architecture(),
    "qwen2_moe": Architecture(shared_gate=True),
    "qwen3": Architecture(qk_norm="head"),
    "qwen3_moe": Architecture(qk_norm="head"),
    "qwen3_next": Architecture(qk_norm="head", rotary=0.25, query_gate=True, shared_gate=True),
    "qwen3_5_text": Architecture(qk_norm="head", rotary=0.25, query_gate=True),
    "qwen3_5_moe_text": Architecture(
        qk_norm="head", rotary=0.25, query_gate=True, shared_gate=True
    ),
    "gemma": Architecture(normalizer=True),
    "gemma2": Architecture(norms=4, normalizer=True),
    "gemma3_text": Architecture(qk_norm="head", norms=4, local_rotary=1.0, normalizer=True),
    "gemma3n_text": Architecture(
        qk_norm="head", norms=4, local_rotary=1.0, normalizer=True, own_projections=True
    ),
    "gemma4_text": Architecture(
        qk_norm="head",
        norms=4,
        local_rotary=1.0,
        whole_rotary=True,
        normalizer=True,
        beside_dense=True,
        layer_extra=1,
        routed_norms=3,
    ),
    "gpt_oss": Architecture(output_bias=True, sinks=True),
    "deepseek": Architecture(),
    "deepseek_v2": Architecture(),
    "deepseek_v3": Architecture(router_bias=True),
    "deepseek_v32": Architecture(router_bias=True),
    "glm_moe_dsa": Architecture(router_bias=True),
    "deepseek_v4": Architecture(rotary=0.125, router_bias=True),
    "kimi_k2": Architecture(router_bias=True),
    "kimi_linear": Architecture(rotary=0.0, router_bias=True),
    "axk1": Architecture(norms=3, router_bias=True),
    "glm4_moe_lite": Architecture(router_bias=True),
    "minicpm3": Architecture(),
    "llama4_text": Architecture(),
    "granite": Architecture(),
    "granitemoe": Architecture(),
    "granitemoeshared": Architecture(),
    "granitemoe_swa": Architecture(sinks=True),
    "granitemoehybrid": Architecture(rotary=0.0),
    "ernie4_5": Architecture(),
    "ernie4_5_moe": Architecture(router_bias=True, fp32_router=True),
    "internlm2": Architecture(),
    "internlm3": Architecture(),
    "baichuan": Architecture(),
    "smollm3": Architecture(),
    "seed_oss": Architecture(),
    "exaone": Architecture(),
    "exaone4": Architecture(qk_norm="head"),
    "exaone_moe": Architecture(qk_norm="head", router_bias=True),
    "cwm": Architecture(),
    "cohere": Architecture(norms=1),
    "cohere2": Architecture(norms=1),
    "olmo": Architecture(norms=0),
    "olmo2": Architecture(qk_norm="full"),
    "olmo3": Architecture(qk_norm="full"),
    "olmoe": Architecture(qk_norm="full"),
    "flex_olmo": Architecture(qk_norm="full"),
    "afmoe": Architecture(
        qk_norm="head", norms=4, output_gate="element", router_bias=True, fp32_router=True
    ),
    "glm": Architecture(rotary=0.5),
    "glm4": Architecture(norms=4, rotary=0.5),
    "glm4_moe": Architecture(rotary=0.5, router_bias=True, fp32_router=True),
    "hunyuan_v1_dense": Architecture(qk_norm="head"),
    "hunyuan_v1_moe": Architecture(qk_norm="head"),
    "hy_v3": Architecture(qk_norm="head", router_bias=True, fp32_router=True),
    "minimax": Architecture(fp32_router=True),
    "minimax_m2": Architecture(qk_norm="full", rotary=0.5, router_bias=True, fp32_router=True),
    "minimax_m3_vl_text": Architecture(
        qk_norm="head", rotary=0.5, router_bias=True, fp32_router=True
    ),
    "mimo_v2_flash": Architecture(rotary=0.334, router_bias=True, fp32_router=True),
    "solar_open": Architecture(router_bias=True),
    "step3p5": Architecture(
        qk_norm="head",
        rotary=0.5,
        local_rotary=1.0,
        output_gate="head",
        router_bias=True,
        fp32_router=True,
    ),
    "laguna": Architecture(
        qk_norm="head", rotary=0.5, local_rotary=1.0, output_gate="head", router_bias=True
    ),
    "bailing_moe": Architecture(),
    "bailing_moe_v2": Architecture(qk_norm="head", router_bias=True, fp32_router=True),
    "nemotron-nas": Architecture(),
    "apertus": Architecture(qk_norm="head", gated=False, layer_extra=2),
    "bitnet": Architecture(attention_sub_norm=True, mlp_sub_norm=True),
    "stablelm": Architecture(norm_bias=True, rotary=0.25),
    "phi": Architecture(
        norms=1,
        norm_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        gated=False,
        rotary=0.4,
    ),
    "starcoder2": Architecture(norm_bias=True, output_bias=True, mlp_bias=True, gated=False),
    "gpt2": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, rotary=0.0, positions=0
    ),
    "gpt_bigcode": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, rotary=0.0, positions=0
    ),
    "opt": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, rotary=0.0, positions=2
    ),
    "bloom": Architecture(
        norm_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        rotary=0.0,
        embedding_norm=True,
    ),
    "gpt_neo": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, rotary=0.0, positions=0
    ),
    "gpt_neox_japanese": Architecture(norm_bias=True, gated=False),
    "bart": _BART,
    "mbart": _BART,
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "gpt_neox": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, rotary=0.25
    ),
    "gptj": Architecture(
        norms=1, norm_bias=True, mlp_bias=True, head_bias=True, gated=False, rotary=0.25
    ),
    "codegen": Architecture(
        norms=1, norm_bias=True, mlp_bias=True, head_bias=True, gated=False, rotary=0.25
    ),
    "falcon": Architecture(norms=1, norm_bias=True, gated=False),
    "mpt": Architecture(norms=2, gated=False, rotary=0.0),
    "jais2": Architecture(norm_bias=True, output_bias=True, mlp_bias=True, gated=False),
    "nemotron": Architecture(norm_bias=True, gated=False, rotary=0.5),
    "nemotron_h": Architecture(norms=1, gated=False, rotary=0.0, single=True),
    "jamba": Architecture(rotary=0.0),
    "bamba": Architecture(rotary=0.5),
    "falcon_h1": Architecture(),
    "falcon_mamba": Architecture(norms=1, rotary=0.0, single=True),
    "mamba": Architecture(norms=1, rotary=0.0, single=True),
    "mamba2": Architecture(norms=1, rotary=0.0, single=True),
    "lfm2": Architecture(qk_norm="head"),
    "lfm2_moe": Architecture(qk_norm="head", router_bias=True),
    "whisper": Architecture(
        norm_bias=True, output_bias=True, mlp_bias=True, gated=False, positions=0
    ),
}


def is_known(model: Model) -> bool:
    """Whether the facts of the model's type are known."""
    return model.model_type in ARCHITECTURES


def architecture_of(model: Model) -> Architecture:
    """The facts of the model's type, the common decoder block where it is not known."""
    known = ARCHITECTURES.get(model.model_type, Architecture())
    if model.model_type == "falcon" and model.kv_heads > 1:
        return replace(known, norms=2)  # the newer decoder has one for each branch
    return known
