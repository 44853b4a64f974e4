"""`gpu=auto`: the facts of the card at hand, from the driver and the catalogue."""

import ctypes
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from kvexp.errors import RequestError
from kvexp.request import Gpu

OPTION = "auto"

# In a process of its own, so that this one holds nothing of CUDA; cuInit makes no context.
_PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
device, total = ctypes.c_int(), ctypes.c_size_t()
name = ctypes.create_string_buffer(256)
for call in (
    lambda: cuda.cuInit(0),
    lambda: cuda.cuDeviceGet(ctypes.byref(device), 0),
    lambda: cuda.cuDeviceGetName(name, 256, device),
    lambda: cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device),
):
    code = call()
    if code:
        raise SystemExit(f"the driver answers error {code}")
values = []
for attribute in (75, 76, 16):  # compute capability, multiprocessors
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    values.append(value.value)
print(name.value.decode(), total.value, *values, sep="\\t")
"""


def with_card(cfg: DictConfig, chosen: str, folders: Iterable[Path]) -> DictConfig:
    """The configuration with the facts of the card at hand, where `gpu=auto` was chosen.

    A card of the catalogue in `folders` with the same name gives what the driver does not tell;
    values that were given stay.

    Raises:
        RequestError: there is no card, or the driver does not answer.
    """
    if chosen != OPTION:
        return cfg
    facts = _catalogued(read := _ask_driver(), folders) | read
    with open_dict(cfg):
        for key, value in facts.items():
            if OmegaConf.is_missing(cfg.gpu, key) or cfg.gpu[key] is None:
                cfg.gpu[key] = value
    return cfg


def _ask_driver() -> dict[str, Any]:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise RequestError(
            "gpu=auto needs an NVIDIA GPU, and no driver is installed (libcuda.so.1);"
            " name a card instead, see python -m kvexp.list gpus"
        ) from None
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROBE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = answer.stdout.strip().split("\t")
    if answer.returncode or len(told) != 5:
        why = (answer.stderr.strip().splitlines() or ["the driver does not answer"])[-1]
        raise RequestError(f"gpu=auto cannot read the card: {why}")
    name, total, major, minor, sms = told
    return {
        "name": name,
        "source": "the driver of this machine",
        "total_bytes": int(total),
        "compute_capability": f"{major}.{minor}",
        "num_sms": int(sms),
    }


def _catalogued(read: dict[str, Any], folders: Iterable[Path]) -> dict[str, Any]:
    """What the catalogue knows of a card of that name beyond what the driver tells."""
    assumed = {"context_bytes": 552402944, "context_from": "h200"}
    for path in sorted(path for folder in folders for path in (folder / "gpu").glob("*.yaml")):
        facts = OmegaConf.to_container(OmegaConf.load(path))
        if isinstance(facts, dict) and facts.get("name") == read["name"]:
            known = {item.name for item in fields(Gpu)} - {"total_printed_gib", "total_bytes"}
            return assumed | {str(k): v for k, v in facts.items() if k in known}
    return assumed
