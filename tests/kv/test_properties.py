"""What holds of every plan, whatever the model."""

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kv_cases import V026, full, mamba, mla, named, plan, sliding

from kvexp.kv import ChunkedLocalAttentionSpec, Plan, PlanRefusal, rules_for

HEADS = st.sampled_from([1, 2, 4, 8])
BLOCKS = st.sampled_from([16, 32, 64])
VERSIONS = st.sampled_from(["0.6.3", "0.8.5", "0.9", "0.11", "0.13", "0.19", "0.22"])
NEWER = st.sampled_from(["0.26.0", "0.28", "0.30", "0.33"])


@st.composite
def models(draw):
    heads, head_size = draw(HEADS), draw(st.sampled_from([64, 128]))
    kinds = {
        "full": full(draw(BLOCKS), heads, head_size),
        "sliding": sliding(draw(st.integers(1, 5000)), 16, heads, head_size),
        "chunked": ChunkedLocalAttentionSpec(
            attention_chunk_size=draw(st.integers(1, 9000)),
            block_size=16,
            num_kv_heads=heads,
            head_size=head_size,
            dtype="bfloat16",
            indexes_kv_by_block_stride=True,
        ),
        "mla": mla(draw(BLOCKS)),
        "mamba": mamba(draw(st.integers(1, 2000)), ((3, draw(st.integers(1, 4096))),)),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(kinds)), min_size=1, max_size=3, unique=True))
    return named(*((kinds[kind], draw(st.integers(1, 12))) for kind in chosen))


LENGTHS = st.integers(1, 200_000)
BYTES = st.integers(1, 10**11)
RARE = [HealthCheck.filter_too_much]
"""Most drawn models are refused: only those that the statement is about are looked at."""


@given(models(), LENGTHS, BYTES, st.integers(0, 10**9), NEWER)
@settings(max_examples=75, deadline=None, suppress_health_check=RARE)
def test_more_bytes_never_give_fewer_blocks(layers, length, available, more, version):
    rules = rules_for(version)
    less = plan(layers, available, length, rules=rules)
    assume(isinstance(less, Plan))
    richer = plan(layers, available + more, length, rules=rules)
    assert isinstance(richer, Plan)
    assert richer.num_blocks >= less.num_blocks
    assert richer.max_concurrency >= less.max_concurrency


@given(models(), LENGTHS, BYTES, st.one_of(VERSIONS, NEWER))
@settings(max_examples=100, deadline=None, suppress_health_check=RARE)
def test_blocks_never_take_more_than_there_is(layers, length, available, version):
    made = plan(layers, available, length, rules=rules_for(version))
    if isinstance(made, Plan):
        assert 0 < made.num_blocks * made.bytes_per_block <= available
        assert (made.num_blocks + 1) * made.bytes_per_block > available
        assert sum(group.num_layers for group in made.groups) <= len(layers)


@given(models(), LENGTHS, st.lists(BYTES, min_size=2, max_size=4), NEWER)
@settings(max_examples=100, deadline=None, suppress_health_check=RARE)
def test_the_smallest_worker_decides(layers, length, amounts, version):
    rules = rules_for(version)
    together = plan(layers, amounts, length, rules=rules)
    alone = [plan(layers, amount, length, rules=rules) for amount in amounts]
    if isinstance(together, Plan):
        assert together.num_blocks == min(single.num_blocks for single in alone)
        assert together.num_blocks_per_worker == tuple(single.num_blocks for single in alone)
    elif together.worker is not None:
        assert alone[together.worker] == PlanRefusal(
            code=together.code,
            message=alone[together.worker].message,
            worker=0,
            needed_bytes=together.needed_bytes,
            available_bytes=together.available_bytes,
            estimated_max_model_len=together.estimated_max_model_len,
        )


@given(models(), st.integers(1000, 200_000), st.integers(10**6, 10**9), NEWER)
@settings(max_examples=75, deadline=None, suppress_health_check=RARE)
def test_the_estimated_length_fits_and_one_token_more_does_not(layers, length, available, version):
    rules = rules_for(version)
    refused = plan(layers, available, length, rules=rules)
    assume(isinstance(refused, PlanRefusal) and refused.code == "max_len_too_large")
    longest = refused.estimated_max_model_len
    if longest:
        assert isinstance(plan(layers, available, longest, rules=rules), Plan)
        fitted = plan(layers, available, length, rules=rules, auto_fit=True)
        assert fitted.max_model_len == longest
    else:
        assert plan(layers, available, length, rules=rules, auto_fit=True).code == "autofit_failed"
    assert isinstance(plan(layers, available, longest + 1, rules=rules), PlanRefusal)


@given(st.integers(1, 64), st.integers(1, 2000), BLOCKS, HEADS)
@settings(max_examples=100, deadline=None, suppress_health_check=RARE)
def test_exactly_one_request_fits_its_own_blocks(num_layers, blocks, block_size, heads):
    """For full attention: a request of all blocks fits, one block more does not."""
    layers = named((full(block_size, heads), num_layers))
    available = blocks * full(block_size, heads).page_size_bytes * num_layers
    made = plan(layers, available, blocks * block_size)
    assert (made.num_blocks, made.max_concurrency) == (blocks, 1.0)
    refused = plan(layers, available, (blocks + 1) * block_size)
    assert refused.estimated_max_model_len == blocks * block_size


@given(models(), LENGTHS, BYTES)
@settings(max_examples=100, deadline=None, suppress_health_check=RARE)
def test_capacity_is_computed_in_doubles_in_the_engine_s_order(layers, length, available):
    made = plan(layers, available, length, rules=V026)
    assume(isinstance(made, Plan))
    assert made.max_concurrency == made.num_blocks / made.blocks_per_request
    assert made.kv_cache_size_tokens == int(made.max_concurrency * length)
