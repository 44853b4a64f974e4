"""SGLang's drafts by release: weights, bytes of a token, states, reserves and its start line."""

import json

import pytest

from engines.eagle3 import EAGLE3
from kvexp.drafts import weights_bytes
from kvexp.errors import InvalidValue
from kvexp.hf import read_model
from kvexp.results import Status

GIB, MIB = 2**30, 2**20
BIG = 8 * GIB
LLAMA_CELL = 32 * 2 * 8 * 128 * 2  # of llama3_8b

DFLASH = {
    **EAGLE3,
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 248320,
}


@pytest.fixture
def drafted(deploy, tmp_path):
    """`drafted(model, config, *overrides)`: SGLang with a draft of that config.json."""

    def make(model, config, *overrides):
        (tmp_path / "config.json").write_text(json.dumps(config))
        draft = read_model(tmp_path)
        return deploy("sglang", f"model={model}", *overrides, draft=draft)

    return make


def test_a_models_own_draft_is_loaded_with_a_copy_of_the_vocabulary(deploy):
    """Qwen3.5-27B and its kind: 5.18 GB with FP8 weights (sgl-project/sglang#35996), 5.53 GB in
    bf16, 0.80 GB of them without embedding and head (sgl-project/sglang#38147)."""
    _, fp8 = deploy("sglang", "model=qwen35_27b", "speculative.method=mtp", "quantization=fp8")
    _, bf16 = deploy("sglang", "model=qwen35_27b", "speculative.method=mtp")

    assert round(weights_bytes(fp8, embedding=True, head=True) / GIB, 2) == 5.18
    assert round(weights_bytes(bf16, embedding=True, head=True) / GIB, 2) == 5.53
    assert round(weights_bytes(bf16, embedding=False, head=False) / GIB, 2) == pytest.approx(
        0.80, abs=0.011
    )


@pytest.mark.parametrize(
    ("draft_layers", "tokens_per_slot"), [((), 2394), (("engine.num_draft_layers=1",), 2253.2)]
)
def test_a_slot_of_states_is_worth_so_many_tokens(deploy, draft_layers, tokens_per_slot):
    """Qwen3.8-27B under SGLang 0.5.19, tp=2, fp8 cache: noonghunna/club-3090#1328."""
    tokens = {}
    for slots in (20, 120):
        engine, deployment = deploy(
            *("sglang", "model=qwen35_27b", "tp=2", "kv_dtype=fp8_e4m3", "max_num_seqs=2"),
            *("engine.version='0.5.19'", "engine.mamba_ssm_dtype=bf16", "speculative.method=mtp"),
            *(f"engine.max_mamba_cache_size={slots}", "util=0.85", *draft_layers),
        )
        _, left = engine.divide(deployment, deployment.free_bytes)
        tokens[slots] = engine.plan(deployment, [left, left]).kv_tokens

    assert (tokens[20] - tokens[120]) / 100 == pytest.approx(tokens_per_slot, abs=0.4)


def test_a_dflash_pool_is_printed_after_the_models(drafted):
    """Qwen3.8-27B with five layers of DFlash, tp=2, fp8 cache: noonghunna/club-3090#1261."""
    engine, deployment = drafted(
        *("qwen35_27b", DFLASH, "tp=2", "kv_dtype=fp8_e4m3", "engine.version='0.5.18'"),
        *("speculative.method=dflash", "engine.max_total_tokens=454112"),
    )
    plan = engine.plan(deployment, [40 * GIB, 40 * GIB])

    assert engine.log_lines(deployment, plan)[:2] == (
        "KV Cache is allocated. #tokens: 454112, K size: 3.46 GB, V size: 3.46 GB",
        "KV Cache is allocated. #tokens: 454112, K size: 1.08 GB, V size: 1.08 GB",
    )
    assert plan.block_bytes_per_rank == (16 * 1024 + 5 * 1024,) * 2


@pytest.mark.parametrize(
    ("version", "cell"),
    [
        ("0.5.23", LLAMA_CELL + LLAMA_CELL // 32),
        ("0.5.14", LLAMA_CELL + LLAMA_CELL // 32),
        ("0.5.13", LLAMA_CELL),  # the draft's cache came out of what is held back
    ],
)
def test_layers_of_eagle3_are_part_of_a_token_since_0_5_14(drafted, version, cell):
    engine, deployment = drafted("llama31_8b", EAGLE3, f"engine.version='{version}'")

    assert engine.plan(deployment, [BIG]).block_bytes_per_rank == (cell,)


@pytest.mark.parametrize(
    ("version", "layer"),
    [
        ("0.5.11", 2 * 4 * 256 * 2),  # a layer of the model's
        ("0.5.17", 2 * 4 * 256 * 2),
        ("0.5.18", 2 * 2 * 128 * 2),  # the draft's own
    ],
)
def test_dflash_has_its_own_layers_since_0_5_18(drafted, version, layer):
    draft = {**DFLASH, "num_key_value_heads": 2}
    engine, deployment = drafted("qwen35_27b", draft, f"engine.version='{version}'")
    model = 16 * 2 * 4 * 256 * 2

    assert engine.plan(deployment, [5 * BIG]).block_bytes_per_rank == (model + 5 * layer,)


def test_weights_are_charged_where_they_are_loaded_before_the_pool(drafted):
    # embedding, three hidden states projected, a layer of twice the inputs, a head of 32,000 words
    layer = 8192 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    numel = 128256 * 4096 + 3 * 4096 * 4096 + layer + 32000 * 4096 + 4 * 4096
    engine, deployment = drafted("llama31_8b", EAGLE3)
    parts = {p.name: p for p in engine.charged(deployment, engine._predicted(deployment))}

    assert parts["draft"].size_bytes == pytest.approx(2 * numel + 8 * 32000, abs=4096)
    old, deployment = drafted("llama31_8b", EAGLE3, "engine.version='0.5.13'")
    assert "draft" not in {p.name for p in old.charged(deployment, old._predicted(deployment))}
    assert any(
        note.startswith("SGLang 0.5.13 loads the draft after the pool: ")
        for note in old.plan(deployment, [BIG]).notes
    )


@pytest.mark.parametrize(
    ("version", "method", "reserved_mib"),
    [
        ("0.5.9", "mtp", 2048),
        ("0.5.10", "mtp", 4096),
        ("0.5.13", "mtp", 4096),
        ("0.5.13", "ngram", 0),
        ("0.5.14", "mtp", 0),
    ],
)
def test_the_automatic_fraction_held_back_for_drafts(deploy, version, method, reserved_mib):
    asked = ("sglang", "model=deepseek_v3", "gpu=h200", "tp=8", f"engine.version='{version}'")
    _, plain = deploy(*asked)
    _, drafts = deploy(*asked, f"speculative.method={method}")
    capacity = 150109880320 / MIB

    assert plain.util - drafts.util == pytest.approx(reserved_mib / capacity, abs=0.0011)


def test_a_whole_model_as_draft_held_back_six_gib(drafted, deploy):
    llama = {**EAGLE3, "architectures": ["LlamaForCausalLM"]}
    asked = ("llama31_8b", "gpu=h100", "engine.version='0.5.12'")
    _, plain = deploy("sglang", f"model={asked[0]}", *asked[1:])
    _, drafts = drafted(asked[0], llama, *asked[1:])

    assert drafts.speculation.method == "draft_model"
    assert plain.util - drafts.util == pytest.approx(6144 / (plain.total_bytes / MIB), abs=0.0011)


def test_forty_eight_requests_run_where_drafts_are_on(deploy):
    _, deployment = deploy("sglang", "speculative.method=ngram")

    assert deployment.max_num_seqs == 48
    assert deployment.speculation.num_tokens == 11  # of 12 that a step verifies


@pytest.mark.parametrize(
    ("model", "version", "tokens"),
    [
        ("qwen35_27b", "0.5.23", 3),
        ("deepseek_v3", "0.5.7", 3),
        ("ernie45_21b_a3b", "0.5.7", 7),  # a tree for models that no rule names
        ("ernie45_21b_a3b", "0.5.8", 3),
    ],
)
def test_tokens_of_a_step_by_model_and_release(deploy, model, version, tokens):
    asked = ["sglang", f"model={model}", f"engine.version='{version}'", "speculative.method=mtp"]
    _, deployment = deploy(*asked, "model.num_nextn_predict_layers=1")

    assert deployment.speculation.num_tokens == tokens


def test_states_of_verified_tokens_are_out_of_the_states_share(deploy):
    # K = (share - slot x (1 + D)) // (slot x (1 + D / ratio)), requests + 1 keep D states each
    asked = ("sglang", "model=qwen35_27b", "gpu=h200", "util=0.85", "speculative.method=mtp")
    engine, deployment = deploy(*asked, "speculative.num_tokens=3")
    _, plain = deploy("sglang", "model=qwen35_27b", "gpu=h200", "util=0.85")
    rest = engine.divide(plain, BIG * 16)
    parts, left = engine.divide(deployment, BIG * 16)
    total = sum(part.size_bytes for part in rest[0]) + rest[1]
    slot = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    share, ratio, drafted = total * 0.9 / 1.9, 5, 4
    slots = int((share - slot * (1 + drafted)) // (slot * (1 + drafted / ratio)))

    assert [(part.name, part.size_bytes) for part in parts] == [
        ("recurrent_states", (slots + 1) * slot),
        ("drafted_states", (min(48, slots // ratio) + 1) * drafted * slot),
    ]
    assert left == total - sum(part.size_bytes for part in parts)
    plan = engine.plan(deployment, [left])
    assert f"at most {min(48, slots // ratio)} requests run at once" in plan.notes


def test_states_of_older_releases_were_a_reserve_of_all_requests(deploy):
    asked = ("sglang", "model=qwen35_27b", "gpu=h200", "util=0.85", "engine.version='0.5.12'")
    engine, deployment = deploy(*asked, "speculative.method=mtp", "max_num_seqs=16")
    parts, _ = engine.divide(deployment, BIG * 16)
    slot = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)

    assert parts[1].size_bytes == 16 * 4 * slot


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("speculative.method=nextn",), "must be one of eagle3, eagle, mtp, draft_model, dflash"),
        (("speculative.method=mtp",), "llama3_8b is llama"),
        (("speculative.method=ngram", "pp=2"), "pp must be 1 with speculative for SGLang, got 2"),
        (("speculative.method=ngram", "engine.version='0.5.6'"), "known for SGLang 0.5.7"),
        (
            ("speculative.method=mtp", "model=qwen35_27b", "engine.version='0.5.9'"),
            "its layers keep states",
        ),
        (("speculative.method=eagle3",), "speculative.model must be given"),
        (("speculative.num_tokens=2",), r"needs speculative.method \(mtp, ngram\)"),
        (("engine.num_draft_layers=-1",), "must be at least 0, got -1"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(deploy, overrides, said):
    with pytest.raises(InvalidValue, match=said) as refused:
        deploy("sglang", *overrides)
    assert "\n" not in str(refused.value)


def test_dflash_needs_its_release(drafted):
    with pytest.raises(InvalidValue, match=r"dflash needs SGLang 0.5.11 or newer"):
        drafted("qwen35_27b", DFLASH, "engine.version='0.5.10'")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), "--speculative-algorithm NEXTN"),
        (
            ("speculative.num_tokens=2",),
            "--speculative-algorithm NEXTN --speculative-num-steps 2 --speculative-eagle-topk 1"
            " --speculative-num-draft-tokens 3",
        ),
        (
            ("engine.num_draft_layers=1",),
            "--speculative-algorithm NEXTN --speculative-draft-model-path Qwen/Qwen3.5-27B",
        ),
    ],
)
def test_the_start_line_drafts_so(deploy, overrides, words):
    _, deployment = deploy(
        "sglang", "model=qwen35_27b", "gpu=h200", "speculative.method=mtp", *overrides
    )

    assert deployment.flags.endswith(f"--max-running-requests 48 {words}")


def test_a_whole_point_with_a_draft_adds_up(run):
    result = run(
        *("model=deepseek_v3", "engine=sglang", "gpu=h200", "tp=8", "speculative.method=mtp")
    )

    assert result.status is Status.ok
    assert result.budget.part("draft").size_bytes > GIB
    assert result.effective["speculative_method"] == "mtp"
