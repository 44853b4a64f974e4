"""The allocator's arithmetic, against what a real one did and against its documented settings."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import measured, recorded_traces

from kvexp.errors import InvalidValue
from kvexp.simulate.addresses import POLICIES
from kvexp.simulate.allocator import CachingAllocator, OutOfMemory
from kvexp.simulate.settings import AllocatorSettings, parse_settings
from kvexp.units import MIB

MEASURED = measured("h200_forwards.json.xz")
WORKSPACES = (33554432, 1048576)


def replay(allocator, events):
    """Allocations that are still alive, with their sizes as requested."""
    blocks = []
    for event in events:
        if isinstance(event, str):
            continue
        if event >= 0:
            blocks.append(allocator.allocate(event))
        else:
            allocator.free(blocks[-event - 1])
            blocks[-event - 1] = None
    return [block for block in blocks if block is not None]


def forwards(model):
    return [row for row in MEASURED["forwards"] if row["model"] == model]


def row_of(model, case):
    batch, seq, logits, extra = case
    for row in forwards(model):
        if (row["batch"], row["seq"], row["logits"], row["extra"]) == (batch, seq, logits, extra):
            return row
    raise KeyError(case)


def phases(model, policy="ranges"):
    """Load and every forward of one process: (measured, allocator after it)."""
    allocator = CachingAllocator(addresses=POLICIES[policy]())
    for trace in recorded_traces():
        if trace["model"] != model:
            continue
        if "load" in trace:
            replay(allocator, trace["load"])
            yield MEASURED["loads"][model], allocator
            allocator.empty_cache()
            started = []
            continue
        row = row_of(model, trace["case"])
        inputs = allocator.allocate(8 * row["batch"] * row["seq"])
        allocator.reset_peaks()
        alive = replay(allocator, trace["run"])
        yield row, allocator
        for block in [inputs, *alive]:
            size = block.requested
            if row["first"] and size in WORKSPACES and size not in started:
                started.append(size)
            else:
                allocator.free(block)
        allocator.empty_cache()


@pytest.mark.parametrize("model", MEASURED["loads"])
@pytest.mark.parametrize("policy", ["ranges", "shuffled_1"])
def test_replayed_traces_allocate_what_the_real_allocator_did(model, policy):
    found = 0
    for real, allocator in phases(model, policy):
        found += 1
        assert allocator.peak_allocated_bytes == real["allocated_peak"]
        if "batch" not in real:
            assert allocator.allocated_bytes == real["allocated"]
            assert allocator.requested_bytes == real["requested"]
            continue
        assert allocator.allocated_bytes == real["after"]
        assert allocator.requested_bytes == real["after_requested"]
        assert allocator.peak_requested_bytes == real["requested_peak"]
    assert found == 1 + len({str(t["case"]) for t in recorded_traces() if is_run(t, model)})


def is_run(trace, model):
    return trace["model"] == model and "case" in trace


def test_reserved_of_the_real_allocator_lies_within_the_policies():
    for model in MEASURED["loads"]:
        runs = [list(reserved_peaks(model, policy)) for policy in POLICIES]
        for real, *simulated in zip(real_peaks(model), *runs, strict=True):
            assert min(simulated) <= real <= max(simulated)


def reserved_peaks(model, policy):
    for _, allocator in phases(model, policy):
        yield allocator.peak_reserved_bytes


def real_peaks(model):
    for real, _ in phases(model):
        yield real["reserved_peak"]


@pytest.mark.parametrize("row", [r for r in MEASURED["block_sizes"] if r[0] > MIB], ids=str)
def test_a_first_request_takes_the_block_and_segment_that_were_measured(row):
    requested, allocated, reserved, *_ = row
    allocator = CachingAllocator()
    allocator.allocate(requested)

    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_a_cap_gives_cached_segments_back_before_it_fails():
    allocator = CachingAllocator(allowed_bytes=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)

    assert allocator.num_retries == 1
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemory, match="CUDA out of memory") as failed:
        allocator.allocate(21 * MIB)
    assert failed.value.allocated_bytes == 80 * MIB
    assert failed.value.cached_bytes == 0
    assert failed.value.requested_bytes == 21 * MIB


def test_the_device_limits_what_the_driver_gives():
    allocator = CachingAllocator(device_bytes=64 * MIB)
    allocator.allocate(40 * MIB)

    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)


def test_a_segment_with_a_live_block_stays_when_the_cache_is_emptied():
    allocator = CachingAllocator()
    first, second = allocator.allocate(12 * MIB), allocator.allocate(8 * MIB)
    kept = allocator.allocate(2 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.empty_cache()

    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


def test_a_large_rest_of_up_to_one_mib_stays_with_its_block():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    allocator.allocate(11 * MIB)

    assert allocator.allocated_bytes == 12 * MIB
    assert allocator.requested_bytes == 11 * MIB


def test_expandable_segments_grow_in_place_and_leave_no_rest():
    plain, expandable = (
        CachingAllocator(),
        CachingAllocator(settings=conf("expandable_segments:True")),
    )
    for allocator in (plain, expandable):
        allocator.free(allocator.allocate(30 * MIB))
        allocator.allocate(50 * MIB)

    assert plain.reserved_bytes == 80 * MIB
    assert expandable.reserved_bytes == 60 * MIB
    assert expandable.allocated_bytes == 50 * MIB


def test_expandable_segments_give_back_whole_pages_in_the_middle():
    allocator = CachingAllocator(settings=conf("expandable_segments:True"))
    blocks = [allocator.allocate(30 * MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 100 * MIB
    allocator.free(blocks[1])
    allocator.empty_cache()

    assert allocator.reserved_bytes == 80 * MIB  # pages of 20 MiB: 40 to 60 of 30 to 60
    allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 100 * MIB


def test_max_split_size_keeps_large_blocks_whole():
    allocator = CachingAllocator(settings=conf("max_split_size_mb:32"))
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(8 * MIB)
    assert allocator.reserved_bytes == 84 * MIB  # a small request does not take the large block

    allocator.allocate(48 * MIB)
    assert allocator.reserved_bytes == 84 * MIB  # within 20 MiB it is taken whole
    assert allocator.allocated_bytes == 72 * MIB


def test_max_split_size_releases_only_what_a_request_needs():
    allocator = CachingAllocator(32 * MIB, allowed_bytes=200 * MIB)
    cached = [allocator.allocate(size * MIB) for size in (40, 60, 90)]
    for block in cached:
        allocator.free(block)
    allocator.allocate(120 * MIB)

    assert allocator.num_retries == 0
    assert allocator.reserved_bytes == (40 + 120) * MIB


def test_garbage_collection_gives_old_segments_back_above_the_threshold():
    allocator = CachingAllocator(
        settings=conf("garbage_collection_threshold:0.5"), allowed_bytes=200 * MIB
    )
    old = allocator.allocate(60 * MIB)
    kept = allocator.allocate(50 * MIB)
    allocator.free(old)
    for _ in range(3):
        allocator.free(allocator.allocate(4))
    allocator.allocate(70 * MIB)

    assert allocator.num_retries == 0
    assert allocator.reserved_bytes == (50 + 70 + 2) * MIB
    assert kept.size == 50 * MIB


@pytest.mark.parametrize(
    ("text", "size", "rounded"),
    [
        ("", 1, 512),
        ("", 1200, 1536),
        ("roundup_power2_divisions:4", 1200 * MIB, 1280 * MIB),
        ("roundup_power2_divisions:4", 1024 * MIB, 1024 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 700 * MIB, 768 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 300 * MIB, 300 * MIB),
        ("roundup_power2_divisions:[256:1,512:2,>:8]", 1100 * MIB, 1152 * MIB),
    ],
)
def test_sizes_are_rounded_as_documented(text, size, rounded):
    assert conf(text).round(size) == rounded


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_split_size_mb:10", "at least 20"),
        ("backend:cudaMallocAsync", "not simulated"),
        ("expandable_segments:yes", "True or False"),
        ("garbage_collection_threshold:2", "between 0 and 1"),
        ("no_such_setting:1", "is not simulated"),
        ("max_split_size_mb", "name:value"),
        ("roundup_power2_divisions:3", "powers of two"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(text, reason):
    with pytest.raises(InvalidValue, match=reason):
        conf(text)


def conf(text):
    return parse_settings(text)


SETTINGS = st.sampled_from(
    [
        "",
        "expandable_segments:True",
        "max_split_size_mb:32",
        "roundup_power2_divisions:4",
        "garbage_collection_threshold:0.3",
    ]
)
OPERATIONS = st.lists(
    st.one_of(
        st.integers(1, 64 * MIB), st.integers(1, 4096), st.integers(-40, -1), st.just("empty")
    ),
    max_size=120,
)


@settings(max_examples=120, deadline=None)
@given(operations=OPERATIONS, text=SETTINGS, policy=st.sampled_from(sorted(POLICIES)))
def test_blocks_never_overlap_and_nothing_is_lost(operations, text, policy):
    allocator = CachingAllocator(
        settings=conf(text), addresses=POLICIES[policy](), allowed_bytes=2**50
    )
    alive = []
    for operation in operations:
        if operation == "empty":
            allocator.empty_cache()
        elif operation > 0:
            alive.append(allocator.allocate(operation))
        elif alive:
            allocator.free(alive.pop(operation % len(alive)))
        assert allocator.allocated_bytes == sum(block.size for block in alive)
        assert allocator.allocated_bytes <= allocator.reserved_bytes
    spans = sorted((block.address, block.address + block.size) for block in alive)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


def test_a_hundred_thousand_events_take_well_under_a_second_of_processor_time():
    events = next(t["run"] for t in recorded_traces() if is_run(t, "qwen3_30b_a3b"))
    repeated = -(-100_000 // len(events))
    started = time.process_time()
    for _ in range(repeated):
        replay(CachingAllocator(), events)

    assert time.process_time() - started < 1.5


def test_defaults_are_torchs():
    assert parse_settings(None) == AllocatorSettings()
    assert AllocatorSettings().max_split_size_bytes is None
