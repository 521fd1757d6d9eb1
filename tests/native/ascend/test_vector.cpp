// Vector instructions: results on ragged tiles, what they leave alone, and what they refuse.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/sim/core.hpp"
#include "tests/native/ascend/check.hpp"

using namespace mkernel::ascend;
using isa::Buffer;
using isa::DType;
using isa::Tile;
using sim::IsaError;
using sim::Kind;
using test::has;
using test::thrown;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kRows = 6, kCols = 40;

// Tiles of `kRows` x `kCols` one after another in UB, filled with the same random numbers; columns
// behind them.
struct Bench {
    explicit Bench(std::uint32_t rows = kRows, std::uint32_t cols = kCols)
        : rows(rows), cols(cols), core(environment, sim::Role::comm, 0, 1, memory, &trace) {
        std::mt19937 random(7);
        std::uniform_real_distribution<float> uniform(-3, 3);
        for (std::uint32_t i = 0; i < 8 * kRows * kCols; ++i) at(0)[i] = uniform(random);
    }
    [[nodiscard]] Tile tile(std::uint32_t number, DType dtype = DType::float32) const {
        return {.buffer = Buffer::UB,
                .dtype = dtype,
                .offset = number * kRows * kCols * 4,
                .rows = kRows,
                .cols = kCols,
                .valid_rows = rows,
                .valid_cols = cols};
    }
    [[nodiscard]] Tile column(std::uint32_t number) const {
        Tile made = tile(number);
        made.cols = made.valid_cols = 1;
        return made;
    }
    [[nodiscard]] float* at(std::uint32_t number) const {
        return reinterpret_cast<float*>(memory.at(Buffer::UB, number * kRows * kCols * 4));
    }
    // Runs an instruction that writes tile 2, which holds something else before, and counts the
    // elements that differ from `want(row, col)`, or from before outside the valid part.
    int wrong(Kind kind, const std::function<void()>& run,
              const std::function<float(std::uint32_t, std::uint32_t)>& want) {
        const std::vector<float> before(at(2), at(2) + kRows * kCols);
        trace.clear();
        run();
        int found = trace.size() == 1 && trace[0].kind == kind && trace[0].pipe == isa::Pipe::V &&
                            trace[0].amount == std::uint64_t{rows} * cols * 4
                        ? 0
                        : 1;
        for (std::uint32_t i = 0; i < kRows * kCols; ++i) {
            const std::uint32_t row = i / kCols, col = i % kCols;
            const bool valid = row < rows && col < cols;
            found += at(2)[i] == (valid ? want(row, col) : before[i]) ? 0 : 1;
        }
        return found;
    }

    std::uint32_t rows, cols;  // valid
    std::vector<sim::Record> trace;
    sim::Environment environment;
    sim::OnChip memory;
    sim::Core core;
};

void elements(std::uint32_t rows, std::uint32_t cols) {
    Bench bench(rows, cols);
    sim::Core& core = bench.core;
    const Tile a = bench.tile(0), b = bench.tile(1), c = bench.tile(2), each = bench.column(3);
    const auto x = [&](std::uint32_t i, std::uint32_t j) { return bench.at(0)[i * kCols + j]; };
    const auto y = [&](std::uint32_t i, std::uint32_t j) { return bench.at(1)[i * kCols + j]; };
    const auto z = [&](std::uint32_t i) { return bench.at(3)[i]; };
    using U = std::uint32_t;

    CHECK(bench.wrong(
              Kind::tadd, [&] { core.tadd(c, a, b); },
              [&](U i, U j) { return x(i, j) + y(i, j); }) == 0);
    CHECK(bench.wrong(
              Kind::tsub, [&] { core.tsub(c, a, b); },
              [&](U i, U j) { return x(i, j) - y(i, j); }) == 0);
    CHECK(bench.wrong(
              Kind::tmul, [&] { core.tmul(c, a, b); },
              [&](U i, U j) { return x(i, j) * y(i, j); }) == 0);
    CHECK(bench.wrong(
              Kind::tmax, [&] { core.tmax(c, a, b); },
              [&](U i, U j) { return std::max(x(i, j), y(i, j)); }) == 0);
    CHECK(bench.wrong(
              Kind::tmuls, [&] { core.tmuls(c, a, 0.3f); },
              [&](U i, U j) { return x(i, j) * 0.3f; }) == 0);
    CHECK(bench.wrong(
              Kind::texp, [&] { core.texp(c, a); }, [&](U i, U j) { return std::exp(x(i, j)); }) ==
          0);
    CHECK(bench.wrong(
              Kind::tfill, [&] { core.tfill(c, -kInfinity); }, [](U, U) { return -kInfinity; }) ==
          0);
    for (const int diagonal : {-2, 0, 3, 100}) {
        CHECK(bench.wrong(
                  Kind::ttril, [&] { core.ttril(c, a, diagonal, -7); },
                  [&](U i, U j) {
                      return static_cast<int>(j) <= static_cast<int>(i) + diagonal ? x(i, j) : -7;
                  }) == 0);
    }
    CHECK(bench.wrong(
              Kind::trowexpandsub, [&] { core.trowexpandsub(c, a, each); },
              [&](U i, U j) { return x(i, j) - z(i); }) == 0);
    CHECK(bench.wrong(
              Kind::trowexpandmul, [&] { core.trowexpandmul(c, a, each); },
              [&](U i, U j) { return x(i, j) * z(i); }) == 0);
    CHECK(bench.wrong(
              Kind::trowexpanddiv, [&] { core.trowexpanddiv(c, a, each); },
              [&](U i, U j) { return x(i, j) / z(i); }) == 0);
    // In place.
    std::vector<float> before(bench.at(2), bench.at(2) + kRows * kCols);
    CHECK(bench.wrong(
              Kind::tadd, [&] { core.tadd(c, c, c); },
              [&](U i, U j) { return 2 * before[i * kCols + j]; }) == 0);
    core.texp(c, c);
    before.assign(bench.at(2), bench.at(2) + kRows * kCols);
    CHECK(bench.wrong(
              Kind::tlog, [&] { core.tlog(c, c); },
              [&](U i, U j) { return std::log(before[i * kCols + j]); }) == 0);
}

void rows_are_reduced(std::uint32_t rows, std::uint32_t cols) {
    Bench bench(rows, cols);
    bench.at(0)[3] = bench.at(0)[17] = -kInfinity;
    const float after = bench.at(2)[rows];
    bench.core.trowmax(bench.column(2), bench.tile(0));
    int wrong = 0;
    for (std::uint32_t i = 0; i < rows; ++i) {
        const float* row = bench.at(0) + i * kCols;
        wrong += bench.at(2)[i] == *std::max_element(row, row + cols) ? 0 : 1;
    }
    bench.at(0)[3] = bench.at(0)[17] = 1;
    bench.core.trowsum(bench.column(2), bench.tile(0));
    for (std::uint32_t i = 0; i < rows; ++i) {
        double sum = 0;
        for (std::uint32_t j = 0; j < cols; ++j) sum += bench.at(0)[i * kCols + j];
        wrong += std::abs(bench.at(2)[i] - sum) < 1e-5 ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(bench.at(2)[rows] == after);
    CHECK(bench.trace.size() == 2 && bench.trace[0].kind == Kind::trowmax &&
          bench.trace[1].kind == Kind::trowsum &&
          bench.trace[0].amount == std::uint64_t{rows} * cols * 4);
}

// Nothing but -inf: the maximum is -inf, and no element is not a number.
void hidden_rows() {
    Bench bench;
    bench.core.tfill(bench.tile(0), -kInfinity);
    bench.core.trowmax(bench.column(2), bench.tile(0));
    CHECK(bench.at(2)[0] == -kInfinity);
    bench.core.texp(bench.tile(0), bench.tile(0));
    bench.core.trowsum(bench.column(2), bench.tile(0));
    CHECK(bench.at(2)[kRows - 1] == 0);
}

void conversions_there_and_back() {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
        Bench bench(4, 37);
        float* const values = bench.at(0);
        // Exact in 8 bits of precision.
        for (std::uint32_t i = 0; i < kRows * kCols; ++i) {
            values[i] = static_cast<float>(static_cast<int>(i) - 120);
        }
        bench.core.tcvt(bench.tile(1, dtype), bench.tile(0));
        CHECK(bench.wrong(
                  Kind::tcvt, [&] { bench.core.tcvt(bench.tile(2), bench.tile(1, dtype)); },
                  [&](std::uint32_t i, std::uint32_t j) { return values[i * kCols + j]; }) == 0);
    }
}

// 11 bits of precision: a step is 2^-9 from 2 on, 2^-10 below; ties go to even.
void halves_are_rounded() {
    Bench bench(4, 37);
    float* const values = bench.at(0);
    for (std::uint32_t i = 0; i < kRows * kCols; ++i) {
        values[i] = (i % 3 == 0 ? 1.0f : 2.0f) * (1 + static_cast<float>(i) * 0x1p-12f);
    }
    bench.core.tcvt(bench.tile(1, DType::float16), bench.tile(0));
    CHECK(bench.wrong(
              Kind::tcvt, [&] { bench.core.tcvt(bench.tile(2), bench.tile(1, DType::float16)); },
              [&](std::uint32_t i, std::uint32_t j) {
                  const float value = values[i * kCols + j], step = value < 2 ? 0x1p-10f : 0x1p-9f;
                  return std::nearbyint(value / step) * step;
              }) == 0);
}

void refusals() {
    Bench bench;
    sim::Core& core = bench.core;
    const Tile a = bench.tile(0), b = bench.tile(1);
    const auto refuses = [&](const char* part, const auto& act) {
        const std::string text = thrown<IsaError>(act);
        CHECK(has(text, part));
        CHECK(has(text, "test_vector.cpp:"));
    };
    refuses("TMAX: shapes do not match", [&] { core.tmax(a, a, b.with_valid(3, 8)); });
    refuses("TMULS: UB[196096, 197056)", [&] {
        Tile late = a;
        late.offset = 192000 + 4096;
        core.tmuls(late, a, 2);
    });
    refuses("takes float32", [&] { core.texp(a, bench.tile(1, DType::float16)); });
    refuses("converts from float32 or to float32",
            [&] { core.tcvt(bench.tile(0, DType::bfloat16), bench.tile(1, DType::float16)); });
    refuses("TROWMAX: shapes do not match", [&] { core.trowmax(b, a); });
    refuses("TROWSUM: shapes do not match",
            [&] { core.trowsum(bench.column(2).with_valid(3, 1), a); });
    refuses("TROWEXPANDDIV: shapes do not match", [&] { core.trowexpanddiv(a, a, b); });
    refuses("row-major tiles in UB", [&] {
        Tile column = a;
        column.layout = isa::Layout::column;
        core.tfill(column, 0);
    });
}

// Each input of an instruction counts as read, its output as written, for strict simulation.
void order_is_followed() {
    const auto says = [](const char* part, const auto& act) {
        sim::Environment environment;
        environment.dry = true;
        environment.strict.emplace();
        std::vector<std::byte> memory(1 << 16);
        environment.memory = {{memory.data(), memory.size(), true}};
        sim::OnChip chip;
        sim::Core core(environment, sim::Role::comm, 0, 1, chip, nullptr);
        const isa::GlobalView view{memory.data(), DType::float32, kRows, kCols, kCols, 1};
        CHECK(has(thrown<IsaError>([&] { act(core, view); }), part));
    };
    const Bench bench;
    const Tile a = bench.tile(0), b = bench.tile(1), each = bench.column(2);
    says("TROWEXPANDSUB (pipe V", [&](sim::Core& core, const isa::GlobalView& view) {
        core.tload(a, view);
        core.trowexpandsub(b, a, each);
    });
    says("reads UB[1920, 1944), which nothing has written",
         [&](sim::Core& core, const isa::GlobalView&) {
             core.tfill(a, 0);
             core.trowexpandsub(b, a, each);
         });
    says("TSTORE (pipe MTE3", [&](sim::Core& core, const isa::GlobalView& view) {
        core.tfill(a, 0);
        core.tstore(view, a);
    });
    says("TTRIL (pipe V", [&](sim::Core& core, const isa::GlobalView& view) {
        core.tfill(a, 0);
        core.set_flag(isa::Pipe::V, isa::Pipe::MTE3, 0);
        core.wait_flag(isa::Pipe::V, isa::Pipe::MTE3, 0);
        core.tstore(view, a);
        core.ttril(a, a, 0, 0);
    });
}

}  // namespace

int main() {
    for (const std::uint32_t cols : {kCols, kCols - 3, 1u}) {
        elements(kRows, cols);
        elements(kRows - 1, cols);
    }
    rows_are_reduced(kRows - 1, kCols);
    rows_are_reduced(kRows - 1, kCols - 3);
    rows_are_reduced(kRows - 2, 19);
    hidden_rows();
    conversions_there_and_back();
    halves_are_rounded();
    refusals();
    order_is_followed();
    return test::finish();
}
