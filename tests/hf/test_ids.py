"""Hugging Face ids in the place of an option."""

import json

import pytest

import kvexp
from kvexp import registry
from kvexp.errors import RequestError
from kvexp.hf import ids

KNOWN = ids.index([registry.config_dir()])


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("Qwen/Qwen3-8B", "qwen3_8b"),
        ("qwen/qwen3-8b", "qwen3_8b"),
        ("META-LLAMA/Llama-3.1-8B-Instruct", "llama31_8b"),
        ("openai/gpt-oss-20b", "gpt_oss_20b"),
        ("NousResearch/Meta-Llama-3-8B-Instruct", "llama3_8b"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama32_1b"),
        ("unsloth/gpt-oss-20b", "gpt_oss_20b"),
        ("TheBloke/Llama-2-13B-chat", "llama2_13b"),
        ("THUDM/GLM-4.5-Air", "glm45_air"),
        ("google/gemma-4-26B-A4B-it-qat-q4_0-unquantized", "gemma4_26b_a4b"),
    ],
)
def test_an_id_in_any_case_and_with_any_owner_is_its_entry(name, option):
    assert ids.find(name, KNOWN) == ids.Known(option=option)


@pytest.mark.parametrize(
    ("name", "option", "quantization", "kv_dtype"),
    [
        ("Qwen/Qwen3-14B-AWQ", "qwen3_14b", "awq", None),
        ("Qwen/Qwen3-30B-A3B-FP8", "qwen3_30b_a3b", "fp8", None),
        ("RedHatAI/Llama-3.3-70B-Instruct-fp8-dynamic", "llama33_70b", "fp8", None),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama31_8b", "w4a16", None),
        ("redhatai/Llama-3.3-70B-Instruct-quantized.w8a8", "llama33_70b", "w8a8", None),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama31_8b", "bitsandbytes", None),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "llama31_70b", "awq", None),
        ("kaitchup/Phi-4-AutoRound-GPTQ-4bit", "phi4", "gptq", None),
        ("amd/Llama-3.1-8B-Instruct-FP8-KV", "llama31_8b", "fp8", "fp8"),
        ("nvidia/Qwen3-8B-NVFP4", "qwen3_8b", "nvfp4", None),
        ("nvidia/DeepSeek-R1-0528-FP4-v2", "deepseek_r1", "nvfp4", None),
        (
            "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8",
            "nemotron3_nano_30b_a3b",
            "fp8",
            None,
        ),
        ("Qwen/Qwen3-32B-FP8-Static-PerTensor", "qwen3_32b", "fp8", None),
        ("ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g", "gemma3_27b_vision", "gptq", None),
        ("gaunernst/gemma-3-27b-it-int4-awq", "gemma3_27b_vision", "awq", None),
        ("Intel/Qwen3-30B-A3B-Instruct-2507-int4-AutoRound", "qwen3_30b_a3b_2507", "gptq", None),
        ("TheBloke/Llama-2-7B-Chat-AWQ", "llama2_7b", "awq", None),
        ("RedHatAI/Qwen3.8-27B-INT4", "qwen35_27b", "w4a16", None),
        ("a/Qwen3-30B-A3B-Instruct-2507-Int4-W4A16", "qwen3_30b_a3b_2507", "w4a16", None),
        ("OPEA/Qwen2.5-72B-Instruct-int4-AutoRound-awq-sym", "qwen25_72b", "awq", None),
    ],
)
def test_a_quantised_repository_is_its_base_and_a_format(name, option, quantization, kv_dtype):
    found = ids.find(name, KNOWN)

    assert found.option == option
    assert found.quantization.name == quantization
    assert (found.kv_dtype.name if found.kv_dtype else None) == kv_dtype


@pytest.mark.parametrize(
    ("name", "weights_gib", "kv_dtype"),
    [  # of public start-up logs: sostrowsk/dgx-spark-local-llm, robotmunki.com, a recorded one
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", 21.88, "bf16"),
        ("nvidia/Gemma-4-31B-IT-NVFP4", 31.18, "fp8"),
        ("unsloth/Qwen3.8-27B-NVFP4", None, "fp8"),
        ("nvidia/Qwen3-8B-NVFP4", None, "fp8"),
        ("someone/Qwen3-8B-NVFP4", None, "bf16"),
    ],
)
def test_what_a_publisher_leaves_out_and_asks_for_the_cache(name, weights_gib, kv_dtype):
    result = kvexp.run([f"model={name}", "gpu=b300", "engine.version=0.25.1"])

    assert result.effective["kv_dtype"] == kv_dtype
    if weights_gib is not None:
        found = result.ranks[0].budget.part("weights").size_bytes
        assert found == pytest.approx(weights_gib * 2**30, rel=0.01)


def test_a_release_that_does_not_read_the_caches_dtype_keeps_its_own():
    result = kvexp.run(["model=nvidia/Qwen3-8B-NVFP4", "gpu=b200", "engine.version=0.12.0"])

    assert result.effective["kv_dtype"] == "bf16"


@pytest.mark.parametrize("key", ["model", "model.hf_id"])
def test_a_point_by_id_has_the_entrys_facts(key):
    by_id = kvexp.run([f"{key}=Qwen/Qwen3-14B-AWQ", "gpu=h200"])
    by_name = kvexp.run(["model=qwen3_14b", "quantization=awq", "gpu=h200"])

    assert by_id.num_blocks == by_name.num_blocks
    assert by_id.effective["quantization"] == "awq"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-GPTQ-Int8", "RedHatAI/Qwen3-8B-quantized.w8a16"])
def test_a_repository_of_eight_bits_takes_twice_that_of_four(name):
    of = {
        each: kvexp.run([f"model={each}", "gpu=h200"]).ranks[0].budget.part("weights").size_bytes
        for each in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-GPTQ-Int4", name)
    }
    packed = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)  # elements of matrices

    assert of[name] == pytest.approx(of["Qwen/Qwen3-8B"] - packed, rel=0.02)
    assert of[name] == pytest.approx(of["Qwen/Qwen3-8B-GPTQ-Int4"] + packed / 2, rel=0.02)


def test_mxfp8_is_a_byte_an_element_and_one_for_each_32():
    base, packed = (
        kvexp.run([f"model={each}", "gpu=h200"]).ranks[0].budget.part("weights").size_bytes
        for each in ("Qwen/Qwen3-8B", "a/Qwen3-8B-MXFP8")
    )
    elements = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)

    assert base - packed == pytest.approx(elements * 31 / 32, rel=0.01)


def test_awq_of_eight_bits_takes_what_a_public_start_of_it_did():
    asked = ["model=cyankiwi/gemma-4-31B-it-AWQ-8bit", "gpu=b200", "engine.version=0.25.1"]
    part = kvexp.run(asked).ranks[0].budget.part("weights")

    assert part.size_bytes == pytest.approx(33.5 * 2**30, rel=0.005)


def test_groups_of_a_publisher_take_what_a_public_start_of_them_did():
    asked = ["model=cyankiwi/Qwen3.5-9B-AWQ-4bit", "gpu=rtx_4090", "engine.version=0.17.1"]
    result = kvexp.run([*asked, "max_model_len=4096"])
    part = result.ranks[0].budget.part("weights")

    assert result.effective["quantization"] == "awq"
    assert part.size_bytes / 2**30 == pytest.approx(8.41, abs=0.01)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt_llm", "lmdeploy"])
def test_a_repositorys_format_replaces_that_of_the_checkpoint(engine):
    """DeepSeek-R1 is stored in fp8: 671 GB over eight cards, and half of that in fp4."""
    run = [f"engine={engine}", "gpu=b200", "tp=8"]
    own = kvexp.run(["model=deepseek-ai/DeepSeek-R1", *run])
    fp4 = kvexp.run(["model=nvidia/DeepSeek-R1-FP4", *run])

    assert own.ranks[0].budget.part("weights").size_bytes == pytest.approx(671e9 / 8, rel=0.05)
    assert fp4.effective["quantization"] == "nvfp4"
    assert fp4.ranks[0].budget.part("weights").size_bytes == pytest.approx(
        671e9 / 2 * 9 / 8 / 8, rel=0.05
    )


def test_a_checkpoint_of_two_formats_is_counted_as_its_publisher_stored_it():
    """Logs: 19.78 GiB of nvidia/Qwen3.6-27B-NVFP4 (public repository file, index id 61544841280);
    MLPs and head are in NVFP4, the 208 projections of its attention in FP8."""
    run = ["model=nvidia/Qwen3.6-27B-NVFP4", "gpu=gb10", "engine.version='0.24.0'"]
    weights = kvexp.run(run).ranks[0].budget.part("weights")

    assert weights.size_bytes == pytest.approx(19.78 * 2**30, rel=0.01)


def test_what_is_given_wins_over_the_repositorys_name():
    result = kvexp.run(["model=Qwen/Qwen3-14B-AWQ", "quantization=w4a16", "gpu=h200"])

    assert result.effective["quantization"] == "w4a16"


def test_ids_are_swept(command_line, tmp_path):
    status, _, err = command_line(
        *("-m", "model=Qwen/Qwen3-8B,Qwen/Qwen3-4B", "gpu=h200", "tracking=off")
    )

    assert status == 0, err
    assert len(list(tmp_path.rglob("result.json"))) == 2


def test_ids_of_different_formats_are_run_apart():
    with pytest.raises(RequestError, match="different formats"):
        kvexp.sweep(["model=Qwen/Qwen3-8B,Qwen/Qwen3-14B-AWQ", "gpu=h200"])


def test_an_unknown_id_is_one_line_with_the_nearest_and_the_way_out(command_line):
    status, _, err = command_line("model.hf_id=Qwen/Qwen3-9B", "tracking=off")

    assert status == 2
    assert "did you mean qwen/qwen3" in err
    assert "model=hf model.path=FOLDER" in err
    assert err.count("\n") == 1


def test_an_id_beside_a_chosen_entry_is_a_label(command_line, tmp_path):
    command_line("model=llama3_8b", "model.hf_id=me/mine", "tracking=off", "gpu=h200")
    (path,) = tmp_path.rglob("result.json")

    assert json.loads(path.read_text())["status"] == "ok"


def test_ids_of_ones_own_folder_are_found(command_line, tmp_path):
    folder = tmp_path / "mine" / "model"
    folder.mkdir(parents=True)
    text = (registry.config_dir() / "model" / "qwen3_8b.yaml").read_text()
    (folder / "ours.yaml").write_text(text.replace("Qwen/Qwen3-8B", "us/ours"))
    status, _, err = command_line(
        "--config-dir", str(folder.parent), "model=us/ours", "tracking=off", "gpu=h200"
    )

    assert status == 0, err


@pytest.mark.parametrize(
    "written",
    [
        "hf_id: me/first\naliases:\n  - me/second # a copy\n  # and\n\n  - me/third\nsource: x\n",
        "hf_id: me/first # mine\naliases: # of it\n- me/second\n- me/third\nsource: x\n",
        "hf_id: 'me/first'\naliases:\n  -   \"me/second\"\n# and\n  - me/third",
        "aliases: [me/second,\n  me/third]\nsource: x\nhf_id: me/first\n",
    ],
)
def test_the_ids_of_a_file_are_read_as_yaml_reads_them(tmp_path, written):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(f"{written}\nlayers:\n- not/one\n")
    (tmp_path / "model" / "wrong.yaml").write_text("hf_id: [me/first\n")
    (tmp_path / "model" / ".#mine.yaml").symlink_to("someone@a-host")  # as an editor locks a file

    assert ids.index([tmp_path]).keys() == {"me/first", "me/second", "me/third"}
