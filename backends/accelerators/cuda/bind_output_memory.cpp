// OutputMemory for Python, and the functions by which torch's allocator takes it. Torch passes these nothing of its
// own, so each memory has a pair of functions, by number.
#include "backends/accelerators/cuda/bind_output_memory.hpp"

#include <cuda_runtime_api.h>
#include <pybind11/stl.h>
#include <sys/types.h>

#include <array>
#include <memory>
#include <mutex>
#include <utility>

#include "backends/accelerators/cuda/output_memory.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

constexpr std::size_t kNumbers = 8;

// The memories by number. A memory keeps its number as long as torch has pieces of it: its tensors may
// outlive the world.
class Numbered {
  public:
    // Adds a memory; returns its number, or -1 where all are taken.
    int add(const std::shared_ptr<OutputMemory>& memory) {
        const std::lock_guard lock(mutex_);
        for (std::size_t number = 0; number < kNumbers; ++number) {
            if (all_[number].memory != nullptr) continue;
            all_[number] = {memory, false};
            return static_cast<int>(number);
        }
        return -1;
    }
    std::shared_ptr<OutputMemory> at(std::size_t number) {
        const std::lock_guard lock(mutex_);
        return all_[number].memory;
    }
    // Forgets a memory once torch has no piece of it.
    void retire(std::size_t number) {
        const std::lock_guard lock(mutex_);
        all_.at(number).retired = true;
        forget_empty(all_[number]);
    }
    void release(std::size_t number, void* piece) {
        const std::lock_guard lock(mutex_);
        Entry& each = all_[number];
        if (each.memory == nullptr) return;
        each.memory->release(piece);
        forget_empty(each);
    }

  private:
    struct Entry {
        std::shared_ptr<OutputMemory> memory;
        bool retired = false;  // its world is over
    };
    static void forget_empty(Entry& each) {
        if (each.memory == nullptr || !each.retired) return;
        if (each.memory->taken() + each.memory->elsewhere() == 0) each = {};
    }

    std::mutex mutex_;
    std::array<Entry, kNumbers> all_;
};

// Never destroyed: torch may free memory while the process ends.
Numbered& numbered() {
    static auto* all = new Numbered;
    return *all;
}

}  // namespace

void bind_output_memory(py::module_& module) {
    py::class_<OutputMemory, std::shared_ptr<OutputMemory>>(module, "OutputMemory")
        .def(py::init<int>(), "device"_a)
        .def("number",
             [](const std::shared_ptr<OutputMemory>& memory) { return numbered().add(memory); })
        .def("retire",
             [](const OutputMemory& /*memory*/, std::size_t number) { numbered().retire(number); })
        .def("add_range", &OutputMemory::add_range, "own"_a, "everywhere"_a)
        .def_property_readonly("ranges", &OutputMemory::ranges)
        .def_property_readonly("taken", &OutputMemory::taken)
        .def_property_readonly("elsewhere", &OutputMemory::elsewhere)
        .def("place_of",
             [](const OutputMemory& memory, std::uint64_t address, std::size_t bytes) {
                 const auto place = memory.place_of(address, bytes);
                 return place ? py::make_tuple(place->range, place->offset)
                              : py::object(py::none());
             })
        .def("allocate",
             [](OutputMemory& memory, std::size_t bytes) {
                 return reinterpret_cast<std::uint64_t>(memory.allocate(bytes));
             })
        .def("release", [](OutputMemory& memory, std::uint64_t address) {
            memory.release(reinterpret_cast<void*>(address));
        });
    module.attr("MOST_OUTPUT_RANGES") = OutputMemory::kMostRanges;
}

}  // namespace mkernel::cuda

// The functions in the form in which torch.cuda.memory.CUDAPluggableAllocator calls them.
#define MKERNEL_OUTPUTS(number)                                                                 \
    extern "C" __attribute__((visibility("default"))) void* mkernel_allocate_outputs_##number(  \
        ssize_t bytes, int, cudaStream_t) {                                                     \
        const auto memory = mkernel::cuda::numbered().at(number);                               \
        return memory == nullptr ? nullptr : memory->allocate(static_cast<std::size_t>(bytes)); \
    }                                                                                           \
    extern "C" __attribute__((visibility("default"))) void mkernel_release_outputs_##number(    \
        void* piece, ssize_t, int, cudaStream_t) {                                              \
        mkernel::cuda::numbered().release(number, piece);                                       \
    }

MKERNEL_OUTPUTS(0)
MKERNEL_OUTPUTS(1)
MKERNEL_OUTPUTS(2)
MKERNEL_OUTPUTS(3)
MKERNEL_OUTPUTS(4)
MKERNEL_OUTPUTS(5)
MKERNEL_OUTPUTS(6)
MKERNEL_OUTPUTS(7)
