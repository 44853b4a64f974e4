"""The constants of terms.yaml: read once, looked up by version and by what a deployment is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from kvexp.contract import GIB, MIB, Deployment, DType
from kvexp_vllm.backends import PROFILED_UNTIL, WORKSPACE_BYTES, is_flashinfer
from kvexp_vllm.graphs import Captured
from kvexp_vllm.peaks import FP32_BYTES, is_hopper, workspace_bytes
from kvexp_vllm.rules import patch_release_of

DISCRETE = "discrete"
GRAPH_SPLITS = 32
"""`flash_attn_max_num_splits_for_cuda_graph`."""

ESTIMATED_ROWS = 512
"""The estimate has no more for a larger graph: gpt-oss-20b's of 1,024 rows on one and two H200."""

MANY_QUERIES = 4
UNIFIED_MIB, UNIFIED_RANKS_MIB = 1024, 4096
"""What free memory of cards that share the system's moves by while graphs are captured, of one and
of several ranks (MiniMax-M2.7 on two GB10 estimated 5.1 GiB)."""

SMALL_CARD_BYTES = 40 * GIB
HOPPER = 9.0
CHIPS = {"blackwell": 10.0, "hopper": HOPPER}
"""The first compute capability of chips whose kernels, or links, take more than older ones'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A size with the interval that the residuals of its fit give, and where it comes from."""

    low_bytes: int
    size_bytes: int
    high_bytes: int
    source: str
    confirmed: bool = False

    @classmethod
    def exactly(cls, size_bytes: int, source: str) -> "Estimate":
        """A size that has no error."""
        return cls(
            low_bytes=size_bytes,
            size_bytes=size_bytes,
            high_bytes=size_bytes,
            source=source,
            confirmed=True,
        )


def non_torch(deployment: Deployment, *, v2_runner: bool, graphed: bool) -> Estimate:
    """Growth outside torch's allocator over the baseline on one rank."""
    facts = _facts(deployment, v2_runner=v2_runner, graphed=graphed)
    rule = _newest(_terms()["non_torch"], deployment, facts)
    sizes = rule["mib"]
    more = rule.get("per_rank_mib", 0) * max(0, deployment.num_ranks - 2)
    measured_on = rule.get("exact_on")
    same_card = measured_on == deployment.gpu.name
    widened = 0 if measured_on is None or same_card else rule["elsewhere_mib"]
    return Estimate(
        low_bytes=int((sizes["low"] + more - widened) * MIB),
        size_bytes=int((sizes["best"] + more) * MIB),
        high_bytes=int((sizes["high"] + more + widened) * MIB),
        source=_source(rule),
        confirmed=same_card,
    )


def communicators(deployment: Deployment, *, custom_all_reduce: bool = True) -> Estimate:
    """What connects the ranks, in use before the baseline, on one card."""
    if deployment.num_ranks == 1:
        return Estimate.exactly(0, "")
    sizes = _terms()["communicators"]
    if deployment.gpu.interconnect == "pcie":
        low, best, high = (int(size * MIB) for size in sizes["pcie_mib"])
        return Estimate(
            low_bytes=low, size_bytes=best, high_bytes=high, source=sizes["pcie_source"]
        )
    mib = sizes["first_mib"]
    if deployment.tp > 1:
        mib += sizes["symmetric_mib"]
        mib += sizes["custom_all_reduce_mib"] if custom_all_reduce else 0
        if deployment.model.moe is not None:
            mib += sizes["experts_mib"]
    return Estimate(
        low_bytes=int(mib * 0.9 * MIB),
        size_bytes=int(mib * MIB),
        high_bytes=int(mib * 1.1 * MIB),
        source=sizes["source"],
    )


def graphs(deployment: Deployment, kind: str, captured: Captured, runner: str) -> Estimate:
    """CUDA-graph memory of one rank: the V1 runner's `estimate`, or what capture takes (`actual`).

    `runner`: v0 (the older engine's), v1 or v2. A type with a rule of its own has
    base + graphs x (so much a graph), all others the sum of what takes the memory.
    """
    kind_of_model = deployment.model.model_type
    rules = [rule for rule in _terms()["graphs"]["rules"] if rule["kind"] == kind]
    own = _latest([rule for rule in rules if kind_of_model in rule.get("type", ())], deployment)
    if own is not None:
        return _by_number(own, captured)
    rules = [rule for rule in rules if rule.get("runner", runner) == runner and "type" not in rule]
    rule = _latest(rules, deployment) or rules[0]
    if kind == "estimate":
        return _estimated(rule, deployment, captured)
    return _of_causes(rule, deployment, captured)


def _by_number(rule: Mapping[str, Any], captured: Captured) -> Estimate:
    size = (rule["base_mib"] + rule["graph_mib"] * captured.made) * MIB
    return Estimate(
        low_bytes=int(size * (1 - rule["spread"])),
        size_bytes=int(size),
        high_bytes=int(size * (1 + rule["spread"])),
        source=_source(rule),
    )


def _of_causes(rule: Mapping[str, Any], deployment: Deployment, captured: Captured) -> Estimate:
    """Graphs by what takes the memory: the driver's nodes, activations and split attention.

    layers x (pieces x so much + whole graphs x so much), cuBLAS's workspace, for each kind the
    activations of its largest size, and FlashAttention 3's fp32 outputs of up to 32 parts for the
    largest whole graph: twice where a block of them was broken up before the next layer needed it,
    which was seen with four queries and more a key on the V2 runner. FlashAttention 2 splits none.
    """
    model = deployment.model
    nodes = model.num_hidden_layers / deployment.pp * _nodes_mib(rule, deployment, captured)
    size = nodes + workspace_bytes(deployment) / MIB
    size += rule["hopper_mib"] if is_hopper(deployment) else 0
    for sizes in filter(None, (captured.pieces, captured.whole)):
        activations = max(sizes) * _widths(deployment) * rule["width_share"] / MIB
        size += rule["base_mib"] + activations
    if model.moe is not None:
        size += rule["experts_mib"] + (rule["mxfp4_mib"] if model.moe.format == "mxfp4" else 0)
    parts = _split_mib(deployment, max(captured.whole, default=0)) if rule["splits"] else 0.0
    many = model.num_attention_heads >= MANY_QUERIES * model.kv_heads and model.mla is None
    again = parts if many and rule["splits"] > 1 else 0.0
    spread = rule["spread"] * size + rule["moves_mib"] + _unified_mib(deployment)
    return Estimate(
        low_bytes=max(0, int((size + parts - spread) * MIB)),
        size_bytes=int((size + parts + again) * MIB),
        high_bytes=int((size + 2 * parts + spread) * MIB),
        source=_source(rule),
    )


def _nodes_mib(rule: Mapping[str, Any], deployment: Deployment, captured: Captured) -> float:
    """What the driver keeps of the graphs of one layer."""
    moe, pieces, whole = deployment.model.moe, len(captured.pieces), len(captured.whole)
    further = rule["adapted_mib"] if deployment.lora is not None else 0
    if moe is not None:
        further += rule["routed_mib"] + (rule["shared_mib"] if moe.shared_intermediate_size else 0)
    taken: float = pieces * rule["piece_mib"] + whole * rule["whole_mib"]
    return taken + (pieces + whole) * further


def _estimated(rule: Mapping[str, Any], deployment: Deployment, captured: Captured) -> Estimate:
    """The V1 runner's estimate (`profile_cudagraph_memory`).

    The first graph of a kind, which has the workspaces and the split outputs, and for each further
    one what the second took of the card, at least 1 MiB. The driver takes memory in large units,
    so that a second graph may take nothing of it, or more than it needs. The workspace of
    FlashInfer's kernels, which whole graphs need, may be there already.
    """
    model = deployment.model
    further = sum(len(sizes) - 1 for sizes in (captured.pieces, captured.whole) if sizes)
    rows = min(max(captured.whole, default=0), ESTIMATED_ROWS)
    first = rule["base_mib"] + workspace_bytes(deployment) / MIB + _split_mib(deployment, rows)
    kernels = WORKSPACE_BYTES / MIB if captured.whole and is_flashinfer(deployment) else 0.0
    counted = kernels if patch_release_of(deployment.engine_version) < PROFILED_UNTIL else 0.0
    layers = model.num_hidden_layers / deployment.pp
    share = rule["experts_share"] if model.moe is not None else rule["each_share"]
    if model.linear is not None or model.mamba is not None:
        share = max(share, rule["recurrent_share"])
    low, best, most = (max(1.0, each * layers) for each in (0.0, share, rule["most_share"]))
    unified = _unified_mib(deployment)
    return Estimate(
        low_bytes=max(0, int((first + further * low - unified) * MIB)),
        size_bytes=int((first + counted + further * best) * MIB),
        high_bytes=int((first + kernels + rule["first_mib"] + further * most + unified) * MIB),
        source=_source(rule),
    )


def _unified_mib(deployment: Deployment) -> int:
    """What free memory moves by where it is the system's."""
    if not deployment.gpu.unified_memory:
        return 0
    return UNIFIED_MIB if deployment.tp * deployment.pp == 1 else UNIFIED_RANKS_MIB


def _split_mib(deployment: Deployment, rows: int) -> float:
    """FlashAttention 3's fp32 outputs of all parts, on Hopper, for a graph of so many rows."""
    if not is_hopper(deployment) or deployment.dtype is DType.fp32:
        return 0.0
    return GRAPH_SPLITS * rows * _attended(deployment) * FP32_BYTES / MIB


def _widths(deployment: Deployment) -> int:
    """Elements a token that a layer makes: projections, the MLP's width and the hidden size."""
    model, tp = deployment.model, deployment.tp
    width = model.intermediate_size
    if model.moe is not None:
        width = model.moe.num_experts_per_tok * model.moe.moe_intermediate_size
    heads = model.num_attention_heads + 2 * model.kv_heads
    return model.hidden_size + (width + heads * model.head_size) // tp


def _attended(deployment: Deployment) -> int:
    """Elements a token of attention's output on one rank."""
    model = deployment.model
    size = model.head_size if model.mla is None else model.mla.kv_lora_rank
    return model.num_attention_heads // deployment.tp * size


def _source(rule: Mapping[str, Any]) -> str:
    return f"{rule['source']} (from {rule['first']} on)"


def _newest(
    rules: Sequence[Mapping[str, Any]], deployment: Deployment, facts: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The first fitting rule of the newest version that has one."""
    fitting = [rule for rule in rules if _fits({"kind": DISCRETE, **rule["when"]}, facts)]
    rule = _latest(fitting, deployment)
    if rule is None:
        raise LookupError(f"terms.yaml has no rule for {facts}")
    return rule


def _latest(rules: Sequence[Mapping[str, Any]], deployment: Deployment) -> Mapping[str, Any] | None:
    """The first of the newest rules that are not younger than the version."""
    release = patch_release_of(deployment.engine_version)
    started = [rule for rule in rules if _release(rule["first"]) <= release]
    if not started:
        return None
    newest = max(_release(rule["first"]) for rule in started)
    return next(rule for rule in started if _release(rule["first"]) == newest)


def _fits(when: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(
        facts[key] in value if isinstance(value, list) else facts[key] == value
        for key, value in when.items()
    )


def _facts(deployment: Deployment, *, v2_runner: bool, graphed: bool) -> dict[str, Any]:
    ranks = "tensor" if deployment.tp > 1 else "pipeline" if deployment.pp > 1 else "alone"
    gpu = deployment.gpu
    capability = float(gpu.compute_capability or HOPPER)
    kind = "unified" if gpu.unified_memory else "amd" if gpu.name.startswith("AMD") else DISCRETE
    return {
        "kind": kind,
        "ranks": ranks,
        "link": deployment.gpu.interconnect,
        "card": "small" if deployment.total_bytes < SMALL_CARD_BYTES else "large",
        "chip": next((name for name, least in CHIPS.items() if capability >= least), "older"),
        "runner": "v2" if v2_runner else "v1",
        "graphs": graphed,
        "mla": deployment.model.mla is not None,
        "type": deployment.model.model_type,
        "class": deployment.model.architecture,
    }


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


@cache
def _terms() -> Any:
    text = files("kvexp_vllm").joinpath("terms.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)
