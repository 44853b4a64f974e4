"""nano-vLLM: a small engine whose budget charges everything in use on the card.

The rules are those of `engine/model_runner.py` (warmup_model, allocate_kv_cache) and `config.py`
at commit bb823b3. Its warm-up is derived from its layers and was not measured.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kvexp.contract import (
    AUTO_FIT,
    MIB,
    CachePlan,
    Deployment,
    DType,
    Engine,
    InvalidValue,
    Knobs,
    KvDtype,
    KvGroup,
    Model,
    Part,
    Profile,
    Provenance,
    Quota,
    RankShape,
    Refusal,
    gib,
    share_of_total,
    terms,
)

VERSION = "bb823b3"
BLOCK_MULTIPLE = 256
WORKSPACE_BYTES = 32 * MIB
FIRST_KERNELS_BYTES = 168 * MIB  # growth over the context after one forward, H200
COMMUNICATOR_BYTES = 979369984  # first NCCL communicator of two ranks, H200
UNVERIFIED = "derived from nano-vLLM's layers, not verified by a measurement"


@dataclass
class NanoVllm(Engine):
    """nano-vLLM at the commit named in its version; memory terms are not verified."""

    version: str = VERSION
    share_of_total: float | None = None

    charges_context: ClassVar[bool] = True

    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """See `Engine.resolve`."""
        _check(knobs, self.version)
        model, gpu = knobs.model, knobs.gpu
        dtype = model.torch_dtype if knobs.dtype is DType.auto else knobs.dtype
        if knobs.kv_dtype not in (KvDtype.auto, KvDtype[dtype.name]):
            raise InvalidValue(
                f"kv_dtype must be auto or {dtype.name} for nano-vLLM (the cache has the compute"
                f" dtype), got {knobs.kv_dtype.name}"
            )
        length = min(knobs.max_model_len or 4096, model.max_position_embeddings)
        tokens = knobs.max_num_batched_tokens or 16384
        if tokens < length:
            raise InvalidValue(
                f"max_num_batched_tokens must be at least max_model_len ({length}) for nano-vLLM,"
                f" got {tokens}"
            )
        deployment = Deployment(
            model=model,
            gpu=gpu,
            engine=name,
            engine_version=self.version,
            usage="llm",
            dtype=dtype,
            quantization=None,
            kv_dtype=KvDtype[dtype.name],
            block_size=knobs.block_size or BLOCK_MULTIPLE,
            util=share_of_total(knobs, self.share_of_total, default=0.9),
            max_model_len=length,
            max_num_batched_tokens=tokens,
            max_num_seqs=knobs.max_num_seqs or 512,
            tp=knobs.tp,
            pp=1,
            enforce_eager=knobs.enforce_eager,
            total_bytes=gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs),
            used_by_others_bytes=gpu.used_by_others_bytes,
            notes=terms.model_notes(model, "nano-vLLM"),
        )
        return replace(deployment, flags=self.flags(deployment))

    def flags(self, deployment: Deployment) -> str:
        """See `Engine.flags`."""
        if deployment.model.is_gguf:  # which it does not open
            return ""
        return (
            f"LLM({json.dumps(deployment.model.checkpoint)},"
            f" gpu_memory_utilization={deployment.util:g},"
            f" kvcache_block_size={deployment.block_size},"
            f" max_model_len={deployment.max_model_len},"
            f" max_num_batched_tokens={deployment.max_num_batched_tokens},"
            f" max_num_seqs={deployment.max_num_seqs}, tensor_parallel_size={deployment.tp},"
            f" enforce_eager={deployment.enforce_eager})"
        )

    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """Tensor-parallel ranks; each holds every layer."""
        return tuple(
            RankShape(
                rank=rank,
                tp_rank=rank,
                pp_rank=0,
                first_layer=0,
                num_layers=deployment.model.num_hidden_layers,
            )
            for rank in range(deployment.tp)
        )

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_weights`."""
        return _assumed("weights", terms.weights_bytes(deployment, shape), UNVERIFIED)

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_activation`."""
        return _assumed("activation", _activation_bytes(deployment), UNVERIFIED)

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_non_torch`: everything in use, the context included."""
        nccl = " and NCCL" if deployment.tp > 1 else ""
        reason = f"context, first kernels{nccl}; taken from NVIDIA H200"
        return _assumed("non_torch", _non_torch_bytes(deployment), reason)

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """See `Engine.predict_cudagraph`."""
        return Part(
            name="cudagraph",
            size_bytes=0,
            provenance=Provenance.derived,
            reason="captured after the cache, nothing is reserved",
        )

    def refuse_start(self, deployment: Deployment) -> Refusal | None:
        """Never: there is no check before it loads."""
        return None

    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """total x util - used - peak + current, with used = total - free after the warm-up."""
        others = Part(
            name="used_by_others",
            size_bytes=deployment.used_by_others_bytes,
            provenance=Provenance.given,
            reason="other processes, inside nano-vLLM's `used`",
        )
        used = others.size_bytes + profile.non_torch_bytes + profile.weights_bytes
        current = profile.weights_bytes
        peak = current + profile.activation_bytes
        available = int(deployment.total_bytes * deployment.util - used - peak + current)
        available -= profile.cudagraph_bytes  # nothing, unless it was given
        available -= sum(part.size_bytes for part in profile.differences)
        parts = (others, *profile.parts)
        return Quota(
            base="total",
            requested_bytes=available + sum(part.size_bytes for part in parts),
            available_bytes=available,
            parts=parts,
        )

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Whole blocks of what is left; every rank counts its own, the least is safe."""
        block_bytes = _block_bytes(deployment)
        counts = tuple(max(0, left) // block_bytes for left in available_bytes)
        blocks = min(counts)
        rank = counts.index(blocks)
        if blocks == 0:
            return Refusal(
                kind="no_memory",
                message=f"{gib(available_bytes[rank])} are left for the cache, one block takes"
                f" {gib(block_bytes)}",
                rank=rank,
                needed_bytes=block_bytes,
                available_bytes=available_bytes[rank],
            )
        per_request = -(-deployment.max_model_len // deployment.block_size)
        layers = deployment.model.num_hidden_layers
        notes = _foreign(deployment.model)
        if deployment.max_model_len < deployment.model.max_position_embeddings:
            notes.append(
                f"max_model_len is {deployment.max_model_len}: nano-vLLM's default is 4096,"
                " whatever the model allows"
            )
        if blocks < per_request:
            notes.append(
                f"a request of max_model_len {deployment.max_model_len} needs {per_request} blocks"
                f" and is never admitted: the cache holds {blocks * deployment.block_size} tokens"
            )
        if len(set(counts)) > 1:
            notes.append(f"ranks differ ({min(counts)} to {max(counts)} blocks); the least counts")
        return CachePlan(
            num_blocks=blocks,
            block_size=deployment.block_size,
            kv_tokens=blocks * deployment.block_size,
            max_concurrency=float(min(blocks // per_request, deployment.max_num_seqs)),
            max_model_len=deployment.max_model_len,
            num_blocks_per_rank=counts,
            block_bytes_per_rank=(block_bytes,) * len(counts),
            groups=(
                KvGroup(
                    kind="full",
                    num_layers=layers,
                    block_size=deployment.block_size,
                    page_size_bytes=block_bytes // layers,
                    num_blocks=blocks,
                    blocks_per_request=per_request,
                ),
            ),
            layout=f"1 group of {layers} layers: full",
            notes=tuple(notes),
        )

    def cache_tensor_bytes(self, plan: CachePlan, rank: int) -> tuple[int, ...]:
        """One tensor for all layers."""
        return (plan.num_blocks * plan.block_bytes_per_rank[rank],)

    def graph_batch_sizes(self, deployment: Deployment) -> tuple[int, ...]:
        """1, 2, 4, 8, then every sixteenth up to 512 or `max_num_seqs`."""
        if deployment.enforce_eager:
            return ()
        largest = min(deployment.max_num_seqs, 512)
        return (*(1, 2, 4, 8), *range(16, largest + 1, 16))

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """Show its own figures by its own names; the engine itself prints nothing."""
        return (f"num_kvcache_blocks = {plan.num_blocks}, kvcache_block_size = {plan.block_size}",)


def _check(knobs: Knobs, version: str) -> None:
    model = knobs.model
    terms.check_attention(model, "nano-vLLM")
    if version != VERSION:
        raise InvalidValue(f"engine.version must be {VERSION} for nano-vLLM, got {version!r}")
    if knobs.quantization is not None:
        raise InvalidValue(
            f"quantization must be null for nano-vLLM, got {knobs.quantization.name}"
        )
    if model.quantization_config is not None:
        raise InvalidValue(
            f"model={model.name} is stored as {model.quantization_config.method.name}, which"
            " nano-vLLM does not load"
        )
    if knobs.max_model_len == AUTO_FIT:
        raise InvalidValue("max_model_len must be at least 1 for nano-vLLM, got -1")
    if knobs.pp != 1:
        raise InvalidValue(f"pp must be 1 for nano-vLLM, got {knobs.pp}")
    if knobs.block_size is not None and knobs.block_size % BLOCK_MULTIPLE:
        raise InvalidValue(
            f"block_size must be a multiple of {BLOCK_MULTIPLE} for nano-vLLM,"
            f" got {knobs.block_size}"
        )
    allowed = [
        n for n in range(1, 9) if model.num_attention_heads % n == 0 and model.kv_heads % n == 0
    ]
    if knobs.tp not in allowed:
        raise InvalidValue(
            f"tp must be one of {', '.join(map(str, allowed))} for {model.name} with nano-vLLM"
            f" ({model.num_attention_heads} attention heads, {model.kv_heads} KV heads),"
            f" got {knobs.tp}"
        )


def _foreign(model: Model) -> list[str]:
    """What the engine does not know: its formula counts K and V of every layer."""
    kinds = {model.layer_type(index) for index in range(model.num_hidden_layers)}
    foreign = [kind for kind in sorted(kinds) if kind != "full_attention"]
    if model.mla is not None:
        foreign.append("latent attention")
    if model.cross_attention:
        foreign.append("cross attention")
    if not foreign:
        return []
    return [
        f"nano-vLLM has no {' or '.join(foreign)}: its formula counts K and V of every token and"
        " layer"
    ]


def _assumed(name: str, size_bytes: int, reason: str) -> Part:
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.assumed, reason=reason)


def _block_bytes(deployment: Deployment) -> int:
    """2 x layers x block x (kv_heads // tp) x head_dim x itemsize."""
    model = deployment.model
    token = 2 * model.num_hidden_layers * deployment.kv_heads_per_rank * model.head_size
    return token * deployment.block_size * deployment.dtype.itemsize_bytes


def _activation_bytes(deployment: Deployment) -> int:
    """The larger of the decoder layer's peak and the sampler's, for the warm-up's prompts.

    The layer holds residual, hidden and normalised states beside gate-up and its product, as in
    vLLM's fused layers; the sampler holds the logits and three fp32 copies of them.
    """
    model, item = deployment.model, deployment.dtype.itemsize_bytes
    seq_len = min(deployment.max_num_batched_tokens, deployment.max_model_len)
    num_seqs = min(deployment.max_num_batched_tokens // seq_len, deployment.max_num_seqs)
    tokens = seq_len * num_seqs
    layer = item * tokens * (3 * model.intermediate_size // deployment.tp + 3 * model.hidden_size)
    logits = num_seqs * model.vocab_size * (item + 3 * 4)
    logits += item * model.hidden_size * (tokens + num_seqs)
    return max(layer, logits) + WORKSPACE_BYTES


def _non_torch_bytes(deployment: Deployment) -> int:
    """Everything of this process outside the torch allocator after the warm-up."""
    context = max(
        0, deployment.total_bytes - deployment.free_bytes - deployment.used_by_others_bytes
    )
    growth = FIRST_KERNELS_BYTES + (COMMUNICATOR_BYTES if deployment.tp > 1 else 0)
    return context + growth
