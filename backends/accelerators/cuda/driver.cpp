#include "backends/accelerators/cuda/driver.hpp"

#include <string>

#include "backends/accelerators/cuda/error.hpp"

namespace mkernel::cuda {

namespace {

// The interface that the types in the header were compiled against, whatever the driver's newest.
constexpr unsigned kInterface = CUDA_VERSION;

template <typename Function>
void look_up(Function& function, const char* name) {
    const std::string call = std::string("looking up ") + name + " in the CUDA driver";
    void* found = nullptr;
    cudaDriverEntryPointQueryResult answer{};
    check(cudaGetDriverEntryPointByVersion(name, &found, kInterface, cudaEnableDefault, &answer),
          call);
    if (answer != cudaDriverEntryPointSuccess || found == nullptr) {
        const bool old = answer == cudaDriverEntryPointVersionNotSufficent;
        throw CudaError(call, static_cast<int>(answer),
                        old ? "the driver is older than CUDA " + std::to_string(kInterface / 1000) +
                                  "." + std::to_string(kInterface / 10 % 100) + "; update it"
                            : "the driver does not have it");
    }
    function = reinterpret_cast<Function>(found);
}

Driver look_up_all() {
    Driver made{};
    look_up(made.get_error_name, "cuGetErrorName");
    look_up(made.device_get_attribute, "cuDeviceGetAttribute");
    look_up(made.device_get, "cuDeviceGet");
    look_up(made.ctx_create, "cuCtxCreate");
    look_up(made.ctx_push_current, "cuCtxPushCurrent");
    look_up(made.ctx_pop_current, "cuCtxPopCurrent");
    look_up(made.ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange");
    look_up(made.stream_create_with_priority, "cuStreamCreateWithPriority");
    look_up(made.stream_query, "cuStreamQuery");
    look_up(made.stream_wait_event, "cuStreamWaitEvent");
    look_up(made.event_create, "cuEventCreate");
    look_up(made.event_record, "cuEventRecord");
    look_up(made.thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
    look_up(made.mem_host_alloc, "cuMemHostAlloc");
    look_up(made.memcpy_async, "cuMemcpyAsync");
    look_up(made.mem_create, "cuMemCreate");
    look_up(made.mem_release, "cuMemRelease");
    look_up(made.mem_address_reserve, "cuMemAddressReserve");
    look_up(made.mem_address_free, "cuMemAddressFree");
    look_up(made.mem_map, "cuMemMap");
    look_up(made.mem_unmap, "cuMemUnmap");
    look_up(made.mem_set_access, "cuMemSetAccess");
    look_up(made.mem_get_allocation_granularity, "cuMemGetAllocationGranularity");
    look_up(made.mem_export_to_shareable_handle, "cuMemExportToShareableHandle");
    look_up(made.mem_import_from_shareable_handle, "cuMemImportFromShareableHandle");
    look_up(made.mem_get_handle_for_address_range, "cuMemGetHandleForAddressRange");
    look_up(made.tensor_map_encode_tiled, "cuTensorMapEncodeTiled");
    look_up(made.flush_gpu_direct_writes, "cuFlushGPUDirectRDMAWrites");
#if CUDA_VERSION >= 13000
    look_up(made.memcpy_batch, "cuMemcpyBatchAsync");
#endif
    look_up(made.stream_write_value, "cuStreamWriteValue64");
    look_up(made.stream_wait_value, "cuStreamWaitValue64");
    return made;
}

}  // namespace

const Driver& driver() {
    static const Driver found = look_up_all();  // a look-up that throws is tried again next time
    return found;
}

void fail(cudaError_t result, const std::string& call) {
    cudaGetLastError();  // told here; not to be found again by whoever asks next
    throw CudaError(call, result, cudaGetErrorName(result));
}

void fail(CUresult result, const std::string& call) {
    const char* name = nullptr;
    if (driver().get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) {
        name = "unknown error";
    }
    throw CudaError(call, result, name);
}

}  // namespace mkernel::cuda
