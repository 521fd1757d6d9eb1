// The Python module `_board`: ranks' boards, by their addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sched.h>
#include <time.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "backends/transport/board.hpp"
#include "backends/transport/clock.hpp"

namespace py = pybind11;
using namespace py::literals;
using mkernel::transport::Board;
using mkernel::transport::BoardSlot;
using mkernel::transport::kDigestBytes;
using mkernel::transport::monotonic_ns;

namespace {

// A peer that makes the same call comes within this time, in nanoseconds; later ones are checked for less
// often.
constexpr std::uint64_t kSpinNs = 200'000;
constexpr long kNapNs = 100'000;

Board board_at(std::uintptr_t address) {
    if (address == 0 || address % alignof(BoardSlot) != 0) {
        throw std::invalid_argument("no board at address " + std::to_string(address));
    }
    return Board(reinterpret_cast<void*>(address));
}

void tell(std::uintptr_t address, std::uint64_t turn, const py::bytes& bytes) {
    const std::string_view digest = bytes;
    if (turn == 0 || digest.size() != kDigestBytes) {
        throw std::invalid_argument("turn " + std::to_string(turn) + ", digest of " +
                                    std::to_string(digest.size()) + " bytes");
    }
    board_at(address).write(turn, reinterpret_cast<const std::uint8_t*>(digest.data()));
}

std::vector<std::optional<py::bytes>> await(const std::vector<std::uintptr_t>& addresses,
                                            std::uint64_t turn, double timeout_s) {
    const auto ranks = static_cast<int>(addresses.size());
    std::vector<Board> boards;
    for (const std::uintptr_t address : addresses) boards.push_back(board_at(address));
    std::vector<std::uint8_t> digests(static_cast<std::size_t>(ranks) * kDigestBytes);
    std::vector<bool> there(ranks);
    {
        const py::gil_scoped_release released;
        const std::uint64_t start = monotonic_ns();
        const auto limit = static_cast<std::uint64_t>(timeout_s * 1e9);
        while (true) {
            int missing = 0;
            for (int rank = 0; rank < ranks; ++rank) {
                if (there[rank]) continue;
                there[rank] = boards[rank].read(turn, digests.data() + rank * kDigestBytes);
                missing += there[rank] ? 0 : 1;
            }
            const std::uint64_t waited = monotonic_ns() - start;
            if (missing == 0 || waited >= limit) break;
            if (waited < kSpinNs) {
                sched_yield();
                continue;
            }
            const timespec nap{0, kNapNs};
            nanosleep(&nap, nullptr);
        }
    }
    std::vector<std::optional<py::bytes>> found(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
        if (!there[rank]) continue;
        found[rank] = py::bytes(reinterpret_cast<const char*>(digests.data() + rank * kDigestBytes),
                                kDigestBytes);
    }
    return found;
}

}  // namespace

PYBIND11_MODULE(_board, module) {
    module.doc() =
        "Boards in host memory, by which ranks of a node compare digests (see board.hpp).";
    module.attr("ALIGNMENT") = alignof(BoardSlot);
    module.attr("BYTES") = Board::kBytes;
    module.def("board_tell", &tell, "address"_a, "turn"_a, "digest"_a);
    module.def("board_await", &await, "addresses"_a, "turn"_a, "timeout_s"_a);
}
