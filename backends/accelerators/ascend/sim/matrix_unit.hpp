// The host arithmetic behind the simulated matrix unit, chosen once for the CPU at hand.
//
// L0 tiles are kept as float32 in a layout that only this file and matrix_unit.cpp know:
//   A: rows x `lda`, row-major, rows padded with zeros to a multiple of `mr`;
//   B: panels of `nr` columns, each k x nr, columns padded with zeros;
//   C: blocks of mr x nr, the blocks of one column panel one after another.
// Every element of C is one chain of multiply-adds in ascending k, whatever the blocking, so
// results do not depend on tile sizes, on the number of cores or on the order of tiles. They may
// differ between CPU kinds (fused or separate multiply-add).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "backends/accelerators/ascend/isa/tile.hpp"

namespace mkernel::ascend::sim {

// A rectangle of source elements: element (r, c) at base + (r * row_stride + c * col_stride).
struct Source {
    const std::byte* base = nullptr;
    isa::DType dtype = isa::DType::float16;
    std::int64_t row_stride = 0, col_stride = 1;  // elements; one of the two is 1
};

struct MatrixUnit {
    const char* name;
    std::uint32_t mr, nr;

    // Packs rows x cols of `source` into the A layout. `out` holds round_up(rows, mr) * lda floats.
    void (*pack_a)(float* out, std::uint32_t lda, Source source, std::uint32_t rows,
                   std::uint32_t cols);
    // Packs k x n of `source` into the B layout. `out` holds k * round_up(n, nr) floats.
    void (*pack_b)(float* out, Source source, std::uint32_t k, std::uint32_t n);
    // Computes C (+)= A · B. `row_blocks` is the number of mr-blocks in one column panel of C's tile.
    void (*multiply)(float* c, std::uint32_t row_blocks, const float* a, std::uint32_t lda,
                     const float* b, std::uint32_t m, std::uint32_t n, std::uint32_t k,
                     bool accumulate);
    // Writes rows x cols of C to memory, rounding to nearest even. `row_stride` in elements.
    void (*unpack_c)(std::byte* out, isa::DType dtype, std::int64_t row_stride, const float* c,
                     std::uint32_t row_blocks, std::uint32_t rows, std::uint32_t cols);
};

// Returns the fastest unit this CPU runs; the same one for the whole life of the process.
const MatrixUnit& matrix_unit();

// Returns every unit that this CPU runs, fastest first; the last one is portable.
std::span<const MatrixUnit* const> matrix_units();

}  // namespace mkernel::ascend::sim
