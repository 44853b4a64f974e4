"""Scratch of kernels on rows of int64, as torch 2.11.0+cu130 asked for it on an H200 (bytes)."""

from dataclasses import dataclass

import pytest

from kvexp.simulate import device, kernels

H200 = device.load("h200")

CUMSUM = {
    1000: [1279],
    8192: [1279],
    20000: [1535],
    65536: [2303],
    131072: [3583],
    400000: [8191],
    1048576: [19967],
    4194304: [76031],
    16777216: [300799],
}
SORT = {
    100: [800],
    1000: [8000],
    1024: [8192],
    1025: [8200],
    2048: [16384],
    2049: [16392],
    4096: [32768],
    4097: [32776, 83967],
    5000: [40000, 99327],
    8192: [65536, 150015],
    9216: [73728, 166399],
    9217: [73736, 167935],
    10000: [80000, 180223],
    13824: [110592, 241151],
    13825: [110600, 242687],
    16384: [131072, 283135],
    20000: [160000, 342015],
    32768: [262144, 549375],
    50000: [400000, 828415],
    65536: [524288, 1080831],
    100000: [800000, 1639423],
    131072: [1048576, 2143743],
    1048576: [8388608, 17027583],
}


@dataclass(frozen=True)
class Row:
    length: int
    dtype: str = "torch.int64"

    @property
    def shape(self):
        return (self.length,)

    def numel(self):
        return self.length

    def dim(self):
        return 1

    def element_size(self):
        return 8


def scratch(operator, length):
    row = Row(length)
    return kernels.SCRATCH[operator](kernels.Call((row, 0), {}, [row, row]), H200)


@pytest.mark.parametrize("length", CUMSUM)
def test_a_scan_of_one_row_asks_for_its_tiles_states(length):
    assert scratch("aten.cumsum.default", length) == CUMSUM[length]


@pytest.mark.parametrize("length", SORT)
def test_a_sort_of_one_row_asks_for_its_indices_and_a_long_one_for_buffers_and_states(length):
    assert scratch("aten.sort.default", length) == SORT[length]
