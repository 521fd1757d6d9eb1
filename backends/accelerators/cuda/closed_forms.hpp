// Closed forms of what calls in parts take beside their products: copies and their order. As in
// topology/cost.hpp, ranks must find the same bits: every step is one IEEE operation, in the order that is
// written here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "topology/cost.hpp"

#include "backends/accelerators/hopper/built_on.hpp"

namespace mkernel::hopper {

using topology::moved_us;
using topology::Size;
using topology::up;
using topology::Wide;

// Measured times of copies by one engine on `blocks` blocks (0: the copy engine), in ascending size.
struct Curve {
    bool copy_engine;
    Size blocks;
    std::vector<std::pair<Size, double>> points;  // at least two: bytes, microseconds

    // Returns the time on the line through the two nearest points; below the first point, that point's.
    double microseconds(Wide nbytes) const {
        std::size_t at = 1;
        while (at + 1 < points.size() && points[at].first < nbytes) ++at;
        const auto &before = points[at - 1], &after = points[at];
        const double slope =
            (after.second - before.second) / static_cast<double>(after.first - before.first);
        const Wide beyond = std::max(nbytes, Wide{points[0].first}) - before.first;
        return before.second + std::max(slope, 0.0) * static_cast<double>(beyond);
    }
};

struct Choice {
    std::size_t curve;
    double microseconds;
};

// The copies of one direction, as the class Engines in transfer/engines.py has them. `most_gbs`: what links
// carry. `keeps_processors`: the share by which a copy engine, which takes no processor, may be slower than
// the best; nothing where it takes some.
class Copies {
  public:
    std::vector<Curve> curves;
    std::optional<double> most_gbs, keeps_processors;

    // As measured, but no sooner than links carry it.
    double microseconds(const Curve& curve, Wide nbytes) const {
        const double measured = curve.microseconds(nbytes);
        if (!most_gbs) return measured;
        return std::max(measured, curve.microseconds(1) + moved_us(nbytes, *most_gbs));
    }

    // The curve for a copy that may use `most_blocks` blocks; nothing if none fits. `flagged`: a flag follows
    // the bytes, for which the copy engine needs one more copy.
    std::optional<Choice> choose(Wide nbytes, Size most_blocks, bool flagged) const {
        const auto taken = [&](const Curve& curve) {
            const double flag = flagged && curve.copy_engine ? curve.microseconds(1) : 0.0;
            return microseconds(curve, nbytes) + flag;
        };
        std::optional<Choice> best;
        for (std::size_t at = 0; at < curves.size(); ++at) {
            if (curves[at].blocks > most_blocks) continue;
            const double found = taken(curves[at]);
            if (!best || found < best->microseconds ||
                (found == best->microseconds && curves[at].blocks < curves[best->curve].blocks)) {
                best = Choice{at, found};
            }
        }
        if (!best || !keeps_processors) return best;
        for (std::size_t at = 0; at < curves.size(); ++at) {
            if (curves[at].blocks > most_blocks || !curves[at].copy_engine) continue;
            const double found = taken(curves[at]);
            if (found <= best->microseconds * (1 + *keeps_processors)) return Choice{at, found};
        }
        return best;
    }
};

// Times of one call without its start: all products, all transfers, and the call.
struct Times {
    double compute, comm, pipelined;
};

// The constants of the class Parts in machine.py, with the copies that go to peers.
struct Parts {
    double gap_us, sum_us, sum_gbs, sum_cached_gbs;
    Size sum_cached_bytes;
    double end_us;
    Copies put;

    // A copy by a copy engine, followed by a flag.
    double copy_us(Wide nbytes) const { return put.choose(nbytes, 0, true)->microseconds; }

    // AllGather+GEMM. Own rows are multiplied first; each part when the previous product has ended and the
    // part has arrived. `own_us`, `part_us`: products of a rank's rows and of a part's. `scaled`: scales of
    // rows go ahead.
    Times gathered(Size world, Size m, Size k, Size itemsize, Size parts, double own_us,
                   double part_us, bool scaled) const {
        const double copy = copy_us(Wide{up(m / world, parts)} * k * itemsize);
        double now = own_us, copied = scaled ? copy_us(1) : 0.0;
        for (Size part = 0; part < (world - 1) * parts; ++part) {
            copied += copy;
            now = std::max(now, copied) + gap_us + part_us;
        }
        return {own_us + static_cast<double>((world - 1) * parts) * part_us, copied, now + end_us};
    }

    // A reduction. Peers' rows are multiplied first and leave part by part; own parts are added when the
    // peers' have arrived, and those of an all-reduce (`whole`) are sent on. `of_sums`, `of_out`: bytes of an
    // element of partial results and of results.
    Times summed(bool whole, Size world, Size m, Size n, Size parts, Size of_sums, Size of_out,
                 double part_us) const {
        const Wide elements = Wide{up(up(m, world), parts)} * n;
        const double copy = copy_us(elements * of_sums), result = copy_us(elements * of_out);
        const Wide moved = elements * (world * of_sums + of_out);
        const double added =
            sum_us + moved_us(moved, moved <= sum_cached_bytes ? sum_cached_gbs : sum_gbs);
        double now = 0, copied = 0, comm = 0;
        std::vector<double> arrived;
        for (Size part = 0; part < (world - 1) * parts; ++part) {
            now += part_us + gap_us;
            copied = std::max(copied, now) + copy;
            comm += copy;
            arrived.push_back(copied);
        }
        for (Size own = 0; own < parts; ++own) {
            const double there = arrived.at(static_cast<std::size_t>((world - 2) * parts + own));
            now = std::max(now + part_us + gap_us, there) + added;
            for (Size peer = 1; whole && peer < world; ++peer) {
                copied = std::max(copied, now) + result;
                comm += result;
            }
        }
        if (whole) {
            const double landed = static_cast<double>(world - 1) / static_cast<double>(world) *
                                  static_cast<double>(m) * static_cast<double>(n) *
                                  static_cast<double>(of_out);
            now = std::max(now, copied) + (sum_us + 2 * landed / (sum_gbs * 1e3));
        }
        return {static_cast<double>(world * parts) * part_us, comm, now + end_us};
    }
};

}  // namespace mkernel::hopper
