"""Which CUDA graphs a start captures: their batch sizes and kinds, by release.

`_set_cudagraph_sizes`: 1, 2, 4, then by 8, from 256 on by 16 (from 0.12). `CUDAGraphMode`: pieces
between the attentions of every size, whole graphs of every size, or whole ones of decoding alone,
whose sizes end with the requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile

from kvexp.contract import Deployment, InvalidValue, check_count
from kvexp_vllm.backends import captures_drafts
from kvexp_vllm.rules import VersionRules, patch_release_of

NONE, PIECEWISE, FULL = "none", "piecewise", "full"
FULL_DECODE_ONLY, FULL_AND_PIECEWISE = "full_decode_only", "full_and_piecewise"
MODES = (NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE)
COMPILES = 3
"""`CompilationMode.VLLM_COMPILE`, the level before 0.12: torch.compile, in pieces."""

LARGEST, SMALL = 512, 32
GPT_OSS_LARGEST, GPT_OSS_SINCE = 1024, (0, 10, 1)
ACROSS_DECODING_SINCE = (0, 12)
LARGEST_SINCE = (0, 11, 1)
"""`max_cudagraph_capture_size`, before it one size of `cuda_graph_sizes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the options ask for; None is the release's own choice.

    `every_small`: all sizes up to 32 (`performance_mode=interactivity`).
    """

    sizes: Sequence[int] | None = None
    largest: int | None = None
    mode: str | None = None
    compilation_mode: int | None = None
    every_small: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The batch sizes of graphs: `pieces` those captured between attentions, `whole` with them."""

    sizes: tuple[int, ...]
    pieces: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def made(self) -> int:
        """The number of graphs."""
        return len(self.pieces) + len(self.whole)


def check(asked: Asked) -> None:
    """The options by themselves.

    Raises:
        InvalidValue: one of them is not allowed.
    """
    given: Sequence[object] = asked.sizes or ()
    if any(not isinstance(size, int) or size < 1 for size in given):
        raise InvalidValue(
            f"engine.cudagraph_capture_sizes must be batch sizes from 1 on, got {list(given)}"
        )
    if asked.largest is not None:
        check_count("engine.max_cudagraph_capture_size", asked.largest)
    if asked.mode is not None and asked.mode not in MODES:
        raise InvalidValue(
            f"engine.cudagraph_mode must be one of {', '.join(MODES)}, got {asked.mode!r}"
        )
    if asked.compilation_mode not in (None, *range(COMPILES + 1)):
        raise InvalidValue(
            f"engine.compilation_mode must be 0 to {COMPILES}, got {asked.compilation_mode}"
        )


def check_largest(asked: Asked, rules: VersionRules, version: str, tokens: int) -> None:
    """A list and a maximum that are both given agree (`_set_cudagraph_sizes`).

    Raises:
        InvalidValue: the maximum is not the list's largest size that a step of `tokens` holds.
    """
    if asked.sizes is None or asked.largest is None or mode(asked, rules) == NONE:
        return
    largest = max((size for size in asked.sizes if size <= tokens), default=None)
    if patch_release_of(version) >= LARGEST_SINCE and asked.largest != largest:
        allowed = "null" if largest is None else f"null or {largest}"
        raise InvalidValue(
            f"engine.max_cudagraph_capture_size must be {allowed}, by the sizes of"
            f" engine.cudagraph_capture_sizes up to max_num_batched_tokens ({tokens}), got"
            f" {asked.largest}"
        )


def compiles(asked: Asked, rules: VersionRules) -> bool:
    """Whether torch.compile runs, where the model is not eager."""
    return not rules.heeds_compilation or asked.compilation_mode in (None, COMPILES)


def is_eager(asked: Asked, rules: VersionRules) -> bool:
    """Whether nothing is compiled and nothing captured, which `enforce_eager` means too."""
    return not rules.is_v0 and not compiles(asked, rules) and mode(asked, rules) == NONE


def mode(asked: Asked, rules: VersionRules) -> str:
    """The mode: pieces need a compiled model, without which they are not captured."""
    if rules.is_v0:
        return FULL  # of decoding, its sizes beyond the requests by less than 8
    chosen = asked.mode
    if chosen is None or (chosen == NONE and not rules.heeds_no_graphs):
        chosen = rules.graph_mode
    needs_pieces = chosen in (PIECEWISE, FULL_AND_PIECEWISE)
    return NONE if needs_pieces and not compiles(asked, rules) else chosen


def captured(deployment: Deployment, rules: VersionRules, asked: Asked) -> Captured:
    """The graphs of a deployment."""
    chosen = NONE if deployment.enforce_eager else mode(asked, rules)
    if not rules.is_v0:
        chosen = _allowed(deployment, rules, chosen)
    sizes = _sizes(deployment, rules, asked)
    decoding = _decoding(deployment, sizes)
    pieces, whole = _made(chosen, sizes, decoding)
    if not pieces and not whole:
        return Captured(sizes=())
    return Captured(
        sizes=decoding if chosen == FULL_DECODE_ONLY else sizes, pieces=pieces, whole=whole
    )


def _allowed(deployment: Deployment, rules: VersionRules, chosen: str) -> str:
    """The mode that embeddings, drafts, and attention to an encoder leave of the chosen one."""
    if rules.pools:
        return NONE if chosen == NONE else PIECEWISE
    if deployment.speculation is not None and not captures_drafts(deployment):
        return PIECEWISE if chosen == FULL_AND_PIECEWISE else chosen
    if not deployment.model.cross_attention or chosen in (NONE, FULL_DECODE_ONLY):
        return chosen
    decoding = patch_release_of(deployment.engine_version) >= ACROSS_DECODING_SINCE
    return FULL_DECODE_ONLY if decoding else PIECEWISE


def largest_of(number: int, rules: VersionRules) -> int:
    """The largest of so many default sizes."""
    return next(islice(_default_sizes(rules), number - 1, None))


def _made(
    chosen: str, sizes: tuple[int, ...], decoding: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of a mode's graphs: of pieces between attentions, and of whole ones."""
    return {
        NONE: ((), ()),
        PIECEWISE: (sizes, ()),
        FULL: ((), sizes),
        FULL_DECODE_ONLY: ((), decoding),
        FULL_AND_PIECEWISE: (sizes, decoding),
    }[chosen]


def _sizes(deployment: Deployment, rules: VersionRules, asked: Asked) -> tuple[int, ...]:
    """Given or default sizes; none is larger than a step's tokens."""
    tokens = deployment.max_num_batched_tokens
    if asked.sizes is not None:
        return tuple(sorted({size for size in asked.sizes if size <= tokens}))
    queries = _queries(deployment) if rules.graphs_of_drafts else 1
    largest = asked.largest or _largest(deployment, rules, 2 * deployment.max_num_seqs * queries)
    steps = _steps(min(largest, tokens), rules)
    if asked.every_small:
        steps = tuple(sorted({*steps, *range(1, min(largest, tokens, SMALL) + 1)}))
    if rules.graph_of_step and tokens <= largest and tokens not in steps:
        return (*steps, tokens)
    return steps


def _largest(deployment: Deployment, rules: VersionRules, wanted: int) -> int:
    """The largest default size: what all requests need, or a fixed one."""
    if rules.is_v0:
        return -(-deployment.max_num_seqs // 8) * 8
    release = patch_release_of(deployment.engine_version)
    if deployment.model.model_type == "gpt_oss" and release >= GPT_OSS_SINCE:
        return GPT_OSS_LARGEST
    return min(wanted, LARGEST) if rules.graphs_by_requests else LARGEST


def _steps(largest: int, rules: VersionRules) -> tuple[int, ...]:
    return tuple(takewhile(lambda size: size <= largest, _default_sizes(rules)))


def _default_sizes(rules: VersionRules) -> Iterator[int]:
    """Default sizes without an end."""
    return chain((1, 2, 4), range(8, 256, 8), count(256, rules.graph_stride))


def _decoding(deployment: Deployment, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of steps in which every request has its next token, and its drafts."""
    queries = _queries(deployment)
    return tuple(s for s in sizes if queries <= s <= queries * deployment.max_num_seqs)


def _queries(deployment: Deployment) -> int:
    drafts = deployment.speculation
    return 1 if drafts is None else 1 + drafts.num_tokens
