"""The inputs of a case as a request: what a user would have asked kvexp for."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from kvexp import registry, weights
from kvexp.dtypes import DType, KvDtype
from kvexp.engine import Engine
from kvexp.hf import gguf, ids
from kvexp.request import Gpu, Model
from kvexp.schema import Run, typed
from kvexp.startup_logs import costs_of
from kvexp.units import parse_bytes
from kvexp.validate import compilation, features, models, sglang, speculative, versions
from kvexp.validate.cards import Card, Cards
from kvexp.validate.case import Inputs
from kvexp.validate.flags import Flags

ENGINES = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt_llm",
    "tensorrt_llm": "tensorrt_llm",
    "trtllm": "tensorrt_llm",
    "lmdeploy": "lmdeploy",
    "nano-vllm": "nano_vllm",
    "nano_vllm": "nano_vllm",
}
"""Options of the group `engine` by the names of records."""

PROFILER = "analytic"

_KNOBS = {
    "gpu_memory_utilization": "util",
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "enforce_eager": "enforce_eager",
}
_DTYPES = {
    "bfloat16": DType.bf16,
    "bf16": DType.bf16,
    "float16": DType.fp16,
    "fp16": DType.fp16,
    "half": DType.fp16,
    "float32": DType.fp32,
    "float": DType.fp32,
}
_OWN_CACHE = ("auto", "bfloat16", "bf16", "float16", "fp16", "half")
"""A cache of the compute dtype, for all that its size says."""

_KV_DTYPES = {each.value: each for each in KvDtype} | {
    "fp8_ds_mla": KvDtype.fp8,
    "int8": KvDtype.int8_per_token_head,
    "int4": KvDtype.int4_per_token_head,
}
_WITHOUT_RULE = ("nvfp4_ds_mla",)
"""Caches of a fraction of the compute dtype's size, which no dtype of ours stands for."""

_AS_LARGE = "whose pools differ from those by 0.4 % in two public logs of DeepSeek-V4"


class NoRequest(ValueError):
    """A case cannot be asked for; the message says what is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A run, and the assumptions that were made on the way to it."""

    run: Run
    engine: str
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """What is installed: engines, models and cards by their options."""

    plugins: Mapping[str, type] = field(default_factory=dict)

    @classmethod
    def here(cls) -> "Known":
        """What this installation knows."""
        groups = (registry.plugins(group) for group in registry.GROUPS)
        return cls({plugin.name: plugin.cls for group in groups for plugin in group})

    @cached_property
    def folders(self) -> list[Path]:
        """The folders of YAML."""
        return registry.config_dirs()

    @cached_property
    def models(self) -> models.Catalogue:
        """The catalogue of models."""
        return models.Catalogue(ids.index(self.folders))

    @cached_property
    def cards(self) -> Cards:
        """The catalogue of cards."""
        return Cards.of(self.folders)

    def draft(self, text: str) -> Model | None:
        """The model that a text names, without the format of its weights; None for none."""
        named = self.models.find(text)
        return None if named is None else self.model(named.option)

    def model(self, option: str) -> Model:
        """A model of the catalogue."""
        if option not in self._models:
            paths = (folder / "model" / f"{option}.yaml" for folder in self.folders)
            facts = OmegaConf.to_container(OmegaConf.load(next(p for p in paths if p.is_file())))
            assert isinstance(facts, dict)
            self._models[option] = typed(Model, {str(key): facts[key] for key in facts})
        return self._models[option]

    @cached_property
    def _models(self) -> dict[str, Model]:
        return {}


def engine_option(inputs: Inputs) -> str:
    """The option of the group `engine` that a record's engine means.

    Raises:
        NoRequest: there is none.
    """
    option = ENGINES.get(inputs.engine.lower())
    if option is None:
        raise NoRequest(f"there are no rules for engine {inputs.engine!r}")
    return option


def request_of(inputs: Inputs, known: Known, card: Card, named: models.Named) -> Request:
    """The request that a case stands for, on a card and with a model that were found.

    Raises:
        NoRequest: there are no rules for the engine.
        InvalidValue: a value is not allowed.
    """
    option = engine_option(inputs)
    draft = _Draft(inputs, option, known.model(named.option))
    draft.notes += card.assumptions
    if named.within is not None:
        draft.notes.append(f"model: {inputs.model!r} counted as {named.within}, which it names")
    draft.version(card.facts.get("compute_capability"))
    asked = draft.flags(known)
    draft.knobs()
    draft.split(counts_replicas="dp" in getattr(known.plugins[option], "counts", ()))
    draft.dtypes(named)
    draft.weights(named)
    draft.length()
    draft.free(card)
    run = Run(
        model=replace(known.model(named.option), **draft.model),
        gpu=Gpu(**{**card.facts, **draft.gpu}),
        engine=typed(known.plugins[option], draft.engine),
        profiler=typed(known.plugins[PROFILER], {}),
        **draft.values,
    )
    run, notes = features.with_features(run, option, asked)
    return Request(run=run, engine=option, assumptions=(*draft.notes, *notes))


class _Draft:
    """The values of a request as they are found, and what was assumed."""

    def __init__(self, inputs: Inputs, option: str, model: Model) -> None:
        self.inputs, self.option, self.known = inputs, option, model
        self.values: dict[str, Any] = {}
        self.engine: dict[str, Any] = {}
        self.model: dict[str, Any] = {}
        self.gpu: dict[str, Any] = {}
        self.notes: list[str] = []

    def version(self, capability: Any) -> None:
        """The engine's release; the plugin's own where none is named."""
        number = None if capability is None else float(capability)
        version = versions.find(self.option, self.inputs.engine_version, number)
        if version.text is not None:
            self.engine["version"] = version.text
        self.notes += version.assumptions

    def flags(self, known: Known) -> features.Asked:
        """Flags that are the engine's own options, and the features that others ask for."""
        given = Flags(self.inputs.other_flags, self.inputs.engine)
        self._inputs_among(given)
        cls = known.plugins[self.option]
        engine: Engine = typed(cls, self.engine)
        self._captured_among(given, engine)
        if self.option == "sglang":
            self.notes += sglang.translate(given, self.inputs.model or "", self.known)
        elif self.option in ("lmdeploy", "tensorrt_llm"):
            speculative.translate(given)
        own = features.options(given, cls, versions.release_of(engine.version))
        asked = features.asked(given, known.draft)
        given.drop_free()
        changes = costs_of(self.inputs.engine).no_rule
        self.notes += [*own.notes, *features.without_rule(given.left, changes)]
        return features.Asked(features=[*own.features, *asked.features], notes=asked.notes)

    def _inputs_among(self, given: Flags) -> None:
        """Flags that are inputs of the record: those that say something else are named."""
        for key, flag, value in given.take_inputs():
            used = getattr(self.inputs, key)
            if value is None:
                self.notes += features.without_rule([flag])
            elif value != used:
                self.notes.append(f"other_flags: {flag.words!r}, but {key} is {used}")

    def _captured_among(self, given: Flags, engine: Engine) -> None:
        """How many sizes were captured: those of vLLM's V0 end with the requests."""
        if engine.largest_graph(1) is None:
            return
        for flag, said in given.take_words(compilation.CAPTURED):
            largest = engine.largest_graph(int(said[1]))
            if not versions.is_v0(engine.version):
                self.engine["max_cudagraph_capture_size"] = largest
            elif self.inputs.max_num_seqs is None:
                self.values["max_num_seqs"] = largest
                self.notes.append(f"max_num_seqs: {largest}, of {flag.words!r}")

    def knobs(self) -> None:
        """What is asked for by the same name, or by another."""
        for name, knob in _KNOBS.items():
            value = getattr(self.inputs, name)
            if value is None and knob in self.values:
                continue
            if value is None:
                self.notes.append(f"{name}: the engine's default")
                continue
            self.values[knob] = value
            if not self.inputs.is_stated(name):
                self.notes.append(f"{name}: {value} as recorded")
        tokens, seqs = (self.values.get(f"max_num_{each}") for each in ("batched_tokens", "seqs"))
        if tokens and seqs and tokens < seqs and not self.inputs.is_stated("max_num_seqs"):
            del self.values["max_num_seqs"]
        self._block_size()

    def _block_size(self) -> None:
        """What is stated; vLLM's depends on the model's layers, a record's default on nothing."""
        size = self.inputs.block_size
        if size is None or self.inputs.is_stated("block_size"):
            self.values["block_size"] = size
        elif self.option == "vllm":
            self.notes.append(f"block_size: {size} as recorded not used, the engine's default")
        else:
            self.values["block_size"] = size
            self.notes.append(f"block_size: {size} as recorded")

    def split(self, *, counts_replicas: bool) -> None:
        """Ranks, stages and replicas; all cards are ranks where only their number is known."""
        pp, dp, tp = self.inputs.pp or 1, self.inputs.dp or 1, self.inputs.tp
        if tp is None:
            tp = max(1, (self.inputs.num_gpus or 1) // (pp * dp))
            self.notes.append(f"tp: {tp}")
        self.values |= {"tp": tp, "pp": pp}
        if counts_replicas:
            self.values["dp"] = dp
        elif dp > 1:
            self.notes.append(f"dp: no rule for {dp} replicas, one alone instead")

    def dtypes(self, named: models.Named) -> None:
        """The compute dtype where it is stated, and the cache's."""
        self._compute_dtype()
        text = (self.inputs.kv_cache_dtype or "auto").lower()
        if text in _OWN_CACHE:
            if named.kv_dtype is not None:
                self.values["kv_dtype"] = named.kv_dtype
        elif text in _KV_DTYPES:
            self.values["kv_dtype"] = _KV_DTYPES[text]
        elif text in _WITHOUT_RULE and self.known.compressed is not None:
            self.values["kv_dtype"] = KvDtype.fp8
            self.notes.append(f"kv_cache_dtype: {text} counted as fp8_ds_mla, {_AS_LARGE}")
        elif text in _WITHOUT_RULE:
            raise NoRequest(f"there are no rules for kv_cache_dtype {text!r}")
        else:
            self.notes.append(f"kv_cache_dtype: no rule for {text!r}, auto instead")

    def _compute_dtype(self) -> None:
        text = self.inputs.weight_dtype
        if text is None or text.lower() == "auto":
            return
        dtype = _DTYPES.get(text.lower())
        if dtype is None:
            self.notes.append(f"weight_dtype: no rule for {text!r}, the model's own instead")
        elif self.inputs.is_stated("weight_dtype"):
            self.values["dtype"] = dtype
        else:
            self.notes.append(f"weight_dtype: {text} as recorded not used, the model's own")

    def weights(self, named: models.Named) -> None:
        """The format of the weights: of the model's name, or of the engine's option."""
        text = self.inputs.quantization or ""
        if named.text_only:
            self.model["tower_parameters"] = self.model["uncounted_tower_parameters"] = 0
        kind = named.gguf or models.gguf_type(text)
        if kind is not None:
            self._gguf(kind)
            return
        if named.bits is not None:
            self._packed(named.bits, "the name's format", tables=False)
            return
        method = named.quantization or models.format_of(text)
        if text and method is None:
            self.notes.append(f"quantization: no rule for {text!r}, the checkpoint's own instead")
        own, moe = self.known.quantization_config, self.known.moe
        if named.kv_cache_scheme is not None:
            self.model["kv_cache_scheme"] = named.kv_cache_scheme
        if named.experts is not None and moe is not None:
            self.model["moe"] = replace(moe, format=named.experts)
            return
        if named.stored is not None:
            self.model["quantization_config"] = named.stored
            return
        if method is None or (moe is not None and method.name == moe.format):
            return
        if own is not None and own.method is method:
            return
        self.values["quantization"] = method
        if own is not None:
            self.model["quantization_config"] = None
            self.notes.append(
                f"quantization: {method.name} instead of the checkpoint's {own.method.name}"
            )

    def _gguf(self, kind: str) -> None:
        """A GGUF file instead of the checkpoint: as many bytes as its type packs elements into."""
        bits = gguf.bits_of(kind)
        if bits is None:
            self.model["quantization_config"] = None
            self.notes.append(f"quantization: no rule for GGUF's {kind}, the compute dtype instead")
            return
        self._packed(bits, f"GGUF's {kind}", tables=True)

    def _packed(self, bits: float, of: str, *, tables: bool) -> None:
        """Matrices, and tables, of so many bits an element instead of the checkpoint's."""
        self.model["quantization_config"] = None
        packed = replace(self.known, **self.model)
        self.model["checkpoint_bytes"] = weights.bytes_at(packed, bits, tables=tables)
        self.notes.append(f"quantization: {of} counted as {bits:g} bits an element")

    def length(self) -> None:
        """A length beyond the model's own is allowed to whoever insists."""
        length, longest = self.inputs.max_model_len, self.known.max_position_embeddings
        if length is not None and length > longest and not self.known.rope_scaling:
            self.model["max_position_embeddings"] = length
            self.notes.append(f"max_model_len: {length} beyond the model's {longest}")

    def free(self, card: Card) -> None:
        """Stated free memory: at the start for vLLM, when the cache is sized for the others."""
        free, first = self.inputs.free_gib, self.inputs.init_free_gib
        total = parse_bytes(card.facts["total_bytes"], key="gpu.total_bytes")
        if self.option != "vllm" and free is not None:
            self.engine["free_after_load_bytes"] = _gib(free)
            if parse_bytes(_gib(free), key="free_gib") > total:
                self.gpu["total_bytes"] = total = parse_bytes(_gib(free), key="free_gib")
                self.notes.append(f"gpu: at least the {free:g} GiB that were free")
            free = None
        known = [each for each in (free, first) if each is not None]
        if known:
            self.gpu["free_bytes"] = min(parse_bytes(_gib(min(known)), key="free_gib"), total)


def _gib(size: float) -> str:
    return f"{size!r}GiB"
