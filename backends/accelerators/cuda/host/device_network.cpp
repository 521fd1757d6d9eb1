#include "backends/accelerators/cuda/host/device_network.hpp"

#include <unistd.h>

#include <cstddef>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::cuda {

namespace {

const transport::Word* words_of(std::uint64_t pad) {
    return transport::SignalPad(reinterpret_cast<void*>(pad)).word(0);
}

// Returns the whole pages that hold the words. A pad begins with a page, and its header is in that.
cuda::MappedPages pages_of(const transport::Word* words, int device) {
    const cuda::DeviceScope scope(device);
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<std::uint64_t>(words) / page * page;
    const auto end = reinterpret_cast<std::uint64_t>(words + kNetworkWords);
    return {start, (end - start + page - 1) / page * page};
}

constexpr std::size_t kCountBytes = kNetworkWords * sizeof(transport::ExpectedCount);

}  // namespace

DeviceNetwork::DeviceNetwork(int device, std::uint64_t fifo, std::uint64_t pad, bool ordered)
    : words_(words_of(pad)),
      pages_(pages_of(words_, device)),
      fifo_(fifo, device),
      counts_(cuda::DeviceMemory::create(device, kCountBytes)),
      ordered_(ordered) {}

Network DeviceNetwork::of(std::uint64_t area, bool staged, std::uint32_t region,
                          std::uint64_t offset) const {
    Network network{};
    network.fifo = fifo_.handle();
    network.channel = {region, offset, offset};
    network.words = words_;
    network.expected = reinterpret_cast<transport::ExpectedCount*>(counts_.address());
    network.area = reinterpret_cast<char*>(area);
    network.staged = staged;
    network.ordered = ordered_;
    return network;
}

}  // namespace mkernel::cuda
