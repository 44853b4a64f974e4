"""An example engine: half of the free memory, less the weights and a margin, in blocks of 16."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvexp.contract import (
    CachePlan,
    Deployment,
    Engine,
    InvalidValue,
    Knobs,
    KvDtype,
    KvGroup,
    Part,
    Profile,
    Quota,
    RankShape,
    Refusal,
    gib,
    layers,
    parse_bytes_of,
    terms,
)

TITLE = "the toy engine"


@dataclass
class Toy(Engine):
    """A toy: the cache gets util of what is free at start, less weights and a margin."""

    version: str = "1.0"
    margin_bytes: Any = "512MiB"

    def resolve(self, knobs: Knobs, name: str) -> Deployment:
        """Its defaults: half of the free memory, blocks of 16 tokens, 64 requests."""
        model = knobs.model
        kinds = {model.layer_type(index) for index in range(model.num_hidden_layers)}
        if kinds != {"full_attention"} or model.mla is not None:
            raise InvalidValue(f"{TITLE} takes models with full attention, not {model.name}")
        if knobs.tp * knobs.pp != 1:
            raise InvalidValue(f"tp and pp must be 1 for {TITLE}")
        parse_bytes_of("engine.margin_bytes", self.margin_bytes)
        dtype = terms.compute_dtype(knobs)
        length = terms.requested_len(knobs, TITLE)
        deployment = Deployment(
            model=model,
            gpu=knobs.gpu,
            engine=name,
            engine_version=self.version,
            usage="serve",
            dtype=dtype,
            quantization=knobs.quantization,
            kv_dtype=terms.cache_dtype(knobs, TITLE, (KvDtype.fp8,)),
            block_size=knobs.block_size or 16,
            util=0.5 if knobs.util is None else knobs.util,
            max_model_len=length,
            max_num_batched_tokens=knobs.max_num_batched_tokens or length,
            max_num_seqs=knobs.max_num_seqs or 64,
            tp=1,
            pp=1,
            enforce_eager=knobs.enforce_eager,
            total_bytes=knobs.gpu.total_bytes,
            free_bytes=terms.free_at_start(knobs),
            used_by_others_bytes=knobs.gpu.used_by_others_bytes,
        )
        return replace(deployment, flags=self.flags(deployment))

    def flags(self, deployment: Deployment) -> str:
        """What starts it."""
        return f"toy {deployment.model.hf_id} --share {deployment.util:g}"

    def ranks(self, deployment: Deployment) -> tuple[RankShape, ...]:
        """One rank."""
        return terms.stages(deployment)

    def predict_weights(self, deployment: Deployment, shape: RankShape) -> Part:
        """The tensors of the model."""
        return terms.derived("weights", terms.weights_bytes(deployment, shape), "its tensors")

    def predict_activation(self, deployment: Deployment, shape: RankShape) -> Part:
        """The margin stands for it."""
        size = parse_bytes_of("engine.margin_bytes", self.margin_bytes)
        return terms.assumed("activation", size, "engine.margin_bytes")

    def predict_non_torch(self, deployment: Deployment, shape: RankShape) -> Part:
        """Nothing is charged."""
        return terms.derived("non_torch", 0, "not charged")

    def predict_cudagraph(self, deployment: Deployment, shape: RankShape) -> Part:
        """There are no graphs."""
        return terms.derived("cudagraph", 0, "no graphs")

    def refuse_start(self, deployment: Deployment) -> Refusal | None:
        """It never looks."""
        return None

    def quota(self, deployment: Deployment, profile: Profile) -> Quota:
        """free x util - weights - margin."""
        requested = int(deployment.free_bytes * deployment.util)
        return Quota(
            base="free before load",
            requested_bytes=requested,
            available_bytes=requested - sum(part.size_bytes for part in profile.parts),
            parts=profile.parts,
        )

    def plan(self, deployment: Deployment, available_bytes: Sequence[int]) -> CachePlan | Refusal:
        """Whole blocks."""
        (left,) = available_bytes
        num_layers = deployment.model.num_hidden_layers
        token_bytes = sum(
            sum(layers.kv_elements(deployment, index)) * layers.itemsize_bytes(deployment.kv_dtype)
            for index in range(num_layers)
        )
        block_bytes = token_bytes * deployment.block_size
        blocks = max(0, left) // block_bytes
        if blocks == 0:
            return Refusal(
                kind="no_memory",
                message=f"{gib(left)} hold no block of {gib(block_bytes)}",
                rank=0,
                needed_bytes=block_bytes,
                available_bytes=left,
            )
        per_request = -(-deployment.max_model_len // deployment.block_size)
        group = KvGroup(
            kind="full",
            num_layers=num_layers,
            block_size=deployment.block_size,
            page_size_bytes=block_bytes // num_layers,
            num_blocks=blocks,
            blocks_per_request=per_request,
        )
        return CachePlan(
            num_blocks=blocks,
            block_size=deployment.block_size,
            kv_tokens=blocks * deployment.block_size,
            max_concurrency=min(blocks / per_request, float(deployment.max_num_seqs)),
            max_model_len=deployment.max_model_len,
            num_blocks_per_rank=(blocks,),
            block_bytes_per_rank=(block_bytes,),
            groups=(group,),
            layout="one pool",
        )

    def log_lines(self, deployment: Deployment, plan: CachePlan) -> tuple[str, ...]:
        """Its one line."""
        return (f"toy: {plan.num_blocks} blocks of {plan.block_size} tokens",)
