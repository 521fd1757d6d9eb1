#include "backends/nics/softverbs/memory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace mkernel::nics::softverbs {
namespace {

struct Area {
    std::uint64_t start = 0, end = 0, offset = 0, inode = 0;
    unsigned major = 0, minor = 0;
    bool readable = false, writable = false, shared = false;
};

struct CloseFile {
    void operator()(std::FILE* file) const { std::fclose(file); }
};
struct CloseDir {
    void operator()(DIR* dir) const { ::closedir(dir); }
};

// Returns the areas that overlap [address, address + length), in order. std::system_error: for example, no
// descriptor is left to look with.
std::vector<Area> areas(std::uint64_t address, std::uint64_t length) {
    std::vector<Area> found;
    const std::unique_ptr<std::FILE, CloseFile> maps(std::fopen("/proc/self/maps", "re"));
    if (!maps) throw std::system_error(errno, std::generic_category(), "/proc/self/maps");
    char line[1024];
    while (std::fgets(line, sizeof(line), maps.get()) != nullptr) {
        Area a;
        char rights[5] = {};
        if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &a.start,
                        &a.end, rights, &a.offset, &a.major, &a.minor, &a.inode) != 7) {
            continue;
        }
        if (a.end <= address || a.start >= address + length) continue;
        a.readable = rights[0] == 'r';
        a.writable = rights[1] == 'w';
        a.shared = rights[3] == 's';
        found.push_back(a);
    }
    return found;
}

// Returns a duplicate of any descriptor of this process that is open on that file.
Fd duplicate_of(const Area& area) {
    const std::unique_ptr<DIR, CloseDir> dir(::opendir("/proc/self/fd"));
    if (!dir) return Fd();
    while (const dirent* entry = ::readdir(dir.get())) {
        const int fd = std::atoi(entry->d_name);
        struct stat info {};
        if (entry->d_name[0] == '.') continue;
        // Looked up by name: another thread may be closing that descriptor, which is none of ours.
        if (::fstatat(::dirfd(dir.get()), entry->d_name, &info, 0) != 0) continue;
        if (info.st_ino != area.inode || major(info.st_dev) != area.major ||
            minor(info.st_dev) != area.minor) {
            continue;
        }
        const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (own < 0) continue;
        // The descriptor may have been closed and used anew in between.
        Fd kept(own);
        if (::fstat(own, &info) == 0 && info.st_ino == area.inode) return kept;
    }
    return Fd();
}

}  // namespace

std::optional<Backing> find_backing(std::uint64_t address, std::uint64_t length) {
    const auto found = areas(address, length);
    if (found.empty() || !found.front().shared || found.front().inode == 0) return std::nullopt;
    const Area& first = found.front();
    std::uint64_t covered = first.start;
    if (covered > address) return std::nullopt;
    for (const Area& a : found) {
        if (!a.shared || a.inode != first.inode || a.start != covered ||
            a.offset - first.offset != a.start - first.start) {
            return std::nullopt;
        }
        covered = a.end;
    }
    if (covered < address + length) return std::nullopt;
    Backing backing;
    backing.fd = duplicate_of(first);
    if (backing.fd.get() < 0) return std::nullopt;
    backing.inode = first.inode;
    backing.offset = first.offset + (address - first.start);
    return backing;
}

bool is_mapped(std::uint64_t address, std::uint64_t length, bool writable) {
    std::uint64_t covered = address;
    for (const Area& a : areas(address, length)) {
        if (a.start > covered || !a.readable || (writable && !a.writable)) return false;
        covered = a.end;
    }
    return covered >= address + length;
}

namespace {

constexpr std::size_t kStreamFrom = 64 * 1024;  // smaller ones fit the caches; their reader is near

// Copies past the caches, as a card writes: the destination is not read first, which saves a third of the
// memory traffic. The fence orders the bytes before the caller's next stores.
void copy_payload(std::byte* to, const std::byte* from, std::size_t bytes) {
    // A word is written whole, as cards do: a poller sees the old one or the new one.
    if (bytes == sizeof(std::uint64_t) &&
        reinterpret_cast<std::uintptr_t>(to) % sizeof(std::uint64_t) == 0) {
        std::uint64_t word = 0;
        std::memcpy(&word, from, sizeof(word));
        std::atomic_ref(*reinterpret_cast<std::uint64_t*>(to))
            .store(word, std::memory_order_release);
        return;
    }
#if defined(__x86_64__)
    if (bytes >= kStreamFrom) {
        constexpr std::size_t kLine = 64;
        constexpr std::size_t kAhead = 1024;
        const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
        std::memcpy(to, from, head);
        std::size_t at = head;
        for (; bytes - at >= kLine; at += kLine) {
            // A prefetch past the end is dropped by the processor.
            _mm_prefetch(reinterpret_cast<const char*>(from) + at + kAhead, _MM_HINT_NTA);
            for (std::size_t i = 0; i < kLine; i += sizeof(__m128i)) {
                const auto* source = reinterpret_cast<const __m128i*>(from + at + i);
                _mm_stream_si128(reinterpret_cast<__m128i*>(to + at + i), _mm_loadu_si128(source));
            }
        }
        std::memcpy(to + at, from + at, bytes - at);
        _mm_sfence();
        return;
    }
#endif
    std::memcpy(to, from, bytes);
}

}  // namespace

void place_bytes(const Config& config, std::uint64_t address, const std::byte* source,
                 std::size_t bytes) {
    auto* to = reinterpret_cast<std::byte*>(address);
    const auto mask = static_cast<std::byte>(config.scramble);
    if (mask == std::byte{0}) {
        copy_payload(to, source, bytes);
    } else {
        std::transform(source, source + bytes, to, [mask](std::byte b) { return b ^ mask; });
    }
}

Mr* MrTable::add(std::unique_ptr<Mr> mr) {
    std::size_t index = next_;
    for (std::size_t tried = 0; index < slots_.size() && slots_[index].mr; ++tried) {
        if (tried == slots_.size()) {
            index = slots_.size();
            break;
        }
        index = (index + 1) % slots_.size();
    }
    if (index >= slots_.size()) {
        if (slots_.size() >= kMax) return nullptr;
        slots_.emplace_back();
        index = slots_.size() - 1;
    }
    Slot& slot = slots_[index];
    // Key 0 is never given out: a forgotten key must not work.
    if (++slot.generation == 0) slot.generation = 1;
    mr->lkey = mr->rkey = (static_cast<std::uint32_t>(index) << 8) | slot.generation;
    mr->handle = mr->rkey;
    slot.mr = std::move(mr);
    next_ = index + 1;
    return slot.mr.get();
}

bool MrTable::remove(Mr* mr) {
    const std::uint32_t index = mr->rkey >> 8;
    if (index >= slots_.size() || slots_[index].mr.get() != mr) return false;
    slots_[index].mr.reset();
    next_ = index;
    return true;
}

}  // namespace mkernel::nics::softverbs
