// Warpgroup matrix products: D [64, N] += A [64, 16] @ B [16, N], float32 accumulators.
//
// A and B lie in shared memory, written by 128-byte-swizzled bulk tensor copies and named by
// descriptors. A is K-major (64 elements, 128 bytes, a row) or M-major (rows of K, one box of 64 columns);
// B is K-major (rows of N) or N-major (rows of K, boxes of 64 columns side by side). With e4m3 a product
// takes 32 of K, the same 32 bytes, and both operands are K-major. A thread's accumulators: for column block
// i of 8, d[4i], d[4i+1] are row lane/4, columns 2(lane%4) and the next; d[4i+2], d[4i+3] are row lane/4 + 8;
// warp w of the warpgroup holds rows 16w to 16w + 15 (PTX ISA, wgmma register fragments).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "backends/accelerators/cuda/ptx/mbarrier.cuh"
#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper::ptx {

// Orders the last access to accumulators by other instructions before the first wgmma.
__device__ inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kOpen>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

// Returns a matrix descriptor with the 128-byte swizzle. `leading` and `stride` in bytes (PTX ISA, matrix
// descriptor): K-major: stride = 1024, the next 8 rows; N-major: leading = next 64 columns, stride = 1024,
// the next 8 rows of K.
__device__ inline std::uint64_t descriptor(const void* at, std::uint32_t leading,
                                           std::uint32_t stride) {
    const auto encode = [](std::uint32_t bytes) {
        return static_cast<std::uint64_t>((bytes & 0x3FFFF) >> 4);
    };
    return encode(shared_address(at)) | encode(leading) << 16 | encode(stride) << 32 |
           std::uint64_t{1} << 62;
}

// `accumulate` false: D = A @ B. kNMajorB, kMMajorA: see above.

#define MKERNEL_ACC8(i)                                                                         \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])

#define MKERNEL_WGMMA_16(kind, transposed)                                                    \
    asm volatile(                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n16" kind                                            \
        " {"                                                                                  \
        "%0, %1, %2, %3, %4, %5, %6, %7"                                                      \
        "}, %8, %9, p, 1, 1" transposed ";\n}\n"                                              \
        : MKERNEL_ACC8(0)                                                                     \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0), \
          "n"(kMMajorA ? 1 : 0))

#define MKERNEL_WGMMA_32(kind, transposed)                                                    \
    asm volatile(                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n32" kind                                            \
        " {"                                                                                  \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                \
        "}, %16, %17, p, 1, 1" transposed ";\n}\n"                                            \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8)                                                    \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0), \
          "n"(kMMajorA ? 1 : 0))

#define MKERNEL_WGMMA_64(kind, transposed)                                                    \
    asm volatile(                                                                             \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                          \
        "wgmma.mma_async.sync.aligned.m64n64" kind                                            \
        " {"                                                                                  \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "              \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, "              \
        "%30, %31"                                                                            \
        "}, %32, %33, p, 1, 1" transposed ";\n}\n"                                            \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24)                \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0), \
          "n"(kMMajorA ? 1 : 0))

#define MKERNEL_WGMMA_128(kind, transposed)                                                       \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n128" kind                                               \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "        \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "        \
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "        \
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                    \
        "}, %64, %65, p, 1, 1" transposed ";\n}\n"                                                \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24), MKERNEL_ACC8(32), \
          MKERNEL_ACC8(40), MKERNEL_ACC8(48), MKERNEL_ACC8(56)                                    \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0),     \
          "n"(kMMajorA ? 1 : 0))

#define MKERNEL_WGMMA_192(kind, transposed)                                                       \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                              \
        "wgmma.mma_async.sync.aligned.m64n192" kind                                               \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "        \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "        \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"          \
        "}, %96, %97, p, 1, 1" transposed ";\n}\n"                                                \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24), MKERNEL_ACC8(32), \
          MKERNEL_ACC8(40), MKERNEL_ACC8(48), MKERNEL_ACC8(56), MKERNEL_ACC8(64),                 \
          MKERNEL_ACC8(72), MKERNEL_ACC8(80), MKERNEL_ACC8(88)                                    \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0),     \
          "n"(kMMajorA ? 1 : 0))

#define MKERNEL_WGMMA_256(kind, transposed)                                                       \
    asm volatile(                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                             \
        "wgmma.mma_async.sync.aligned.m64n256" kind                                               \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "        \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "        \
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "        \
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "        \
        "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "        \
        "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "        \
        "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "      \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "    \
        "%126, %127"                                                                              \
        "}, %128, %129, p, 1, 1" transposed ";\n}\n"                                              \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24), MKERNEL_ACC8(32), \
          MKERNEL_ACC8(40), MKERNEL_ACC8(48), MKERNEL_ACC8(56), MKERNEL_ACC8(64),                 \
          MKERNEL_ACC8(72), MKERNEL_ACC8(80), MKERNEL_ACC8(88), MKERNEL_ACC8(96),                 \
          MKERNEL_ACC8(104), MKERNEL_ACC8(112), MKERNEL_ACC8(120)                                 \
        : "l"(a), "l"(b), "r"(static_cast<std::uint32_t>(accumulate)), "n"(kNMajorB ? 1 : 0),     \
          "n"(kMMajorA ? 1 : 0))

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[8], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_16("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_16("k16.f32.f16.f16", ", %12, %11");
    } else {
        MKERNEL_WGMMA_16("k16.f32.bf16.bf16", ", %12, %11");
    }
}

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[16], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_32("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_32("k16.f32.f16.f16", ", %20, %19");
    } else {
        MKERNEL_WGMMA_32("k16.f32.bf16.bf16", ", %20, %19");
    }
}

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[32], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_64("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_64("k16.f32.f16.f16", ", %36, %35");
    } else {
        MKERNEL_WGMMA_64("k16.f32.bf16.bf16", ", %36, %35");
    }
}

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_128("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_128("k16.f32.f16.f16", ", %68, %67");
    } else {
        MKERNEL_WGMMA_128("k16.f32.bf16.bf16", ", %68, %67");
    }
}

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[96], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_192("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_192("k16.f32.f16.f16", ", %100, %99");
    } else {
        MKERNEL_WGMMA_192("k16.f32.bf16.bf16", ", %100, %99");
    }
}

template <class Element, bool kNMajorB, bool kMMajorA = false>
__device__ inline void wgmma(float (&d)[128], std::uint64_t a, std::uint64_t b, bool accumulate) {
    if constexpr (std::is_same_v<Element, __nv_fp8_e4m3>) {
        static_assert(!kNMajorB && !kMMajorA);
        MKERNEL_WGMMA_256("k32.f32.e4m3.e4m3", "");
    } else if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_256("k16.f32.f16.f16", ", %132, %131");
    } else {
        MKERNEL_WGMMA_256("k16.f32.bf16.bf16", ", %132, %131");
    }
}

#define MKERNEL_WGMMA_64_OF_REGISTERS(kind)                                                \
    asm volatile(                                                                          \
        "wgmma.mma_async.sync.aligned.m64n64" kind                                         \
        " {"                                                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"             \
        "}, {%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n"                                    \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24)             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kNMajorB ? 1 : 0))

#define MKERNEL_WGMMA_128_OF_REGISTERS(kind)                                                      \
    asm volatile(                                                                                 \
        "wgmma.mma_async.sync.aligned.m64n128" kind                                               \
        " {"                                                                                      \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "        \
        "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "        \
        "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "        \
        "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                    \
        "}, {%64, %65, %66, %67}, %68, 1, 1, 1, %69;\n"                                           \
        : MKERNEL_ACC8(0), MKERNEL_ACC8(8), MKERNEL_ACC8(16), MKERNEL_ACC8(24), MKERNEL_ACC8(32), \
          MKERNEL_ACC8(40), MKERNEL_ACC8(48), MKERNEL_ACC8(56)                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kNMajorB ? 1 : 0))

// Computes D += A @ B with A in registers: a[0], a[1] are rows lane/4 and lane/4 + 8, columns 2(lane%4) and
// the next; a[2], a[3] the same, 8 columns on. Accumulators of two column blocks, rounded in pairs, are
// therefore such an A. It must not be written before the product has been waited for.
template <class Element, bool kNMajorB>
__device__ inline void wgmma(float (&d)[32], const std::uint32_t* a, std::uint64_t b) {
    static_assert(sizeof(Element) == 2);
    if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_64_OF_REGISTERS("k16.f32.f16.f16");
    } else {
        MKERNEL_WGMMA_64_OF_REGISTERS("k16.f32.bf16.bf16");
    }
}
template <class Element, bool kNMajorB>
__device__ inline void wgmma(float (&d)[64], const std::uint32_t* a, std::uint64_t b) {
    static_assert(sizeof(Element) == 2);
    if constexpr (std::is_same_v<Element, __half>) {
        MKERNEL_WGMMA_128_OF_REGISTERS("k16.f32.f16.f16");
    } else {
        MKERNEL_WGMMA_128_OF_REGISTERS("k16.f32.bf16.bf16");
    }
}

// Orders the computation of these values before later code, and their uses after earlier code.
template <int kCount>
__device__ inline void hold(float (&values)[kCount]) {
#pragma unroll
    for (float& each : values) asm volatile("" : "+f"(each)::"memory");
}

#undef MKERNEL_WGMMA_128_OF_REGISTERS
#undef MKERNEL_WGMMA_64_OF_REGISTERS
#undef MKERNEL_WGMMA_256
#undef MKERNEL_WGMMA_192
#undef MKERNEL_WGMMA_128
#undef MKERNEL_WGMMA_64
#undef MKERNEL_WGMMA_32
#undef MKERNEL_WGMMA_16
#undef MKERNEL_ACC8

}  // namespace mkernel::hopper::ptx
