// Memory of outputs: which pieces torch's allocator gets of the ranges, where these are full, and what is told of a
// place. Devices and their memory are stand-ins: a range is where its size in MiB says, ordinary memory behind all.
#include "backends/accelerators/cuda/output_memory.hpp"

#include <cuda_runtime_api.h>

#include <memory>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/native/nics/check.hpp"

using mkernel::cuda::DeviceMemory;
using mkernel::cuda::OutputMemory;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::uint64_t kOrdinary = std::uint64_t{1} << 40;
constexpr int kDevice = 3, kCallers = 1;

struct Fake {
    int device = kCallers;
    int most = 1 << 20;  // pieces of ordinary memory that there are
    std::uint64_t next = kOrdinary;
    std::set<std::uint64_t> ordinary;
    std::vector<int> devices;  // on which it was allocated
    cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
    bool outside = true;  // every such call was outside of captures
    int ranges = 0;       // that are mapped
};
Fake fake;

}  // namespace

namespace mkernel::cuda {

DeviceMemory DeviceMemory::create(int device, std::size_t nbytes) {
    DeviceMemory made;
    made.device_ = device;
    made.address_ = nbytes << 8;
    made.mapped_ = nbytes;
    made.is_mapped_ = true;
    ++fake.ranges;
    return made;
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      is_mapped_(other.is_mapped_),
      address_(other.address_),
      mapped_(other.mapped_) {
    other.is_mapped_ = false;
}

DeviceMemory::~DeviceMemory() {
    if (is_mapped_) --fake.ranges;
}

}  // namespace mkernel::cuda

cudaError_t cudaGetDevice(int* device) {
    *device = fake.device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    fake.device = device;
    return cudaSuccess;
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, fake.mode);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void** made, std::size_t bytes) {
    fake.outside = fake.outside && fake.mode == cudaStreamCaptureModeRelaxed;
    if (static_cast<int>(fake.ordinary.size()) == fake.most) return cudaErrorMemoryAllocation;
    fake.devices.push_back(fake.device);
    fake.ordinary.insert(fake.next);
    *made = reinterpret_cast<void*>(fake.next);
    fake.next += bytes;
    return cudaSuccess;
}

cudaError_t cudaFree(void* made) {
    fake.outside = fake.outside && fake.mode == cudaStreamCaptureModeRelaxed;
    CHECK(fake.ordinary.erase(reinterpret_cast<std::uint64_t>(made)) == 1);
    return cudaSuccess;
}

namespace {

std::uint64_t start_of(std::size_t mib) {
    return (mib * kMiB) << 8;
}

void add(OutputMemory& memory, std::size_t mib) {
    auto own = std::make_shared<DeviceMemory>(DeviceMemory::create(kDevice, mib * kMiB));
    memory.add_range(std::move(own), {start_of(mib), 7 * mib});
}

// Where it lies in the range of that size, in MiB; -1: elsewhere.
std::int64_t taken(OutputMemory& memory, std::size_t bytes, std::size_t mib) {
    const auto at = reinterpret_cast<std::uint64_t>(memory.allocate(bytes));
    if (at < start_of(mib) || at >= start_of(mib) + mib * kMiB) return -1;
    return static_cast<std::int64_t>((at - start_of(mib)) / kMiB);
}

void release(OutputMemory& memory, std::size_t mib, std::size_t at) {
    memory.release(reinterpret_cast<void*>(start_of(mib) + at * kMiB));
}

TEST(pieces_follow_each_other_and_gaps_are_used_again) {
    fake = {};
    OutputMemory memory(kDevice);
    add(memory, 16);
    CHECK(taken(memory, 4 * kMiB, 16) == 0);
    CHECK(taken(memory, 1, 16) == 4);  // a whole piece
    CHECK(taken(memory, 6 * kMiB, 16) == 6);
    CHECK(taken(memory, 4 * kMiB, 16) == 12);
    CHECK(memory.taken() == 16 * kMiB);
    release(memory, 16, 4);
    release(memory, 16, 12);
    CHECK(memory.taken() == 10 * kMiB);
    CHECK(taken(memory, 4 * kMiB, 16) == 12);  // the gap of 2 MiB is too narrow
    CHECK(taken(memory, 2 * kMiB, 16) == 4);
    release(memory, 16, 0);
    CHECK(taken(memory, 2 * kMiB, 16) == 0);
    CHECK(taken(memory, 2 * kMiB, 16) == 2);
    CHECK(memory.taken() == 16 * kMiB);
    CHECK(memory.elsewhere() == 0 && fake.ordinary.empty());
}

TEST(where_ranges_are_full_a_piece_is_ordinary_memory_of_the_device) {
    fake = {};
    OutputMemory memory(kDevice);
    CHECK(taken(memory, kMiB, 4) == -1);  // there is no range at all
    add(memory, 4);
    CHECK(taken(memory, 6 * kMiB, 4) == -1);
    CHECK(taken(memory, 4 * kMiB, 4) == 0);
    CHECK(taken(memory, 2 * kMiB, 4) == -1);
    CHECK(memory.elsewhere() == 9 * kMiB);
    CHECK((fake.devices == std::vector<int>{kDevice, kDevice, kDevice}));
    CHECK(fake.device == kCallers);
    CHECK(!memory.place_of(*fake.ordinary.begin(), 1));
    while (!fake.ordinary.empty()) {
        memory.release(reinterpret_cast<void*>(*fake.ordinary.begin()));
    }
    CHECK(memory.elsewhere() == 0 && memory.taken() == 4 * kMiB);
    fake.most = 0;
    CHECK(memory.allocate(kMiB) == nullptr && memory.elsewhere() == 0);
    CHECK(fake.device == kCallers && fake.outside);
}

TEST(later_ranges_take_what_earlier_ones_have_no_room_for) {
    fake = {};
    OutputMemory memory(kDevice);
    for (const std::size_t mib : {4, 8, 16, 32}) add(memory, mib);
    CHECK(memory.ranges() == OutputMemory::kMostRanges);
    CHECK(taken(memory, 10 * kMiB, 16) == 0);
    CHECK(taken(memory, 4 * kMiB, 4) == 0);
    CHECK(taken(memory, 4 * kMiB, 8) == 0);
    release(memory, 8, 0);
    CHECK(memory.taken() == 14 * kMiB);
    CHECK(taken(memory, 8 * kMiB, 8) == 0);
    CHECK(memory.range_of(2, 0) == start_of(16) && memory.range_of(2, 1) == 7 * 16);
    bool refused = false;
    try {
        add(memory, 64);
    } catch (const std::length_error&) {
        refused = true;
    }
    CHECK(refused && memory.ranges() == OutputMemory::kMostRanges);
}

TEST(a_place_is_a_range_and_where_in_it) {
    fake = {};
    OutputMemory memory(kDevice);
    add(memory, 4);
    add(memory, 8);
    const auto place = memory.place_of(start_of(8) + 512, kMiB);
    CHECK(place && place->range == 1 && place->offset == 512);
    CHECK(memory.place_of(start_of(4), 4 * kMiB).has_value());
    CHECK(!memory.place_of(start_of(4) + 1, 4 * kMiB));  // its end lies behind the range
    CHECK(!memory.place_of(start_of(4) - 1, 1));
    CHECK(!memory.place_of(start_of(4) + 4 * kMiB, 1));
}

TEST(ranges_stay_mapped_as_long_as_the_memory_lives) {
    fake = {};
    {
        OutputMemory memory(kDevice);
        add(memory, 4);
        add(memory, 8);
        CHECK(fake.ranges == 2);
    }
    CHECK(fake.ranges == 0);
}

}  // namespace

int main(int argc, char** argv) {
    return mkernel::nics::testing::run(argc, argv);
}
