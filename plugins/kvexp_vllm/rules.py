"""What vLLM's versions do differently outside the cache planner.

One row a column of releases, each from the first one whose wheel has its facts: read were 0.5.1,
0.5.3, 0.6.0, 0.6.3 to 0.6.6, 0.7.0, 0.7.3, 0.8.0 to 0.8.5 and a wheel of every minor release from
0.9 to 0.33; what is said of adapters from vLLM's pull requests 28545 (no vocabulary of their own)
and 21229 (of experts); what the sampler and the experts keep was read from start-up logs.
"""

import re
from dataclasses import dataclass, replace
from functools import cache

from kvexp.contract import InvalidValue


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRules:
    """Facts of one column.

    `requested_is_whole`: the request is ceil(total x util) rather than a float.
    `checks_free_memory`: start is refused when less than the request is free.
    `estimates_graphs`: whether a CUDA-graph estimate is subtracted: never, for the V1 model
    runner only, or always.
    `v2_runner`: what runs on the V2 model runner by default: none, all, dense models and
    `v2_architectures`, those alone (listed), or of those what is not quantised.
    `charges_whole_device`: all that is in use on the device is charged, the CUDA context,
    communicators and other processes included.
    `charges_adapters`: the room for adapters is charged; else it is made between the load and the
    profile, neither of which counts it.
    `load_split_limit`: loading runs with the allocator's split limit at 20 MiB. `unpacks_zeros`:
    AWQ goes through the kernels of mixed precision, whose zero points on Hopper (Machete) are of
    the compute dtype and scaled. `nests_scales`: the scales of bitsandbytes stay quantised.
    `marlin_capability`: the least compute capability of Marlin's kernels for GPTQ.
    `sampler_bytes`: of a vocabulary entry and row, beside the logits; `sampler_keeps_rows`: the
    top-k kernel keeps an fp32 row a multiprocessor; `pools`: embeddings are asked for, of which
    none are sampled; `flashinfer_samples`: FlashInfer's
    kernel does it instead, null: where it is installed; `rejection_bytes`: more of them where the
    profile rejects drafts. `keeps_experts_workspace`: the fused experts'
    buffers outlive the forward. `v2_profiles_images`: the V2 runner's profile has images too.
    `drops_images`: V0's profile has no images where its step is too short for a prompt of them,
    but for classes (`keeps_images`) whose prompt is then as long as its images.
    `rounds_items_up`: V1's profile has a last item that its step holds a part of alone.
    `video_images`: a video is as much as so many images at most, `video_beside_images`: and as the
    length has room for beside images; `reads_frames`: videos of frames that are not images;
    `times_videos`: the times written between frames count as many tokens each as a frame's.
    `fills_outputs`: the profile's cache has as many rows of each item's output as the encoder's
    `budget` or a largest `item` counts tokens, or `none` more than there are.
    `pixel_bytes`: of a number of an image, where it is not of the compute dtype; `joins_pixels`:
    the items' pixels come apart and are joined; `gathers_parts`: an encoder of windows gathers its
    projections as a list that is joined;
    `turns_queries_in_dtype`: an encoder turns queries and keys together, in the compute dtype, else
    `rotary_copies`: fp32 copies of an encoder's queries beside those that are turned (in 0.11 of
    queries and keys together, with the tensor that they are joined in), and `rotary_tables`: fp32
    tables of half a head beside them: the angles, their cosines and sines, and both repeated by
    torch's own turning, to 0.8. `chunks_frames`: Gemma 4's
    frames pass together, as many as a tenth of the card holds one-hot positions of, and
    `one_hot_positions`: transformers of its time makes those.
    `mrope_rows`: rows of a multimodal rotary cache for each position of the model.
    `keeps_streams`: DeepSeek V4 keeps its residual streams for drafts that nobody asked for;
    `pools_queries`: its attention has one buffer of a step's queries for all layers.
    `log_shape`: how capacity is printed: v0, two_lines or one_line.
    `lora_extra_vocab`: tokens that an adapter may add. `lora_experts`: adapters cover experts.
    `skips_towers`: a tower is not built when all its modalities are limited to none.
    `mm_limit`: items of a modality in a request where no limit is given.
    `state_for_each_request`: whole graphs are refused where recurrent layers have fewer blocks than
    requests are allowed.
    `graph_mode`: the default mode of CUDA graphs; `graph_stride`: between sizes from 256 up;
    `graphs_by_requests`: the largest size goes by the requests (twice their number), with what is
    drafted for each (`graphs_of_drafts`); `graph_of_step`: a whole step's tokens are a size too.
    `heeds_no_graphs`, `heeds_compilation`: V1 leaves graphs out when asked, and compilation; before
    it set both.
    `offloads_again`: parameters that loading makes anew are offloaded once more; `v2_offloads`:
    the V2 runner offloads at all.
    `very_large_server_tokens`: the API server's tokens of a step on cards from 160 GiB up.
    `large_cards`: which cards get more tokens and requests: `hopper` (H100 or H200 in the name),
    `memory` (70 GiB), or that without the A100; `small_card_seqs`:
    requests of the others.
    `caps_tokens`, `caps_seqs`: a default of tokens is at most what all requests hold, one of
    requests at most the tokens. V0 takes a whole prompt a step, at least `image_tokens` with a
    model of images, or `chunk_tokens` where it splits prompts; it does so by default with long
    contexts (`chunks_long`, `chunks_latent` with MLA too). `may_not_chunk`: prompts may be left
    whole (`enable_chunked_prefill=false`, which V1 did not heed before 0.12).
    """

    first: tuple[int, ...]
    util: float
    requested_is_whole: bool
    checks_free_memory: bool
    estimates_graphs: str
    v2_runner: str
    charges_whole_device: bool = False
    charges_adapters: bool = True
    load_split_limit: bool = False
    unpacks_zeros: bool = False
    nests_scales: bool = False
    marlin_capability: float = 8.0
    sampler_bytes: int = 36
    sampler_keeps_rows: bool = False
    flashinfer_samples: bool | None = False
    pools: bool = False
    rejection_bytes: int = 4
    keeps_experts_workspace: bool = False
    native_norms: bool = False
    v2_architectures: tuple[str, ...] = ()
    v2_profiles_images: bool = False
    log_shape: str = "two_lines"
    very_large_server_tokens: int = 8192
    large_cards: str = "none"
    small_card_seqs: int = 256
    caps_tokens: bool = False
    caps_seqs: bool = False
    chunk_tokens: int = 512
    chunks_long: bool = False
    may_not_chunk: bool = True
    chunks_latent: bool = True
    image_tokens: int = 0
    drops_images: bool = False
    keeps_images: tuple[str, ...] = ()
    rounds_items_up: bool = False
    video_images: int = 8
    video_beside_images: bool = True
    times_videos: bool = False
    fills_outputs: str = "none"
    reads_frames: bool = False
    chunks_frames: bool = False
    one_hot_positions: bool = True
    pixel_bytes: int = 0
    joins_pixels: bool = True
    gathers_parts: bool = False
    turns_queries_in_dtype: bool = False
    rotary_copies: int = 1
    rotary_tables: int = 3
    mrope_rows: int = 4
    lora_extra_vocab: int = 256
    lora_experts: bool = False
    skips_towers: bool = False
    mm_limit: int = 1
    graph_mode: str = "piecewise"
    graph_stride: int = 8
    state_for_each_request: bool = False
    graphs_by_requests: bool = False
    graphs_of_drafts: bool = False
    graph_of_step: bool = False
    heeds_no_graphs: bool = True
    heeds_compilation: bool = True
    offloads_again: bool = False
    v2_offloads: bool = False
    keeps_streams: bool = False
    pools_queries: bool = False

    @property
    def is_v0(self) -> bool:
        """Whether the column is of the older engine."""
        return self.log_shape == "v0"


_LEGACY = ("InternVL", "MiniCPMV", "Pixtral")
_NEXT = ("LlavaNext", "LlavaMistral", "LlavaLlama", "LlavaOnevision")
"""Classes with a dummy prompt of their own (`register_dummy_data`): those, and in 0.6 these too."""

_V0 = VersionRules(
    first=(0, 5),
    nests_scales=True,
    util=0.9,
    requested_is_whole=False,
    checks_free_memory=False,
    estimates_graphs="never",
    v2_runner="none",
    log_shape="v0",
    drops_images=True,
    keeps_images=(*_NEXT, *_LEGACY),
    pixel_bytes=4,
    rotary_copies=3,
    rotary_tables=7,
    mrope_rows=1,
)
_V0_5_3 = replace(_V0, first=(0, 5, 3), chunks_long=True)
_V0_6 = replace(_V0_5_3, first=(0, 6), image_tokens=4096)
_V0_6_3 = replace(_V0_6, first=(0, 6, 3), image_tokens=5120)
_V0_6_5 = replace(_V0_6_3, first=(0, 6, 5), chunk_tokens=2048, charges_adapters=False)
_V0_7 = replace(_V0_6_5, first=(0, 7), keeps_images=_LEGACY)
_V0_7_2 = replace(_V0_7, first=(0, 7, 2), keeps_images=("Pixtral",), mrope_rows=4)
_V0_8 = replace(
    _V0_7_2,
    first=(0, 8),
    keeps_images=(),
    chunks_latent=False,
    gathers_parts=True,
    charges_adapters=True,
)
_V0_8_3 = replace(_V0_8, first=(0, 8, 3), drops_images=False)
_V0_9 = replace(
    _V0_8_3, first=(0, 9), caps_tokens=True, pixel_bytes=0, rotary_copies=1, rotary_tables=3
)
_V0_9_2 = replace(_V0_9, first=(0, 9, 2), nests_scales=False)
V0_COLUMNS = (
    *(_V0, _V0_5_3, _V0_6, _V0_6_3, _V0_6_5),
    *(_V0_7, _V0_7_2, _V0_8, _V0_8_3, _V0_9, _V0_9_2),
)

_V2_DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
_V2_EXPERTS = ("DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM")
_V2_0_26 = (
    *_V2_EXPERTS,
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "LongcatFlashNgramForCausalLM",
)
_V1 = replace(
    _V0,
    first=(0, 8),
    charges_whole_device=True,
    flashinfer_samples=None,
    log_shape="two_lines",
    large_cards="hopper",
    small_card_seqs=1024,
    may_not_chunk=False,
    heeds_no_graphs=False,
    heeds_compilation=False,
    mm_limit=999,
    drops_images=False,
    gathers_parts=True,
    rounds_items_up=True,
    mrope_rows=4,
)
_0_8_4 = replace(_V1, first=(0, 8, 4), small_card_seqs=256)
_0_8_5 = replace(_0_8_4, first=(0, 8, 5), large_cards="memory")
_0_9 = replace(
    _0_8_5,
    first=(0, 9),
    large_cards="memory_but_a100",
    pixel_bytes=0,
    rotary_copies=1,
    rotary_tables=3,
    reads_frames=True,
)
_0_9_1 = replace(
    _0_9,
    first=(0, 9, 1),
    charges_whole_device=False,
    checks_free_memory=True,
    heeds_no_graphs=True,
)
_0_9_2 = replace(_0_9_1, first=(0, 9, 2), nests_scales=False)
_0_10 = replace(_0_9_2, first=(0, 10), rounds_items_up=False, graphs_by_requests=True)
_0_10_1 = replace(
    _0_10, first=(0, 10, 1), caps_seqs=True, heeds_compilation=True, joins_pixels=False
)
_0_10_2 = replace(_0_10_1, first=(0, 10, 2), video_beside_images=False)
_0_11 = replace(
    _0_10_2,
    first=(0, 11),
    video_images=7,
    times_videos=True,
    fills_outputs="budget",
    rotary_copies=5,
    graph_mode="full_and_piecewise",
)
_0_11_1 = replace(
    _0_11, first=(0, 11, 1), rotary_copies=3, gathers_parts=False, flashinfer_samples=False
)
_0_12 = replace(
    _0_11_1,
    first=(0, 12),
    fills_outputs="item",
    turns_queries_in_dtype=True,
    lora_extra_vocab=0,
    lora_experts=True,
    keeps_experts_workspace=True,
    rejection_bytes=16,
    caps_tokens=True,
    may_not_chunk=True,
    graph_stride=16,
)
_0_13 = replace(
    _0_12, first=(0, 13), times_videos=False, fills_outputs="none", graphs_of_drafts=True
)
_0_14 = replace(_0_13, first=(0, 14), requested_is_whole=True, marlin_capability=7.5)
_0_15 = replace(_0_14, first=(0, 15), skips_towers=True)
_0_17 = replace(
    _0_15, first=(0, 17), sampler_bytes=12, sampler_keeps_rows=True, offloads_again=True
)
_0_19 = replace(_0_17, first=(0, 19), unpacks_zeros=True)
_0_20 = replace(
    _0_19,
    first=(0, 20),
    util=0.92,
    estimates_graphs="v1_runner",
    keeps_streams=True,
    state_for_each_request=True,
)
_0_21 = replace(_0_20, first=(0, 21), load_split_limit=True, graph_of_step=True)
_0_22 = replace(
    _0_21,
    first=(0, 22),
    v2_runner="listed_unquantized",
    v2_architectures=("Qwen3ForCausalLM",),
    chunks_frames=True,
    native_norms=True,
)
_0_23 = replace(_0_22, first=(0, 23), v2_architectures=_V2_DENSE, one_hot_positions=False)
_0_24 = replace(
    _0_23, first=(0, 24), v2_runner="listed", v2_architectures=(*_V2_DENSE, *_V2_EXPERTS)
)
_0_25 = replace(_0_24, first=(0, 25), v2_runner="dense", v2_architectures=_V2_EXPERTS)
_0_26 = replace(_0_25, first=(0, 26), v2_architectures=_V2_0_26)
_0_27 = replace(
    _0_26,
    first=(0, 27),
    v2_profiles_images=True,
    v2_architectures=(*_V2_0_26, "KimiK3ForConditionalGeneration"),
    keeps_streams=False,
    pools_queries=True,
)
_0_28 = replace(
    _0_27,
    first=(0, 28),
    log_shape="one_line",
    v2_offloads=True,
    very_large_server_tokens=16384,
    v2_architectures=(*_0_27.v2_architectures, "DeepseekV4ForCausalLM"),
)
_0_29 = replace(
    _0_28, first=(0, 29), estimates_graphs="always", v2_runner="all", pools_queries=False
)
V1_COLUMNS = (
    *(
        _V1,
        _0_8_4,
        _0_8_5,
        _0_9,
        _0_9_1,
        _0_9_2,
        _0_10,
        _0_10_1,
        _0_10_2,
        _0_11,
        _0_11_1,
        _0_12,
        _0_13,
        _0_14,
    ),
    *(_0_15, _0_17, _0_19, _0_20, _0_21, _0_22, _0_23, _0_24, _0_25, _0_26, _0_27, _0_28, _0_29),
)
LAST_PATCH = 999
"""The patch of a version of two numbers: 0.8 means the last of the 0.8 releases."""

MEASURED = (0, 26)
"""The release whose memory terms were measured."""


@cache
def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version.

    Raises:
        InvalidValue: it is no version, or older than every column.
    """
    match = re.match(r"v?(\d+)\.(\d+)(?:[.\-+a-z]|$)", version)
    release = (int(match[1]), int(match[2])) if match else (-1, -1)
    if release < V0_COLUMNS[0].first:
        raise InvalidValue(
            f"engine.version must be a vLLM version from 0.5 on, such as 0.26.0, got {version!r}"
            " (in YAML write it in quotes: a bare 0.20 is read as 0.2)"
        )
    return release


@cache
def patch_release_of(version: str) -> tuple[int, int, int]:
    """Major, minor and patch number of a version.

    Raises:
        InvalidValue: it is no version, or older than every column.
    """
    major, minor = release_of(version)
    match = re.match(r"v?\d+\.\d+\.(\d+)", version)
    return major, minor, int(match[1]) if match else LAST_PATCH


def is_v0(version: str) -> bool:
    """Whether a version runs the older engine: up to 0.7, and 0.8 to 0.10 where `-v0` says so."""
    return version.lower().endswith("-v0") or release_of(version) < V1_COLUMNS[0].first


@cache
def version_rules(version: str) -> VersionRules:
    """The column of a version: the newest one of its engine that is not younger than it.

    0.8 to 0.10 had two engines: `0.8.5` means V1, `0.8.5-v0` the older one.
    """
    release = patch_release_of(version)
    columns = V0_COLUMNS if is_v0(version) else V1_COLUMNS
    return max((c for c in columns if c.first <= release), key=lambda c: c.first)
