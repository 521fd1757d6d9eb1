// Scalar instructions of a core: one int32 of global memory, pipe S.
#include <cstring>

#include "backends/accelerators/ascend/sim/core.hpp"

namespace mkernel::ascend::sim {

using isa::DType;
using isa::GlobalView;
using isa::Pipe;

GlobalView Core::scalar_access(const char* instruction, const std::byte* at, bool write) {
    const GlobalView word{const_cast<std::byte*>(at), DType::int32, 1, 1, 1, 1};
    if (!check(instruction, word, write).real) {
        fail(instruction, "a record has no memory here");
    }
    if (reinterpret_cast<std::uintptr_t>(at) % sizeof(std::int32_t) != 0) {
        fail(instruction, "the address is not four-byte aligned");
    }
    const std::uint32_t stored = write ? sizeof(std::int32_t) : 0;
    if (trace_ != nullptr && !trace_->empty() && trace_->back().kind == Kind::scalar &&
        trace_->back().chunk == chunk_) {
        trace_->back().amount += sizeof(std::int32_t);
        trace_->back().value += stored;
    } else {
        record({.kind = Kind::scalar,
                .pipe = Pipe::S,
                .peer = environment_.rank,
                .amount = sizeof(std::int32_t),
                .value = stored});
    }
    return word;
}

// S executes instructions when it issues them: nothing is put off.
std::int32_t Core::sload(const std::byte* from, Where where) {
    where_ = where;
    const GlobalView word = scalar_access("SLOAD", from, false);
    if (strict_) strict_->issue({"SLOAD", where_}, Pipe::S, {reads(word)}, [] {});
    std::int32_t value = 0;
    std::memcpy(&value, from, sizeof value);
    return value;
}

void Core::sstore(std::byte* to, std::int32_t value, Where where) {
    where_ = where;
    const GlobalView word = scalar_access("SSTORE", to, true);
    if (strict_) strict_->issue({"SSTORE", where_}, Pipe::S, {writes(word)}, [] {});
    std::memcpy(to, &value, sizeof value);
}

}  // namespace mkernel::ascend::sim
