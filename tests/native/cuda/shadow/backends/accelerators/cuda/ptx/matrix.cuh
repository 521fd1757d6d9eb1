// In place of the instructions of a GPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace mkernel::cuda::ptx {

template <class Element>
std::uint32_t pack(float low, float high) {
    const Element two[2] = {Element(low), Element(high)};
    std::uint32_t both;
    std::memcpy(&both, two, sizeof both);
    return both;
}
template <class Element>
float2 unpack(std::uint32_t both) {
    Element two[2];
    std::memcpy(static_cast<void*>(two), &both, sizeof both);
    return {static_cast<float>(two[0]), static_cast<float>(two[1])};
}

}  // namespace mkernel::cuda::ptx
