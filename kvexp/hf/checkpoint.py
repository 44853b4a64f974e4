"""Which files of a folder are the checkpoint, and what their tensors take."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvexp.errors import InvalidValue
from kvexp.hf.files import read_json
from kvexp.hf.safetensors import Stored, read_header

INDEX = "model.safetensors.index.json"
OTHER_SUFFIXES = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
_TOWER = re.compile(
    r"vision|visual|audio|image|speech|vpm|projector|aligner|connector|mm_|embed_vision|multi_modal"
)

MODULES = (
    ("towers", _TOWER),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output)\.")),
    ("norms", re.compile(r"norm|(^|\.)ln_|layer_norm")),
    ("embedding", re.compile(r"embed|(^|\.)wte\.|(^|\.)wpe\.")),
    (
        "experts",
        re.compile(
            r"(?<!shared_)experts?\b(?<!shared_expert)|block_sparse_moe|exps|router|mlp\.gate\.|shared_expert_gate"
        ),
    ),
    ("mlp", re.compile(r"mlp|feed_forward|ffn|shared_expert|fc1|fc2|fc_in|fc_out|dense_")),
    ("attention", re.compile(r"attn|attention|mixer|mamba|conv|ssm|query_key_value")),
)
"""Modules by the names of tensors, the first that matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The tensors that an engine loads, and what is left out with its reason."""

    tensors: tuple[Stored, ...]
    files: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that are loaded."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    def by_module(self) -> dict[str, int]:
        """Bytes of each module."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors:
            module = module_of(tensor.name)
            sizes[module] = sizes.get(module, 0) + tensor.size_bytes
        return sizes


def module_of(name: str) -> str:
    """The module that a tensor belongs to, by its name."""
    return next((module for module, pattern in MODULES if pattern.search(name)), "other")


def find_checkpoint(folder: Path, *, index: str | None = None) -> Checkpoint | None:
    """The safetensors checkpoint of a folder, None where it has none.

    The files of the index count, else a single file, else a complete set of shards.

    Raises:
        InvalidValue: a file is missing, damaged or foreign, or it is not clear which count.
    """
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    own = [name for name in names if name.endswith(".safetensors")]
    indices = [index] if index else [name for name in names if name == INDEX]
    if indices:
        weight_map = _weight_map(folder / indices[0])
        files = sorted(set(weight_map.values()))
        tensors = _indexed(folder, weight_map)
    else:
        files = _unindexed(folder, own)
        tensors = [tensor for name in files for tensor in read_header(folder / name)]
    if not files:
        return None
    ignored = [name for name in own if name not in files]
    ignored += [name for name in names if name.endswith(OTHER_SUFFIXES)]
    _refuse_duplicates(folder, tensors)
    return Checkpoint(tensors=tuple(tensors), files=tuple(files), ignored=tuple(ignored))


def one_file(path: Path) -> Checkpoint:
    """A single safetensors file as a checkpoint.

    Raises:
        InvalidValue: it is damaged or foreign.
    """
    return Checkpoint(tensors=tuple(read_header(path)), files=(path.name,))


def loaded(checkpoint: Checkpoint, *, num_layers: int, tied: bool) -> Checkpoint:
    """The tensors that an engine keeps: no copy of a tied head, no draft layers, no buffers."""
    kept: list[Stored] = []
    left: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        reason = _left_out(tensor.name, num_layers, tied)
        if reason:
            left[reason] = left.get(reason, 0) + tensor.size_bytes
        else:
            kept.append(tensor)
    return Checkpoint(
        tensors=tuple(kept), files=checkpoint.files, ignored=checkpoint.ignored, left_out=left
    )


def _left_out(name: str, num_layers: int, tied: bool) -> str:
    if tied and module_of(name) == "head":
        return "the head is the embedding"
    if "rotary_emb.inv_freq" in name or name.endswith((".attn.bias", ".masked_bias")):
        return "buffers are recomputed"
    match = _LAYER.search(name)
    drafts = match is not None and int(match[1]) >= num_layers and not _TOWER.search(name)
    if drafts or name.startswith(("mtp.", "model.mtp.")):
        return "draft layers are loaded with speculative decoding alone"
    return ""


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidValue(f"{path} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InvalidValue(f"{path}: tensor {name!r} is in {file!r}, no file of this folder")
    return weight_map


def _indexed(folder: Path, weight_map: dict[str, str]) -> list[Stored]:
    tensors: list[Stored] = []
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise InvalidValue(f"{folder / file} is missing, the index names it")
        header = {tensor.name: tensor for tensor in read_header(folder / file)}
        for name in (name for name, where in weight_map.items() if where == file):
            if name not in header:
                raise InvalidValue(f"{folder / file} has no tensor {name!r}, the index names it")
            tensors.append(header[name])
    return tensors


def _unindexed(folder: Path, own: list[str]) -> list[str]:
    if "model.safetensors" in own:
        return ["model.safetensors"]
    usable = [name for name in own if not name.startswith(("consolidated", "adapter_"))]
    usable = usable or [name for name in own if name.startswith("consolidated")]
    matches = [_SHARD.fullmatch(name) for name in usable]
    shards = [match for match in matches if match is not None]
    if shards and len(shards) == len(usable) and len({(m[1], m[3]) for m in shards}) == 1:
        if len(shards) == int(shards[0][3]):
            return usable
        raise InvalidValue(
            f"{folder} has {len(shards)} of {int(shards[0][3])} shards and no {INDEX}"
        )
    if len(usable) <= 1:
        return usable
    raise InvalidValue(
        f"{folder} has several safetensors files and no {INDEX}: {', '.join(usable[:4])}; give one"
        " of them as model.path"
    )


def _refuse_duplicates(folder: Path, tensors: Iterable[Stored]) -> None:
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise InvalidValue(f"{folder}: tensor {tensor.name!r} is in two files")
        seen.add(tensor.name)
