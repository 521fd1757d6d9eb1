// What is prefetched lies within the tensor, and comes once: in the shares of blocks beside those that exchange, however
// many find a place, or in those of all blocks; nothing comes where too few find one.
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <map>

#include "backends/accelerators/cuda/kernels/prefetch.hpp"

using mkernel::cuda::Prefetch;

namespace {

constexpr std::uint64_t kAddress = 0x7f0000000000;  // a multiple of 16

// Returns true where whole 16 bytes of the tensor are taken, and no more than 15 bytes at each end are not.
bool is_within(std::uint64_t address, std::uint32_t nbytes) {
    const Prefetch made = Prefetch::of(address, nbytes);
    if (made.begin % 16 != 0 || made.nbytes % 16 != 0) return false;
    if (made.nbytes == 0) return nbytes < 31;
    const std::uint64_t before = made.begin - address;
    const std::uint64_t after = address + nbytes - (made.begin + made.nbytes);
    return before < 16 && after < 16;  // unsigned: neither is negative
}

// Returns true where the shares of a grid are all of it, once, and those blocks alone have one that do not exchange.
bool is_whole(const Prefetch& made, std::uint32_t grid) {
    bool right = true;
    std::map<std::uint64_t, std::uint64_t> found;  // address → bytes
    for (std::uint32_t block = 0; block < grid; ++block) {
        const auto before = found.size();
        made.for_share(block, grid, [&](std::uint64_t at, std::uint32_t count) {
            right = right && at % 16 == 0 && count % 16 == 0 && count > 0;
            right = right && count <= Prefetch::kChunk && found.emplace(at, count).second;
        });
        if (block < made.exchange && found.size() != before) return false;
    }
    std::uint64_t next = made.begin;
    for (const auto& [at, count] : found) {
        if (at != next) return false;
        next = at + count;
    }
    return right && next == made.begin + made.nbytes;
}

// Returns true where a grid has as many blocks beside those that exchange as there are bytes and room for, and all of
// it is shared; or none, and nothing is, where there is too little room.
bool is_beside(std::uint32_t nbytes, std::uint32_t blocks, std::uint32_t most) {
    Prefetch made = Prefetch::of(kAddress, nbytes);
    const std::uint32_t wanted = made.nbytes, room = most - blocks;
    const std::uint32_t grid = made.blocks_beside(blocks, most);
    if (made.exchange != blocks || grid < blocks || grid > most) return false;
    if (room < 16) return grid == blocks && made.nbytes == 0 && is_whole(made, grid);
    const std::uint32_t chunks = (wanted + 16383) / 16384;
    const std::uint32_t more = chunks < 64 && chunks < room ? chunks : room < 64 ? room : 64;
    return grid == blocks + more && made.nbytes == wanted && is_whole(made, grid);
}

}  // namespace

int main() {
    int failures = 0;
    const std::uint32_t sizes[] = {0,  1,    15,    16,    17,     31,       32,
                                   33, 4095, 16384, 16400, 100000, 25165824, 1u << 30};
    for (std::uint64_t begin = 0; begin < 17; ++begin) {
        for (const std::uint32_t nbytes : sizes) {
            if (is_within(kAddress + begin, nbytes)) continue;
            std::printf("FAIL %u bytes from %llu on\n", nbytes,
                        static_cast<unsigned long long>(begin));
            ++failures;
        }
    }
    for (const std::uint32_t nbytes : sizes) {
        for (const std::uint32_t blocks : {1u, 2u, 32u, 68u, 69u, 131u, 132u, 264u}) {
            for (const std::uint32_t most : {1u, 64u, 84u, 85u, 132u, 264u, 2112u}) {
                if (blocks > most || is_beside(nbytes, blocks, most)) continue;
                std::printf("FAIL %u bytes beside %u blocks of %u\n", nbytes, blocks, most);
                ++failures;
            }
            if (is_whole(Prefetch::of(kAddress, nbytes), blocks)) continue;
            std::printf("FAIL %u bytes by %u blocks\n", nbytes, blocks);
            ++failures;
        }
    }
    if (failures == 0) std::printf("ok\n");
    return failures == 0 ? 0 : 1;
}
