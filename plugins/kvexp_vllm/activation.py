"""torch_peak_increase of vLLM: the largest of the profile run's phases, by rule and runner."""

from dataclasses import dataclass, replace

from kvexp.contract import KIB, Deployment, RankShape
from kvexp_vllm import images, phases
from kvexp_vllm.peaks import UNSPLIT_BYTES, V1_FITTED, Peak, kept_bytes, workspace_bytes
from kvexp_vllm.rules import VersionRules, release_of

ADAPTERS_BYTES = 5 * KIB  # a layer, on the V2 runner: three sizes of adapters, one and two cards


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What passes in a profile run: on which runner, with items (`takes_items`) or text alone.

    `shares_items`: each rank has a share of them. `returned_bytes` of an offloaded layer are on the
    card while the forward runs.
    """

    v2_runner: bool
    takes_items: bool = True
    shares_items: bool = False
    returned_bytes: int = 0


def peak(deployment: Deployment, shape: RankShape, rules: VersionRules, passes: Passes) -> Peak:
    """The activation peak of one rank; of two phases the higher end counts for the interval too."""
    v2_runner = passes.v2_runner
    pictures = images.profiled(deployment, rules) if passes.takes_items else images.Images()
    step = images.step(deployment, pictures)
    found = phases.of_tokens(step, shape, rules, v2_runner=v2_runner)
    if back := passes.returned_bytes:
        found = [each.with_layer(back) if each.phase == "forward" else each for each in found]
    profiles_items = shape.pp_rank == 0 or not rules.is_v0  # V1 encodes before it asks its stage
    if pictures.held and profiles_items:
        held = images.held_bytes(step, rules, pictures)
        found = [phase.with_held(held) for phase in found]
        found.append(images.encoding(step, rules, pictures, shared=passes.shares_items))
    largest = max(found, key=lambda phase: phase.size_bytes)
    adapts = deployment.lora is not None
    adapters = ADAPTERS_BYTES * shape.num_layers if adapts and v2_runner else 0
    more = UNSPLIT_BYTES if adapts else 0
    if adapts and rules.is_v0:  # one log has so much more
        more += step.max_num_batched_tokens * step.model.hidden_size * step.dtype.itemsize_bytes
    more += images.unknown_bytes(step) if profiles_items and passes.takes_items else 0
    beyond = 4 if release_of(deployment.engine_version) < V1_FITTED[0] else 1  # a log of 0.5 has 4
    return replace(
        largest,
        size_bytes=largest.size_bytes + adapters,
        low_bytes=max(phase.low_bytes for phase in found) + adapters,
        high_bytes=beyond * max(phase.high_bytes for phase in found) + adapters + more,
    )


def items(
    deployment: Deployment, shape: RankShape, rules: VersionRules, passes: Passes
) -> Peak | None:
    """What the items of a step take beyond a peak that was profiled without them.

    As many as a profile with items has, by its rule; the low end is a load of text. None where they
    were profiled, or where there are none.
    """
    if passes.takes_items or shape.pp_rank:
        return None
    charged = peak(deployment, shape, rules, passes)
    whole = peak(deployment, shape, rules, replace(passes, takes_items=True))
    if whole.high_bytes <= charged.high_bytes:
        return None
    return replace(
        whole,
        size_bytes=max(0, whole.size_bytes - charged.size_bytes),
        low_bytes=0,
        high_bytes=whole.high_bytes - charged.size_bytes,
    )


def lasting_bytes(deployment: Deployment, rules: VersionRules) -> int:
    """What the first forward allocates for good: workspaces of cuBLAS and of experts."""
    return workspace_bytes(deployment) + kept_bytes(deployment, rules)
