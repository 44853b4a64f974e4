"""How many slots of recurrent states a request takes: by release, strategy and architecture.

`_calculate_mamba_ratio` of the wheels of 0.5.7 to 0.5.23: three with the radix cache, two more for
the extra buffer's ping-pong where schedules overlap, one where they do not or where the second one
is lazy. Without the radix cache one is enough. The buffer is the automatic choice of some
architectures where schedules overlap or a page has several tokens.
"""

from dataclasses import dataclass

from kvexp.contract import InvalidValue

SLOTS, OVERLAPPED, PLAIN = 3, 2, 1
AUTO, NO_BUFFER, EXTRA_BUFFER, LAZY = "auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"
STRATEGIES = (AUTO, NO_BUFFER, EXTRA_BUFFER, LAZY)

STRATEGIES_SINCE, OVERLAP_SINCE, AUTO_BUFFERS_SINCE = (0, 5, 7), (0, 5, 10), (0, 5, 14)
JOINTLY_SINCE = (0, 5, 13)
"""The first release whose states of drafts are out of the share of states."""

COUNTED_ALWAYS = (0, 5, 7)
"""The release that counted the ping-pong without a buffer too."""

_BUFFERED: tuple[tuple[tuple[int, ...], frozenset[str]], ...] = (
    (
        AUTO_BUFFERS_SINCE,
        frozenset(
            {
                "BailingMoeV2_5ForCausalLM",
                "FalconH1ForCausalLM",
                "GraniteMoeHybridForCausalLM",
                "InternS2PreviewForConditionalGeneration",
                "MiniCPMV4_6ForConditionalGeneration",
                "NemotronHForCausalLM",
                "NemotronHPuzzleForCausalLM",
                "Qwen3NextForCausalLM",
                "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration",
            }
        ),
    ),
    ((0, 5, 18), frozenset({"KimiK3ForConditionalGeneration", "KimiLinearForCausalLM"})),
    (
        (0, 5, 20),
        frozenset(
            {
                "BailingMoeV3ForCausalLM",
                "Glm5NextForConditionalGeneration",
                "NemotronH_Omni_Reasoning_V3",
                "Qwen3_5ForCausalLM",
                "Qwen3_5MoeForCausalLM",
                "Qwen4ExpForConditionalGeneration",
            }
        ),
    ),
)
"""Architectures whose extra buffer is the automatic choice, from the first wheel read with them."""


def check(strategy: str, release: tuple[int, ...], *, overlaps: bool) -> None:
    """The strategy as the releases take it.

    Raises:
        InvalidValue: it is none, or the release does not have it.
    """
    key = "engine.mamba_radix_cache_strategy"
    if strategy not in STRATEGIES:
        raise InvalidValue(f"{key} must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if strategy != AUTO and release < STRATEGIES_SINCE:
        raise InvalidValue(f"{key} needs SGLang 0.5.7 or newer, got {strategy!r}")
    if strategy == LAZY and release < AUTO_BUFFERS_SINCE:
        raise InvalidValue(f"{key}={LAZY} needs SGLang 0.5.14 or newer")
    if strategy == LAZY and not overlaps:
        raise InvalidValue(f"{key}={LAZY} needs engine.disable_overlap_schedule=false")


def flag_of(release: tuple[int, ...]) -> str:
    """The strategy's name on the command line."""
    name = "radix-cache" if release >= AUTO_BUFFERS_SINCE else "scheduler"
    return f"--mamba-{name}-strategy"


def slots_per_request(
    release: tuple[int, ...], strategy: str, architecture: str, *, overlaps: bool, pages: bool
) -> int:
    """Slots of one request with the radix cache."""
    if strategy == AUTO:
        buffered = (overlaps or pages) and architecture in _buffered(release)
        strategy = EXTRA_BUFFER if buffered else NO_BUFFER
    if release == COUNTED_ALWAYS:
        return SLOTS + OVERLAPPED
    if strategy == NO_BUFFER:
        return SLOTS
    lazy = strategy == LAZY or (release >= OVERLAP_SINCE and not overlaps)
    return SLOTS + (PLAIN if lazy else OVERLAPPED)


def _buffered(release: tuple[int, ...]) -> frozenset[str]:
    return frozenset().union(*(names for since, names in _BUFFERED if since <= release))


@dataclass(frozen=True, kw_only=True, slots=True)
class Slots:
    """How slots of recurrent states are counted (`_handle_max_mamba_cache`).

    `slot_bytes` are of one rank, `per_request` the slots that a request takes, `share` is states :
    tokens, `given` a number that memory plays no part in. With drafts every one of `max_requests`
    keeps `verified` states more; since 0.5.13 (`jointly`) out of the share of states, of no more
    requests than the slots allow, and of one for padding.
    """

    slot_bytes: int
    per_request: int
    share: float
    given: int | None
    verified: int
    max_requests: int
    jointly: bool

    def within(self, rest_bytes: int) -> int:
        """Slots beside the padding slot where `rest_bytes` are for states and tokens."""
        if self.given is not None:
            return self.given
        if not self.jointly:
            rest_bytes -= self.drafted_bytes(0)
        states = rest_bytes * self.share / (1 + self.share)
        extra = self.verified if self.jointly else 0
        slot = self.slot_bytes
        return max(0, int((states - slot * (1 + extra)) // (slot * (1 + extra / self.per_request))))

    def drafted_bytes(self, slots: int) -> int:
        """States of the tokens that are verified together."""
        requests = self.max_requests
        if self.jointly:
            requests = min(requests, slots // self.per_request) + 1
        return self.slot_bytes * requests * self.verified

    def taken_bytes(self, slots: int) -> int:
        """All states of so many slots, the padding slot included."""
        return (slots + 1) * self.slot_bytes + self.drafted_bytes(slots)

    def beside(self, tokens_bytes: int) -> int:
        """Slots that were split off when `tokens_bytes` remained for tokens."""
        slots, found = -1, 0
        while found > slots:
            slots, found = found, self.within(tokens_bytes + self.taken_bytes(found))
        return slots
