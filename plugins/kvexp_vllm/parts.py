"""Parts of a budget: sizes with where they come from and how far they may be off."""

from kvexp.contract import Deployment, Part, Provenance, Quantization, gib, terms, weights
from kvexp_vllm import multimodal, sparse_attention, stages
from kvexp_vllm.fitted import Estimate
from kvexp_vllm.rules import VersionRules
from kvexp_vllm.weights import Loaded

MEASURED_TYPES = (
    "llama",
    "mistral",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "deepseek_v2",
)
"""Model types whose weights were measured."""

FOUR_BITS = (Quantization.nvfp4, Quantization.w4a16, Quantization.awq, Quantization.gptq)
REACH_ABOVE = 0.15
"""Of public starts of Qwen3.5 to 3.8, Nemotron-H, Gemma 4 and Laguna half took 6 to 15 % more."""

BITSANDBYTES_SPREAD, BITSANDBYTES_ABOVE = 0.03, 0.12
"""Five public starts took 2 % less to 0.4 % more, three of dynamic checkpoints 10 to 12 % more."""

FINER_SCALES = 16  # elements that share one


def weights_of(deployment: Deployment, loaded: Loaded, rules: VersionRules) -> Part:
    """What was loaded, with what speaks against its size."""
    model, doubts, spread = deployment.model, [], 0.0
    if shared := stages.on_every_stage(deployment):
        doubts.append(f"{', '.join(sorted(shared))} on every stage, as vLLM's class builds them")
    if deployment.quantization is Quantization.fp8:
        doubts.append("fp8 scales and residue from one measured case")
        spread = 0.002
    elif deployment.quantization is not None:
        doubts.append(f"no measurement of {deployment.quantization.name} weights")
        spread = 0.005
    above = 0.0
    if deployment.quantization is Quantization.bitsandbytes:
        doubts.append("a dynamic checkpoint keeps some matrices in 16 bits")
        spread, above = BITSANDBYTES_SPREAD, BITSANDBYTES_ABOVE
    elif _reach_is_guessed(deployment):
        doubts.append(
            "a re-upload in 4 bits often leaves recurrent layers, gates or attention alone"
        )
        above = REACH_ABOVE
    if model.model_type not in MEASURED_TYPES:
        doubts.append("no measurement of this model type")
        spread += 0.002
    if model.tower_parameters:
        listed = model.encoder is not None and model.encoder.num_hidden_layers is not None
        doubts.append(f"encoders {'layer by layer' if listed else 'by their number of parameters'}")
        spread += 0.002 if listed and deployment.tp == 1 else 0.005
    uncounted = _uncounted_bytes(deployment, rules)
    if uncounted:
        doubts.append("an encoder whose sizes or class are not known may take more")
    if terms.beyond_formula_bytes(deployment):
        doubts.append("scaled to the checkpoint's tensors, which the formula does not describe")
        spread += 0.005
    if not weights.is_known(model):
        spread += 0.03
    if not rules.load_split_limit:
        spread += 0.001
    beside = _beside(deployment, loaded, rules)
    if deployment.draft is not None:
        doubts.append("drafts of four kinds were measured, with random weights")
        spread += 0.002
    size = loaded.total_bytes - (0 if rules.charges_adapters else loaded.lora_bytes)
    error = int(spread * size) if spread or uncounted else None
    unreached = int(above * size)
    kept = _kept_scales_bytes(deployment)
    if kept:
        doubts.append("kernels of forks for such cards may keep finer scales of the experts")
    return Part(
        name="weights",
        size_bytes=size,
        provenance=Provenance.derived if weights.is_known(model) else Provenance.assumed,
        reason="; ".join([_loading(loaded), *doubts]),
        low_bytes=None if error is None else size - error,
        high_bytes=None if error is None else size + error + kept + unreached + uncounted,
        includes=beside,
    )


def _uncounted_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """What encoders that are not known may take, whole on each rank, where vLLM builds them."""
    if not any(multimodal.towers_built(deployment, rules).values()):
        return 0
    return deployment.model.uncounted_tower_parameters * deployment.dtype.itemsize_bytes


def _reach_is_guessed(deployment: Deployment) -> bool:
    """Whether a format of 4 bits is asked for on a model whose layers are of several kinds."""
    model, known = deployment.model, weights.architecture_of(deployment.model)
    if deployment.quantization not in FOUR_BITS or model.quantization_config is not None:
        return False
    recurrent = model.linear is not None or model.mamba is not None
    return recurrent or known.beside_dense or bool(known.output_gate)


def _kept_scales_bytes(deployment: Deployment) -> int:
    """What experts in mxfp4 may take beside their own scales on cards of compute capability 12.

    Public logs of DeepSeek-V4 on GB10 print the checkpoint's size under three builds and 12 % more
    under one whose plugin keeps a byte of scale for each 16 elements (index id 58321427789).
    """
    model, moe = deployment.model, deployment.model.moe
    if model.compressed is None or moe is None or not sparse_attention.is_sm120(deployment):
        return 0
    drafting = deployment.draft.num_hidden_layers if deployment.draft is not None else 0
    experts = 3 * moe.num_experts * moe.moe_intermediate_size * model.hidden_size
    experts *= model.num_hidden_layers + drafting
    return experts // FINER_SCALES // (deployment.tp * deployment.pp)


def _beside(deployment: Deployment, loaded: Loaded, rules: VersionRules) -> tuple[Part, ...]:
    """What the weights hold beside the model itself."""
    found = list(adapters(deployment, loaded)) if rules.charges_adapters else []
    drafts, draft = deployment.speculation, deployment.draft
    if drafts is not None and draft is not None:
        reason = f"{draft.name} by {drafts.method}"
        found.append(derived("draft", loaded.draft_bytes, reason))
    return tuple(found)


def adapters(deployment: Deployment, loaded: Loaded) -> tuple[Part, ...]:
    """The room for adapters, where there is some."""
    room = deployment.lora
    if room is None:
        return ()
    reason = f"room for {room.max_loras} adapters of rank {room.max_rank}"
    return (derived("lora", loaded.lora_bytes, reason),)


def _loading(loaded: Loaded) -> str:
    moved = loaded.offloaded_bytes
    beside = f", {gib(moved)} more in the host's memory" if moved else ""
    return f"tensors of this rank through the loader's allocator{beside}"


def derived(name: str, size_bytes: int, reason: str) -> Part:
    """A size that the engine's code states."""
    return Part(name=name, size_bytes=size_bytes, provenance=Provenance.derived, reason=reason)


def predicted(name: str, reason: str, estimate: Estimate) -> Part:
    """A term with its interval; one without an error is derived, any other assumed."""
    exact = estimate.low_bytes == estimate.high_bytes
    return Part(
        name=name,
        size_bytes=estimate.size_bytes,
        provenance=Provenance.derived if estimate.confirmed else Provenance.assumed,
        reason="; ".join(filter(None, [reason, "" if estimate.confirmed else estimate.source])),
        low_bytes=None if exact else estimate.low_bytes,
        high_bytes=None if exact else estimate.high_bytes,
    )
