"""Buffers of LoRA under SGLang, which allocates them between the load and the pool.

Read in the wheels of 0.5.7 to 0.5.23: `lora/mem_pool.py: init_buffers`, `lora/utils.py:
get_default_hidden_dim`. Every layer of the model has A (rank x inputs, for each matrix that is
fused) and B (outputs x rank) for every adapter of a batch, of the modules that adapters target;
those of experts come since 0.5.10. A is whole where outputs are split, B where inputs are; A of
the embedding and of the head too. The buffers of both tables are made twice where both are
targeted.
"""

from collections.abc import Iterator, Sequence

from kvexp.contract import (
    CachingAllocator,
    Deployment,
    InvalidValue,
    Knobs,
    LoraRoom,
    Model,
    Part,
    terms,
    weights,
)

MAX_LORAS_PER_BATCH = 8
EXPERTS_SINCE = (0, 5, 10)

ALL = "all"
_STACKED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
MLP = ("gate_up_proj", "down_proj")
LAYERS = ("qkv_proj", "o_proj", *MLP)
TABLES = ("embed_tokens", "lm_head")


def room(knobs: Knobs, targets: Sequence[str] | None, release: tuple[int, ...]) -> LoraRoom | None:
    """What is asked for, completed with SGLang's default.

    Raises:
        InvalidValue: the rank is not given, or the buffers of the model are not known.
    """
    asked, model, named = knobs.lora, knobs.model, modules(targets)
    if not asked.is_asked:
        return None
    if asked.max_rank is None:
        raise InvalidValue("lora.max_rank must be given for SGLang, which reads it from adapters")
    problem = _unknown(model)
    if problem is not None:
        raise InvalidValue(f"lora is not known for {model.name} with SGLang: it has {problem}")
    if model.moe is not None and release < EXPERTS_SINCE and {*named} & {*MLP}:
        raise InvalidValue(
            f"lora is not known for the experts of {model.name} before SGLang 0.5.10: give"
            f" engine.lora_target_modules without {' and '.join(MLP)}"
        )
    return LoraRoom(max_loras=asked.max_loras or MAX_LORAS_PER_BATCH, max_rank=asked.max_rank)


def modules(targets: Sequence[str] | None) -> tuple[str, ...]:
    """The modules that have buffers; those of attention and MLP where none are named.

    Raises:
        InvalidValue: a name is none of SGLang's for a plain model.
    """
    if targets is None:
        return LAYERS
    if list(targets) == [ALL]:
        return (*LAYERS, *TABLES)
    known = (*LAYERS, *TABLES)
    found = {_STACKED.get(name, name) for name in targets}
    if not found or not found <= set(known):
        names = ", ".join((ALL, *_STACKED, *known))
        raise InvalidValue(
            f"engine.lora_target_modules must be of {names}, got {', '.join(targets) or 'none'}"
        )
    return tuple(name for name in known if name in found)


def part(deployment: Deployment, targets: Sequence[str] | None) -> Part | None:
    """The buffers of one rank."""
    lora = deployment.lora
    if lora is None:
        return None
    named = modules(targets)
    allocator = CachingAllocator()
    for size in _buffers(deployment, lora, named):
        allocator.allocate(size)
    assumed = ", as no modules are named" if targets is None else ""
    return terms.assumed(
        "lora",
        allocator.allocated_bytes,
        f"room for {lora.max_loras} adapters of rank {lora.max_rank} in"
        f" {', '.join(named)}{assumed}",
    )


def flags(deployment: Deployment, targets: Sequence[str] | None) -> Iterator[str]:
    """The options that keep so much room."""
    lora = deployment.lora
    if lora is None:
        return
    yield f"--enable-lora --max-loras-per-batch {lora.max_loras} --max-lora-rank {lora.max_rank}"
    yield f"--lora-target-modules {' '.join(targets or modules(targets))}"


def _unknown(model: Model) -> str | None:
    """What of a model the rules here do not cover."""
    known = weights.architecture_of(model)
    shared = model.moe is not None and model.moe.shared_intermediate_size
    problems = {
        "latent attention": model.mla is not None,
        "layers that keep states": model.is_hybrid or model.is_attention_free,
        "compressed caches": model.compressed is not None,
        "layers of several head counts": model.sliding_heads is not None,
        "a gate beside its queries": known.query_gate,
        "an MLP without a gate": not known.gated,
        "inputs for each layer": model.per_layer_input is not None,
        "experts beside others that are shared or dense layers": bool(
            shared or (model.moe is not None and _has_dense_layers(model))
        ),
    }
    return next((name for name, applies in problems.items() if applies), None)


def _has_dense_layers(model: Model) -> bool:
    return not all(model.has_experts(index) for index in range(model.num_hidden_layers))


def _buffers(deployment: Deployment, lora: LoraRoom, named: Sequence[str]) -> Iterator[int]:
    """Bytes of each buffer of one rank."""
    model, tp = deployment.model, deployment.tp
    unit = lora.max_loras * lora.max_rank * deployment.dtype.itemsize_bytes
    experts = 1 if model.moe is None else model.moe.num_experts
    for name in named:
        if name in TABLES:
            continue
        stacked, inputs, outputs = _matrix(model, name, tp)
        copies = experts if name in MLP else 1
        for _ in range(model.num_hidden_layers):
            yield unit * copies * stacked * inputs
            yield unit * copies * outputs
    tables = [name for name in named if name in TABLES]
    for _ in tables:
        for name in tables:
            yield from (unit * size for size in _table(model, name, tp))


def _matrix(model: Model, name: str, tp: int) -> tuple[int, int, int]:
    """Fused matrices, inputs and outputs of one rank."""
    hidden, heads = model.hidden_size, model.heads(0)
    width = heads.head_dim
    value = heads.v_head_dim or width
    queries = heads.num_attention_heads // tp
    kept = max(1, heads.num_key_value_heads // tp)
    wide = model.intermediate_size if model.moe is None else model.moe.moe_intermediate_size
    return {
        "qkv_proj": (3, hidden, queries * width + kept * (width + value)),
        "o_proj": (1, queries * value, hidden),
        "gate_up_proj": (2, hidden, 2 * wide // tp),
        "down_proj": (1, wide // tp, hidden),
    }[name]


def _table(model: Model, name: str, tp: int) -> tuple[int, int]:
    """A over all words on every rank; B of the head over a rank's own."""
    if name == "embed_tokens":
        return model.vocab_size, model.hidden_size
    return model.hidden_size, -(-model.vocab_size // tp)
