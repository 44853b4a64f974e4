"""What vLLM's classes build on every pipeline stage, though one stage alone reads it.

Read in vLLM 0.7.3 to 0.26 `model_executor/models`: most classes ask `get_pp_group()` before they
build the embedding (`VocabParallelEmbedding`) or the output head (`ParallelLMHead`); these do not.
No class asks before it builds a vision or audio tower.
"""

from kvexp.contract import Deployment, weights

EMBEDDING_AND_HEAD = frozenset(
    (
        *("arctic", "baichuan", "bloom", "chameleon", "cohere", "cohere2", "dbrx", "deepseek"),
        *("falcon", "falcon_mamba", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gpt2"),
        *("gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granitemoe", "granitemoehybrid"),
        *("granitemoeshared", "grok1", "grok2", "hy_v3", "internlm2", "jamba", "mamba"),
        *("mixtral", "molmo", "molmo2", "mpt", "nemotron_h", "olmo", "olmo2", "olmo3"),
        *("olmo_hybrid", "olmoe", "opt", "orion", "persimmon", "phi", "phimoe", "plamo2"),
        *("plamo3", "qwen", "qwen2_moe", "qwen3_moe", "qwen3_next", "stablelm", "starcoder2"),
    )
)
"""Model types whose embedding, last norm and head every stage holds."""

EMBEDDING = frozenset(("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text"))
"""Model types whose embedding alone every stage holds."""

CLASSES = frozenset(("ChatGLMModel", "MiniCPMForCausalLM", "MiniCPM3ForCausalLM"))
"""Classes that hold both, of model types that other classes serve too."""


def on_every_stage(deployment: Deployment) -> frozenset[weights.Module]:
    """Modules that each pipeline stage of this model holds; none where there is one stage."""
    model = deployment.model
    if deployment.pp == 1:
        return frozenset()
    both = model.model_type in EMBEDDING_AND_HEAD or model.architecture in CLASSES
    found: set[weights.Module] = {"towers"} if model.has_towers else set()
    if both or model.model_type in EMBEDDING:
        found.add("embedding")
    if both:
        found.add("head")
    return frozenset(found)
