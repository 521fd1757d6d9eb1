// The signature of a call, which differs between calls of an op: everything that its checks and its plan see
// of the arguments.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace mkernel::known {

constexpr int kMostDims = 4;
constexpr int kMostTensors = 6;
constexpr std::size_t kMostNameBytes = 32;

// All zero where the argument is None.
struct TensorSignature {
    std::int64_t shape[kMostDims];
    std::int64_t strides[kMostDims];  // in elements
    std::int32_t ndim;
    std::uint32_t dtype;  // code, bits and lanes
    std::int32_t device_type, device;
    std::int64_t buffer;  // 1 + the number of the symmetric buffer that holds it; 0: none does
    std::int64_t offset;  // in bytes, in that buffer
};

// Two signatures are equal exactly when their bytes are; there is no padding. Made all zero.
struct Signature {
    char op[kMostNameBytes];
    std::uintptr_t out_dtype;  // identity of torch's object, which lives as long as torch
    std::uint64_t use_fast_accum;
    TensorSignature tensors[kMostTensors];

    bool operator==(const Signature& other) const {
        return std::memcmp(this, &other, sizeof(Signature)) == 0;
    }
};
static_assert(sizeof(TensorSignature) == 8 * (2 * kMostDims + 2) + 16);
static_assert(sizeof(Signature) == kMostNameBytes + 16 + kMostTensors * sizeof(TensorSignature));

struct SignatureHash {
    std::size_t operator()(const Signature& signature) const {
        std::uint64_t words[sizeof(Signature) / 8];
        std::memcpy(words, &signature, sizeof(words));
        std::uint64_t hash = 0;
        for (const std::uint64_t word : words) {
            hash = (hash ^ word) * 0x9e3779b97f4a7c15;
            hash ^= hash >> 32;
        }
        return hash;
    }
};

}  // namespace mkernel::known
