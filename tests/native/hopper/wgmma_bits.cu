// Bits of one output element by every kind of wgmma that kernels here use: which of them add alike?
//
//   wgmma_bits        prints {dtype: {operands: {kind: [bits, ...]}}}, the bits of x . y as hexadecimal float32
//
// A row x of A meets a column y of B, at several places of the tile: among other rows and columns of the same kind,
// then with every row x and every column y. All bits that came are listed, so a list of one says that neither the place nor
// the neighbours matter. Kinds are named by the shape, then by how operands lie: `n256`; `nmajor`, B in rows of K;
// `mmajor`, A in rows of K; `weights`, y as A and x as B, as kernels/gemm/few_rows has them; `registers`, A from
// registers; `promoted`, of e4m3, each 128 of K by itself and then added. Two are planted: `shuffled` takes K in
// another order, and `halves` adds two halves of K.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/ptx/sync.cuh"
#include "backends/accelerators/hopper/ptx/wgmma.cuh"
#include "backends/accelerators/hopper/tile/block.cuh"

namespace ptx = mkernel::hopper::ptx;
using mkernel::cuda::check;
using mkernel::hopper::kElementBytes;
using mkernel::hopper::kSliceN;
using mkernel::hopper::kStepK;
using mkernel::hopper::kTileK;
using mkernel::hopper::kWarpgroup;

namespace {

constexpr int kRows = 64;  // of A: those of a warpgroup
constexpr int kMostColumns = 256;
constexpr int kRowBytes = kTileK * kElementBytes;

enum class Form { shared, n_major, m_major, registers, promoted };

// An operand: at `place`, or everywhere where that is negative, is `line`; elsewhere are lines [256, k] of others.
template <class In>
struct Operand {
    const In* line;
    const In* others;
    int place;

    __device__ const In* at(int which, int k) const {
        return place < 0 || which == place ? line : others + std::int64_t{which} * k;
    }
};

template <class In>
struct Args {
    Operand<In> a, b;
    int k, begin, end;  // lines' length, and what of them is multiplied
    float* out;         // [64, kN]
};

// Fills a stage as a bulk tensor copy with the 128-byte swizzle does: lines of K.
template <class In>
__device__ void fill_lines(unsigned char* to, const Operand<In>& from, int lines, int k,
                           int first) {
    constexpr int kElements = 16 / sizeof(In);
    for (int i = threadIdx.x; i < lines * 8; i += kWarpgroup) {
        const int line = i / 8, vector = i % 8;
        *reinterpret_cast<uint4*>(to + line * kRowBytes + (vector ^ line % 8) * 16) =
            *reinterpret_cast<const uint4*>(from.at(line, k) + first + vector * kElements);
    }
}

// The same of an operand that lies in rows of K: boxes of 64 columns side by side.
template <class In>
__device__ void fill_rows_of_k(unsigned char* to, const Operand<In>& from, int lines, int k,
                               int first) {
    for (int i = threadIdx.x; i < lines * kTileK; i += kWarpgroup) {
        const int line = i % lines, depth = i / lines;
        const int column = line % kSliceN;
        unsigned char* const box = to + line / kSliceN * kTileK * kRowBytes;
        *reinterpret_cast<In*>(box + depth * kRowBytes + (column / 8 ^ depth % 8) * 16 +
                               column % 8 * sizeof(In)) = from.at(line, k)[first + depth];
    }
}

// Returns two neighbours of a line as a register of A has them.
template <class In>
__device__ std::uint32_t pair(const Operand<In>& a, int row, int k, int at) {
    return *reinterpret_cast<const std::uint32_t*>(a.at(row, k) + at);
}

template <class In, int kN, Form kForm>
__global__ void __launch_bounds__(kWarpgroup) product(const __grid_constant__ Args<In> args) {
    __shared__ alignas(1024) unsigned char a[kRows * kRowBytes];
    __shared__ alignas(1024) unsigned char b[kN * kRowBytes];
    constexpr bool kNMajorB = kForm == Form::n_major || kForm == Form::registers;
    constexpr bool kMMajorA = kForm == Form::m_major;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
    float sum[kN / 2] = {};
    float total[kForm == Form::promoted ? kN / 2 : 1] = {};
    for (int first = args.begin; first < args.end; first += kStepK<In>) {
        if constexpr (kMMajorA) {
            fill_rows_of_k(a, args.a, kRows, args.k, first);
        } else {
            fill_lines(a, args.a, kRows, args.k, first);
        }
        if constexpr (kNMajorB) {
            fill_rows_of_k(b, args.b, kN, args.k, first);
        } else {
            fill_lines(b, args.b, kN, args.k, first);
        }
        std::uint32_t registers[4][4] = {};
        if constexpr (kForm == Form::registers) {
            for (int step = 0; step < 4; ++step) {
                for (int i = 0; i < 4; ++i) {
                    const int at = first + step * 16 + i / 2 * 8 + lane % 4 * 2;
                    registers[step][i] = pair(args.a, row + i % 2 * 8, args.k, at);
                }
            }
        }
        ptx::fence_async_shared();
        __syncthreads();
        std::uint64_t a_place = ptx::descriptor(a, 0, 8 * kRowBytes);
        std::uint64_t b_place =
            ptx::descriptor(b, kNMajorB ? kTileK * kRowBytes : 0, 8 * kRowBytes);
        ptx::hold(sum);
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            if constexpr (kForm == Form::registers) {
                ptx::wgmma<In, kNMajorB>(sum, registers[step], b_place);
            } else {
                ptx::wgmma<In, kNMajorB, kMMajorA>(sum, a_place, b_place,
                                                   kForm != Form::promoted || step > 0);
            }
            a_place += (kMMajorA ? 16 * kRowBytes : 16 * kElementBytes) >> 4;
            b_place += (kNMajorB ? 16 * kRowBytes : 16 * kElementBytes) >> 4;
        }
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::hold(sum);
        if constexpr (kForm == Form::promoted) {
            for (int i = 0; i < kN / 2; ++i) total[i] += sum[i];
        }
        __syncthreads();
    }
    for (int i = 0; i < kN / 2; ++i) {
        const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        args.out[(row + i / 2 % 2 * 8) * kN + column] =
            kForm == Form::promoted ? total[i % std::size(total)] : sum[i];
    }
}

template <class T>
class Buffer {
  public:
    explicit Buffer(std::size_t count) : count_(count) {
        check(cudaMalloc(&at_, count * sizeof(T)), "allocating");
    }
    ~Buffer() { cudaFree(at_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    [[nodiscard]] T* at() const { return at_; }
    void fill(const std::vector<T>& from) {
        check(cudaMemcpy(at_, from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), "filling");
    }
    [[nodiscard]] std::vector<T> copy() const {
        std::vector<T> found(count_);
        check(cudaMemcpy(found.data(), at_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "reading");
        return found;
    }

  private:
    T* at_ = nullptr;
    std::size_t count_;
};

// Operands that show an order: sums that cancel, terms of many sizes, terms that are subnormal, a long K.
struct Kind {
    const char* name;
    int k;
    int least, most;  // exponents
    bool cancels;
};

template <class In>
std::vector<Kind> kinds() {
    constexpr bool kWide = std::is_same_v<In, __nv_bfloat16>;
    constexpr int kRange = kWide ? 16 : std::is_same_v<In, __half> ? 7 : 4;
    constexpr int kTiny = kWide                        ? -70
                          : std::is_same_v<In, __half> ? -18
                                                       : -8;  // of a product: twice
    return {{"plain", 4096, -1, 0, false},
            {"mixed", 4096, -kRange, kRange, false},
            {"cancelling", 4096, -kRange, kRange, true},
            {"subnormal", 4096, kTiny - 3, kTiny + 2, false},
            {"long", 32768, -1, 0, false}};
}

std::vector<float> drawn(const Kind& kind, std::mt19937_64& bits) {
    std::vector<float> line(kind.k);
    for (float& each : line) {
        const std::uint64_t word = bits();
        const float fraction = 1.0f + static_cast<float>(word >> 40) * 0x1p-24f;
        const int range = kind.most - kind.least + 1;
        each = std::ldexp(fraction, kind.least + static_cast<int>(word % range));
        if ((word >> 32 & 1) != 0) each = -each;
    }
    return line;
}

template <class In>
std::vector<In> rounded(const std::vector<float>& line) {
    std::vector<In> found;
    found.reserve(line.size());
    for (const float each : line) found.push_back(static_cast<In>(each));
    return found;
}

template <class In>
class Experiment {
  public:
    explicit Experiment(const Kind& kind)
        : k_(kind.k),
          x_(k_),
          y_(k_),
          rows_(kMostColumns * k_),
          columns_(kMostColumns * k_),
          out_(kRows * kMostColumns) {
        std::mt19937_64 bits(0x5EED + kind.k);
        line_x_ = drawn(kind, bits);
        line_y_ = drawn(kind, bits);
        order_.resize(k_);
        std::iota(order_.begin(), order_.end(), 0);
        for (int i = k_ - 1; i > 0; --i) std::swap(order_[i], order_[bits() % (i + 1)]);
        if (kind.cancels) {  // all but the last 64 in pairs
            for (int i = 0; i + 1 < k_ - 64; i += 2) {
                line_x_[order_[i + 1]] = -line_x_[order_[i]];
                line_y_[order_[i + 1]] = line_y_[order_[i]];
            }
        }
        std::vector<float> rows, columns;
        for (int line = 0; line < kMostColumns; ++line) {
            for (auto* each : {&rows, &columns}) {
                const auto more = drawn(kind, bits);
                each->insert(each->end(), more.begin(), more.end());
            }
        }
        rows_.fill(rounded<In>(rows));
        columns_.fill(rounded<In>(columns));
        place(false);
    }

    std::map<std::string, std::set<std::uint32_t>> run() {
        constexpr bool kScaled = sizeof(In) == 1;
        std::map<std::string, std::set<std::uint32_t>> found;
        each_shape<Form::shared, 16, 32, 64, 128, 192, 256>(found, "", false);
        each_shape<Form::shared, 16, 32, 64, 128>(found, " weights", true);
        if constexpr (kScaled) {
            each_shape<Form::promoted, 128>(found, " promoted", false);
        } else {
            each_shape<Form::n_major, 128, 192, 256>(found, " nmajor", false);
            each_shape<Form::m_major, 16, 32, 64, 128>(found, " weights mmajor", true);
            each_shape<Form::registers, 128>(found, " registers", false);
        }
        for (const std::uint32_t low : bits_of<Form::shared, 256>(false, 0, k_ / 2)) {
            for (const std::uint32_t high : bits_of<Form::shared, 256>(false, k_ / 2, k_)) {
                found["halves"].insert(std::bit_cast<std::uint32_t>(std::bit_cast<float>(low) +
                                                                    std::bit_cast<float>(high)));
            }
        }
        place(true);
        found["shuffled"] = bits_of<Form::shared, 256>(false, 0, k_);
        for (const auto& [name, bits] : found) judge(name, bits);
        return found;
    }

  private:
    // Throws unless all of them are the product, as far as matrix units add.
    void judge(const std::string& name, const std::set<std::uint32_t>& found) const {
        const auto x = rounded<In>(line_x_), y = rounded<In>(line_y_);
        double exact = 0, sizes = 0;
        for (int i = 0; i < k_; ++i) {
            const double term = double{static_cast<float>(x[i])} * double{static_cast<float>(y[i])};
            exact += term;
            sizes += std::abs(term);
        }
        const double limit = sizes * (sizeof(In) == 1 ? 0x1p-6 : 0x1p-12) + 0x1p-140;
        for (const std::uint32_t bits : found) {
            if (!(std::abs(double{std::bit_cast<float>(bits)} - exact) <= limit)) {
                throw std::runtime_error(name + " is " +
                                         std::to_string(std::bit_cast<float>(bits)) +
                                         ", which is wrong: " + std::to_string(exact));
            }
        }
    }

    void place(bool shuffled) {
        std::vector<float> x = line_x_, y = line_y_;
        for (int i = 0; shuffled && i < k_; ++i) {
            x[i] = line_x_[order_[i]];
            y[i] = line_y_[order_[i]];
        }
        x_.fill(rounded<In>(x));
        y_.fill(rounded<In>(y));
    }

    template <Form kForm, int... kN>
    void each_shape(std::map<std::string, std::set<std::uint32_t>>& found, const char* how,
                    bool weights) {
        ((found["n" + std::to_string(kN) + how] = bits_of<kForm, kN>(weights, 0, k_)), ...);
    }

    // Returns what comes at several places among others, and everywhere among the same.
    template <Form kForm, int kN>
    std::set<std::uint32_t> bits_of(bool weights, int begin, int end) {
        Operand<In> x{x_.at(), rows_.at(), 0}, y{y_.at(), columns_.at(), 0};
        std::set<std::uint32_t> found;
        const auto take = [&](int row, int column) {
            Operand<In> a = weights ? y : x, b = weights ? x : y;
            a.place = row;
            b.place = column;
            product<In, kN, kForm><<<1, kWarpgroup>>>({a, b, k_, begin, end, out_.at()});
            check(cudaGetLastError(), "starting a product");
            const std::vector<float> out = out_.copy();
            for (int i = 0; i < kRows * kN; ++i) {
                if ((row < 0 || i / kN == row) && (column < 0 || i % kN == column)) {
                    found.insert(std::bit_cast<std::uint32_t>(out[i]));
                }
            }
        };
        take(-1, -1);
        for (const int row : {0, 7, 37, kRows - 1}) {
            for (const int column : {0, 9, kN - 1}) take(row, column);
        }
        return found;
    }

    int k_;
    Buffer<In> x_, y_, rows_, columns_;
    Buffer<float> out_;
    std::vector<float> line_x_, line_y_;
    std::vector<int> order_;
};

template <class In>
void print(const char* dtype, const char* before) {
    std::printf("%s\"%s\": {", before, dtype);
    const char* comma = "";
    for (const Kind& kind : kinds<In>()) {
        std::printf("%s\"%s\": {", comma, kind.name);
        const char* inner = "";
        for (const auto& [name, bits] : Experiment<In>(kind).run()) {
            std::printf("%s\"%s\": [", inner, name.c_str());
            const char* last = "";
            for (const std::uint32_t each : bits) {
                std::printf("%s\"%08x\"", last, each);
                last = ", ";
            }
            std::printf("]");
            inner = ", ";
        }
        std::printf("}");
        comma = ",\n ";
    }
    std::printf("}");
}

}  // namespace

int main() {
    try {
        print<__nv_bfloat16>("bfloat16", "{");
        print<__half>("float16", ",\n");
        print<__nv_fp8_e4m3>("float8_e4m3fn", ",\n");
        std::printf("}\n");
    } catch (const std::exception& error) {
        std::fprintf(stderr, "wgmma_bits: %s\n", error.what());
        return 1;
    }
    return 0;
}
