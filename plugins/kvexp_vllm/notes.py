"""What is assumed of a model where its config or the user says nothing."""

from kvexp.contract import Deployment, Knobs, Model, weights

LEAST_CAPABILITY = 7.0
"""The least compute capability that vLLM's wheels are built for."""

_NEEDED = {"awq": 7.5, "w8a8": 7.5, "mxfp4": 8.0}
_OF_MARLIN = ("fp8", "w4a16", "nvfp4")
"""Formats that older cards have Marlin's kernels alone for."""


def of_model(model: Model) -> list[str]:
    """What the reader assumed, and what vLLM takes for keys that are absent."""
    found = list(model.notes)
    if not weights.is_known(model) and model.path is None:  # the reader says it
        kind = model.model_type
        found.append(f"the structure of model_type {kind!r} is assumed: a gated decoder")
    if model.head_dim is None:
        found.append(f"head_dim = hidden_size / heads = {model.head_size}")
    if model.num_key_value_heads is None:
        found.append(f"num_key_value_heads = num_attention_heads = {model.kv_heads}")
    return found


def of_replicas(knobs: Knobs, *, expert_parallel: bool) -> list[str]:
    """Which replica the figures are of, where they differ."""
    moe, ranks = knobs.model.moe, knobs.tp * knobs.dp
    if moe is None or not expert_parallel or moe.num_experts % ranks == 0:
        return []
    return [
        f"{moe.num_experts} experts are dealt out to {ranks} ranks unevenly: figures are of the"
        " first replica, which holds the most"
    ]


def of_card(deployment: Deployment, *, marlin_capability: float) -> list[str]:
    """What no wheel of vLLM starts on a card: `get_min_capability` of each format's class."""
    gpu, moe = deployment.gpu, deployment.model.moe
    if gpu.compute_capability is None:
        return []
    quantized = deployment.quantization
    stored = {quantized.name if quantized else None, moe.format if moe else None} - {None}
    needed = _NEEDED | dict.fromkeys(_OF_MARLIN, marlin_capability)
    known = [(needed[name], f"{name} weights") for name in stored if name in needed]
    least, what = max([(LEAST_CAPABILITY, "models"), *known])
    if float(gpu.compute_capability) >= least:
        return []
    return [
        f"vLLM {deployment.engine_version} takes {what} from compute capability {least:.1f} on,"
        f" {gpu.name} has {gpu.compute_capability}: only a build of one's own starts here"
    ]
