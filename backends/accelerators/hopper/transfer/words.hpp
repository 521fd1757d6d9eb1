// Signals of copies: words in memory that streams write and wait for, without a multiprocessor.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace mkernel::hopper::transfer {

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

// Write `value` to the word at `address` after all that was put on `stream` before: whoever sees the
// value sees what that wrote, too. Returns at once. CudaError.
void write_word(std::uint64_t address, std::uint64_t value, cudaStream_t stream);

// `stream`, of device `device`, goes on once the word at `address` is `value` or later (as a signed
// difference). It has no deadline: whoever gives up must write such a value. Returns at once.
// CudaError.
void wait_word(int device, std::uint64_t address, std::uint64_t value, cudaStream_t stream);

}  // namespace mkernel::hopper::transfer
