// In place of the system's: unmapped pages are kept, as zeros, for the next execution. To make shared ones anew took
// longer than what was tried on them.
#pragma once

#include_next <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <vector>

namespace mkernel::model {

inline std::map<std::size_t, std::vector<void*>> kept_pages;  // by their size

inline void* map_pages(void* at, std::size_t bytes, int rights, int flags, int fd, off_t offset) {
    auto& kept = kept_pages[bytes];
    if (fd != -1 || kept.empty()) return ::mmap(at, bytes, rights, flags, fd, offset);
    void* pages = kept.back();
    kept.pop_back();
    return pages;
}

inline int unmap_pages(void* pages, std::size_t bytes) {
    std::memset(pages, 0, bytes);
    kept_pages[bytes].push_back(pages);
    return 0;
}

}  // namespace mkernel::model

#define mmap(...) mkernel::model::map_pages(__VA_ARGS__)
#define munmap(...) mkernel::model::unmap_pages(__VA_ARGS__)
