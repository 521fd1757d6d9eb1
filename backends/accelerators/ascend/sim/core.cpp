#include "backends/accelerators/ascend/sim/core.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>

#include "backends/accelerators/ascend/sim/matrix_unit.hpp"

namespace mkernel::ascend::sim {

using isa::Buffer;
using isa::DType;
using isa::GlobalView;
using isa::Layout;
using isa::Pipe;
using isa::Tile;

namespace {

constexpr std::uint64_t kOwnRankGraceNs = 200'000'000;

constexpr std::uint32_t round_up(std::uint32_t value, std::uint32_t to) {
    return (value + to - 1) / to * to;
}

constexpr std::uint32_t host_scale(Buffer buffer) {
    return buffer == Buffer::L0A || buffer == Buffer::L0B ? 2 : 1;
}

// Copies rows x cols elements between two strided places. Both have the same contiguous direction.
void copy_rectangle(std::byte* to, std::int64_t to_stride, const std::byte* from,
                    std::int64_t from_stride, std::size_t lines, std::size_t line_bytes) {
    if (to_stride == from_stride && to_stride == static_cast<std::int64_t>(line_bytes)) {
        std::memcpy(to, from, lines * line_bytes);
        return;
    }
    for (std::size_t line = 0; line < lines; ++line) {
        std::memcpy(to + static_cast<std::int64_t>(line) * to_stride,
                    from + static_cast<std::int64_t>(line) * from_stride, line_bytes);
    }
}

}  // namespace

std::string describe(const Tile& tile) {
    return std::string(name_of(tile.buffer)) + "[" + std::to_string(tile.offset) + ", " +
           std::to_string(std::uint64_t{tile.offset} +
                          std::uint64_t{tile.rows} * tile.cols * bytes_of(tile.dtype)) +
           ") " + std::to_string(tile.rows) + "x" + std::to_string(tile.cols) + " " +
           name_of(tile.dtype) + ", valid " + std::to_string(tile.valid_rows) + "x" +
           std::to_string(tile.valid_cols);
}

void OnChip::Free::operator()(std::byte* memory) const {
    ::operator delete(memory, std::align_val_t{4096});
}

OnChip::OnChip() {
    for (int i = 0; i < isa::kBuffers; ++i) {
        const auto buffer = static_cast<Buffer>(i);
        const std::size_t bytes = std::size_t{capacity_of(buffer)} * host_scale(buffer);
        // The memory is not touched here: only pages that a kernel uses become resident.
        memory_[i].reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{4096})));
    }
}

std::byte* OnChip::at(Buffer buffer, std::uint32_t offset) const {
    return memory_[static_cast<int>(buffer)].get() + std::size_t{offset} * host_scale(buffer);
}

Core::Core(const Environment& environment, Role role, std::uint32_t index, std::uint32_t count,
           OnChip& memory, std::vector<Record>* trace)
    : environment_(environment),
      role_(role),
      index_(index),
      count_(count),
      memory_(memory),
      trace_(trace) {
    if (environment.strict)
        strict_.emplace(*environment.strict, role, index, name(), environment.rank,
                        environment.races);
}

std::string Core::name() const {
    return "rank " + std::to_string(environment_.rank) + " " + core_name(role_, index_);
}

void Core::fail(const char* instruction, const std::string& what) const {
    throw IsaError(name() + ", " + instruction + ": " + what + " (" + place(where_) + ")");
}

std::byte* Core::check(const char* instruction, const Tile& tile) const {
    const std::uint64_t end =
        std::uint64_t{tile.offset} + std::uint64_t{tile.rows} * tile.cols * bytes_of(tile.dtype);
    if (end > capacity_of(tile.buffer)) {
        fail(instruction, describe(tile) + " ends beyond the buffer's " +
                              std::to_string(capacity_of(tile.buffer)) + " bytes");
    }
    if (tile.valid_rows > tile.rows || tile.valid_cols > tile.cols) {
        fail(instruction, describe(tile) + ": the valid part is larger than the tile");
    }
    if (tile.dtype == DType::int32 && tile.buffer != Buffer::UB) {
        fail(instruction, describe(tile) + ": int32 goes through UB only");
    }
    if (tile.offset % 32 != 0)
        fail(instruction, describe(tile) + ": offset is not 32-byte aligned");
    const bool cube = tile.buffer != Buffer::UB;
    if (cube != (role_ == Role::cube)) {
        fail(instruction, describe(tile) + ": this kind of core has no such buffer");
    }
    return memory_.at(tile.buffer, tile.offset);
}

const GmRange& Core::check(const char* instruction, const GlobalView& view, bool write) const {
    if (view.rows == 0 || view.cols == 0) fail(instruction, "empty view of global memory");
    if (view.row_stride != 1 && view.col_stride != 1) {
        fail(instruction, "a view of global memory must be contiguous along rows or columns");
    }
    const std::byte* last = view.at(view.rows - 1, view.cols - 1) + bytes_of(view.dtype);
    for (const GmRange& range : environment_.memory) {
        if (view.base >= range.base && last <= range.base + range.bytes &&
            (range.writable || !write)) {
            return range;
        }
    }
    fail(instruction, std::string(write ? "writes " : "reads ") + std::to_string(last - view.base) +
                          " bytes of global memory outside the call's tensors and workspaces");
}

std::uint32_t Core::piece_of(const GmRange& range, const GlobalView& view) const {
    if (range.writable) return 0;
    // Pieces differ by where they begin; two that fold to one number count as one.
    const auto number = static_cast<std::uint64_t>(&range - environment_.memory.data());
    const auto begin = static_cast<std::uint64_t>(view.base - range.base);
    const auto folded = static_cast<std::uint32_t>(begin ^ (begin >> 32) ^ (number << 27));
    return folded == 0 ? 1 : folded;
}

void Core::tload(const Tile& to, const GlobalView& from, Where where) {
    where_ = where;
    std::byte* tile = check("TLOAD", to);
    const std::uint32_t piece = piece_of(check("TLOAD", from, false), from);
    if (to.buffer != Buffer::L1 && to.buffer != Buffer::UB) {
        fail("TLOAD", describe(to) + ": loads go to L1 or UB");
    }
    if (to.dtype != from.dtype) fail("TLOAD", describe(to) + ": the view has another dtype");
    if (from.rows != to.valid_rows || from.cols != to.valid_cols) {
        fail("TLOAD", describe(to) + ": the view is " + std::to_string(from.rows) + "x" +
                          std::to_string(from.cols));
    }
    const auto size = static_cast<std::int64_t>(bytes_of(to.dtype));
    if (to.layout == Layout::row ? from.col_stride != 1 : from.row_stride != 1) {
        fail("TLOAD", to.layout == Layout::row
                          ? "a row-major tile needs contiguous rows in memory"
                          : "a column-major tile needs contiguous columns in memory");
    }
    execute("TLOAD", Pipe::MTE2, {reads(from), writes(to)}, [=] {
        if (to.layout == Layout::row) {
            copy_rectangle(tile, to.cols * size, from.base, from.row_stride * size, from.rows,
                           from.cols * size);
        } else {
            copy_rectangle(tile, to.rows * size, from.base, from.col_stride * size, from.cols,
                           from.rows * size);
        }
    });
    record({.kind = Kind::tload,
            .pipe = Pipe::MTE2,
            .signal = piece,
            .peer = environment_.rank,
            .amount = std::uint64_t{from.rows} * from.cols * bytes_of(to.dtype)});
}

void Core::tstore(const GlobalView& to, const Tile& from, Where where) {
    where_ = where;
    const std::byte* tile = check("TSTORE", from);
    check("TSTORE", to, true);
    if (to.rows != from.valid_rows || to.cols != from.valid_cols) {
        fail("TSTORE", describe(from) + ": the view is " + std::to_string(to.rows) + "x" +
                           std::to_string(to.cols));
    }
    if (to.col_stride != 1) fail("TSTORE", "the view's rows must be contiguous");
    const auto size = static_cast<std::int64_t>(bytes_of(to.dtype));
    const Pipe pipe = from.buffer == Buffer::L0C ? Pipe::FIX : Pipe::MTE3;
    if (pipe == Pipe::FIX && to.dtype == DType::int32) {
        fail("TSTORE", describe(from) + ": results do not convert to int32");
    }
    if (pipe == Pipe::MTE3 && (from.buffer != Buffer::UB || from.dtype != to.dtype)) {
        fail("TSTORE", describe(from) + ": stores come from UB (same dtype) or L0C");
    }
    execute("TSTORE", pipe, {reads(from), writes(to)}, [=, &unit = matrix_unit()] {
        if (pipe == Pipe::FIX) {
            unit.unpack_c(to.base, to.dtype, to.row_stride, reinterpret_cast<const float*>(tile),
                          from.rows / unit.mr, to.rows, to.cols);
        } else {
            copy_rectangle(to.base, to.row_stride * size, tile, from.cols * size, to.rows,
                           to.cols * size);
        }
    });
    record_work(Kind::tstore, pipe, std::uint64_t{to.rows} * to.cols * bytes_of(to.dtype));
    // A cube core has just finished an output tile: a good place to let urgent cores run.
    if (role_ == Role::cube && !environment_.dry) environment_.scheduler->yield(priority());
}

void Core::textract(const Tile& to, const Tile& from, std::uint32_t row, std::uint32_t col,
                    Where where) {
    where_ = where;
    std::byte* out = check("TEXTRACT", to);
    const std::byte* in = check("TEXTRACT", from);
    if (from.buffer != Buffer::L1 || (to.buffer != Buffer::L0A && to.buffer != Buffer::L0B)) {
        fail("TEXTRACT", describe(to) + " from " + describe(from) + ": goes from L1 to L0A or L0B");
    }
    if (to.dtype != from.dtype) fail("TEXTRACT", describe(to) + " from " + describe(from));
    if (std::uint64_t{row} + to.valid_rows > from.valid_rows ||
        std::uint64_t{col} + to.valid_cols > from.valid_cols) {
        fail("TEXTRACT", describe(to) + " at (" + std::to_string(row) + ", " + std::to_string(col) +
                             ") reads beyond the valid part of " + describe(from));
    }
    const std::int64_t row_stride = from.layout == Layout::row ? from.cols : 1;
    const std::int64_t col_stride = from.layout == Layout::row ? 1 : from.rows;
    const std::size_t size = bytes_of(from.dtype);
    const Source source{
        in + (row * row_stride + col * col_stride) * static_cast<std::int64_t>(size), from.dtype,
        row_stride, col_stride};
    // This is the matrix unit's granule; it also keeps the padded float32 form inside the tile.
    if (to.rows % 16 != 0 || to.cols % (to.buffer == Buffer::L0B ? 32 : 16) != 0) {
        fail("TEXTRACT", describe(to) + ": L0A tiles are multiples of 16x16, L0B tiles of 16x32");
    }
    execute("TEXTRACT", Pipe::MTE1,
            {reads(from, row, col, to.valid_rows, to.valid_cols), writes(to)},
            [=, &unit = matrix_unit()] {
                auto* packed = reinterpret_cast<float*>(out);
                if (to.buffer == Buffer::L0A) {
                    unit.pack_a(packed, to.cols, source, to.valid_rows, to.valid_cols);
                } else {
                    unit.pack_b(packed, source, to.valid_rows, to.valid_cols);
                }
            });
    record_work(Kind::textract, Pipe::MTE1, std::uint64_t{to.valid_rows} * to.valid_cols * size);
}

void Core::multiply(const char* instruction, const Tile& c, const Tile& a, const Tile& b,
                    bool accumulate) {
    std::byte* sum = check(instruction, c);
    const std::byte* left = check(instruction, a);
    const std::byte* right = check(instruction, b);
    if (c.buffer != Buffer::L0C || a.buffer != Buffer::L0A || b.buffer != Buffer::L0B) {
        fail(instruction, "takes L0A and L0B tiles into L0C, got " + describe(a) + ", " +
                              describe(b) + ", " + describe(c));
    }
    if (c.dtype != DType::float32 || c.rows % 16 != 0 || c.cols % 32 != 0) {
        fail(instruction, describe(c) + ": L0C tiles are float32, multiples of 16x32");
    }
    if (a.valid_cols != b.valid_rows || c.valid_rows != a.valid_rows ||
        c.valid_cols != b.valid_cols) {
        fail(instruction,
             "shapes do not match: " + describe(a) + ", " + describe(b) + ", " + describe(c));
    }
    const auto effect = [=, &unit = matrix_unit()] {
        unit.multiply(reinterpret_cast<float*>(sum), c.rows / unit.mr,
                      reinterpret_cast<const float*>(left), a.cols,
                      reinterpret_cast<const float*>(right), a.valid_rows, b.valid_cols,
                      a.valid_cols, accumulate);
    };
    if (accumulate) {
        execute(instruction, Pipe::M, {reads(a), reads(b), reads(c), writes(c)}, effect);
    } else {
        execute(instruction, Pipe::M, {reads(a), reads(b), writes(c)}, effect);
    }
    record_work(accumulate ? Kind::tmatmul_acc : Kind::tmatmul, Pipe::M,
                std::uint64_t{round_up(a.valid_rows, 16)} * round_up(a.valid_cols, 16) *
                    round_up(b.valid_cols, 16),
                bytes_of(a.dtype));
}

void Core::tmatmul(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    multiply("TMATMUL", c, a, b, false);
}

void Core::tmatmul_acc(const Tile& c, const Tile& a, const Tile& b, Where where) {
    where_ = where;
    multiply("TMATMUL_ACC", c, a, b, true);
}

void Core::tput(std::uint32_t peer, const GlobalView& to, const GlobalView& from, const Tile& ping,
                const Tile& pong, Where where) {
    where_ = where;
    copy(Kind::tput, peer, to, from, ping, pong);
}

void Core::tget(std::uint32_t peer, const GlobalView& to, const GlobalView& from, const Tile& ping,
                const Tile& pong, Where where) {
    where_ = where;
    copy(Kind::tget, peer, to, from, ping, pong);
}

void Core::copy(Kind kind, std::uint32_t peer, const GlobalView& to, const GlobalView& from,
                const Tile& ping, const Tile& pong) {
    const char* const name = name_of(kind);
    const std::array halves{check(name, ping), check(name, pong)};
    const std::uint32_t piece = piece_of(check(name, from, false), from);
    check(name, to, true);
    if (to.rows != from.rows || to.cols != from.cols || to.dtype != from.dtype ||
        to.col_stride != 1 || from.col_stride != 1) {
        fail(name, "source and destination must agree in shape and dtype, with contiguous rows");
    }
    const std::size_t line = std::size_t{from.cols} * bytes_of(from.dtype);
    const auto rows_of = [line](const Tile& tile) {
        return static_cast<std::uint32_t>(tile.bytes() / line);
    };
    const std::uint32_t step = std::min(rows_of(ping), rows_of(pong));
    if (step == 0) fail(name, describe(ping) + " does not hold one row of " + std::to_string(line));
    const auto size = static_cast<std::int64_t>(bytes_of(from.dtype));
    const auto effect = [=, this, puts = kind == Kind::tput] {
        if (environment_.dry || (puts && given_up(peer))) return;
        const auto packed = static_cast<std::int64_t>(line);
        for (std::uint32_t row = 0, half = 0; row < from.rows; row += step, half ^= 1) {
            const std::uint32_t rows = std::min(step, from.rows - row);
            copy_rectangle(halves[half], packed, from.at(row, 0), from.row_stride * size, rows,
                           line);
            copy_rectangle(to.at(row, 0), to.row_stride * size, halves[half], packed, rows, line);
        }
    };
    if (strict_) {
        strict_->put({name, where_}, to, from, ping, pong, effect);
    } else {
        effect();
    }
    record({.kind = kind,
            .pipe = Pipe::MTE3,
            .signal = piece,
            .peer = peer,
            .amount = std::uint64_t{from.rows} * line});
}

void Core::set_flag(Pipe source, Pipe waiting, std::uint32_t event, Where where) {
    where_ = where;
    if (strict_ && !strict_->executes_sync()) return;
    auto& flag = flags_[static_cast<int>(source)][static_cast<int>(waiting)][event % isa::kEvents];
    if (event >= isa::kEvents) fail("SET_FLAG", "event " + std::to_string(event) + " of 8");
    if (flag.set) {
        fail("SET_FLAG", std::string(name_of(source)) + "→" + name_of(waiting) + " event " +
                             std::to_string(event) +
                             " is already set and nobody has waited for it");
    }
    flag = {true, where};
    if (strict_) strict_->set_flag({"SET_FLAG", where_}, source, waiting, event);
    record({.kind = Kind::set_flag,
            .pipe = source,
            .other = waiting,
            .event = static_cast<std::uint8_t>(event)});
}

void Core::wait_flag(Pipe source, Pipe waiting, std::uint32_t event, Where where) {
    where_ = where;
    if (strict_ && !strict_->executes_sync()) return;
    auto& flag = flags_[static_cast<int>(source)][static_cast<int>(waiting)][event % isa::kEvents];
    if (event >= isa::kEvents) fail("WAIT_FLAG", "event " + std::to_string(event) + " of 8");
    if (!flag.set) {
        fail("WAIT_FLAG", std::string(name_of(source)) + "→" + name_of(waiting) + " event " +
                              std::to_string(event) + " was not set before: pipe " +
                              name_of(waiting) + " would wait for ever");
    }
    flag.set = false;
    if (strict_) strict_->wait_flag(source, waiting, event);
    record({.kind = Kind::wait_flag,
            .pipe = source,
            .other = waiting,
            .event = static_cast<std::uint8_t>(event)});
}

void Core::fence(Pipe pipe) {
    if (strict_) {
        if (!strict_->executes_sync()) return;
        strict_->fence(pipe);
    }
    // Instructions took effect in this thread already; tnotify and the FIFO's commit word release.
    record({.kind = Kind::fence, .pipe = pipe == Pipe::ALL ? Pipe::S : pipe});
}

void Core::tnotify(std::uint32_t peer, std::byte* pad, std::uint32_t signal, std::uint64_t value,
                   Where where) {
    where_ = where;
    const auto add = [&] {
        if (environment_.dry || given_up(peer)) return std::uint64_t{0};
        return transport::SignalPad(pad).add(signal, value);
    };
    if (strict_) {
        if (!strict_->executes_sync()) return;
        strict_->publish(
            {"TNOTIFY", where_},
            "raises signal " + std::to_string(signal) + " of rank " + std::to_string(peer), peer,
            signal, add);
    } else {
        add();
    }
    record(
        {.kind = Kind::tnotify, .pipe = Pipe::S, .signal = signal, .peer = peer, .amount = value});
}

transport::Diagnosis Core::diagnosis(std::uint32_t peer) const {
    return {.waiter = waiter_of(kernel_of(role_)),
            .core = index_,
            .peer = peer,
            .chunk = chunk_,
            .op = environment_.op};
}

bool Core::given_up(std::uint32_t peer) const {
    if (peer == environment_.rank) return false;
    const std::uint64_t until = environment_.peers_wait_until_ns;
    return environment_.pad.aborted() != transport::AbortCode::none ||
           (until != 0 && transport::monotonic_ns() > until);
}

std::uint64_t Core::wanted(std::uint32_t signal, std::int64_t amount) const {
    const std::int64_t value =
        static_cast<std::int64_t>(environment_.pad.expected(signal).value) + amount;
    return static_cast<std::uint64_t>(std::max<std::int64_t>(value, 0));
}

bool Core::twait(std::uint32_t signal, std::int64_t amount, std::uint32_t peer, Where where) {
    where_ = where;
    if (strict_ && !strict_->executes_wait()) return true;
    // In a trace a call is alone: everything that earlier calls add is there.
    record({.kind = Kind::twait,
            .pipe = Pipe::S,
            .signal = signal,
            .peer = peer,
            .amount = static_cast<std::uint64_t>(std::max<std::int64_t>(amount, 0))});
    if (environment_.dry) return true;
    const std::uint64_t value = wanted(signal, amount);
    if (!await(signal, value, peer)) return false;
    if (strict_) strict_->seen(peer, signal, value);
    return true;
}

bool Core::await(std::uint32_t signal, std::uint64_t value, std::uint32_t peer) {
    if (environment_.pad.load(signal) >= value) {
        // A core that never has to sleep must still see an abort between two waits.
        return environment_.pad.aborted() == transport::AbortCode::none;
    }
    // A wait for the own rank's other cores fails because one of those waits in vain: that core, which knows
    // the reason, reports first.
    const std::uint64_t grace = peer == environment_.rank ? kOwnRankGraceNs : 0;
    const auto sleep = [&] {
        environment_.scheduler->begin_block();
        const transport::WaitResult result =
            environment_.pad.wait(signal, value, environment_.deadline_ns + grace, diagnosis(peer));
        environment_.scheduler->end_block(priority());
        return result;
    };
    if (environment_.waits == nullptr) return sleep() == transport::WaitResult::ok;
    const auto entry =
        environment_.waits->sleep({core_name(role_, index_), place(where_), signal, value, peer});
    const transport::WaitResult result = sleep();
    if (result == transport::WaitResult::ok) environment_.waits->wake(entry);
    if (result == transport::WaitResult::timed_out) environment_.waits->deadline_passed();
    return result == transport::WaitResult::ok;
}

bool Core::nic_put(const transport::PutCommand& command, Where where) {
    where_ = where;
    if (strict_) {
        if (!strict_->executes_sync()) return true;
        strict_->publish({"NIC_PUT", where_},
                         "queues a put to rank " + std::to_string(command.peer), command.peer,
                         command.signal, [] { return std::uint64_t{0}; });
    }
    if (environment_.fifo == nullptr && !environment_.dry) {
        fail("NIC_PUT", "rank " + std::to_string(command.peer) +
                            " is on another node, but the call has no command FIFO");
    }
    record({.kind = Kind::nic_put,
            .pipe = Pipe::S,
            .signal = command.signal,
            .peer = command.peer,
            .amount = command.bytes,
            .value = command.value});
    if (environment_.dry) return true;
    const transport::FifoHandle& fifo = *environment_.fifo;
    const auto load = [](std::uint64_t* word) {
        return std::atomic_ref(*word).load(std::memory_order_acquire);
    };
    // Only a full ring makes push wait; then the slot goes to another core meanwhile.
    const bool full = load(fifo.head) - load(fifo.tail) >= fifo.capacity;
    if (full) environment_.scheduler->begin_block();
    const transport::WaitResult result =
        fifo.push(command, environment_.pad, environment_.deadline_ns, diagnosis(command.peer));
    if (full) environment_.scheduler->end_block(priority());
    return result == transport::WaitResult::ok;
}

void Core::finish(bool complete) {
    if (!complete) return;
    if (strict_) strict_->drain();
    for (int source = 0; source < isa::kPipes; ++source) {
        for (int waiting = 0; waiting < isa::kPipes; ++waiting) {
            for (int event = 0; event < isa::kEvents; ++event) {
                const auto& flag = flags_[source][waiting][event];
                if (!flag.set) continue;
                where_ = flag.where;
                fail("end of kernel", std::string("flag ") + name_of(static_cast<Pipe>(source)) +
                                          "→" + name_of(static_cast<Pipe>(waiting)) + " event " +
                                          std::to_string(event) + " was set and never waited for");
            }
        }
    }
}

}  // namespace mkernel::ascend::sim
