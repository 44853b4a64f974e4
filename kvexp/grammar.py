"""What kvexp adds to Hydra's grammar: versions and names stay text, and -m may stand anywhere."""

import re
from collections.abc import Iterable

from kvexp.errors import RequestError, nearest

_TEXT = re.compile(r"(?:engine\.version=[\w.,+-]+|(?:gpu|model)=\d+)")
_SWITCHES = (
    *("-m", "--multirun", "-r", "--run", "-h", "--help", "--hydra-help", "--version"),
    *("--resolve", "-sc", "--shell-completion"),
)
_CFG = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_KEYS = (
    *(
        "model",
        "gpu",
        "engine",
        "profiler",
        "tracking",
        "experiment",
        "sweep",
        "util",
        "tp",
        "pp",
        "dp",
    ),
    *("dtype", "kv_dtype", "quantization", "block_size", "max_model_len", "max_num_seqs"),
)
_WITH_VALUE: dict[str, tuple[str, ...]] = {
    "-c": _CFG,
    "--cfg": _CFG,
    "-i": _INFO,
    "--info": _INFO,
    "-p": (),
    "--package": (),
    "-cd": (),
    "--config-dir": (),
    "-cn": (),
    "--config-name": (),
    "-cp": (),
    "--config-path": (),
}


def keep_version_text(overrides: Iterable[str]) -> list[str]:
    """Quote every value of engine.version: Hydra would read 0.20 as the number 0.2.

    A name of digits alone too, such as gpu=4090, so that it is looked for like any other.
    """
    kept = []
    for override in overrides:
        if _TEXT.fullmatch(override):
            key, _, given = override.partition("=")
            values = ",".join(f"'{value}'" for value in given.split(","))
            override = f"{key}={values}"
        kept.append(override)
    return kept


def shown(override: str) -> str:
    """An override as a person would type it: texts without the quotes added here."""
    match = re.fullmatch(r"(engine\.version|gpu|model)='([^']*)'", override)
    return f"{match[1]}={match[2]}" if match else override


def flags_first(arguments: Iterable[str]) -> list[str]:
    """Move every flag and its value to the front: Hydra 1.3 refuses overrides on both sides.

    Raises:
        RequestError: a flag is not known, or its value is missing or not allowed.
    """
    flags: list[str] = []
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flag, given, value = argument.partition("=")
        if flag in _SWITCHES and not given:
            if argument not in flags:
                flags.append(argument)
            continue
        if flag not in _WITH_VALUE:
            if re.fullmatch(r"--\w+", flag) and flag.lstrip("-") in _KEYS:
                key = flag.lstrip("-")
                raise RequestError(f"unknown flag {flag}; write {key}={value or next(rest, '...')}")
            known = (*_SWITCHES, *_WITH_VALUE)
            hint = nearest(flag, known) or "; see python -m kvexp --help"
            raise RequestError(f"unknown flag {flag}{hint}")
        value = value if given else next(rest, "")
        allowed = _WITH_VALUE[flag]
        if not value or (allowed and value not in allowed):
            what = f"one of {', '.join(allowed)}" if allowed else "a value"
            raise RequestError(f"{flag} takes {what}, got {value!r}")
        flags += [flag, value]
    return [*flags, *overrides]
