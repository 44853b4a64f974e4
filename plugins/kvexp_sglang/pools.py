"""SGLang's pools: bytes of a token, the window's own pool, slots of recurrent states.

Rules of 0.5.23 (`model_executor/pool_configurator.py`, `mem_cache/kv_cache_configurator.py`).
"""

from dataclasses import dataclass, replace

from kvexp.contract import Deployment, KvDtype, RankShape, layers

FP4_GROUP = 16  # elements that share one byte of scale
RAW_SCALE_GROUP, RAW_SCALE_BYTES = 128, 4  # of the sparse latent's fp8 layout
RAW_ROPE_BYTES = 2
ANY_NUMBER = 2**63 - 1  # of tokens, on a stage whose layers keep none
STATES_ALONE_SINCE = (0, 5, 20)
"""The first release with models without attention (`models/mamba2.py`, `falcon_mamba.py`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Bytes of one token on one rank, in the layers that keep all and in those with a window."""

    full_k_bytes: int
    full_v_bytes: int
    swa_bytes: int
    num_full: int
    num_swa: int

    @property
    def full_bytes(self) -> int:
        """K and V of the layers that keep every token."""
        return self.full_k_bytes + self.full_v_bytes

    @property
    def has_two_pools(self) -> bool:
        """Whether windowed layers have a pool of their own."""
        return self.num_full > 0 and self.num_swa > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pools:
    """Tokens of one rank's pools; `swa_tokens` is None where there is one pool."""

    tokens: int
    swa_tokens: int | None
    cell_bytes: float


def cell_of(deployment: Deployment, shape: RankShape, *, two_pools: bool) -> Cell:
    """The cell of one rank; without `two_pools` a windowed layer keeps every token too.

    A model whose layers all slide has one pool. Layers that read an earlier layer's cache have
    one of their own all the same: pools go by the kinds of all layers.
    """
    model = replace(deployment.model, num_kv_shared_layers=0)
    deployment = replace(deployment, model=model)
    full_k = full_v = swa = num_full = num_swa = 0
    kinds = {layers.is_windowed(deployment, i) for i in layers.of_rank(shape)}
    for index in layers.of_rank(shape):
        k_bytes, v_bytes = layer_bytes(deployment, index)
        if k_bytes == 0:
            continue
        if two_pools and len(kinds) == 2 and layers.is_windowed(deployment, index):
            swa += k_bytes + v_bytes
            num_swa += 1
        else:
            full_k += k_bytes
            full_v += v_bytes
            num_full += 1
    return Cell(
        full_k_bytes=full_k,
        full_v_bytes=full_v,
        swa_bytes=swa,
        num_full=num_full,
        num_swa=num_swa,
    )


def pools_of(cell: Cell, budget_bytes: int, *, page: int, ratio: float, draft_bytes: int) -> Pools:
    """Tokens by floor division, whole pages.

    Two pools: a token of the full pool carries `ratio` tokens of the window's pool. A draft adds
    its own bytes to a token.
    """
    if not cell.has_two_pools:
        cell_bytes = cell.full_bytes + cell.swa_bytes + draft_bytes
        tokens = _pages(budget_bytes // cell_bytes, page) if cell_bytes else ANY_NUMBER
        return Pools(tokens=tokens, swa_tokens=None, cell_bytes=cell_bytes)
    shared = cell.full_bytes + ratio * cell.swa_bytes + draft_bytes
    tokens = _pages(int(budget_bytes // shared), page)
    return Pools(tokens=tokens, swa_tokens=_pages(int(tokens * ratio), page), cell_bytes=shared)


def slot_bytes(deployment: Deployment, shape: RankShape, recurrent_itemsize: int) -> int:
    """Bytes of one request's recurrent state on one rank."""
    convolution, recurrent = layers.state_elements(deployment, shape)
    return convolution * deployment.dtype.itemsize_bytes + recurrent * recurrent_itemsize


def layer_bytes(deployment: Deployment, index: int) -> tuple[int, int]:
    """Bytes of K and of V of one token in one layer; a latent vector counts as K."""
    k, v = layers.kv_elements(deployment, index)
    mla = deployment.model.mla
    if k and mla is not None and mla.index_head_dim is not None:
        latent = k * layers.itemsize_bytes(deployment.kv_dtype)
        if deployment.kv_dtype.is_fp8:
            scales = mla.kv_lora_rank // RAW_SCALE_GROUP * RAW_SCALE_BYTES
            latent = mla.kv_lora_rank + scales + mla.qk_rope_head_dim * RAW_ROPE_BYTES
        return latent + layers.indexer_bytes(deployment), 0
    return _bytes(k, deployment.kv_dtype), _bytes(v, deployment.kv_dtype)


def _bytes(elements: int, kv_dtype: KvDtype) -> int:
    if kv_dtype is KvDtype.nvfp4:
        return elements // 2 + elements // FP4_GROUP
    return elements * layers.itemsize_bytes(kv_dtype)


def _pages(tokens: int, page: int) -> int:
    return max(0, tokens) // page * page
