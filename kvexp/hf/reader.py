"""From a path to the facts of a model: what `model=hf model.path=...` means."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp import weights
from kvexp.errors import InvalidValue
from kvexp.hf.checkpoint import Checkpoint, find_checkpoint, loaded, module_of, one_file
from kvexp.hf.decoder import decoder_facts
from kvexp.hf.files import read_json
from kvexp.hf.gguf import config_of, read_gguf
from kvexp.request import Model

CONFIG = "config.json"
MODELOPT = "hf_quant_config.json"

_AUDIO = re.compile("audio|speech")
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """What a path turned out to hold."""

    config: dict[str, Any]
    name: str
    source: str
    path: Path
    checkpoint: Checkpoint | None = None


def read_model(
    path: Path,
    *,
    config_path: str | None = None,
    given: Mapping[str, Any] | None = None,
    key: str = "model.path",
) -> Model:
    """The model that a folder, a config.json, a safetensors, index or GGUF file describes.

    `given` are facts that take the place of the file's, by the names of `Model`; `key` is what
    named the path.

    Raises:
        InvalidValue: a fact or a file is missing, damaged or not known; one line says which.
    """
    try:
        files = _open(path, key)
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from None
    notes: list[str] = []
    config = {**files.config}
    _complete_dtype(config, files.checkpoint, notes)
    own = given or {}
    try:
        facts = decoder_facts(config, config_path, notes, own)
        facts.update(own)
        facts.setdefault("name", files.name)
        facts.setdefault("hf_id", _repository(config) or files.name)
        facts.setdefault("source", files.source)
        model = Model(**facts, path=str(files.path), config_path=config_path)
    except InvalidValue as error:
        raise InvalidValue(_by_its_file(str(error), files.path, own)) from None
    if files.checkpoint is not None:
        _compare(model, files.checkpoint, notes)
    model.notes = notes
    return model


def _by_its_file(message: str, path: Path, given: Mapping[str, Any]) -> str:
    """A message about a fact by the name of the file that states it; given ones have their key."""
    text = message.removeprefix(f"{CONFIG}: ").removeprefix("model.")
    place, _, rest = text.partition(" ")
    keys = place.split(".")
    stated = next((index for index, key in enumerate(keys) if key in given), None)
    if stated is not None:
        return f"model.{'.'.join(keys[stated:])} {rest}"
    return f"{path.name if path.suffix in ('.json', '.gguf') else CONFIG}: {text}"


def _repository(config: Mapping[str, Any]) -> str | None:
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and name.count("/") == 1 and name[0] not in "./" else None


def _open(path: Path, key: str) -> _Files:
    if not path.exists():
        raise InvalidValue(
            f"{key} {path} does not exist; it is a folder or file of this machine, nothing is"
            " downloaded"
        )
    if path.is_dir():
        return _folder(path)
    if path.suffix == ".gguf":
        return _gguf(path)
    if path.suffix == ".safetensors":
        return _with_config(path, one_file(path), name=path.stem)
    if path.name.endswith(".safetensors.index.json"):
        return _with_config(path, find_checkpoint(path.parent, index=path.name))
    if path.suffix == ".json":
        return _Files(
            config=read_json(path),
            name=path.resolve().parent.name,
            path=path,
            source=f"{path.name} of {path.resolve().parent.name}",
        )
    raise InvalidValue(
        f"{key} {path} must be a folder, a config.json, a .safetensors file, its index or a"
        " .gguf file"
    )


def _folder(folder: Path) -> _Files:
    if (folder / CONFIG).is_file():
        return _with_config(folder, find_checkpoint(folder))
    found = sorted(path.name for path in folder.glob("*.gguf"))
    if len(found) == 1:
        return _gguf(folder / found[0])
    if found:
        raise InvalidValue(f"{folder} has several GGUF files; give one as model.path: {found[0]}")
    raise InvalidValue(f"{folder} has no {CONFIG}")


def _with_config(path: Path, checkpoint: Checkpoint | None, name: str = "") -> _Files:
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        raise InvalidValue(
            f"{folder} has no {CONFIG}: tensors alone do not say how they are cached"
        )
    config = read_json(folder / CONFIG)
    if config.get("quantization_config") is None and (folder / MODELOPT).is_file():
        config["quantization_config"] = read_json(folder / MODELOPT)
    return _Files(
        config=config,
        name=name or folder.resolve().name,
        path=path,
        source=f"{CONFIG} of {folder.resolve().name}",
        checkpoint=checkpoint,
    )


def _gguf(path: Path) -> _Files:
    header = read_gguf(path)
    config = config_of(header, path)
    return _Files(
        config=config,
        name=path.stem,
        path=path,
        source=f"header of {path.name}",
        checkpoint=Checkpoint(tensors=tuple(header.tensors), files=(path.name,)),
    )


def _complete_dtype(
    config: dict[str, Any], checkpoint: Checkpoint | None, notes: list[str]
) -> None:
    """A dtype that the config leaves out is that of most of the checkpoint's bytes."""
    if checkpoint is None or any(config.get(key) is not None for key in ("dtype", "torch_dtype")):
        return
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors:
        if tensor.dtype in _DTYPES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size_bytes
    if sizes:
        config["dtype"] = _DTYPES[max(sizes, key=lambda dtype: sizes[dtype])]
        notes.append(f"dtype is not given: {config['dtype']}, as most of the checkpoint's tensors")


def _compare(model: Model, checkpoint: Checkpoint, notes: list[str]) -> None:
    """Note what the tensors take, and where that is not what the formula says."""
    kept = loaded(checkpoint, num_layers=model.num_hidden_layers, tied=model.tie_word_embeddings)
    in_towers = [tensor for tensor in kept.tensors if module_of(tensor.name) == "towers"]
    if in_towers:
        model.tower_parameters = sum(tensor.numel for tensor in in_towers)
        audio = (tensor.numel for tensor in in_towers if _AUDIO.search(tensor.name))
        model.audio_tower_parameters = sum(audio)
        notes[:] = [note for note in notes if "by the rule of a plain encoder" not in note]
    model.uncounted_tower_parameters = 0
    model.checkpoint_bytes = kept.size_bytes
    count = len(kept.files)
    notes.append(
        f"checkpoint: {len(kept.tensors)} tensors, {kept.size_bytes:,} bytes in {count}"
        f" file{'s' if count > 1 else ''}"
    )
    if kept.ignored:
        notes.append(f"not counted: {', '.join(kept.ignored)}")
    for reason, size in kept.left_out.items():
        notes.append(f"not counted: {size:,} bytes, {reason}")
    method = model.quantization_config.method if model.quantization_config else None
    formula = weights.bytes_by_module(model, method)
    own = kept.by_module()
    differences = {
        module: own.get(module, 0) - formula.get(module, 0)
        for module in (*formula, *(m for m in own if m not in formula))
    }
    text = ", ".join(f"{module} {size:+,}" for module, size in differences.items() if size)
    if text:
        notes.append(f"bytes beyond the formula's, by module: {text}")
