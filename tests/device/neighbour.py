"""A neighbour on the first visible GPU: `neighbour.py GIB [GIB_A_STEP SECONDS_A_STEP STEPS]`.

Holds that much until it is killed; then grows, where it is told to.
"""

import ctypes
import sys
import time

GIB = 1 << 30
cuda = ctypes.CDLL("libcuda.so.1")
context, device = ctypes.c_void_p(), ctypes.c_int()


def call(name, *arguments):
    if code := getattr(cuda, name)(*arguments):
        sys.exit(f"{name}: error {code}")


def take(gib):
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(int(gib * GIB)))


call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
take(float(sys.argv[1]))
print("held", flush=True)
if len(sys.argv) > 2:
    size, pause, steps = float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    for _ in range(steps):
        time.sleep(pause)
        take(size)
time.sleep(3600)
