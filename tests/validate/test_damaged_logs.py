"""A log that is cut off or damaged is read, or is one line that says why not."""

import random
import re

import pytest
import sample_logs

from kvexp.startup_logs import UnreadableLog, read_log
from kvexp.validate.case import UnreadableRecord, case_of

LOGS = {name: text for name, text in vars(sample_logs).items() if name.isupper()}
ODD = ["-1", "0", "nan", "inf", "1e999", "9" * 400, "", "\ufffd", "{", "'", "[", "\r", "\x00"]


def check(text):
    try:
        case_of(read_log(text, "damaged"))
    except (UnreadableLog, UnreadableRecord) as error:
        assert len(str(error)) < 300
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_log_may_be_cut_anywhere(name):
    text = LOGS[name]
    for place in range(0, len(text), max(1, len(text) // 20)):
        check(text[:place])
        check(text[place:])


@pytest.mark.parametrize("name", sorted(LOGS))
def test_a_logs_figures_may_be_anything(name):
    drawn = random.Random(name)
    for _ in range(10):
        check(re.sub(r"\d+(\.\d+)?", lambda m: drawn.choice([m[0], m[0], *ODD]), LOGS[name]))
