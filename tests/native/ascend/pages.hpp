// Memory of a rank in whole calls of several ranks in one process.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace mkernel::ascend::test {

// Zeroed, page-aligned memory.
struct Pages {
    explicit Pages(std::size_t bytes)
        : memory(static_cast<std::byte*>(
                     std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096)),
                 &std::free) {
        std::memset(memory.get(), 0, bytes);
    }
    std::unique_ptr<std::byte, decltype(&std::free)> memory;
};

}  // namespace mkernel::ascend::test
