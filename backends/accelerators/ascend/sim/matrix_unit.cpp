#include "backends/accelerators/ascend/sim/matrix_unit.hpp"

#include <cstring>
#include <vector>

#include "backends/accelerators/ascend/sim/number.hpp"

// One body, instantiated for each CPU kind inside a function that carries the target attribute; the
// bodies are always inlined there. This file is compiled with -ffp-contract=fast, so that products
// and sums fuse where the target can. Plain GCC vector extensions: portable to aarch64.

namespace mkernel::ascend::sim {
namespace {

template <int Lanes>
struct Vec {
    using F __attribute__((vector_size(Lanes * 4), aligned(4), may_alias)) = float;
    using I __attribute__((vector_size(Lanes * 4))) = std::int32_t;
    using U __attribute__((vector_size(Lanes * 4))) = std::uint32_t;
    using W __attribute__((vector_size(Lanes * 2), aligned(2), may_alias)) = std::uint16_t;
};

// `count` contiguous elements → float32.
template <int Lanes, isa::DType Kind>
MKERNEL_INLINE void widen_run(float* out, const std::byte* in, std::uint32_t count) {
    using V = Vec<Lanes>;
    std::uint32_t i = 0;
    for (; i + Lanes <= count; i += Lanes) {
        typename V::F value;
        if constexpr (Kind == isa::DType::float32) {
            value = *reinterpret_cast<const typename V::F*>(in + i * 4);
        } else if constexpr (Kind == isa::DType::float16) {
            // Compilers widen halves one by one; in integers it is seven vector operations. The
            // product rescales the exponent and normalizes subnormals exactly.
            const auto bits = __builtin_convertvector(
                *reinterpret_cast<const typename V::W*>(in + i * 2), typename V::U);
            const auto scaled = reinterpret_cast<typename V::F>((bits & 0x7fffu) << 13) * 0x1p112f;
            const auto special = reinterpret_cast<typename V::U>((bits & 0x7c00u) == 0x7c00u);
            value =
                reinterpret_cast<typename V::F>(reinterpret_cast<typename V::U>(scaled) |
                                                (special & 0x7f800000u) | ((bits & 0x8000u) << 16));
        } else {
            const auto bits = __builtin_convertvector(
                *reinterpret_cast<const typename V::W*>(in + i * 2), typename V::U);
            value = reinterpret_cast<typename V::F>(bits << 16);
        }
        *reinterpret_cast<typename V::F*>(out + i) = value;
    }
    for (; i < count; ++i) out[i] = widen(in + i * isa::bytes_of(Kind), Kind);
}

template <int Lanes>
MKERNEL_INLINE void widen_run(float* out, const std::byte* in, isa::DType dtype,
                              std::uint32_t count) {
    switch (dtype) {
        case isa::DType::float16:
            return widen_run<Lanes, isa::DType::float16>(out, in, count);
        case isa::DType::bfloat16:
            return widen_run<Lanes, isa::DType::bfloat16>(out, in, count);
        case isa::DType::float32:
            return widen_run<Lanes, isa::DType::float32>(out, in, count);
        case isa::DType::int32:
            return;  // never in L1
    }
}

// Butterfly transpose of a Lanes x Lanes block held in vectors.
template <int Lanes>
MKERNEL_INLINE void transpose(typename Vec<Lanes>::F (&rows)[Lanes]) {
    using V = Vec<Lanes>;
#pragma GCC unroll 4
    for (int s = Lanes / 2; s > 0; s /= 2) {
        typename V::I low, high;
#pragma GCC unroll 16
        for (int lane = 0; lane < Lanes; ++lane) {
            low[lane] = (lane & s) == 0 ? lane : lane - s + Lanes;
            high[lane] = (lane & s) == 0 ? lane + s : lane + Lanes;
        }
#pragma GCC unroll 16
        for (int i = 0; i < Lanes; ++i) {
            if ((i & s) != 0) continue;
            const typename V::F a = rows[i], b = rows[i + s];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + s] = __builtin_shuffle(a, b, high);
        }
    }
}

template <int Lanes, int Mr>
MKERNEL_INLINE void pack_a_body(float* out, std::uint32_t lda, Source source, std::uint32_t rows,
                                std::uint32_t cols) {
    const std::uint32_t size = isa::bytes_of(source.dtype);
    for (std::uint32_t r = 0; r < rows; ++r) {
        float* row = out + std::size_t{r} * lda;
        const std::byte* from = source.base + r * source.row_stride * size;
        if (source.col_stride == 1) {
            widen_run<Lanes>(row, from, source.dtype, cols);
        } else {
            for (std::uint32_t c = 0; c < cols; ++c) {
                row[c] = widen(from + c * source.col_stride * size, source.dtype);
            }
        }
    }
    for (std::uint32_t r = rows; r % Mr != 0; ++r) {
        std::memset(out + std::size_t{r} * lda, 0, std::size_t{cols} * 4);
    }
}

template <int Lanes, int Nr>
MKERNEL_INLINE void pack_b_body(float* out, Source source, std::uint32_t k, std::uint32_t n) {
    const std::uint32_t size = isa::bytes_of(source.dtype);
    for (std::uint32_t j = 0; j < n; j += Nr) {
        float* panel = out + std::size_t{j} * k;
        const std::uint32_t width = n - j < Nr ? n - j : Nr;
        if (source.col_stride == 1) {
            for (std::uint32_t r = 0; r < k; ++r) {
                float* row = panel + std::size_t{r} * Nr;
                const std::byte* from = source.base + (r * source.row_stride + j) * size;
                if (width == Nr) {
                    widen_run<Lanes>(row, from, source.dtype, Nr);
                } else {
                    widen_run<Lanes>(row, from, source.dtype, width);
                    std::memset(row + width, 0, (Nr - width) * 4);
                }
            }
            continue;
        }
        // Columns contiguous along k: convert Lanes columns x Lanes rows, transpose, store.
        for (std::uint32_t block = 0; block < Nr; block += Lanes) {
            for (std::uint32_t r = 0; r < k; r += Lanes) {
                const std::uint32_t depth = k - r < Lanes ? k - r : Lanes;
                typename Vec<Lanes>::F rows[Lanes];
#pragma GCC unroll 16
                for (std::uint32_t c = 0; c < Lanes; ++c) {
                    alignas(64) float line[Lanes] = {};
                    if (block + c < width) {
                        const std::byte* from =
                            source.base + ((j + block + c) * source.col_stride + r) * size;
                        widen_run<Lanes>(line, from, source.dtype, depth);
                    }
                    rows[c] = *reinterpret_cast<const typename Vec<Lanes>::F*>(line);
                }
                transpose<Lanes>(rows);
                float* to = panel + std::size_t{r} * Nr + block;
                if (depth == Lanes) {
#pragma GCC unroll 16
                    for (std::uint32_t d = 0; d < Lanes; ++d) {
                        *reinterpret_cast<typename Vec<Lanes>::F*>(to + d * Nr) = rows[d];
                    }
                } else {
                    for (std::uint32_t d = 0; d < depth; ++d) {
                        *reinterpret_cast<typename Vec<Lanes>::F*>(to + d * Nr) = rows[d];
                    }
                }
            }
        }
    }
}

template <int Lanes, int Mr, int Nv>
MKERNEL_INLINE void multiply_body(float* c, std::uint32_t row_blocks, const float* a,
                                  std::uint32_t lda, const float* b, std::uint32_t m,
                                  std::uint32_t n, std::uint32_t k, bool accumulate) {
    using F = typename Vec<Lanes>::F;
    constexpr int kNr = Lanes * Nv;
    for (std::uint32_t j = 0; j < n; j += kNr) {
        const float* panel = b + std::size_t{j} * k;
        for (std::uint32_t i = 0; i < m; i += Mr) {
            float* block = c + (std::size_t{j / kNr} * row_blocks + i / Mr) * (Mr * kNr);
            const float* rows = a + std::size_t{i} * lda;
            F sum[Mr][Nv];
#pragma GCC unroll 16
            for (int r = 0; r < Mr; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < Nv; ++v) {
                    sum[r][v] =
                        accumulate ? *reinterpret_cast<F*>(block + r * kNr + v * Lanes) : F{};
                }
            }
#pragma GCC unroll 2
            for (std::uint32_t p = 0; p < k; ++p) {
                F right[Nv];
#pragma GCC unroll 8
                for (int v = 0; v < Nv; ++v) {
                    right[v] =
                        *reinterpret_cast<const F*>(panel + std::size_t{p} * kNr + v * Lanes);
                }
#pragma GCC unroll 16
                for (int r = 0; r < Mr; ++r) {
                    const float left = rows[std::size_t(r) * lda + p];
#pragma GCC unroll 8
                    for (int v = 0; v < Nv; ++v) sum[r][v] += left * right[v];
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < Mr; ++r) {
#pragma GCC unroll 8
                for (int v = 0; v < Nv; ++v) {
                    *reinterpret_cast<F*>(block + r * kNr + v * Lanes) = sum[r][v];
                }
            }
        }
    }
}

template <int Mr, int Nr>
MKERNEL_INLINE void unpack_c_body(std::byte* out, isa::DType dtype, std::int64_t row_stride,
                                  const float* c, std::uint32_t row_blocks, std::uint32_t rows,
                                  std::uint32_t cols) {
    const std::uint32_t size = isa::bytes_of(dtype);
    for (std::uint32_t r = 0; r < rows; ++r) {
        for (std::uint32_t j = 0; j < cols; j += Nr) {
            const float* line = c + (std::size_t{j / Nr} * row_blocks + r / Mr) * (Mr * Nr) +
                                std::size_t{r % Mr} * Nr;
            std::byte* to = out + (r * row_stride + j) * size;
            const std::uint32_t width = cols - j < Nr ? cols - j : Nr;
            narrow_run(to, dtype, line, width);
        }
    }
}

// A unit whose functions are compiled for `TARGET`, with blocks of MR rows x NV vectors of LANES.
#define MKERNEL_MATRIX_UNIT(ID, TARGET, LANES, MR, NV)                                             \
    TARGET void pack_a_##ID(float* out, std::uint32_t lda, Source source, std::uint32_t rows,      \
                            std::uint32_t cols) {                                                  \
        pack_a_body<LANES, MR>(out, lda, source, rows, cols);                                      \
    }                                                                                              \
    TARGET void pack_b_##ID(float* out, Source source, std::uint32_t k, std::uint32_t n) {         \
        pack_b_body<LANES, LANES * NV>(out, source, k, n);                                         \
    }                                                                                              \
    TARGET void multiply_##ID(float* c, std::uint32_t row_blocks, const float* a,                  \
                              std::uint32_t lda, const float* b, std::uint32_t m, std::uint32_t n, \
                              std::uint32_t k, bool accumulate) {                                  \
        multiply_body<LANES, MR, NV>(c, row_blocks, a, lda, b, m, n, k, accumulate);               \
    }                                                                                              \
    TARGET void unpack_c_##ID(std::byte* out, isa::DType dtype, std::int64_t row_stride,           \
                              const float* c, std::uint32_t row_blocks, std::uint32_t rows,        \
                              std::uint32_t cols) {                                                \
        unpack_c_body<MR, LANES * NV>(out, dtype, row_stride, c, row_blocks, rows, cols);          \
    }                                                                                              \
    constexpr MatrixUnit k_##ID{#ID,           MR,           LANES * NV, pack_a_##ID, pack_b_##ID, \
                                multiply_##ID, unpack_c_##ID};

MKERNEL_MATRIX_UNIT(portable, , 4, 4, 4)
#if defined(__x86_64__)
MKERNEL_MATRIX_UNIT(avx2, __attribute__((target("arch=x86-64-v3"))), 8, 4, 2)
MKERNEL_MATRIX_UNIT(avx512, __attribute__((target("arch=x86-64-v4"))), 16, 8, 2)
#endif

}  // namespace

std::span<const MatrixUnit* const> matrix_units() {
    static const std::vector<const MatrixUnit*> units = [] {
        std::vector<const MatrixUnit*> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("x86-64-v4")) found.push_back(&k_avx512);
        if (__builtin_cpu_supports("x86-64-v3")) found.push_back(&k_avx2);
#endif
        found.push_back(&k_portable);
        return found;
    }();
    return units;
}

const MatrixUnit& matrix_unit() {
    static const MatrixUnit& unit = *matrix_units().front();
    return unit;
}

}  // namespace mkernel::ascend::sim
