// The driver functions that backends on CUDA devices call, looked up at run time: nothing links libcuda, so
// modules load, and report what is missing, on machines without a driver.
#pragma once

#include <cuda.h>

namespace mkernel::cuda {

struct Driver {
    decltype(&cuGetErrorName) get_error_name;
    decltype(&cuDeviceGetAttribute) device_get_attribute;
    decltype(&cuDeviceGet) device_get;
    decltype(&cuCtxCreate) ctx_create;
    decltype(&cuCtxPushCurrent) ctx_push_current;
    decltype(&cuCtxPopCurrent) ctx_pop_current;
    decltype(&cuCtxGetStreamPriorityRange) ctx_get_stream_priority_range;
    decltype(&cuStreamCreateWithPriority) stream_create_with_priority;
    decltype(&cuStreamQuery) stream_query;
    decltype(&cuStreamWaitEvent) stream_wait_event;
    decltype(&cuEventCreate) event_create;
    decltype(&cuEventRecord) event_record;
    decltype(&cuThreadExchangeStreamCaptureMode) thread_exchange_stream_capture_mode;
    decltype(&cuMemHostAlloc) mem_host_alloc;
    decltype(&cuMemcpyAsync) memcpy_async;
    decltype(&cuMemCreate) mem_create;
    decltype(&cuMemRelease) mem_release;
    decltype(&cuMemAddressReserve) mem_address_reserve;
    decltype(&cuMemAddressFree) mem_address_free;
    decltype(&cuMemMap) mem_map;
    decltype(&cuMemUnmap) mem_unmap;
    decltype(&cuMemSetAccess) mem_set_access;
    decltype(&cuMemGetAllocationGranularity) mem_get_allocation_granularity;
    decltype(&cuMemExportToShareableHandle) mem_export_to_shareable_handle;
    decltype(&cuMemImportFromShareableHandle) mem_import_from_shareable_handle;
    decltype(&cuMemGetHandleForAddressRange) mem_get_handle_for_address_range;
    decltype(&cuTensorMapEncodeTiled) tensor_map_encode_tiled;
    decltype(&cuFlushGPUDirectRDMAWrites) flush_gpu_direct_writes;
#if CUDA_VERSION >= 13000
    decltype(&cuMemcpyBatchAsync) memcpy_batch;
#endif
    decltype(&cuStreamWriteValue64) stream_write_value;
    decltype(&cuStreamWaitValue64) stream_wait_value;
};

// Returns the functions of the installed driver. Any thread. CudaError where there is no driver, or one that
// lacks a function (it names it).
const Driver& driver();

}  // namespace mkernel::cuda
