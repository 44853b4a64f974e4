"""Buffers of LoRA: vLLM keeps room for every adapter while it loads, inside `weights_memory`.

From vLLM 0.26 `v1/worker/gpu_model_runner.py: load_model`, `lora/model_manager.py` and
`lora/layers/`: each module that maps numbers has for every adapter A (rank x inputs) for each
module that is fused in it, and B (outputs x rank). A is whole where the outputs are split, B where
the inputs are; with `fully_sharded_loras` both are split. Layouts of 0.26 were compared with
vLLM's own classes on small models.
"""

import re
from collections.abc import Iterable, Iterator

from kvexp.contract import Deployment, InvalidValue, Knobs, LoraRoom, Model, Tensor, weights
from kvexp_vllm.rules import VersionRules

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_ROOM = LoraRoom(max_loras=1, max_rank=16)
LARGEST_VOCAB = 258048
OLD_VOCAB_MULTIPLE = 256  # of a head with room for added tokens

EMBEDDINGS = (
    "apertus",
    "cwm",
    "ernie4_5",
    "exaone",
    "exaone4",
    "exaone_moe",
    "falcon_h1",
    "glm",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "internlm3",
    "jais2",
    "jamba",
    "lfm2",
    "lfm2_moe",
    "llama",
    "llama4_text",
    "minicpm3",
    "mistral",
    "mixtral",
    "nemotron",
    "nemotron_h",
    "phi3",
    "phimoe",
    "qwen3",
    "qwen3_moe",
)
"""Types whose adapters cover the embedding and the head (`embedding_modules`)."""

REFUSED = (
    "bloom",
    "cohere2_moe",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gptj",
    "kimi_linear",
    "mimo_v2_flash",
    "mpt",
    "stablelm",
)
"""Types whose classes take no adapters (`SupportsLoRA`)."""

FUSED = {
    "phi3": ("qkv_proj", "gate_up_proj"),
    "internlm2": ("qkv_proj",),
    "granitemoehybrid": ("shared_experts.gate_up_proj", "gate_up_proj"),
    "qwen3_next": ("in_proj_ba",),
}
"""Modules that checkpoints of a type hold fused: one adapter covers all of it."""

FUSED_EXPERTS = ("gpt_oss", "qwen3_5_moe_text")
FUSED_EXPERT_CLASSES = ("Qwen3VLMoeForConditionalGeneration",)
"""Types and classes whose experts' gate and up are one module (`is_3d_moe_weight`)."""

_SPLIT_INPUTS = ("o_proj", "out_proj", "down_proj", "linear_right", "w2")
_ON_EVERY_RANK = re.compile(
    r"gate|kv_a_proj|indexer\..*|latent_.*|per_layer_.*|altup\..*|shared_expert_gate"
)


def room(knobs: Knobs) -> LoraRoom | None:
    """What is asked for, completed with vLLM's defaults.

    Raises:
        InvalidValue: the rank is none that vLLM takes, or the model takes no adapters.
    """
    asked, model = knobs.lora, knobs.model
    if not asked.is_asked:
        return None
    found = LoraRoom(
        max_loras=asked.max_loras or DEFAULT_ROOM.max_loras,
        max_rank=asked.max_rank or DEFAULT_ROOM.max_rank,
    )
    if found.max_rank not in RANKS:
        raise InvalidValue(
            f"lora.max_rank must be one of {', '.join(map(str, RANKS))} for vLLM,"
            f" got {found.max_rank}"
        )
    if model.model_type in REFUSED:
        raise InvalidValue(
            f"lora cannot be used with {model.name}: vLLM's class for model_type"
            f" {model.model_type!r} takes no adapters"
        )
    if covers_embeddings(model) and model.vocab_size > LARGEST_VOCAB:
        raise InvalidValue(
            f"lora needs a vocabulary of at most {LARGEST_VOCAB}, {model.name} has"
            f" {model.vocab_size}"
        )
    return found


def check_sharding(knobs: Knobs, lora: LoraRoom | None, *, expert_parallel: bool) -> None:
    """Fully sharded adapters split the rank itself, and go with experts that are split too.

    Raises:
        InvalidValue: it does not divide, or experts are dealt out whole.
    """
    if lora is None:
        return
    if lora.max_rank % knobs.tp:
        raise InvalidValue(
            f"lora.max_rank must be a multiple of tp ({knobs.tp}) with engine.fully_sharded_loras,"
            f" got {lora.max_rank}"
        )
    if expert_parallel and knobs.model.moe is not None and knobs.tp * knobs.dp > 1:
        raise InvalidValue(
            "engine.fully_sharded_loras must be false with engine.enable_expert_parallel=true"
        )


def covers_embeddings(model: Model) -> bool:
    """Whether adapters cover the embedding and the head."""
    text_only = not model.architecture.endswith("ForConditionalGeneration")
    return text_only and model.model_type in EMBEDDINGS


def added_vocabulary(deployment: Deployment, rules: VersionRules) -> tuple[int, int]:
    """Rows that the embedding and the head have more for tokens that adapters add."""
    extra, model = rules.lora_extra_vocab, deployment.model
    if deployment.lora is None or not extra or not covers_embeddings(model):
        return 0, 0
    multiple = OLD_VOCAB_MULTIPLE
    head = -(-model.vocab_size // multiple) * multiple + extra - weights.padded_vocab_size(model)
    return extra * deployment.lora.max_loras, head


def buffers(
    deployment: Deployment,
    tensors: Iterable[Tensor],
    rules: VersionRules,
    *,
    first_stage: bool,
    last_stage: bool,
    fully_sharded: bool,
) -> Iterator[int]:
    """Sizes in bytes of what one rank allocates, `tensors` being those of its layers."""
    lora = deployment.lora
    assert lora is not None
    yield from _indices(deployment, lora)
    if covers_embeddings(deployment.model) and first_stage:
        yield from _embedding(deployment, lora, rules)
    for tensor in tensors:
        if not tensor.outputs:
            continue
        if tensor.name.startswith("experts."):
            if not rules.lora_experts:
                continue
            if tensor.name == "experts.w13":
                yield 4 * (lora.max_loras + 1)  # which adapters are on
        yield from _module(deployment, lora, tensor, fully_sharded=fully_sharded)
    if covers_embeddings(deployment.model) and last_stage:
        yield from _head(deployment, lora, rules)


def _module(
    deployment: Deployment, lora: LoraRoom, tensor: Tensor, *, fully_sharded: bool
) -> Iterator[int]:
    outputs = tensor.outputs
    if _is_fused(deployment.model, tensor.name):
        outputs = (sum(outputs),)
    shared = deployment.dp if tensor.name.startswith("experts.") else 1
    tp = deployment.tp * shared if fully_sharded else 1
    replicated = _ON_EVERY_RANK.fullmatch(tensor.name) is not None
    split_inputs = tensor.name.endswith(_SPLIT_INPUTS) and not replicated
    a_rank = lora.max_rank // (1 if split_inputs or replicated else tp)
    unit = lora.max_loras * tensor.count * deployment.dtype.itemsize_bytes
    for _ in outputs:
        yield unit * a_rank * tensor.inputs
    for size in outputs:
        yield unit * lora.max_rank * (size // tp if split_inputs else size)


def _is_fused(model: Model, name: str) -> bool:
    if name == "experts.w13":
        fused = model.model_type in FUSED_EXPERTS
        return fused or model.architecture in FUSED_EXPERT_CLASSES
    return name in FUSED.get(model.model_type, ())


def _embedding(deployment: Deployment, lora: LoraRoom, rules: VersionRules) -> Iterator[int]:
    model, item, extra = deployment.model, deployment.dtype.itemsize_bytes, rules.lora_extra_vocab
    if extra:
        yield lora.max_loras * extra * model.hidden_size * item
    yield lora.max_loras * (model.vocab_size + extra) * lora.max_rank * item
    yield lora.max_loras * model.hidden_size * lora.max_rank * item


def _head(deployment: Deployment, lora: LoraRoom, rules: VersionRules) -> Iterator[int]:
    """A and B over the whole vocabulary on every rank, and with tp the order of its shares."""
    model, item, extra = deployment.model, deployment.dtype.itemsize_bytes, rules.lora_extra_vocab
    rows = model.vocab_size
    if extra:
        rows = -(-(rows + extra) // OLD_VOCAB_MULTIPLE) * OLD_VOCAB_MULTIPLE
        yield lora.max_loras * extra * model.hidden_size * item
    yield lora.max_loras * lora.max_rank * model.hidden_size * item
    yield lora.max_loras * rows * lora.max_rank * item
    if deployment.tp > 1:
        yield 8 * weights.padded_vocab_size(model)


def _indices(deployment: Deployment, lora: LoraRoom) -> Iterator[int]:
    """Which adapter each token and request uses (`PunicaWrapperGPU`)."""
    tokens, seqs = deployment.max_num_batched_tokens, deployment.max_num_seqs
    yield from (8 * tokens, 8 * tokens, 8 * tokens, 16 * tokens)
    yield from (8 * seqs for _ in range(3))
    for _ in ("tokens", "prompts"):
        yield from (4 * tokens, 4 * tokens)
        yield from (4 * (lora.max_loras + more) for more in (1, 1, 2))
