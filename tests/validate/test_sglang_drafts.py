"""SGLang's drafts and adapters in commands, raw logs and the words of whoever kept a log."""

from dataclasses import replace

import pytest
from test_flags import KNOWN, LLAMA

from kvexp.startup_logs import read_log
from kvexp.validate.case import case_of
from kvexp.validate.predict import predict
from kvexp.validate.request import request_of

SGL = replace(LLAMA, engine="sglang", engine_version="0.5.23")
QWEN = replace(SGL, model="Qwen/Qwen3.5-27B")

NEXTN = """\
[2026-09-12 00:22:40 TP0] server_args=ServerArgs(model_path='Qwen/Qwen3.5-27B', tp_size=2, \
kv_cache_dtype='fp8_e4m3', mem_fraction_static=0.85, speculative_algorithm='NEXTN', \
speculative_draft_model_path=None, speculative_num_steps=3, speculative_eagle_topk=1, \
speculative_num_draft_tokens=4, speculative_attention_mode='prefill', max_loras_per_batch=8)
[2026-09-12 00:22:41 TP0] Load weight begin. avail mem=30.50 GB
[2026-09-12 00:22:44 TP0] Load weight end. elapsed=3.1 s, type=Qwen3_5ForConditionalGeneration, \
avail mem=20.10 GB, mem usage=10.40 GB.
[2026-09-12 00:22:46 TP0] Load weight begin. avail mem=20.10 GB
[2026-09-12 00:22:47 TP0] Load weight end. elapsed=0.9 s, type=Qwen3_5ForCausalLMMTP, \
avail mem=17.50 GB, mem usage=2.60 GB.
[2026-09-12 00:22:48 TP0] Mamba Cache is allocated. max_mamba_cache_size: 12, conv_state size: \
0.02GB, ssm_state size: 0.91GB intermediate_ssm_state_cache size: 1.12GB \
intermediate_conv_window_cache size: 0.02GB
[2026-09-12 00:22:48 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 454112, \
K size: 3.46 GB, V size: 3.46 GB
[2026-09-12 00:22:48 TP0] Memory pool end. avail mem=8.40 GB
[2026-09-12 00:22:48 TP0] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 454112, \
K size: 1.08 GB, V size: 1.08 GB
[2026-09-12 00:22:48 TP0] Memory pool end. avail mem=6.23 GB
[2026-09-12 00:22:59 TP0] Capture target verify CUDA graph end. elapsed=4.1 s, \
mem usage=0.50 GB, avail mem=5.70 GB.
[2026-09-12 00:23:01 TP0] Capture draft decode CUDA graph end. elapsed=1.1 s, \
mem usage=0.10 GB, avail mem=5.60 GB.
[2026-09-12 00:23:02 TP0] Capture draft extend CUDA graph end. elapsed=1.0 s, \
mem usage=0.05 GB, avail mem=5.55 GB.
"""
"""Lines of the pools as in noonghunna/club-3090#1261, the others in the words of 0.5.23."""


def request_with(flags, inputs=SGL):
    inputs = replace(inputs, other_flags=flags)
    card = KNOWN.cards.find(inputs.gpu, inputs.gpu_total_gib)
    return request_of(inputs, KNOWN, card, KNOWN.models.find(inputs.model))


def drafted(request):
    asked = request.run.speculative
    return asked.method, asked.model, asked.num_tokens


@pytest.mark.parametrize(
    ("flags", "inputs", "expected"),
    [
        ("--speculative-algorithm NGRAM", SGL, ("ngram", None, None)),
        (
            "--speculative-algorithm STANDALONE --speculative-draft-model-path"
            " meta-llama/Llama-3.2-1B --speculative-num-steps 4 --speculative-eagle-topk 2"
            " --speculative-num-draft-tokens 7",
            SGL,
            ("draft_model", "llama32_1b", 6),
        ),
        ("speculative_algorithm=EAGLE; speculative_num_steps=2", QWEN, ("mtp", None, 2)),
        ("--speculative-algo NEXTN", QWEN, ("mtp", None, None)),
    ],
)
def test_flags_become_the_request(flags, inputs, expected):
    assert drafted(request_with(flags, inputs)) == expected


@pytest.mark.parametrize(("path", "layers"), [("Qwen/Qwen3.5-27B", 1), (None, None)])
def test_a_models_own_layers_count_where_its_path_is_given_again(path, layers):
    given = "" if path is None else f" --speculative-draft-model-path {path}"
    request = request_with(f"--speculative-algorithm NEXTN{given}", QWEN)

    assert drafted(request)[0] == "mtp"
    assert request.run.engine.num_draft_layers == layers


def test_a_draft_that_is_in_no_catalogue_is_named():
    flags = "--speculative-algorithm EAGLE --speculative-draft-model-path a/b-eagle"
    request = request_with(flags)

    assert any("'a/b-eagle' is in no catalogue" in note for note in request.assumptions)
    assert not request.run.speculative.is_asked


def test_an_eagle3_draft_that_is_in_no_catalogue_has_one_layer():
    flags = "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b-eagle3"
    request = request_with(flags)

    assert drafted(request)[0] == "eagle3"
    assert request.run.speculative.draft.num_hidden_layers == 1
    assert any("'a/b-eagle3' counted as one layer" in note for note in request.assumptions)


@pytest.mark.parametrize(
    ("flags", "room", "modules"),
    [
        ("--enable-lora --max-lora-rank 32 --max-loras-per-batch 4", (4, 32), None),
        ("--lora-paths a=/b --max-lora-rank 8 --lora-target-modules all", (8, 8), ["all"]),
        ("--lora-paths a=/b --lora-target-modules q_proj v_proj", (8, 16), ["q_proj", "v_proj"]),
    ],
)
def test_adapters_become_the_request(flags, room, modules):
    run = request_with(flags).run

    assert (run.lora.max_loras, run.lora.max_rank) == room
    assert run.engine.lora_target_modules == modules


def test_adapters_of_a_start_without_any_are_none():
    assert not request_with("max_loras_per_batch=8; enable_lora=False").run.lora.is_asked


def test_a_draft_in_brackets_is_the_models_own_and_leaves_room_for_none():
    said = replace(QWEN, model="Qwen3.5-27B (hybrid GDN + draft)")
    plain, found = predict(replace(QWEN, model="Qwen3.5-27B")), predict(said)

    assert "'hybrid GDN + draft' counted as the model's own drafting layers" in found.assumptions
    tokens = found.values["kv_tokens"]
    assert tokens.best < plain.values["kv_tokens"].best <= tokens.high
    llama = predict(replace(SGL, model="meta-llama/Llama-3.1-8B-Instruct (with draft)"))
    assert "'with draft': no rule for a draft that is not named" in llama.assumptions
    assert llama.values["kv_tokens"].best == predict(SGL).values["kv_tokens"].best


def test_a_log_tells_the_models_pool_from_the_drafts():
    found = read_log(NEXTN, "a-log")

    assert found["outputs"]["available_kv_gib"] == 6.92
    assert found["outputs"]["kv_tokens"] == 454112
    assert found["outputs"]["weights_gib"] == 10.40
    assert found["outputs"]["cudagraph_gib"] == 0.50
    extra = found["extra"]
    assert (extra["draft_kv_gib"], extra["draft_weights_gib"]) == (2.16, 2.60)
    assert (extra["draft_graph_gib"], extra["draft_extend_graph_gib"]) == (0.10, 0.05)
    assert (extra["state_slots"], extra["draft_ssm_state_gib"]) == (12, 1.12)
    assert (extra["avail_after_pool_gib"], extra["draft_avail_after_pool_gib"]) == (8.40, 6.23)
    assert extra["free_gib"] == 17.50  # the draft was loaded before the pool was sized


def test_a_draft_that_was_loaded_after_the_pool_leaves_what_was_free_before():
    lines = NEXTN.splitlines(keepends=True)
    pool = next(n for n, line in enumerate(lines) if "Memory pool end" in line)
    draft = [n for n, line in enumerate(lines) if "Load weight" in line][2:]
    late = "".join(lines[n] for n in draft).replace("17.50", "5.80").replace("20.10", "8.40")
    kept = [line for n, line in enumerate(lines) if n not in draft]
    kept.insert(pool - len(draft) + 1, late)

    assert read_log("".join(kept), "a-log")["extra"]["free_gib"] == 20.10


def test_a_raw_log_with_a_draft_is_predicted_with_it():
    inputs = case_of(read_log(NEXTN, "a-log")).inputs
    found = predict(replace(inputs, gpu="RTX 5090", num_gpus=2, engine_version="0.5.23"))

    assert found.used["speculative_method"] == "mtp"
    assert found.used["speculative_num_tokens"] == 3
    assert not [note for note in found.assumptions if "speculative" in note]


@pytest.mark.parametrize(
    ("engine", "flags", "expected"),
    [
        (
            "tensorrt-llm",
            "speculative_config={'decoding_type': 'MTP', 'num_nextn_predict_layers': 3}",
            ("mtp", None, 3),
        ),
        (
            "lmdeploy",
            "--speculative-algorithm deepseek_mtp --speculative-num-draft-tokens 2",
            ("mtp", None, 2),
        ),
    ],
)
def test_other_engines_name_drafts_in_their_own_words(engine, flags, expected):
    inputs = replace(LLAMA, engine=engine, engine_version=None, model="deepseek-ai/DeepSeek-V3")

    assert drafted(request_with(flags, replace(inputs, gpu="H200", tp=8))) == expected


def test_a_number_of_drafts_in_words_counts():
    inputs = replace(QWEN, other_flags="MTP 3 tokens")
    card, named = KNOWN.cards.find(inputs.gpu, None), KNOWN.models.find(inputs.model)
    drafts = request_of(inputs, KNOWN, card, named).run.speculative

    assert (drafts.method, drafts.num_tokens) == ("mtp", 3)
