"""Did the device run out of memory?"""

import re

_DEVICE_OOM = re.compile(
    r"(CUDA|HIP) out of memory"
    r"|(CUDA|HIP)( driver| runtime)? error:? out of memory"
    r"|Cuda failure( 2)? '?out of memory"
    r"|\b(cuda|hip)ErrorMemoryAllocation\b|\b(cuda|hip)ErrorOutOfMemory\b"
    r"|\bCUDA_ERROR_OUT_OF_MEMORY\b"
    r"|\b(CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED\b"
    r"|\bNVML_ERROR_MEMORY\b"
    # the driver query made while torch writes its out-of-memory message can itself fail
    r"|NVML_SUCCESS == r INTERNAL ASSERT FAILED[^\n]*CUDACachingAllocator",
    re.IGNORECASE,
)
_DEVICE_OOM_TYPES = frozenset({"OutOfMemoryError", "NVMLError_Memory"})


def is_out_of_memory(error: BaseException) -> bool:
    """True when the device ran out of memory, here or in an error that led here.

    Host memory (`MemoryError`, torch's CPU allocator), device-side assertions, missing kernels,
    too large a kernel and driver faults are other errors: a smaller model would not cure them.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(base.__name__ in _DEVICE_OOM_TYPES for base in type(link).__mro__):
            return True
        if not isinstance(link, MemoryError) and _DEVICE_OOM.search(str(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
