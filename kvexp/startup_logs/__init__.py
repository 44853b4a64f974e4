"""Start-up logs of engines, read into records: one JSON object for each start.

A record has the keys of a start's inputs at the top, `explicit` with those that were printed,
`outputs` with the figures that the engine printed and `extra` with further ones.
"""

from kvexp.startup_logs.costs import Costs, costs_of
from kvexp.startup_logs.keys import INPUTS
from kvexp.startup_logs.reading import UnreadableLog, arguments, as_input, full_name, read_log
from kvexp.startup_logs.text import read_text

__all__ = [
    "INPUTS",
    "Costs",
    "UnreadableLog",
    "arguments",
    "as_input",
    "costs_of",
    "full_name",
    "read_log",
    "read_text",
]
