import pytest

from kvexp.workload import is_out_of_memory


class OutOfMemoryError(RuntimeError):
    """Named as torch's, and as deep in the hierarchy."""


class WorkerOutOfMemoryError(OutOfMemoryError):
    pass


class AcceleratorError(RuntimeError):
    pass


class NVMLError_Memory(Exception):  # noqa: N801
    pass


class NVMLError_GpuIsLost(Exception):  # noqa: N801
    pass


OUT_OF_MEMORY = [
    RuntimeError(
        "CUDA out of memory. Tried to allocate 448.00 MiB. GPU 0 has a total capacity of 139.80 GiB"
        " of which 122.32 GiB is free."
    ),
    RuntimeError(
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.78 GiB total capacity)"
    ),
    RuntimeError("HIP out of memory. Tried to allocate 1.00 GiB."),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in docs"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("cudaErrorMemoryAllocation: the API call failed to allocate enough memory"),
    RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: cuMemCreate failed"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("NCCL WARN Cuda failure 2 'out of memory'"),
    RuntimeError(
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED at"
        ' "/opt/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131, please report a bug'
    ),
    OutOfMemoryError("Allocation on device 0 would exceed allowed memory."),
    WorkerOutOfMemoryError("worker 3"),
    NVMLError_Memory("Insufficient Memory"),
]

OTHER = [
    MemoryError(),
    MemoryError("Unable to allocate 12.0 GiB for an array with shape (3, 1073741824)"),
    MemoryError("std::bad_alloc while handling: CUDA out of memory"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory:"
        " you tried to allocate 103079215104 bytes. Error code 12 (Cannot allocate memory)"
    ),
    OSError(12, "Cannot allocate memory"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: misaligned address"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA driver version is insufficient for CUDA runtime version"),
    RuntimeError("CUDA error: invalid device ordinal"),
    RuntimeError(
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must"
        " use the 'spawn' start method"
    ),
    RuntimeError("out of resource: shared memory, Required: 278528, Hardware limit: 232448"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at driver_api.cpp:40"),
    ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
    ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization"),
    TypeError("unexpected keyword argument 'out_of_memory'"),
    NVMLError_GpuIsLost("GPU is lost"),
    KeyboardInterrupt(),
]


def named(error):
    return f"{type(error).__name__}: {error}"[:60]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=named)
def test_device_memory_errors_are_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHER, ids=named)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


def test_the_table_is_balanced():
    assert len(OUT_OF_MEMORY) + len(OTHER) >= 20
    assert len(OTHER) >= len(OUT_OF_MEMORY)


def test_the_first_cause_counts_before_the_last_error():
    try:
        try:
            raise OUT_OF_MEMORY[0]
        except RuntimeError as error:
            raise KeyError("block 7") from error
    except KeyError as error:
        assert is_out_of_memory(error)


def test_the_context_counts_unless_it_is_suppressed():
    first, second = KeyError("left"), KeyError("hidden")
    first.__context__ = OUT_OF_MEMORY[0]
    second.__context__ = OUT_OF_MEMORY[0]
    second.__suppress_context__ = True
    assert is_out_of_memory(first)
    assert not is_out_of_memory(second)


def test_a_circle_of_causes_ends():
    first, second = KeyError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_the_error_is_not_kept():
    import gc
    import weakref

    error = OutOfMemoryError("CUDA out of memory")
    kept = weakref.ref(error)
    assert is_out_of_memory(error)
    del error
    gc.collect()
    assert kept() is None


def test_torch_raises_what_is_recognised():
    torch = pytest.importorskip("torch")
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert not is_out_of_memory(caught.value)
