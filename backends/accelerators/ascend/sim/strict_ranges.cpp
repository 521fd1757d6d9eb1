#include "backends/accelerators/ascend/sim/strict_ranges.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace mkernel::ascend::sim {

using isa::Buffer;
using isa::GlobalView;
using isa::Layout;
using isa::Pipe;
using isa::Tile;

namespace {

struct ByteRange {
    std::uint32_t begin = 0, end = 0;
    [[nodiscard]] bool holds(const ByteRange& other) const {
        return begin <= other.begin && other.end <= end;
    }
};

ByteRange whole(const Tile& tile) {
    return {tile.offset, tile.offset + tile.bytes()};
}

// Returns the bytes from the first to the last that an operand touches. A write may touch all of its tile,
// since the elements outside the valid part are unspecified; the layout of L0 is not known.
ByteRange touched(const Operand& operand) {
    const Tile& tile = operand.tile;
    if (operand.write || (tile.buffer != Buffer::L1 && tile.buffer != Buffer::UB)) {
        return whole(tile);
    }
    const bool by_row = tile.layout == Layout::row;
    const std::uint32_t pitch = by_row ? tile.cols : tile.rows;
    const std::uint32_t line = by_row ? operand.row : operand.col;
    const std::uint32_t from = by_row ? operand.col : operand.row;
    const std::uint32_t lines = by_row ? operand.rows : operand.cols;
    const std::uint32_t length = by_row ? operand.cols : operand.rows;
    const std::uint32_t size = bytes_of(tile.dtype);
    if (lines == 0 || length == 0) return {tile.offset, tile.offset};
    return {tile.offset + (line * pitch + from) * size,
            tile.offset + ((line + lines - 1) * pitch + from + length) * size};
}

std::string words(Buffer buffer, const ByteRange& span) {
    return std::string(name_of(buffer)) + "[" + std::to_string(span.begin) + ", " +
           std::to_string(span.end) + ")";
}

// A view as equally long runs of bytes.
struct Lines {
    const std::byte* base = nullptr;
    std::int64_t count = 0, length = 0, pitch = 0;
    [[nodiscard]] const std::byte* end() const { return base + (count - 1) * pitch + length; }
};

Lines lines_of(const GlobalView& view) {
    const std::int64_t size = bytes_of(view.dtype);
    Lines lines = view.col_stride == 1
                      ? Lines{view.base, view.rows, view.cols * size, view.row_stride * size}
                      : Lines{view.base, view.cols, view.rows * size, view.col_stride * size};
    if (lines.count == 1) lines.pitch = lines.length;  // whatever the stride
    return lines;
}

// Returns true where views with the same pitch overlap.
bool overlap_in_step(const Lines& a, const Lines& b) {
    const std::int64_t apart = b.base - a.base;
    std::int64_t line = apart / a.pitch, shift = apart % a.pitch;
    if (shift < 0) {
        shift += a.pitch;
        --line;
    }
    // Line j of b begins in line `line + j` of a, and may reach into the one after.
    const auto meets = [&](std::int64_t offset) {
        return offset < a.count && offset + b.count > 0;
    };
    return (shift < a.length && meets(line)) || (shift + b.length > a.pitch && meets(line + 1));
}

// Returns true where a overlaps bytes [begin, end), counted from its base.
bool overlap_run(const Lines& a, std::int64_t begin, std::int64_t end) {
    const std::int64_t first = std::max<std::int64_t>(begin / a.pitch, 0);
    const std::int64_t last = std::min((end - 1) / a.pitch, a.count - 1);
    for (std::int64_t line = first; line <= last; ++line) {
        const std::int64_t at = line * a.pitch;
        if (begin < at + a.length && end > at) return true;
    }
    return false;
}

// Returns true for a word that S writes where it is part of, or the next one after, a run of words that it
// wrote: then that run covers it.
template <class Accesses>
bool extends(Accesses& writes, const GlobalView& word) {
    for (auto& each : writes) {
        if (each.pipe != Pipe::S || word.base < each.view.base) continue;
        const auto apart = word.base - each.view.base;
        const std::int64_t length = std::int64_t{each.view.cols} * bytes_of(each.view.dtype);
        if (apart > length) continue;
        if (apart == length) {
            ++each.view.cols;
            ++each.view.row_stride;
            each.end = end_of(each.view);
        }
        return true;
    }
    return false;
}

std::string flags_between(Pipe earlier, Pipe later) {
    return std::string("; nothing orders ") + name_of(later) +
           " after it: set_flag and wait_flag(" + name_of(earlier) + ", " + name_of(later) +
           ") are missing";
}

bool is_load(const Site& site) {
    return std::string_view(site.instruction) == "TLOAD";
}

}  // namespace

bool overlap(const GlobalView& first, const GlobalView& second) {
    Lines a = lines_of(first), b = lines_of(second);
    if (a.base >= b.end() || b.base >= a.end()) return false;
    if (a.pitch == b.pitch && a.pitch > 0) return overlap_in_step(a, b);
    if (b.count > a.count) std::swap(a, b);
    for (std::int64_t line = 0; line < b.count; ++line) {
        const std::int64_t begin = b.base - a.base + line * b.pitch;
        if (begin + b.length > 0 && overlap_run(a, begin, begin + b.length)) return true;
    }
    return false;
}

const std::byte* end_of(const GlobalView& view) {
    return lines_of(view).end();
}

std::string describe(const GlobalView& view) {
    const Lines lines = lines_of(view);
    return std::to_string(lines.end() - lines.base) + " bytes of global memory at " +
           std::to_string(reinterpret_cast<std::uintptr_t>(lines.base)) + " (" +
           std::to_string(view.rows) + "x" + std::to_string(view.cols) + " " + name_of(view.dtype) +
           ")";
}

std::string place(const Line& where) {
    std::string_view file = where.file;
    file.remove_prefix(file.rfind('/') + 1);  // npos + 1 is 0
    return std::string(file) + ":" + std::to_string(where.line);
}

std::string describe(const Site& site, Pipe pipe) {
    return std::string(site.instruction) + " (pipe " + name_of(pipe) + ", " + place(site.where) +
           ")";
}

std::string Ranges::access(const Order& order, const Site& site, Pipe pipe, std::uint32_t at,
                           const Operand& operand) {
    const Access now{pipe, at, site};
    return operand.kind == Operand::Kind::tile ? tile_access(order, now, operand)
                                               : global_access(order, now, operand);
}

void Ranges::cut(Segments& segments, std::uint32_t at) {
    auto next = segments.upper_bound(at);
    if (next == segments.begin()) return;
    auto& [begin, segment] = *std::prev(next);
    if (begin == at || segment.end <= at) return;
    Segment rest = segment;
    segment.end = at;
    segments.emplace_hint(next, at, std::move(rest));
}

std::string Ranges::tile_access(const Order& order, const Access& now, const Operand& operand) {
    const Tile& tile = operand.tile;
    const ByteRange span = touched(operand), all = whole(tile);
    if (span.begin == span.end) return {};
    Segments& segments = buffers_[static_cast<int>(tile.buffer)];
    cut(segments, span.begin);
    cut(segments, span.end);

    const auto pending = [&](const Access& access) {
        return access.at != 0 && access.pipe != now.pipe &&
               !order.after(now.pipe, access.pipe, access.at);
    };
    const auto last = segments.lower_bound(span.end);
    std::uint32_t covered = span.begin;
    const Written* only = nullptr;
    bool pieces = false, sticks_out = false;
    for (auto it = segments.lower_bound(span.begin); it != last; ++it) {
        auto& [begin, segment] = *it;
        const ByteRange here{begin, segment.end};
        const Written* written = segment.written.get();
        if (written != nullptr && pending(*written)) {
            return std::string(operand.write ? "overwrites " : "reads ") +
                   words(tile.buffer, here) + " while " + describe(written->site, written->pipe) +
                   " may still write it" + flags_between(written->pipe, now.pipe);
        }
        if (operand.write) {
            for (const Access& reader : segment.readers) {
                if (!pending(reader)) continue;
                return "overwrites " + words(tile.buffer, here) + " while " +
                       describe(reader.site, reader.pipe) + " may still read it" +
                       flags_between(reader.pipe, now.pipe);
            }
            if (written != nullptr && !written->read && is_load(now.site) &&
                is_load(written->site)) {
                return "overwrites " + words(tile.buffer, here) + ", which " +
                       describe(written->site, written->pipe) +
                       " loaded and nobody has read: do the two tiles overlap?";
            }
            continue;
        }
        if (begin != covered || written == nullptr) break;  // a gap
        covered = segment.end;
        pieces = pieces || (only != nullptr && only != written);
        only = written;
        const ByteRange theirs = whole(written->tile);
        sticks_out = sticks_out || !(theirs.holds(all) || all.holds(theirs));
    }

    if (operand.write) {
        segments.erase(segments.lower_bound(span.begin), last);
        auto written = std::make_shared<Written>();
        static_cast<Access&>(*written) = now;
        written->tile = tile;
        segments.emplace(span.begin, Segment{span.end, std::move(written), {}});
        return {};
    }
    if (covered != span.end) {
        return "reads " + words(tile.buffer, {covered, span.end}) + ", which nothing has written";
    }
    if (pieces && sticks_out) {
        return "reads " + words(tile.buffer, span) + ", part of which was overwritten by " +
               describe(only->site, only->pipe) + " as part of " +
               words(tile.buffer, whole(only->tile)) + ": the tiles overlap";
    }
    const Tile& source = only->tile;
    if (!pieces && source.offset == tile.offset && source.layout == tile.layout &&
        source.dtype == tile.dtype && source.rows == tile.rows && source.cols == tile.cols &&
        (operand.row + operand.rows > source.valid_rows ||
         operand.col + operand.cols > source.valid_cols)) {
        return "reads " + std::to_string(operand.rows) + "x" + std::to_string(operand.cols) +
               " elements of " + words(tile.buffer, span) + " from (" +
               std::to_string(operand.row) + ", " + std::to_string(operand.col) + ") on, but " +
               describe(only->site, only->pipe) + " has written " +
               std::to_string(source.valid_rows) + "x" + std::to_string(source.valid_cols) +
               "; the rest is uninitialised";
    }
    for (auto it = segments.lower_bound(span.begin); it != last; ++it) {
        it->second.written->read = true;
        it->second.readers[static_cast<std::size_t>(now.pipe)] = now;
    }
    return {};
}

std::string Ranges::global_access(const Order& order, const Access& now, const Operand& operand) {
    const std::byte* const end = end_of(operand.view);
    const auto conflict = [&](const GlobalAccess& earlier) -> std::string {
        if (earlier.end <= operand.view.base || end <= earlier.view.base) return {};  // as most
        // The words that S reads and writes lie in its cache: only a fence makes it and memory agree.
        const bool cached = earlier.write && (earlier.pipe == Pipe::S || now.pipe == Pipe::S);
        const bool ordered = !cached && order.after(now.pipe, earlier.pipe, earlier.at);
        if (earlier.pipe == now.pipe || ordered || !overlap(earlier.view, operand.view)) return {};
        if (cached) {
            return std::string(operand.write ? "overwrites " : "reads ") + describe(operand.view) +
                   ", part of which " + describe(earlier.site, earlier.pipe) +
                   " wrote; fence() between the scalar cache and memory is missing";
        }
        return std::string(operand.write ? "overwrites " : "reads ") + describe(operand.view) +
               " while " + describe(earlier.site, earlier.pipe) + " may still " +
               (earlier.write ? "write" : "read") + " part of it" +
               flags_between(earlier.pipe, now.pipe);
    };
    for (const GlobalAccess& earlier : writes_) {
        if (std::string wrong = conflict(earlier); !wrong.empty()) return wrong;
    }
    if (operand.write) {
        for (const GlobalAccess& earlier : reads_) {
            if (std::string wrong = conflict(earlier); !wrong.empty()) return wrong;
        }
    }
    // S has read before it issues anything else, and writes one word after the other.
    if (now.pipe == Pipe::S && (!operand.write || extends(writes_, operand.view))) return {};
    GlobalAccess access{};
    static_cast<Access&>(access) = now;
    access.write = operand.write;
    access.view = operand.view;
    access.end = end;
    (operand.write ? writes_ : reads_).push_back(access);
    return {};
}

void Ranges::each_pending_read(const Order& order, const Read& read) const {
    for (const GlobalAccess& each : reads_) {
        if (!order.after(Pipe::S, each.pipe, each.at)) read(each.site, each.pipe, each.view);
    }
}

std::string Ranges::unpublished(const Order& order, bool reads) const {
    if (!writes_.empty()) {
        const GlobalAccess& first = writes_.front();
        return "what " + describe(first.site, first.pipe) +
               " wrote may not be visible yet; fence() is missing";
    }
    std::string pending;
    each_pending_read(order, [&](const Site& site, Pipe pipe, const isa::GlobalView& view) {
        if (!reads || !pending.empty()) return;
        pending =
            describe(site, pipe) + " may still read " + describe(view) + "; fence() is missing";
    });
    return pending;
}

void Ranges::fence(isa::Pipe pipe) {
    const auto ends = [pipe](const GlobalAccess& each) {
        return pipe == isa::Pipe::ALL || each.pipe == pipe;
    };
    std::erase_if(reads_, ends);
    std::erase_if(writes_, ends);
}

}  // namespace mkernel::ascend::sim
