"""The KV-cache planner: how many blocks, and so how many requests, a model gets.

Pure arithmetic on layer specs and bytes, without torch, equal to vLLM's own planner.
"""

from __future__ import annotations

from .dtypes import KVQuantMode, element_bytes, kv_quant_mode, storage_dtype
from .errors import EngineError
from .parallel import max_in_flight_tokens, pp_layer_ranges
from .plan import GroupPlan, Plan, PlanRefusal
from .planner import plan_cache
from .request import PlanRequest
from .rules import PlannerRules, rules_for
from .specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

__all__ = [
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "EngineError",
    "FullAttentionSpec",
    "GroupPlan",
    "HiddenStateCacheSpec",
    "KVQuantMode",
    "LayerSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "Plan",
    "PlanRefusal",
    "PlanRequest",
    "PlannerRules",
    "RSWASpec",
    "SinkFullAttentionSpec",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "element_bytes",
    "kv_quant_mode",
    "max_in_flight_tokens",
    "plan_cache",
    "pp_layer_ranges",
    "rules_for",
    "storage_dtype",
]
