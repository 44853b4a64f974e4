"""Models named by a path or a Hugging Face id, turned into what Hydra composes."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from kvexp.errors import InvalidValue, RequestError, nearest
from kvexp.hf import ids, read_model
from kvexp.request import Model, QuantizationConfig

OPTION = "hf"
"""The option of the group `model` whose facts are read from `model.path`."""

_FILES = (".json", ".safetensors", ".gguf")
_OR_PATH = "; with its config.json: speculative.model=FOLDER"

_STORED = "model.quantization_config"
_MODEL = re.compile(r"model=(.+)")
_HF_ID = re.compile(r"\+{0,2}model\.hf_id=(.+)")


def with_facts(cfg: DictConfig, overrides: Sequence[str], option: str) -> DictConfig:
    """The configuration with the facts that `model.path` holds; given ones win.

    The path is kept: profilers that build the model take its config.json and weights.

    Raises:
        InvalidValue: the path is missing, or what it holds cannot be read.
    """
    node = OmegaConf.select(cfg, "model", throw_on_missing=False)
    if not isinstance(node, DictConfig):
        return cfg
    path = node.get("path")
    if option != OPTION:
        if path is None:
            return cfg
        raise InvalidValue(f"model.path must be given with model={OPTION}, got model={option}")
    if path is None or not str(path).strip():
        raise InvalidValue(
            "model.path must be given with model=hf: a folder with config.json, a config.json,"
            " a safetensors index or file, or a GGUF file"
        )
    model = read_model(
        Path(str(path)).expanduser(),
        config_path=node.get("config_path"),
        given=_given(node, overrides),
    )
    _hold_literally(model)
    filled = copy.deepcopy(cfg)
    with open_dict(filled):
        filled.model = OmegaConf.structured(model)
        for name in _partial(node):
            read = filled.model[name]
            filled.model[name] = node[name] if read is None else OmegaConf.merge(read, node[name])
    return filled


def _partial(node: DictConfig) -> list[str]:
    """Parts of which some values are given and others missing: those stay the file's."""
    parts = {item.name: node.get(item.name) for item in fields(Model)}
    return [
        name
        for name, part in parts.items()
        if isinstance(part, DictConfig) and OmegaConf.missing_keys(part)
    ]


def with_draft(cfg: DictConfig, folders: Sequence[Path]) -> DictConfig:
    """The configuration with the facts of `speculative.model`: an entry, an id or a path.

    A path is kept with those facts, and replaced by the model's name where it was given.

    Raises:
        InvalidValue: there is no such model, or it cannot be read.
    """
    named = OmegaConf.select(cfg, "speculative.model", throw_on_missing=False)
    if named is None:
        return cfg
    if not str(named).strip():
        raise InvalidValue("speculative.model must name a model, a Hugging Face id or a folder")
    model = _draft(str(named), folders)
    filled = copy.deepcopy(cfg)
    with open_dict(filled):
        filled.speculative.draft = OmegaConf.structured(model)
        filled.speculative.model = model.name
    return filled


def _draft(name: str, folders: Sequence[Path]) -> Model:
    path = Path(name).expanduser()
    if path.exists() or name.startswith((".", "~", "/")) or path.suffix in _FILES:
        model = read_model(path, key="speculative.model")
        _hold_literally(model)
        return model
    try:
        option = _found(name, ids.index(folders)).option
    except RequestError as error:
        known = f"speculative.model: {error}"
        raise InvalidValue(known.partition("; with its config.json")[0] + _OR_PATH) from None
    for folder in folders:
        file = folder / "model" / f"{option}.yaml"
        if file.is_file():
            return _entry(file)
    options = sorted({path.stem for each in folders for path in (each / "model").glob("*.yaml")})
    raise InvalidValue(
        f"speculative.model {name} does not exist{nearest(option, options) or _OR_PATH}"
    )


def _entry(file: Path) -> Model:
    """One file of the catalogue, read without its group.

    Raises:
        InvalidValue: a value is not allowed.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(Model), OmegaConf.load(file))
        return cast(Model, OmegaConf.to_object(merged))
    except (OmegaConfBaseException, YAMLError) as error:
        raise InvalidValue(f"{file.name}: {str(error).splitlines()[0]}") from None


def _hold_literally(model: Model) -> None:
    """Break what would be an interpolation: texts of a file are facts, not configuration."""
    if model.path is not None:
        model.path = str(Path(model.path).absolute()).replace("${", r"\${")  # the same path
    for name in ("name", "hf_id", "source", "architecture", "model_type"):
        setattr(model, name, getattr(model, name).replace("${", "$ {"))
    model.notes = [note.replace("${", "$ {") for note in model.notes]
    if model.quantization_config is not None:
        stored = model.quantization_config
        stored.ignore = [text.replace("${", "$ {") for text in stored.ignore]
        stored.fp8 = [text.replace("${", "$ {") for text in stored.fp8]


def _given(node: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """What the user stated: on the line, or in a file with a value that is no default."""
    typed = {
        each.lstrip("+").partition("=")[0].removeprefix("model.").partition(".")[0]
        for each in overrides
        if each.lstrip("+").startswith("model.")
    }
    defaults = OmegaConf.structured(Model)
    given: dict[str, Any] = {}
    left_out = {"path", "config_path", *_partial(node)}
    for item in fields(Model):
        if item.name in left_out or OmegaConf.is_missing(node, item.name):
            continue
        value = node[item.name]
        default = None if OmegaConf.is_missing(defaults, item.name) else defaults[item.name]
        if item.name in typed or value != default:
            given[item.name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
    return given


def with_model_ids(overrides: Iterable[str], folders: Sequence[Path]) -> list[str]:
    """Overrides with Hugging Face ids replaced by the catalogue's options.

    `model.hf_id=ID` chooses the entry unless `model=` chooses one; `model=ID` does too. A quantised
    repository adds `quantization` and `kv_dtype` where they are not given.

    Raises:
        RequestError: no entry has the id.
    """
    overrides = list(overrides)
    chosen = any(_MODEL.fullmatch(each) for each in overrides)
    kept: list[str] = []
    for override in overrides:
        match = _MODEL.fullmatch(override)
        by_id = match is not None and "/" in match[1] and not _is_option(match[1], folders)
        if match is None and not chosen:
            match = _HF_ID.fullmatch(override)
            by_id = match is not None
        if match is None or not by_id:
            kept.append(override)
            continue
        names = [name.strip("'\" ") for name in match[1].split(",")]
        kept += _options(names, overrides, folders)
    return kept


def _is_option(name: str, folders: Sequence[Path]) -> bool:
    """Whether a value with a slash is a file in a folder below conf/model."""
    return any((folder / "model" / f"{name}.yaml").is_file() for folder in folders)


def config_folders(arguments: Iterable[str]) -> list[Path]:
    """The folders of YAML that --config-dir names on a command line."""
    arguments = list(arguments)
    folders = []
    for index, argument in enumerate(arguments):
        flag, given, value = argument.partition("=")
        if flag not in ("--config-dir", "-cd"):
            continue
        if not given and index + 1 < len(arguments):
            value = arguments[index + 1]
        folders.append(Path(value))
    return folders


def _options(names: Sequence[str], overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    known = ids.index(folders)
    found = [_found(name, known) for name in names]
    extra: list[str] = []
    as_first = [replace(each, option=found[0].option) for each in found]
    if any(each != found[0] for each in as_first):
        raise RequestError(
            f"{', '.join(names)} are stored in different formats: run them apart, or sweep over"
            " model and quantization"
        )
    quantization = found[0].quantization
    given = {each.lstrip("+").partition("=")[0] for each in overrides}
    stated = (
        ("quantization", quantization),
        ("kv_dtype", found[0].kv_dtype),
        ("model.kv_cache_scheme", found[0].kv_cache_scheme),
    )
    for key, value in stated:
        if value is not None and key not in given:
            extra.append(f"{key}={value.name}")
    own = {ids.own_format(folders, each.option) for each in found}
    replaces = quantization is not None and bool(own - {None, quantization.name})
    if (found[0].stored is not None or replaces) and not given & {"quantization", _STORED}:
        extra.append(f"{_STORED}={_written(found[0].stored)}")
    if found[0].experts is not None and "model.moe.format" not in given:
        extra.append(f"model.moe.format={found[0].experts}")
    options = [f"model={','.join(each.option for each in found)}"]
    if len(names) == 1:
        options.append(f"model.hf_id={names[0]}")
    return options + extra


def _written(stored: QuantizationConfig | None) -> str:
    """A format as the value of an override: JSON, but for keys without quotes."""
    if stored is None:
        return "null"
    default = asdict(QuantizationConfig())
    given = {key: value for key, value in asdict(stored).items() if value != default[key]}
    given["method"] = stored.method.name
    return f"{{{','.join(f'{key}:{json.dumps(value)}' for key, value in given.items())}}}"


def _found(name: str, known: Mapping[str, str]) -> ids.Known:
    if "/" not in name:
        return ids.Known(option=name)
    found = ids.find(name, known)
    if found is None:
        raise RequestError(
            f"no entry of the catalogue has the id {name}{nearest(name, known)}; with its"
            " config.json: model=hf model.path=FOLDER"
        )
    return found
