"""vLLM's own worker, behind stand-ins for the modules of vLLM that are used.

The stand-in worker answers with what vLLM 0.26.0 found on an H200, case by case; its planner
divides by the bytes of a block, as vLLM's does for layers that are all alike.
"""

import importlib
import json
import math
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import kvexp
from kvexp import pipeline
from kvexp.api import compose_points
from kvexp.bench import Bench
from kvexp.contract import ProfilerUnavailable
from kvexp.results import Provenance, Stage, Status

DATA = json.loads((Path(__file__).parents[1] / "data" / "vllm_h200.json").read_text())
CASES = {case["case"]: case for case in DATA["cases"]}
TOTAL, FREE = 150109880320, 149557477376
ENVIRONMENT = (
    "HF_HUB_OFFLINE",
    "VLLM_ENABLE_STARTUP_PLAN",
    "VLLM_LOGGING_LEVEL",
    "VLLM_LOGGING_STREAM",
    "VLLM_NO_USAGE_STATS",
)
GRAPHS = 1050673152
NO_MEMORY = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`."
TOO_LOW = (
    "Free memory on device cuda:0 (10.0/139.8 GiB) on startup is less than desired GPU memory"
    " utilization (0.92, 128.62 GiB). Decrease GPU memory utilization or reduce GPU memory used by"
    " other processes."
)


class FakeVllm:
    """What the stand-in engine answers and what it was asked."""

    def __init__(self, case):
        self.case = case
        self.free_bytes = FREE
        self.version = "0.26.0"
        self.fail = {}
        self.lacks = ""
        self.calls = []
        self.arguments = {}
        self.config = {}
        self.files = []
        self.draft = {}
        self.page_bytes = 65536
        self.max_model_len = 8192
        self.refused = ""

    def enter(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise self.fail[name]


def config_in(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def modules(fake):
    """The modules of vLLM that the plugin imports, by name."""

    class Worker:
        def __init__(self, vllm_config, rank):
            self.vllm_config = vllm_config
            self.rank = rank

        def init_device(self):
            fake.enter("init_device")
            self.device = "cuda:0"
            self.init_snapshot = SimpleNamespace(total_memory=TOTAL, free_memory=fake.free_bytes)
            if requested() > fake.free_bytes:
                raise ValueError(TOO_LOW)
            self.requested_memory = requested()

        def load_model(self, *, load_dummy_weights=False):
            fake.enter("load_model")
            self.model_runner = Runner()
            self.model_runner.model_memory_usage = fake.case["ranks"][self.rank]["weights_bytes"]

        def determine_available_memory(self):
            fake.enter("profile")
            found = fake.case["ranks"][self.rank]
            self.peak_activation_memory = found["activation_bytes"]
            self.non_torch_memory = found["non_torch_bytes"]
            self.cudagraph_memory_estimate = found["cudagraph_bytes"]
            self.available_kv_cache_memory_bytes = found["available_bytes"]
            if fake.lacks:
                delattr(self, fake.lacks)
            return found["available_bytes"]

        def get_kv_cache_spec(self):
            return {f"layers.{i}": fake.page_bytes for i in range(fake.config["num_hidden_layers"])}

        def initialize_from_config(self, configs):
            fake.enter("allocate")
            tensors = configs[self.rank].kv_cache_tensors
            self.model_runner.kv_caches = [Cache(tensor.size) for tensor in tensors]

        def compile_or_warm_up_model(self):
            fake.enter("warm_up")
            if not fake.arguments["enforce_eager"]:
                self.model_runner.capture_model()

    class Runner:
        def profile_run(self):
            fake.enter("verify")

        def capture_model(self):
            fake.enter("capture")
            return GRAPHS

    class Cache:
        def __init__(self, size):
            self.size = size

        def untyped_storage(self):
            return SimpleNamespace(data_ptr=lambda: id(self), nbytes=lambda: self.size)

    class Executor:
        @staticmethod
        def get_class(config):
            return Executor

        def __init__(self, config):
            staged = importlib.import_module("kvexp_vllm_worker.worker").StagedWorker
            self.workers = [staged(config, rank) for rank in range(len(fake.case["ranks"]))]
            for worker in self.workers:
                worker.init_device()
                worker.load_model()

        def collective_rpc(self, method, args=()):
            return [getattr(worker, method)(*args) for worker in self.workers]

        def determine_available_memory(self):
            return self.collective_rpc("determine_available_memory")

        def get_kv_cache_specs(self):
            return self.collective_rpc("get_kv_cache_spec")

        def shutdown(self):
            fake.enter("shutdown")

    class EngineArgs:
        def __init__(self, **arguments):
            fake.arguments = arguments

        def create_engine_config(self, usage):
            fake.usage = usage
            fake.config = config_in(fake.arguments["model"])
            fake.files = sorted(file.name for file in Path(fake.arguments["model"]).iterdir())
            drafting = fake.arguments.get("speculative_config", {})
            if "model" in drafting:
                fake.draft = config_in(drafting["model"])
            if fake.refused:
                raise ValueError(fake.refused)
            return SimpleNamespace(
                model_config=SimpleNamespace(max_model_len=fake.max_model_len),
                cache_config=SimpleNamespace(),
            )

    def get_kv_cache_configs(config, specs, available):
        spec, size = specs[0], min(available)
        if size <= 0:
            raise ValueError(NO_MEMORY)
        if fake.case["error"]:
            raise ValueError(fake.case["error"])
        blocks = size // sum(spec.values())
        tensors = [SimpleNamespace(size=blocks * page) for page in spec.values()]
        group = SimpleNamespace(
            layer_names=list(spec),
            kv_cache_spec=SimpleNamespace(
                block_size=16,
                page_size_bytes=fake.page_bytes,
                max_memory_usage_bytes=lambda config: fake.page_bytes * fake.max_model_len // 16,
            ),
        )
        one = SimpleNamespace(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=[group])
        return [one] * len(specs)

    def requested():
        return math.ceil(TOTAL * fake.arguments["gpu_memory_utilization"])

    def capacity(config, cache):
        concurrency = cache.num_blocks / (fake.max_model_len // 16)
        return int(concurrency * fake.max_model_len), concurrency

    platform = SimpleNamespace(
        update_block_size_for_backend=lambda config: fake.calls.append("block_size"),
    )
    return {
        "vllm": {"__version__": fake.version},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.platforms": {"current_platform": platform},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {
            "UsageContext": SimpleNamespace(LLM_CLASS="llm", OPENAI_API_SERVER="serve")
        },
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.kv_cache_utils": {
            "generate_scheduler_kv_cache_config": lambda configs: configs[0],
            "get_kv_cache_capacity": capacity,
            "get_kv_cache_configs": get_kv_cache_configs,
        },
        "vllm.v1.executor": {"Executor": Executor},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
    }


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Put the stand-ins in vLLM's place; returns the switchboard of one case."""

    def put(name):
        fake = FakeVllm(CASES[name])
        for module, content in modules(fake).items():
            made = ModuleType(module)
            vars(made).update(content)
            monkeypatch.setitem(sys.modules, module, made)
        torch = ModuleType("torch")
        torch.cuda = SimpleNamespace(
            get_device_name=lambda device: "NVIDIA H200",
            mem_get_info=lambda device: (10973478912, TOTAL),
        )

        @contextmanager
        def inference_mode():
            yield

        torch.inference_mode = inference_mode
        monkeypatch.setitem(sys.modules, "torch", torch)
        for module in ("engine", "worker"):
            monkeypatch.delitem(sys.modules, f"kvexp_vllm_worker.{module}", raising=False)
        for variable in ENVIRONMENT:
            monkeypatch.setenv(variable, "0")  # restored afterwards
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return fake

    return put


def run(name, *more):
    """The point of a case, in this process."""
    (point,) = compose_points([*CASES[name]["overrides"], "gpu=h200", "profiler=vllm", *more])
    assert not point.problem, point.problem
    bench = Bench()
    try:
        return pipeline.execute(point.run, "vllm", bench=bench)
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("name", "layers"), [("02_llama3_8b_eager", 32), ("10_qwen3_8b_eager", 36)]
)
def test_a_point_has_the_engines_terms_and_blocks(install, name, layers):
    case, fake = CASES[name], install(name)
    found = case["ranks"][0]
    fake.max_model_len = {32: 8192, 36: 40960}[layers]

    result = run(name)

    assert (result.status, result.stage) == (Status.ok, Stage.done)
    assert result.num_blocks == case["num_blocks"]
    assert result.kv_tokens == case["kv_tokens"]
    assert result.max_concurrency == case["max_concurrency"]
    assert result.block_bytes == layers * 65536
    assert result.allocated_bytes == case["num_blocks"] * layers * 65536
    assert result.verified is True
    profile = result.profile
    assert profile.weights_bytes == found["weights_bytes"]
    assert profile.activation_bytes == found["activation_bytes"]
    assert profile.non_torch_bytes == found["non_torch_bytes"]
    assert profile.cudagraph_bytes == 0
    assert {part.provenance for part in profile.parts} == {Provenance.measured}
    assert result.budget.requested_bytes == case["requested_bytes"]
    assert result.budget.available_bytes == found["available_bytes"]
    assert len(fake.config["architectures"]) == 1
    assert fake.config["num_hidden_layers"] == layers


def test_the_rules_stand_beside_what_was_measured(install):
    install("02_llama3_8b_eager")

    result = run("02_llama3_8b_eager")

    assert result.readings["num_blocks_by_rules"] == 57629
    (rules,) = result.readings["rules_by_rank"]
    assert rules == {"weights": 16062685184, "activation": 939540992, "non_torch": 241172480}
    (note,) = [note for note in result.notes if note.startswith("by the rules")]
    assert "activation 939,540,992 (+0)" in note
    assert "num_blocks 57,629 (+0)" in note


def test_the_stages_come_in_the_engines_order(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager")

    assert fake.calls == [
        "init_device",
        "load_model",
        "block_size",
        "profile",
        "allocate",
        "warm_up",
        "verify",
        "shutdown",
    ]


def test_vllm_is_given_the_points_values(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager", "max_num_seqs=64", "kv_dtype=fp8", "block_size=32", "util=0.85")

    given = fake.arguments
    assert given["load_format"] == "dummy"
    assert given["dtype"] == "bfloat16"
    assert given["gpu_memory_utilization"] == 0.85
    assert given["max_model_len"] == 8192
    assert given["max_num_seqs"] == 64
    assert given["max_num_batched_tokens"] == 8192
    assert given["kv_cache_dtype"] == "fp8"
    assert given["block_size"] == 32
    assert given["enforce_eager"] is True
    assert fake.usage == "serve"
    assert not Path(given["model"]).exists()  # written for the engine, gone with it


def test_adapters_are_asked_for(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager", "lora.max_loras=4", "lora.max_rank=64")

    given = fake.arguments
    assert given["enable_lora"] is True
    assert (given["max_loras"], given["max_lora_rank"]) == (4, 64)
    assert given["fully_sharded_loras"] is False


def test_a_draft_is_another_model_of_the_engine(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager", "speculative.model=llama32_1b", "speculative.num_tokens=3")

    drafting = fake.arguments["speculative_config"]
    assert (drafting["method"], drafting["num_speculative_tokens"]) == ("draft_model", 3)
    assert (fake.config["num_hidden_layers"], fake.draft["num_hidden_layers"]) == (32, 16)
    assert not Path(drafting["model"]).exists()  # written for the engine, gone with it


def test_a_method_without_a_draft_names_no_model(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager", "speculative.method=ngram", "speculative.num_tokens=5")

    drafting = fake.arguments["speculative_config"]
    assert drafting == {"method": "ngram", "num_speculative_tokens": 5}


def test_layers_of_stages_are_given_as_vllm_reads_them(install, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "")
    install("02_llama3_8b_eager")

    run("02_llama3_8b_eager", "pp=2", "pp_partition=[10,22]")

    assert os.environ["VLLM_PP_LAYER_PARTITION"] == "10,22"


def test_the_default_block_size_is_left_to_vllm(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager")

    assert "block_size" not in fake.arguments
    assert "kv_cache_dtype" not in fake.arguments


def test_captured_graphs_stand_beside_what_was_subtracted(install):
    install("01_llama3_8b_default_graphs")

    result = run("01_llama3_8b_default_graphs")

    (rank,) = result.readings["vllm"]["ranks"]
    assert rank["cudagraph_estimate_bytes"] == 0
    assert rank["cudagraph_bytes"] == GRAPHS
    assert result.profile.cudagraph_bytes == 0
    assert result.num_blocks == 57512


def test_an_estimate_that_was_subtracted_is_a_term(install):
    name = "28_llama3_8b_default_graphs_V1runner"
    install(name)

    result = run(name)

    assert result.profile.cudagraph_bytes == 532676608
    assert result.num_blocks == 56853


def test_ranks_have_profiles_of_their_own_and_the_tightest_counts(install):
    name = "t07_llama3_8b_tp2_graphs"
    case, fake = CASES[name], install(name)
    fake.page_bytes = 32768  # the heads are split

    result = run(name)

    assert result.status is Status.ok, result.reason
    assert fake.arguments["tensor_parallel_size"] == 2
    assert result.num_blocks == case["num_blocks"] == 123242
    for rank, found in zip(result.ranks, case["ranks"], strict=True):
        assert rank.profile.non_torch_bytes == found["non_torch_bytes"]
        assert rank.budget.available_bytes == found["available_bytes"]
    assert [rank.num_blocks for rank in result.ranks] == [123244, 123242]


def test_too_long_a_request_is_refused_in_vllms_words(install):
    name = "22a_llama3_8b_eager_u0115_FAIL"
    install(name)

    result = run(name)

    assert (result.status, result.stage) == (Status.infeasible, Stage.budget)
    assert result.reason == CASES[name]["error"]
    assert result.refusal.kind == "max_len_too_large"
    assert result.refusal.needed_bytes == 1 << 30
    assert result.refusal.available_bytes == 19237581
    assert result.profile.activation_bytes == 939540992


def test_no_memory_for_blocks_is_refused_in_vllms_words(install):
    fake = install("02_llama3_8b_eager")
    short = dict(fake.case["ranks"][0])
    short["available_bytes"] = math.ceil(TOTAL * 0.1) - (138101089895 - short["available_bytes"])
    fake.case = {**fake.case, "ranks": [short]}

    result = run("02_llama3_8b_eager", "util=0.1")

    assert (result.status, result.stage) == (Status.infeasible, Stage.budget)
    assert result.reason == NO_MEMORY
    assert result.refusal.kind == "no_memory"


def test_too_little_free_memory_is_refused_before_loading(install):
    fake = install("02_llama3_8b_eager")
    fake.free_bytes = 10 << 30

    result = run("02_llama3_8b_eager")

    assert (result.status, result.stage) == (Status.infeasible, Stage.start)
    assert result.reason == TOO_LOW
    assert result.refusal.needed_bytes == 138101089895
    assert result.refusal.available_bytes == 10 << 30
    assert "load_model" not in fake.calls
    assert fake.calls[-1] == "shutdown"


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    ("call", "stage"),
    [
        ("load_model", Stage.load),
        ("profile", Stage.warmup),
        ("allocate", Stage.allocate),
        ("warm_up", Stage.verify),
        ("verify", Stage.verify),
        ("capture", Stage.graphs),
    ],
)
def test_out_of_memory_names_its_stage(install, call, stage):
    fake = install("02_llama3_8b_eager")
    fake.fail[call] = OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB")

    result = run("02_llama3_8b_eager", f"enforce_eager={str(call != 'capture').lower()}")

    assert (result.status, result.stage) == (Status.oom, stage)
    assert "Tried to allocate 1.96 GiB" in result.reason
    assert fake.calls[-1] == "shutdown"
    if stage in (Stage.allocate, Stage.verify, Stage.graphs):
        assert result.verified is False
        assert result.num_blocks == 57629


def test_values_that_vllm_refuses_make_the_point_invalid(install):
    fake = install("02_llama3_8b_eager")
    fake.refused = "max_num_batched_tokens (8) is\n smaller than max_model_len (8192)."

    result = run("02_llama3_8b_eager")

    assert (result.status, result.stage) == (Status.invalid, Stage.start)
    assert result.reason == (
        "vLLM 0.26.0 refuses: max_num_batched_tokens (8) is smaller than max_model_len (8192)."
    )


def test_an_attribute_that_another_version_lacks_is_named(install):
    fake = install("02_llama3_8b_eager")
    fake.lacks = "peak_activation_memory"

    result = run("02_llama3_8b_eager")

    assert (result.status, result.stage) == (Status.error, Stage.warmup)
    assert "vLLM 0.26.0 keeps no peak_activation_memory in StagedWorker" in result.reason


def test_another_layout_of_vllm_is_one_clear_line(install, monkeypatch):
    install("02_llama3_8b_eager")
    monkeypatch.delattr(sys.modules["vllm.v1.core.kv_cache_utils"], "get_kv_cache_capacity")

    result = run("02_llama3_8b_eager")

    assert (result.status, result.stage) == (Status.error, Stage.start)
    assert "cannot be used as vLLM 0.26.0 is: cannot import name 'get_kv_cache_capacity'" in (
        result.reason
    )


def test_without_verification_nothing_is_allocated(install):
    fake = install("02_llama3_8b_eager")

    result = run("02_llama3_8b_eager", "profiler.verify=false")

    assert result.num_blocks == 57629
    assert (result.allocated_bytes, result.verified) == (None, None)
    assert fake.calls[-2:] == ["profile", "shutdown"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["engine=nano_vllm"], "profiler=vllm runs engine=vllm, got engine=nano_vllm"),
        (["engine.kv_cache_memory_bytes=1GiB"], "vLLM measures nothing"),
        (["dp=2"], "profiler=vllm starts one replica: leave dp out, got dp=2"),
        (["quantization=awq"], "give model=hf model.path=FOLDER of such a checkpoint"),
        (["model=qwen3_next_80b_a3b"], "no config.json can be written for model.model_type="),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(overrides, problem):
    (point,) = compose_points(["gpu=h200", "profiler=vllm", *overrides])

    assert problem in point.problem


VISION = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "torch_dtype": "bfloat16",
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a model of images, its weights and all."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(VISION))
    for name in (
        "preprocessor_config.json",
        "tokenizer.json",
        "consolidated.00.pth",
        "training_args.bin",
    ):
        (folder / name).write_text("{}")
    return folder


def of(checkpoint):
    return ["model=hf", f"model.path={checkpoint}", "gpu=h200", "profiler=vllm"]


def test_images_of_the_profile_are_made_by_the_checkpoints_processor(install, checkpoint):
    fake = install("02_llama3_8b_eager")
    (point,) = compose_points([*of(checkpoint), "enforce_eager=true"])
    assert not point.problem, point.problem

    bench = Bench()
    try:
        pipeline.execute(point.run, "vllm", bench=bench)
    finally:
        bench.close()

    assert fake.files == ["config.json", "preprocessor_config.json", "tokenizer.json"]
    assert fake.arguments["skip_tokenizer_init"] is False
    assert (checkpoint / "consolidated.00.pth").is_file()


def test_a_checkpoint_without_a_processor_is_refused(checkpoint):
    (checkpoint / "preprocessor_config.json").unlink()

    (point,) = compose_points(of(checkpoint))
    (text,) = compose_points([*of(checkpoint), "mm.limits={image: 0, video: 0}"])

    assert point.problem == (
        "vLLM makes the images and videos of its profile with the checkpoint's processor, and"
        f" {checkpoint} has no preprocessor_config.json: give model.path=FOLDER with it and the"
        " tokenizer's files, or 'mm.limits={image: 0, video: 0}'"
    )
    assert not text.problem


def test_text_alone_needs_no_tokenizer(install):
    fake = install("02_llama3_8b_eager")

    run("02_llama3_8b_eager")

    assert fake.files == ["config.json"]
    assert fake.arguments["skip_tokenizer_init"] is True


def test_another_version_than_asked_for_is_refused(tmp_path, monkeypatch):
    info = tmp_path / "vllm-0.25.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.1+cu130\n")
    monkeypatch.syspath_prepend(tmp_path)

    (point,) = compose_points(["gpu=h200", "profiler=vllm"])

    assert point.problem == (
        "vLLM 0.25.1 is installed, got engine.version=0.26.0: give engine.version=0.25.1"
    )


def test_without_vllm_the_line_says_what_to_install():
    from kvexp_vllm_worker import VllmWorker

    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed")
    with pytest.raises(ProfilerUnavailable, match=r"not installed: pip install vllm==0\.26\.0"):
        VllmWorker().check()


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU")
def test_vllm_itself_measures_a_small_model_and_verifies_its_cache():
    values = ["max_model_len=8192", "util=0.5", "enforce_eager=true"]
    result = kvexp.run(["model=qwen3_0_6b", "gpu=auto", "profiler=vllm", *values])

    assert (result.status, result.reason) == (Status.ok, "")
    assert result.verified is True
    assert result.allocated_bytes == result.num_blocks * result.block_bytes
    assert result.profile.weights_bytes >= 1192099840
    (rules,) = result.readings["rules_by_rank"]
    assert result.profile.activation_bytes == pytest.approx(rules["activation"], rel=0.05)
    assert not [note for note in result.notes if "planner by its rules" in note]
