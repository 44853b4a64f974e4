"""Dtypes of vLLM's cache: their bytes, the layers they leave out, and who takes them."""

from dataclasses import replace

import pytest

import kvexp
from caching.planned import KNOWN, PLAIN, cases, check
from kvexp.dtypes import DType, KvDtype
from kvexp.errors import InvalidValue
from kvexp.kv.dtypes import turboquant_slot_bytes
from kvexp_vllm import Vllm

CASES = cases("vllm_kv_dtypes.jsonl")


@pytest.mark.parametrize("dtype", sorted({case["kv_cache_dtype"] for case in CASES}))
def test_blocks_are_those_of_the_engines_own_planner(dtype):
    for case in (each for each in CASES if each["kv_cache_dtype"] == dtype):
        check(case)


def test_a_slot_holds_packed_keys_and_values_with_norm_scale_and_zero():
    names = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
    assert [turboquant_slot_bytes(f"turboquant_{name}", 128) for name in names] == [
        128 + 64 + 4,
        64 + 2 + 64 + 4,
        48 + 2 + 64 + 4,
        48 + 2 + 48 + 4,
    ]
    assert turboquant_slot_bytes("turboquant_3bit_nc", 84) == 32 + 2 + 32 + 4


def decided(model, kv_dtype, version="0.26.0", **changes):
    run = replace(
        PLAIN, model=KNOWN.model(model), kv_dtype=kv_dtype, engine=Vllm(version=version), **changes
    )
    return run.engine.decide(run, "vllm")


def test_turboquant_leaves_out_two_layers_at_each_end_but_of_hybrids():
    packed = KvDtype.turboquant_4bit_nc
    assert decided("llama31_8b", packed).kv_skip_layers == {0, 1, 30, 31}
    assert decided("qwen3_next_80b_a3b", packed, tp=2).kv_skip_layers == frozenset()
    assert decided("llama31_8b", KvDtype.fp8).kv_skip_layers == frozenset()


def test_blocks_are_doubled_beside_layers_left_out_from_0_25():
    sizes = [
        decided("llama31_8b", KvDtype.turboquant_k8v4, version).block_size
        for version in ("0.20.0", "0.24.0", "0.25.0", "0.33.0")
    ]
    assert sizes == [16, 16, 32, 32]


def test_the_sparse_layout_by_its_own_name_is_that_of_fp8():
    named, short = (
        decided("deepseek_v32", dtype, tp=8) for dtype in (KvDtype.fp8_ds_mla, KvDtype.fp8)
    )
    pages = [Vllm().plan(each, [40 << 30] * 8).groups[0].page_size_bytes for each in (named, short)]
    assert pages[0] == pages[1] == 61 * 64 * (656 + 132)


REFUSED = {
    ("deepseek_v2_lite", "fp8_ds_mla", "0.26.0"): "fp8_ds_mla needs sparse latent attention",
    ("deepseek_v2_lite", "nvfp4", "0.26.0"): "for the latent attention of deepseek_v2_lite, got",
    ("deepseek_v2_lite", "turboquant_k8v4", "0.26.0"): "for the latent attention of",
    ("gemma3_12b", "turboquant_k8v4", "0.26.0"): "full attention, gemma3_12b has sliding_attention",
    ("falcon_mamba_7b", "turboquant_k8v4", "0.26.0"): "kv_dtype=turboquant_k8v4 needs full",
    ("nemotron_nano_9b_v2", "turboquant_k8v4", "0.20.0"): "needs vLLM 0.22 or newer for the",
    ("llama31_8b", "turboquant_k8v4", "0.19.0"): "kv_dtype=turboquant_k8v4 needs vLLM 0.20",
    ("deepseek_v32", "fp8_ds_mla", "0.11.0"): "kv_dtype=fp8_ds_mla needs vLLM 0.11.1 or newer",
}


@pytest.mark.parametrize(("model", "dtype", "version"), REFUSED)
def test_a_format_that_no_kernel_takes_is_refused(model, dtype, version):
    with pytest.raises(InvalidValue, match="kv_dtype") as raised:
        decided(model, KvDtype[dtype], version, tp=2)
    assert REFUSED[model, dtype, version] in str(raised.value)


OWN = {  # a cache of 16 bits beside another compute dtype: the first releases whose flag has it
    ("fp16", "bf16", "0.10.2"): "kv_dtype=bf16 needs vLLM 0.11 or newer",
    ("bf16", "fp16", "0.17.0"): "kv_dtype=fp16 needs vLLM 0.18 or newer",
}


@pytest.mark.parametrize(("dtype", "kv_dtype", "version"), OWN)
def test_a_cache_of_another_dtype_is_refused_where_the_flag_has_none(dtype, kv_dtype, version):
    asked = {"dtype": DType[dtype], "kv_dtype": KvDtype[kv_dtype]}
    with pytest.raises(InvalidValue, match="kv_dtype") as raised:
        decided("llama31_8b", version=version, **asked)
    assert OWN[dtype, kv_dtype, version] in str(raised.value)


@pytest.mark.parametrize(("dtype", "version"), [("bf16", "0.11.0"), ("fp16", "0.18.0")])
def test_it_is_pasted_where_the_flag_has_it(dtype, version):
    other = {"bf16": "fp16", "fp16": "bf16"}[dtype]
    result = kvexp.run(
        ["gpu=h100", f"engine.version={version}", f"dtype={other}", f"kv_dtype={dtype}"]
    )
    assert f"--kv-cache-dtype {KvDtype[dtype].value}" in result.effective["flags"]


def test_a_cache_of_the_compute_dtype_is_pasted_nowhere():
    result = kvexp.run(["gpu=h100", "engine.version=0.10.0", "kv_dtype=bf16"])
    assert result.ok
    assert "--kv-cache-dtype" not in result.effective["flags"]
