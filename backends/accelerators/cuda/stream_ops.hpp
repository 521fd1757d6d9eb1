// Operations of streams that need no multiprocessor: copies by copy engines, and signals, which are words in
// memory that streams write and wait for. Addresses and streams are plain integers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mkernel::cuda {

// Host pages that devices may address, by the same addresses, until the end of this object's life; no
// stream may use them any more then. Whole pages, registered by nobody else.
class MappedPages {
  public:
    // CudaError.
    MappedPages(std::uint64_t address, std::size_t nbytes);
    ~MappedPages();
    MappedPages(const MappedPages&) = delete;
    MappedPages& operator=(const MappedPages&) = delete;

  private:
    void* address_;
};

// Copies `nbytes` on `stream`, of the current device, between any two addresses that it can reach. The
// ranges must not overlap. Returns at once; any thread; may be captured. CudaError.
void copy(std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes, std::uint64_t stream);

// Writes `value` to the word at `address` after everything that was put on `stream` before: a reader that
// sees the value sees that work's writes, too. Returns at once. CudaError.
void write_word(std::uint64_t address, std::uint64_t value, std::uint64_t stream);

// Makes `stream`, of device `device`, go on once the word at `address` is `value` or later (as a signed
// difference). The wait has no deadline: to give it up, such a value must be written. Returns at once.
// CudaError.
void wait_word(int device, std::uint64_t address, std::uint64_t value, std::uint64_t stream);

}  // namespace mkernel::cuda
