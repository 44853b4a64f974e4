"""Five engines, one question: the same model and card, explained term by term."""

import io
import json

import pytest

import kvexp
from kvexp import report
from kvexp.compare import comparison_lines, shares
from thinned import thinned

ENGINES = ["vllm", "nano_vllm", "sglang", "tensorrt_llm", "lmdeploy"]
FREE = ENGINES[2:]


@pytest.fixture(scope="module")
def rows():
    results = kvexp.sweep(["sweep=engine", "model=qwen3_8b", "gpu=h200"])
    return list(zip(ENGINES, results, strict=True))


def test_all_five_answer(rows):
    assert [result.effective["engine"] for _, result in rows] == ENGINES
    assert all(result.ok for _, result in rows)
    assert len({result.budget.base for _, result in rows}) == 4


def test_where_the_bytes_went_sums_to_the_card(rows):
    for _, result in rows:
        assert sum(shares(result).values()) == result.budget.total_bytes


def test_the_table_names_base_terms_differences_and_flags(rows):
    out = io.StringIO()
    report.print_table(rows, out)
    text = out.getvalue()

    assert "free before load" in text
    assert "left after everything else" in text
    assert "sglang: activation 0: not subtracted" in text
    assert "sglang against vllm: cache " in text
    assert "lmdeploy: to paste: lmdeploy serve api_server Qwen/Qwen3-8B" in text
    assert "used before load is not charged" in text


STARTS = {
    "vllm": "vllm serve {}",
    "nano_vllm": 'LLM("{}", ',
    "sglang": "python -m sglang.launch_server --model-path {}",
    "tensorrt_llm": "trtllm-serve {}",
    "lmdeploy": "lmdeploy serve api_server {}",
}


@pytest.mark.parametrize("engine", thinned(ENGINES, one_of=2))
def test_the_line_to_paste_names_what_the_engine_opens(engine, tmp_path):
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 1000}
    config |= {"max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = {
        "model=llama3_8b": "meta-llama/Meta-Llama-3-8B",
        "model=unsloth/Meta-Llama-3.1-8B-Instruct": "unsloth/Meta-Llama-3.1-8B-Instruct",
        f"model=hf model.path={tmp_path}": tmp_path,
        f"model=hf model.path={tmp_path}/config.json": tmp_path,
        f"model=hf model.path={tmp_path} model.hf_id=a/b": tmp_path,
    }
    for asked, place in opened.items():
        flags = kvexp.run([*asked.split(), "gpu=h100", f"engine={engine}"]).effective["flags"]
        assert flags.startswith(STARTS[engine].format(place)), asked


def test_points_of_one_engine_are_not_compared(rows):
    out = io.StringIO()
    report.print_table([rows[2], rows[2]], out)

    assert "term by term" not in out.getvalue()


def test_differences_add_up(rows):
    vllm, sglang = rows[0][1], rows[2][1]
    before, after = shares(vllm), shares(sglang)
    terms = (set(before) | set(after)) - {"kv_cache"}

    cache = after["kv_cache"] - before["kv_cache"]
    assert cache == sum(before.get(t, 0) - after.get(t, 0) for t in terms)
    assert any(line.startswith("sglang against vllm") for line in comparison_lines(rows))


@pytest.mark.parametrize("engine", FREE)
def test_a_share_of_the_card_becomes_the_engines_own_fraction_and_back(run, engine):
    asked = ["model=qwen3_8b", "gpu=h200", f"engine={engine}"]
    result = run(*asked, "engine.share_of_total=0.9")
    fraction = result.effective["util"]
    again = run(*asked, f"util={fraction}")

    assert result.budget.requested_bytes / result.budget.total_bytes == pytest.approx(0.9, abs=1e-4)
    assert again.kv_tokens == result.kv_tokens
    assert f" {fraction:g} " in result.effective["flags"]


@pytest.mark.parametrize("engine", FREE)
def test_a_share_of_the_card_that_cannot_be_is_invalid(run, engine):
    asked = ["model=qwen3_8b", "gpu=h200", f"engine={engine}"]

    assert "engine.share_of_total" in run(*asked, "engine.share_of_total=0.003").reason
    both = run(*asked, "engine.share_of_total=0.5", "util=0.5")
    assert "not both" in both.reason


@pytest.mark.parametrize("engine", FREE)
def test_the_bytes_of_a_cache_can_be_given(run, engine):
    result = run(
        "model=qwen3_8b", "gpu=h200", f"engine={engine}", "engine.kv_cache_memory_bytes=10GiB"
    )

    assert result.budget.base == "kv_cache_memory_bytes"
    assert result.budget.available_bytes == 10 * 2**30


@pytest.mark.parametrize("engine", FREE)
def test_bytes_that_are_given_fit_the_card(run, engine):
    asked = ["model=qwen3_8b", "gpu=h100", f"engine={engine}"]
    beside_weights = run(*asked, "engine.kv_cache_memory_bytes=70GiB")

    assert (str(beside_weights.status), str(beside_weights.stage)) == ("oom", "allocate")
    assert "of 78.68 GiB that are free" in beside_weights.reason
    for option in ("kv_cache_memory_bytes", "free_after_load_bytes"):
        larger = run(*asked, f"engine.{option}=80GiB")
        assert f"engine.{option} must not exceed gpu.total_bytes" in larger.reason


@pytest.mark.parametrize("engine", ENGINES)
def test_measured_terms_of_one_engine_are_taken_by_another(run, engine):
    source = run("engine=vllm", "model=qwen3_8b", "gpu=h200")
    given = [f"profiler.{part.name}_bytes={part.size_bytes}" for part in source.profile.parts]
    free = f"gpu.free_bytes={source.budget.free_bytes}"
    result = run("model=qwen3_8b", "gpu=h200", f"engine={engine}", free, *given)

    assert result.profile.weights_bytes == source.profile.weights_bytes
    assert result.profile.activation_bytes == source.profile.activation_bytes
    assert result.budget.free_bytes == source.budget.free_bytes
    assert result.budget.part("weights").size_bytes == source.profile.weights_bytes


@pytest.mark.parametrize("engine", FREE)
def test_what_is_assumed_before_and_of_the_load_is_in_the_interval(run, engine):
    """Logs of SGLang take 10 to 140 MiB beside the tensors; contexts go by a card's chip."""
    asked = ["model=qwen3_4b", "gpu=l4", f"engine={engine}"]
    scratch, given = run(*asked), run(*asked, "engine.free_after_load_bytes=6GiB")

    spread = (scratch.num_blocks_high - scratch.num_blocks_low) * scratch.block_bytes
    assert spread > 80 * 2**20
    low = given.num_blocks if given.num_blocks_low is None else given.num_blocks_low
    high = given.num_blocks if given.num_blocks_high is None else given.num_blocks_high
    assert (high - low) * given.block_bytes < spread
    used = scratch.ranks[0].budget.part("used_before_load")
    assert used.low_bytes < used.size_bytes < used.high_bytes
