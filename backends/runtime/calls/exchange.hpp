// The part of DLPack's exchange table (version 1.x) that reads a tensor and the current stream without
// a call into Python. Layouts are those of dlpack.h, which torch's wheel ships as ATen/dlpack.h.
#pragma once

#include <Python.h>

#include <cstdint>

namespace mkernel::calls {

struct DlDevice {
    std::int32_t type;
    std::int32_t index;
};

struct DlType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

// A view of a tensor; `shape` and `strides` (in elements) live as long as it.
struct DlTensor {
    void* data;
    DlDevice device;
    std::int32_t ndim;
    DlType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

constexpr std::int32_t kDlCpu = 1;
constexpr const char* kExchangeCapsule = "dlpack_exchange_api";
constexpr std::uint32_t kExchangeMajor = 1;

struct DlExchange {
    std::uint32_t major, minor;
    DlExchange* previous;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*read)(void* object, DlTensor* out);  // 0; -1 with a Python exception set. May be null
    int (*current_stream)(std::int32_t device_type, std::int32_t device, void** out);  // likewise
};

// Returns null, without an exception, where the capsule holds no table that can read tensors.
inline const DlExchange* exchange_of(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, kExchangeCapsule)) return nullptr;
    const auto* table =
        static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, kExchangeCapsule));
    while (table != nullptr && table->major > kExchangeMajor) table = table->previous;
    const bool fits = table != nullptr && table->major == kExchangeMajor &&
                      table->read != nullptr && table->current_stream != nullptr;
    return fits ? table : nullptr;
}

}  // namespace mkernel::calls
