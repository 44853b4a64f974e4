"""Parameters of decoder layers that `cpu_offload_gb` keeps in the host's memory.

`make_layers` builds a layer on the card, then moves its parameters in their order until the size is
reached, so that the last one may go beyond it. V0 brings all of a layer's own back while the layer
runs (`functional_call`); V1 maps them, and its forward copies nothing (UVA).
"""

from dataclasses import dataclass, field

from kvexp.contract import GIB, Deployment, InvalidValue, Quantization, Tensor
from kvexp_vllm.rules import VersionRules, patch_release_of

MOST_GIB = 1 << 20
"""No host has more memory."""

V1_SINCE = (0, 8, 3)
REPACKED = (Quantization.w4a16, Quantization.awq, Quantization.gptq, Quantization.mxfp4)
"""Formats whose matrices are made anew after loading."""


@dataclass(slots=True)
class Offloader:
    """Says which parameters leave the card until `limit_bytes` are reached.

    `by_layer`: what left of each layer, in bytes.
    """

    limit_bytes: int
    by_layer: dict[int, int] = field(default_factory=dict)

    def takes(self, layer: int, tensor: Tensor) -> bool:
        """Whether the next tensor of a layer leaves it."""
        if sum(self.by_layer.values()) >= self.limit_bytes or not is_parameter(tensor):
            return False
        self.by_layer[layer] = self.by_layer.get(layer, 0) + tensor.size_bytes
        return True


def is_parameter(tensor: Tensor) -> bool:
    """Whether it is one of `module.parameters()`, rather than a buffer."""
    return tensor.name != "attn.scale"


def check(size_gib: float, version: str, rules: VersionRules, *, lora: bool) -> None:
    """`cpu_offload_gb` as the releases take it.

    Raises:
        InvalidValue: it is negative, or the release refuses it.
    """
    key, release = "engine.cpu_offload_gb", patch_release_of(version)
    if not 0 <= size_gib <= MOST_GIB:
        raise InvalidValue(f"{key} must be from 0 to {MOST_GIB} GiB, got {size_gib:g}")
    if not size_gib:
        return
    if not rules.is_v0 and release < V1_SINCE:
        raise InvalidValue(
            f"{key} made vLLM {version} run its V0 engine: use engine.version={version}-v0"
        )
    if rules.is_v0 and lora:
        raise InvalidValue(f"{key} must be 0 with lora: the V0 engine refuses both together")


def limit_bytes(
    deployment: Deployment, rules: VersionRules, size_gib: float, *, v2_runner: bool
) -> int:
    """The size that stays in the host's memory: none where the release loses it again."""
    if v2_runner and not rules.v2_offloads:
        return 0
    if not rules.is_v0 and not rules.offloads_again and method(deployment) in REPACKED:
        return 0
    return int(size_gib * GIB)


def note(deployment: Deployment, rules: VersionRules, size_gib: float, *, v2_runner: bool) -> str:
    """What is to be said of a size that moves nothing; empty where it moves something."""
    if not size_gib or limit_bytes(deployment, rules, size_gib, v2_runner=v2_runner):
        return ""
    version = deployment.engine_version
    if v2_runner:
        return f"cpu_offload_gb moves nothing: the V2 model runner of {version} has no offloader"
    return f"cpu_offload_gb moves nothing: {version} makes the matrices of this format anew"


def method(deployment: Deployment) -> Quantization | None:
    """How the weights are stored."""
    own = deployment.model.quantization_config
    return deployment.quantization or (None if own is None else own.method)
