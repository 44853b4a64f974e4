"""What was measured on one H200, for the tests of the simulation."""

import importlib.metadata
import importlib.util
import json
import lzma
from functools import cache
from pathlib import Path

DATA = Path(__file__).with_name("data")


@cache
def measured(name):
    with lzma.open(DATA / name, "rt") as stream:
        return json.load(stream)


@cache
def recorded_traces():
    """Of each model the loading, then its forwards, with integers as in a `Trace`.

    `sN` is a segment of N bytes that the driver gave for the next allocation.
    """
    with lzma.open(DATA / "h200_allocation_traces.jsonl.xz", "rt") as stream:
        return [json.loads(line) for line in stream]


def transformers_version():
    if importlib.util.find_spec("transformers") is None:
        return None
    return importlib.metadata.version("transformers")
