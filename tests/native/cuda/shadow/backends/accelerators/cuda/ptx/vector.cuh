// In place of the instructions of a GPU.
#pragma once

#include <cstdint>
#include <cstring>

namespace mkernel::cuda::ptx {

inline uint4 load_16(const void* from) {
    uint4 v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store_16(void* to, uint4 v) {
    std::memcpy(to, &v, sizeof v);
}

}  // namespace mkernel::cuda::ptx
