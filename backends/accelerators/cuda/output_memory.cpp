#include "backends/accelerators/cuda/output_memory.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "backends/accelerators/cuda/device.hpp"

namespace mkernel::cuda {

void OutputMemory::add_range(std::shared_ptr<DeviceMemory> own,
                             std::vector<std::uint64_t> everywhere) {
    const std::lock_guard lock(mutex_);
    if (ranges_.size() == kMostRanges) {
        throw std::length_error("memory of outputs has " + std::to_string(kMostRanges) +
                                " ranges, and takes no more");
    }
    ranges_.push_back({std::move(own), std::move(everywhere), {}});
}

std::size_t OutputMemory::ranges() const {
    const std::lock_guard lock(mutex_);
    return ranges_.size();
}

std::uint64_t OutputMemory::range_of(std::size_t range, std::size_t rank) const {
    const std::lock_guard lock(mutex_);
    return ranges_.at(range).everywhere.at(rank);
}

std::optional<OutputMemory::Place> OutputMemory::place_of(std::uint64_t address,
                                                          std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    return find(address, bytes);
}

std::optional<OutputMemory::Place> OutputMemory::find(std::uint64_t address,
                                                      std::size_t bytes) const {
    for (std::size_t i = 0; i < ranges_.size(); ++i) {
        const DeviceMemory& own = *ranges_[i].own;
        const std::uint64_t at = address - own.address();
        if (address < own.address() || at > own.mapped_bytes()) continue;
        if (bytes <= own.mapped_bytes() - at) return Place{static_cast<int>(i), at};
    }
    return std::nullopt;
}

void* OutputMemory::allocate(std::size_t bytes) noexcept {
    const std::size_t piece = (bytes + kPiece - 1) / kPiece * kPiece;
    const std::lock_guard lock(mutex_);
    for (Range& range : ranges_) {  // the first gap that is wide enough
        std::size_t at = 0;
        for (const auto& [offset, taken] : range.pieces) {
            if (offset - at >= piece) break;
            at = offset + taken;
        }
        if (range.own->mapped_bytes() < at || range.own->mapped_bytes() - at < piece) continue;
        range.pieces.emplace(at, piece);
        return reinterpret_cast<void*>(range.own->address() + at);
    }
    const OutsideCapture outside;
    int before = 0;
    void* made = nullptr;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) {
        return nullptr;
    }
    const cudaError_t found = cudaMalloc(&made, bytes);
    cudaSetDevice(before);
    if (found != cudaSuccess) {
        cudaGetLastError();
        return nullptr;
    }
    ordinary_.emplace(reinterpret_cast<std::uint64_t>(made), bytes);
    return made;
}

void OutputMemory::release(void* piece) noexcept {
    const auto address = reinterpret_cast<std::uint64_t>(piece);
    const std::lock_guard lock(mutex_);
    if (const auto place = find(address, 1)) {
        ranges_[static_cast<std::size_t>(place->range)].pieces.erase(place->offset);
        return;
    }
    const OutsideCapture outside;
    ordinary_.erase(address);
    cudaFree(piece);
}

std::size_t OutputMemory::taken() const {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const Range& range : ranges_) {
        for (const auto& [offset, taken] : range.pieces) bytes += taken;
    }
    return bytes;
}

std::size_t OutputMemory::elsewhere() const {
    const std::lock_guard lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [address, taken] : ordinary_) bytes += taken;
    return bytes;
}

}  // namespace mkernel::cuda
