"""`python -m kvexp.plan < CASES`: KV-cache cases in, answers out, one JSON object a line.

A case that cannot be is answered with `invalid_case` and the reason; the other lines are
answered all the same and the exit status stays 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

from kvexp.arguments import ArgumentParser, cannot_go_on
from kvexp.kv import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    Plan,
    PlanRefusal,
    PlanRequest,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    max_in_flight_tokens,
    plan_cache,
    rules_for,
)
from kvexp.kv.dtypes import kv_quant_mode, storage_dtype

RULES = rules_for("0.26.0")
"""The rules that the cases are answered by."""

_LARGEST = 2**63 - 1
_MOST_LAYERS = 100_000
_CACHE_MODES = ("none", "align", "all")

Json = Any

_ENCODER = json.JSONEncoder(allow_nan=False)


class InvalidCaseError(ValueError):
    """A case that no engine could be given; the message names the key."""


def answer_case(case: Json) -> dict[str, Json]:
    """Return the answer to one case.

    Args:
        case: The decoded JSON value.

    Returns:
        A JSON-serialisable answer; an impossible case gives ``invalid_case``.
    """
    case_id = case.get("id") if isinstance(case, dict) else None
    try:
        if not isinstance(case, dict):
            raise InvalidCaseError("a case must be a JSON object")
        outcome = plan_cache(read_case(case), RULES)
    except InvalidCaseError as error:
        return _invalid(case_id, str(error))
    if isinstance(outcome, PlanRefusal):
        return {"id": case_id, "ok": False, **_refusal(outcome)}
    return {"id": case_id, "ok": True, **_plan(outcome)}


def answer_line(line: str) -> dict[str, Json]:
    """Return the answer to one line of text."""
    try:
        case = json.loads(line)
    except RecursionError:
        return _invalid(None, "the line is nested too deeply")
    except ValueError as error:
        return _invalid(None, f"the line is not JSON: {error}")
    return answer_case(case)


def run(lines: Iterable[bytes], out: IO[str]) -> None:
    """Answer each line that is not blank, in order, and flush after each."""
    for raw in lines:
        line = raw.decode("utf-8", errors="replace").strip()
        if line:
            out.write(_encode(answer_line(line)) + "\n")
            out.flush()


def _encode(answer: dict[str, Json]) -> str:
    try:
        return _ENCODER.encode(answer)
    except (RecursionError, ValueError):  # an id that JSON text cannot carry
        return _ENCODER.encode({**answer, "id": None})


def main() -> int:
    """Answer standard input on standard output; the status is 0 whatever the cases say.

    It is 2 where either of them fails.
    """
    ArgumentParser(prog="python -m kvexp.plan", description=__doc__).parse_args()
    try:
        run(sys.stdin.buffer, sys.stdout)
    except OSError as error:
        return cannot_go_on(error)
    except KeyboardInterrupt:
        return 130
    return 0


def _invalid(case_id: Json, message: str) -> dict[str, Json]:
    return {"id": case_id, "ok": False, "code": "invalid_case", "message": message}


def _plan(plan: Plan) -> dict[str, Json]:
    base: dict[str, Json] = {
        "num_blocks": plan.num_blocks,
        "num_blocks_per_worker": plan.num_blocks_per_worker,
        "max_model_len": plan.max_model_len,
        "max_in_flight_tokens": plan.max_in_flight_tokens,
        "needed_bytes_per_worker": plan.needed_bytes_per_worker,
    }
    if plan.max_concurrency is None:
        return base
    return {
        **base,
        "bytes_per_block": plan.bytes_per_block,
        "kv_cache_size_tokens": plan.kv_cache_size_tokens,
        "max_concurrency": plan.max_concurrency,
        "max_concurrency_hex": plan.max_concurrency.hex(),
        "log_concurrency": f"{plan.max_concurrency:.2f}",
        "blocks_per_request": plan.blocks_per_request,
        "groups": [
            {
                "kind": group.kind,
                "num_layers": group.num_layers,
                "block_size": group.block_size,
                "page_size_bytes": group.page_size_bytes,
                "max_memory_usage_bytes": group.max_memory_usage_bytes,
            }
            for group in plan.groups
        ],
    }


def _refusal(refusal: PlanRefusal) -> dict[str, Json]:
    return {
        "code": refusal.code,
        "message": refusal.message,
        "worker": refusal.worker,
        "needed_bytes": refusal.needed_bytes,
        "available_bytes": refusal.available_bytes,
        "estimated_max_model_len": refusal.estimated_max_model_len,
    }


# --------------------------------------------------------------------------------------------
# Reading a case
# --------------------------------------------------------------------------------------------

_CASE_KEYS = frozenset(
    (
        "id",
        "model",
        "kv_cache_dtype",
        "align",
        "enable_cross_layers_blocks",
        "use_eagle",
        "layers",
        "block_size",
        "max_model_len",
        "original_max_model_len",
        "max_num_batched_tokens",
        "async_scheduling",
        "v2_model_runner",
        "tp",
        "pp",
        "max_in_flight_tokens",
        "available_bytes",
        "workers",
        "hybrid",
        "num_gpu_blocks_override",
        "dcp",
        "mamba_cache_mode",
        "max_num_encoder_input_tokens",
    )
)
_NAMING_KEYS = frozenset(("type", "name", "repeat"))
_ATTENTION_KEYS = _NAMING_KEYS | frozenset(
    (
        "num_kv_heads",
        "head_size",
        "head_size_v",
        "dtype",
        "kv_cache_dtype",
        "storage_dtype",
        "block_size",
        "page_size_padded",
        "indexes_kv_by_block_stride",
    )
)
_FULL_KEYS = _ATTENTION_KEYS | {"sliding_window", "attention_chunk_size", "non_causal"}
_MLA_KEYS = _ATTENTION_KEYS | {"cache_dtype_str", "alignment", "compress_ratio", "model_version"}
_LAYER_KEYS = {
    "full": _FULL_KEYS,
    "sink": _FULL_KEYS | {"sink_len"},
    "rswa": _FULL_KEYS | {"rswa_window"},
    "sliding": _ATTENTION_KEYS | {"sliding_window"},
    "chunked": _ATTENTION_KEYS | {"attention_chunk_size"},
    "mla": _MLA_KEYS,
    "sliding_mla": _MLA_KEYS | {"sliding_window"},
    "hidden": _MLA_KEYS,
    "cross": _ATTENTION_KEYS,
    "encoder_only": _ATTENTION_KEYS,
    "mamba": _NAMING_KEYS
    | {
        "shapes",
        "dtypes",
        "block_size",
        "page_size_padded",
        "num_speculative_blocks",
        "mamba_cache_mode",
    },
}


def read_case(case: dict[str, Json]) -> PlanRequest:
    """Turn a JSON case into a request.

    Raises:
        InvalidCaseError: If a key is unknown or a value impossible; the message names the key.
    """
    _check_keys(case, _CASE_KEYS, "case")
    batched = _whole(case, "max_num_batched_tokens", 8192)
    length = _whole(case, "max_model_len")
    original = case.get("original_max_model_len")
    if original is not None and original != -1:
        _whole(case, "original_max_model_len")
    _whole(case, "tp", 1)
    layers = _layers(case, length)
    workers, available = _workers(case, layers)
    in_flight = _optional(case, "max_in_flight_tokens")
    if in_flight is None:
        in_flight = max_in_flight_tokens(
            batched,
            _whole(case, "pp", 1),
            _flag(case, "async_scheduling", True),
            _flag(case, "v2_model_runner", False),
        )
    return PlanRequest(
        workers=workers,
        available_bytes=available,
        max_model_len=length,
        max_num_batched_tokens=batched,
        max_in_flight_tokens=in_flight,
        block_size=_whole(case, "block_size", 16),
        auto_fit=original == -1,
        num_gpu_blocks_override=_optional(case, "num_gpu_blocks_override", least=0),
        hybrid=_flag(case, "hybrid", True),
        dcp=_whole(case, "dcp", 1),
        mamba_cache_mode=_cache_mode(case, "none"),
        max_num_encoder_input_tokens=_optional(case, "max_num_encoder_input_tokens", least=0),
        enable_cross_layers_blocks=_flag(case, "enable_cross_layers_blocks", False),
        use_eagle=_flag(case, "use_eagle", False),
    )


def _layers(case: dict[str, Json], length: int) -> dict[str, LayerSpec]:
    """Read the layers; equal layers share one spec, which keeps the planner fast."""
    entries = case.get("layers")
    if not isinstance(entries, list):
        raise InvalidCaseError("layers must be a list of objects")
    seen: dict[str, LayerSpec] = {}
    layers: dict[str, LayerSpec] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise InvalidCaseError("layers must be a list of objects")
        fields = dict(entry)
        name = fields.pop("name", None)
        if name is not None and (not isinstance(name, str) or not name):
            raise InvalidCaseError("name must be a text that is not empty")
        repeat = _whole(entry, "repeat", 1, least=0)
        if len(layers) + repeat > _MOST_LAYERS:
            raise InvalidCaseError(f"repeat: more than {_MOST_LAYERS} layers")
        form = repr(fields)
        spec = seen.get(form)
        if spec is None:
            spec = seen[form] = _spec(entry, case, length)
        first = len(layers)
        if name is not None and repeat == 1:
            names = [name]
        else:
            prefix = name or "model.layers"
            names = [f"{prefix}.{index}" for index in range(first, first + repeat)]
        layers.update(dict.fromkeys(names, spec))
        if len(layers) != first + repeat:
            raise InvalidCaseError(f"name: two layers are called {names[0]!r} or alike")
    return layers


def _spec(layer: dict[str, Json], case: dict[str, Json], length: int) -> LayerSpec:
    kind = layer.get("type")
    keys = _LAYER_KEYS.get(kind) if isinstance(kind, str) else None
    if keys is None:
        raise InvalidCaseError(f"type {kind!r} is not one of {', '.join(_LAYER_KEYS)}")
    assert isinstance(kind, str)
    _check_keys(layer, keys, f"{kind} layer")
    return _BUILDERS[kind](layer, case, length)


def _attention(layer: dict[str, Json], case: dict[str, Json]) -> dict[str, Any]:
    cache_dtype = _text(layer, "kv_cache_dtype", _text(case, "kv_cache_dtype", "auto"))
    if cache_dtype != "auto":
        _dtype("kv_cache_dtype", cache_dtype)
    model_dtype = _text(layer, "dtype", "bfloat16")
    storage = _text(layer, "storage_dtype", model_dtype if cache_dtype == "auto" else cache_dtype)
    _optional(layer, "head_size_v", least=0)
    return {
        "block_size": _whole(layer, "block_size", _whole(case, "block_size", 16)),
        "num_kv_heads": _whole(layer, "num_kv_heads"),
        "head_size": _whole(layer, "head_size"),
        "dtype": _dtype("dtype", storage),
        "kv_quant_mode": kv_quant_mode(cache_dtype),
        "page_size_padded": _optional(layer, "page_size_padded"),
        "indexes_kv_by_block_stride": _flag(layer, "indexes_kv_by_block_stride", True),
    }


def _full(layer: dict[str, Json], case: dict[str, Json]) -> dict[str, Any]:
    return {
        **_attention(layer, case),
        "head_size_v": _optional(layer, "head_size_v", least=0),
        "sliding_window": _optional(layer, "sliding_window"),
        "attention_chunk_size": _optional(layer, "attention_chunk_size"),
        "non_causal": _flag(layer, "non_causal", False),
    }


def _mla(layer: dict[str, Json], case: dict[str, Json]) -> dict[str, Any]:
    fields = _attention(layer, case)
    if "cache_dtype_str" in layer:
        cache_dtype: str | None = _text(layer, "cache_dtype_str", None)
    elif layer["type"] == "hidden":
        cache_dtype = None
    else:
        cache_dtype = _text(layer, "kv_cache_dtype", _text(case, "kv_cache_dtype", "auto"))
    return {
        **fields,
        "cache_dtype_str": cache_dtype,
        "alignment": _optional(layer, "alignment"),
        "compress_ratio": _whole(layer, "compress_ratio", 1),
        "model_version": _text(layer, "model_version", None),
    }


def _mamba(layer: dict[str, Json], case: dict[str, Json], length: int) -> LayerSpec:
    shapes, dtypes = layer.get("shapes"), layer.get("dtypes")
    if not isinstance(shapes, list) or not shapes:
        raise InvalidCaseError("shapes must be a list of shapes that is not empty")
    if not isinstance(dtypes, list) or len(dtypes) != len(shapes):
        raise InvalidCaseError("dtypes must name one dtype for each shape")
    for shape in shapes:
        if not isinstance(shape, list) or not all(_is_whole(size, 1) for size in shape):
            raise InvalidCaseError("shapes must hold lists of whole numbers of at least 1")
    return MambaSpec(
        block_size=_whole(layer, "block_size", length),
        shapes=tuple(map(tuple, shapes)),
        dtypes=tuple(_dtype("dtypes", dtype) for dtype in dtypes),
        page_size_padded=_optional(layer, "page_size_padded"),
        num_speculative_blocks=_whole(layer, "num_speculative_blocks", 0, least=0),
        mamba_cache_mode=_cache_mode(layer, _cache_mode(case, "none")),
    )


_Builder = Callable[[dict[str, Json], dict[str, Json], int], LayerSpec]

_BUILDERS: Mapping[str, _Builder] = {
    "full": lambda layer, case, _: FullAttentionSpec(**_full(layer, case)),
    "sink": lambda layer, case, _: SinkFullAttentionSpec(
        sink_len=_whole(layer, "sink_len", least=0), **_full(layer, case)
    ),
    "rswa": lambda layer, case, _: RSWASpec(
        rswa_window=_whole(layer, "rswa_window"), **_full(layer, case)
    ),
    "sliding": lambda layer, case, _: SlidingWindowSpec(
        sliding_window=_whole(layer, "sliding_window"),
        head_size_v=_optional(layer, "head_size_v", least=0),
        **_attention(layer, case),
    ),
    "chunked": lambda layer, case, _: ChunkedLocalAttentionSpec(
        attention_chunk_size=_whole(layer, "attention_chunk_size"), **_attention(layer, case)
    ),
    "mla": lambda layer, case, _: MLAAttentionSpec(**_mla(layer, case)),
    "hidden": lambda layer, case, _: HiddenStateCacheSpec(**_mla(layer, case)),
    "sliding_mla": lambda layer, case, _: SlidingWindowMLASpec(
        sliding_window=_whole(layer, "sliding_window"), **_mla(layer, case)
    ),
    "cross": lambda layer, case, _: CrossAttentionSpec(**_attention(layer, case)),
    "encoder_only": lambda layer, case, _: EncoderOnlyAttentionSpec(**_attention(layer, case)),
    "mamba": _mamba,
}


def _workers(
    case: dict[str, Json], layers: dict[str, LayerSpec]
) -> tuple[list[dict[str, LayerSpec]], list[int]]:
    available = case.get("available_bytes")
    amounts: list[Json] = available if isinstance(available, list) else [available]
    if not amounts or not all(_is_whole(amount, -_LARGEST) for amount in amounts):
        raise InvalidCaseError("available_bytes must be a whole number or a list of them")
    parts = case.get("workers")
    if parts is None:
        return [layers] * len(amounts), amounts
    if not isinstance(parts, list) or not parts:
        raise InvalidCaseError("workers must be a list that is not empty")
    workers = [_worker(part, layers) for part in parts]
    if not isinstance(available, list):
        amounts = amounts * len(workers)
    if len(amounts) != len(workers):
        raise InvalidCaseError("available_bytes must hold one number for each worker")
    return workers, amounts


def _worker(part: Json, layers: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
    if not isinstance(part, list):
        raise InvalidCaseError("workers must hold lists of layer names or [first, last) pairs")
    chosen: list[Json] = []
    if part and isinstance(part[0], list):
        names = list(layers)
        for pair in part:
            if (
                not isinstance(pair, list)
                or len(pair) != 2
                or not all(_is_whole(end, 0) for end in pair)
                or not pair[0] <= pair[1] <= len(names)
            ):
                raise InvalidCaseError(f"workers: {pair!r} is no [first, last) pair of layers")
            chosen.extend(names[pair[0] : pair[1]])
    else:
        chosen = part
    for name in chosen:
        if not isinstance(name, str) or name not in layers:
            raise InvalidCaseError(f"workers: there is no layer {name!r}")
    return {name: layers[name] for name in chosen}


# --------------------------------------------------------------------------------------------
# Reading one key
# --------------------------------------------------------------------------------------------


def _check_keys(entry: dict[str, Json], known: frozenset[str] | set[str], what: str) -> None:
    if entry.keys() <= known:
        return
    unknown = next(key for key in entry if key not in known)
    raise InvalidCaseError(f"unknown key {unknown!r} in a {what}")


def _is_whole(value: Json, least: int) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _whole(entry: dict[str, Json], key: str, default: int | None = None, least: int = 1) -> int:
    value = entry.get(key, default)
    if type(value) is int and least <= value <= _LARGEST:
        return value
    raise InvalidCaseError(f"{key} must be a whole number of at least {least}")


def _optional(entry: dict[str, Json], key: str, least: int = 1) -> int | None:
    value = entry.get(key)
    return None if value is None else _whole(entry, key, least=least)


def _flag(entry: dict[str, Json], key: str, default: bool) -> bool:
    value = entry.get(key, default)
    if isinstance(value, bool):
        return value
    raise InvalidCaseError(f"{key} must be true or false")


def _text(entry: dict[str, Json], key: str, default: Any) -> Any:
    value = entry.get(key, default)
    if value is default or isinstance(value, str):
        return value
    raise InvalidCaseError(f"{key} must be a text")


def _cache_mode(entry: dict[str, Json], default: Any) -> Any:
    mode = entry.get("mamba_cache_mode", default)
    if isinstance(mode, str) and mode in _CACHE_MODES:
        return mode
    raise InvalidCaseError("mamba_cache_mode must be none, align or all")


def _dtype(key: str, name: Json) -> str:
    if isinstance(name, str):
        try:
            return storage_dtype(name)
        except ValueError:
            pass
    raise InvalidCaseError(f"{key}: {name!r} is no known dtype")


if __name__ == "__main__":
    sys.exit(main())
