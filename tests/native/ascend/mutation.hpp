// The mutation test: every flag and fence of a kernel taken away in turn must be reported by
// strict simulation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "backends/accelerators/ascend/sim/trace.hpp"
#include "tests/native/ascend/check.hpp"

namespace mkernel::ascend::test {

struct Mutations {
    // Single syncs, of which some keep nothing apart; flags with the waits that answer them, same.
    std::uint32_t syncs = 0, idle_syncs = 0, pairs = 0, idle_pairs = 0;
};

// Tries blocks 0 and 1 of a kernel. `kernels.run(role, index, without)`: what strict simulation says of
// that block without the syncs of those numbers, counted over flags, fences, TNOTIFYs and
// NIC_PUTs; `kernels.trace()`: what the latest run issued.
//
// First each by itself. A fence keeps nothing apart if the block touched no memory since the one
// before, but to read it by scalar instructions; that of one pipe, if that pipe did not.
// Then each flag with its wait, which no count can find: only the order of the accesses that it kept
// apart. A flag set before its pipe's first instruction, or waited for after the other pipe's last
// one, keeps nothing apart: it only starts or ends the alternation of set and wait, and both ends are
// needed for the count alone. Nor does one with a fence between its ends, which orders all pipes; a fence
// of one pipe does so up to that pipe's latest work, which others have led to. Nor does one behind whose
// start another flag between the same pipes is set, and waited for before the waiting pipe works again.
template <class Kernels>
Mutations every_sync_is_needed(const char* name, Kernels& kernels, sim::Role role) {
    using sim::Kind;
    using sim::Record;
    const auto is_sync = [](const Record& each) {
        return each.kind == Kind::set_flag || each.kind == Kind::wait_flag ||
               each.kind == Kind::fence || each.kind == Kind::tnotify || each.kind == Kind::nic_put;
    };
    const auto is_work = [&](const Record& each) {
        return !is_sync(each) && each.kind != Kind::twait;
    };
    Mutations found;
    for (const std::uint32_t index : {0u, 1u}) {
        const auto judge = [&](std::vector<std::uint32_t> without, bool needed) {
            const bool reported = !kernels.run(role, index, without).empty();
            if (reported != needed) {
                std::fprintf(stderr, "%s %s %u: without %u (of %zu): %sreported\n", name,
                             name_of(role), index, without[0], without.size(),
                             reported ? "" : "not ");
            }
            CHECK(reported == needed);
        };
        const std::string sound = kernels.run(role, index, {});
        if (!sound.empty()) std::fprintf(stderr, "%s: %s\n", name, sound.c_str());
        CHECK(sound.empty());
        const std::vector<Record> all = kernels.trace();
        std::vector<std::size_t> at;  // of the syncs
        for (std::size_t i = 0; i < all.size(); ++i) {
            if (is_sync(all[i])) at.push_back(i);
        }
        // By pipe, as record's number + 1: its latest access of memory, and up to where a fence, or the
        // order that the fence of one pipe implies, has covered them.
        std::size_t touched[isa::kPipes] = {}, covered[isa::kPipes] = {};
        for (std::uint32_t i = 0, next = 0; i < at.size(); ++i) {
            for (; next < at[i]; ++next) {
                const Record& each = all[next];
                if (each.kind == Kind::tload || each.kind == Kind::tstore ||
                    each.kind == Kind::tput || each.kind == Kind::tget ||
                    (each.kind == Kind::scalar && each.value > 0)) {
                    touched[static_cast<int>(each.pipe)] = next + 1;
                }
            }
            const Kind kind = all[at[i]].kind;
            if (kind == Kind::tnotify || kind == Kind::nic_put) continue;  // not seen when dry
            bool needed = kind != Kind::fence;
            if (kind == Kind::fence) {
                const auto fenced = static_cast<int>(all[at[i]].pipe);
                for (int pipe = 0; pipe < isa::kPipes; ++pipe) {
                    const bool one = fenced > 0;
                    if (!one || pipe == fenced) needed = needed || touched[pipe] > covered[pipe];
                    covered[pipe] = std::max(covered[pipe], one ? touched[fenced] : at[i] + 1);
                }
            }
            judge({i}, needed);
            ++found.syncs;
            found.idle_syncs += needed ? 0 : 1;
        }
        for (std::uint32_t i = 0; i < at.size(); ++i) {
            const Record& set = all[at[i]];
            if (set.kind != Kind::set_flag) continue;
            std::uint32_t j = i + 1;
            const auto answers = [&](const Record& wait) {
                return wait.kind == Kind::wait_flag && wait.pipe == set.pipe &&
                       wait.other == set.other && wait.event == set.event;
            };
            while (!answers(all[at[j]])) ++j;
            const auto uses = [&](isa::Pipe pipe, std::size_t from, std::size_t to) {
                return std::any_of(
                    all.begin() + static_cast<std::ptrdiff_t>(from),
                    all.begin() + static_cast<std::ptrdiff_t>(to),
                    [&](const auto& each) { return each.pipe == pipe && is_work(each); });
            };
            const bool fenced = std::any_of(at.begin() + i, at.begin() + j, [&](std::size_t each) {
                if (all[each].kind != Kind::fence) return false;
                if (all[each].pipe == isa::Pipe::S || all[each].pipe == set.pipe) return true;
                return uses(all[each].pipe, at[i], each);
            });
            std::size_t works = at[j];  // the waiting pipe, again
            while (works < all.size() && !(all[works].pipe == set.other && is_work(all[works]))) {
                ++works;
            }
            bool again = false;
            for (std::size_t later = at[i] + 1; later < works; ++later) {
                const Record& other = all[later];
                if (other.kind != Kind::set_flag || other.pipe != set.pipe ||
                    other.other != set.other) {
                    continue;
                }
                again = again || std::any_of(all.begin() + static_cast<std::ptrdiff_t>(later),
                                             all.begin() + static_cast<std::ptrdiff_t>(works),
                                             [&](const Record& wait) {
                                                 return wait.kind == Kind::wait_flag &&
                                                        wait.pipe == other.pipe &&
                                                        wait.other == other.other &&
                                                        wait.event == other.event;
                                             });
            }
            const bool needed =
                !fenced && !again && uses(set.pipe, 0, at[i]) && uses(set.other, at[j], all.size());
            judge({i, j}, needed);
            ++found.pairs;
            found.idle_pairs += needed ? 0 : 1;
        }
    }
    std::printf(
        "%s %s: %u syncs, each missed but %u; %u pairs, missed but for %u that keep nothing "
        "apart\n",
        name, name_of(role), found.syncs, found.idle_syncs, found.pairs, found.idle_pairs);
    CHECK(found.syncs > found.idle_syncs);
    return found;
}

}  // namespace mkernel::ascend::test
