// Closed forms of the times of products on one device, and of exchanges between devices. Times are microseconds, bandwidths GB/s.
//
// Ranks that make the same plan must find the same times, on whatever machine: integers of 128 bits, which
// hold what sizes of 31 bits multiply to, and IEEE doubles in the order that is written here, which the
// compiler may not contract (CMakeLists.txt).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace mkernel::topology {

using Size = std::int64_t;
__extension__ using Wide = __int128;

inline Size up(Size value, Size by) {
    return (value + by - 1) / by;
}

inline double moved_us(Wide nbytes, double gbs) {
    return static_cast<double>(nbytes) / (gbs * 1e3);
}

// One output tile on one core: 2 * rows * columns * K / rate.
inline double gemm_tile_us(Size rows, Size columns, Size k, double tflops_per_core) {
    return 2.0 * static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(k) /
           (tflops_per_core * 1e6);
}

// C [m, n] = A [m, k] @ B [k, n] on one device: whole waves of one tile per core, edge tiles counted in
// full, and never below the time to read A and B and write C once (roofline: Williams, Waterman, Patterson,
// CACM 2009).
inline double gemm_us(Size m, Size n, Size k, Size tile_m, Size tile_n, Size cores,
                      double tflops_per_core, double memory_gbs, Size itemsize, Size out_itemsize) {
    const Size waves = up(up(m, tile_m) * up(n, tile_n), cores);
    const double compute =
        static_cast<double>(waves) * gemm_tile_us(tile_m, tile_n, k, tflops_per_core);
    const Wide traffic = (Wide{m} * k + Wide{k} * n) * itemsize + Wide{m} * n * out_itemsize;
    return std::max(compute, moved_us(traffic, memory_gbs));
}

// The types of the same names in topology/cost.py, which say what the numbers are.
struct Tile {
    Size rows, columns, cores;
    double tflops_per_core;
};

struct LoadedLines {
    Size depth;
    double uneven, lines_a_us;

    // Of `tiles` tiles at once. Rows are K long: gcd(K, depth) / depth of them begin with a line.
    double loaded_us(const Tile& tile, Size tiles, Size k) const {
        const double begin = static_cast<double>(std::gcd(k, depth)) / static_cast<double>(depth);
        const Wide rows = Wide{up(k, depth)} * tiles * (tile.rows + tile.columns);
        return static_cast<double>(rows) * (begin + (1.0 - begin) * uneven) / lines_a_us;
    }
};

struct Streamed {
    Size even_depth;
    double uneven_rate, depth_us, results_gbs, loads_gbs, sums_gbs;
};

// The device of a product, and the bytes of an element of its operands and of its result.
struct Device {
    Size cores;
    double memory_gbs;
    Size itemsize;
};

// The time of a product on one device and of one of its tiles; `tile` is the number of the kind of tiles of
// products in waves, else -1.
struct Product {
    double total_us, tile_us;
    Size tile;
};

// A call of which a product is the compute.
struct Overlapped {
    Product product;
    double pipelined_us;
};

// The products that one path offers: one for each kind of tile and each cut of K.
class Products {
  public:
    std::vector<Tile> tiles;
    std::optional<Streamed> streamed;  // whose tiles are `tiles`; nothing: products are in waves
    std::optional<LoadedLines> loaded;
    std::vector<Size> splits;
    double tile_us, split_us;

    // Calls `take` with the time of C [owners * rows, n] = A @ B, for each way. Tiles hold rows of one owner
    // only. Parts of K are written in float32, read again and added by a separate launch.
    template <typename Take>
    void each(Size owners, Size rows, Size n, Size k, const Device& device, Take&& take) const {
        const Size m = owners * rows;
        if (streamed) {
            for (const Size parts : splits) {
                double total = streamed_us(m, n, k, parts, device);
                total += parts > 1 ? split_us : 0.0;
                take(Product{total, total, -1});
            }
            return;
        }
        const Wide moved = (Wide{m} * k + Wide{k} * n + Wide{m} * n) * device.itemsize;
        const double traffic = moved_us(moved, device.memory_gbs);
        for (std::size_t at = 0; at < tiles.size(); ++at) {
            const Tile& tile = tiles[at];
            const Size count = owners * up(rows, tile.rows) * up(n, tile.columns);
            for (const Size parts : splits) {
                Product found = in_waves(tile, count * parts, up(k, parts), device.cores);
                found.total_us = std::max(found.total_us, traffic);
                if (parts > 1) {
                    found.total_us +=
                        split_us + moved_us(Wide{2} * parts * m * n * 4, device.memory_gbs);
                }
                found.tile = static_cast<Size>(at);
                take(found);
            }
        }
    }

    // The fastest by itself, the first of equal ones.
    Product fastest(Size owners, Size rows, Size n, Size k, const Device& device) const {
        std::optional<Product> best;
        each(owners, rows, n, k, device, [&best](const Product& found) {
            if (!best || found.total_us < best->total_us) best = found;
        });
        return *best;
    }

    // The product that makes a call the fastest that overlaps it with communication of `comm_us`: the last
    // rows to come, or the first partial results to leave, are one tile's work away from the rest, and
    // `unhidden` of the shorter of both is not hidden.
    Overlapped overlapped(Size owners, Size rows, Size n, Size k, const Device& device,
                          double comm_us, double unhidden) const {
        std::optional<Overlapped> best;
        each(owners, rows, n, k, device, [&](const Product& found) {
            const double compute = found.total_us;
            const double floor = std::max(compute, comm_us != 0 ? comm_us + found.tile_us : 0.0);
            const double whole =
                std::min(floor + unhidden * std::min(compute, comm_us), compute + comm_us);
            if (!best || whole < best->pipelined_us) best = Overlapped{found, whole};
        });
        return *best;
    }

  private:
    // `count` tiles of one kind: rounds of one tile per core, or per group of cores that share one. Each takes
    // a fixed time, plus the time of its products, or of its loads if these take longer.
    Product in_waves(const Tile& tile, Size count, Size k, Size cores) const {
        const Size places = std::max(Size{1}, cores / tile.cores);
        const double rate = static_cast<double>(tile.cores) * tile.tflops_per_core;
        const double multiplied = gemm_tile_us(tile.rows, tile.columns, k, rate);
        const auto products_us = [&](Size at_once) {
            return std::max(multiplied, loaded ? loaded->loaded_us(tile, at_once, k) : 0.0);
        };
        const Size waves = count / places, left = count % places;
        const double each = tile_us + products_us(waves != 0 ? places : left);
        const double last = left != 0 ? tile_us + products_us(left) : 0.0;
        return {static_cast<double>(waves) * each + last, each, -1};
    }

    // With K in `parts` parts, without the launch that adds them.
    double streamed_us(Size m, Size n, Size k, Size parts, const Device& device) const {
        const double even = k % streamed->even_depth != 0 ? streamed->uneven_rate : 1.0;
        std::optional<double> multiplied;
        for (const Tile& tile : tiles) {
            const Size filled = up(m, tile.rows) * up(n, tile.columns);
            const double rate = static_cast<double>(device.cores) * tile.tflops_per_core * even;
            const double found =
                static_cast<double>(filled) * gemm_tile_us(tile.rows, tile.columns, k, rate);
            multiplied = std::min(multiplied.value_or(found), found);
        }
        const double loaded_us =
            moved_us((Wide{m} * k + Wide{k} * n) * device.itemsize, streamed->loads_gbs);
        const double written = moved_us(Wide{m} * n * device.itemsize, streamed->results_gbs);
        const double added =
            parts > 1 ? moved_us(Wide{2} * parts * m * n * 4, streamed->sums_gbs) : 0.0;
        const double deep =
            streamed->depth_us * static_cast<double>(k) / static_cast<double>(parts) / 1e3;
        return deep + std::max(*multiplied, loaded_us) + written + added;
    }
};

// Exchanges between the ranks of one node, by the constants of one path (class PathConstants). Bytes are those
// that a rank sends to each peer.
struct Exchanges {
    // A way that takes at most so many bytes of all ranks together, as a rank counts them.
    struct Mail {
        Size most_bytes;
        double egress_gbs, latency_us;

        bool takes(double nbytes) const {
            return std::ceil(nbytes) <= static_cast<double>(most_bytes);
        }
        double sent_us(double nbytes) const { return latency_us + nbytes / (egress_gbs * 1e3); }
    };

    double egress_gbs, exchange_us;
    std::optional<double> scattered_sums_gbs;
    std::optional<std::pair<Size, Size>> one_shot;  // most_bytes, most_more_bytes
    std::optional<std::pair<Size, double>> brief;   // most_bytes, less_us
    std::optional<Mail> mail, mail_twice;

    // Returns whether one exchange goes by mail; otherwise it waits for flags.
    bool by_mail(double nbytes, Size world) const {
        return world > 1 && mail && mail->takes(static_cast<double>(world) * nbytes);
    }

    double once_us(double nbytes, Size world) const {
        const auto ranks = static_cast<double>(world);
        if (by_mail(nbytes, world)) return mail->sent_us((ranks - 1) * nbytes);
        return flags_us(nbytes, world) - saved_us(ranks * nbytes);
    }

    // A reduce-scatter. `ratio`: bytes of a sum by those of a term; terms that came are read and added.
    double scattered_us(double nbytes, double ratio, Size world) const {
        const double moved = nbytes * (static_cast<double>(world) + ratio);
        return once_us(nbytes, world) +
               (scattered_sums_gbs ? moved / (*scattered_sums_gbs * 1e3) : 0.0);
    }

    // Returns whether all partial results of an all-reduce are so few that they go to every rank at once.
    bool in_one(double whole, Size world) const {
        const auto nbytes = static_cast<Wide>(std::nearbyint(whole));
        return one_shot && nbytes <= one_shot->first && nbytes * (world - 2) <= one_shot->second;
    }

    // An all-reduce: of `whole` bytes at once where that is little, else terms and then their sums.
    double reduced_us(double terms, double sums, double whole, Size world) const {
        if (in_one(whole, world)) return once_us(whole, world);
        const double by_flags = twice_by_flags_us(terms, sums, world);
        return std::min(by_flags, twice_by_mail_us(terms, sums, world));
    }

    // Whether both exchanges of an all-reduce go by mail.
    bool twice_by_mail(double terms, double sums, Size world) const {
        return world > 1 &&
               twice_by_mail_us(terms, sums, world) < twice_by_flags_us(terms, sums, world);
    }

  private:
    double flags_us(double nbytes, Size world) const {
        return exchange_us + static_cast<double>(world - 1) * nbytes / (egress_gbs * 1e3);
    }

    // What a call saves that brings so many bytes to a rank.
    double saved_us(double nbytes) const {
        const bool few = brief && std::ceil(nbytes) <= static_cast<double>(brief->first);
        return few ? brief->second : 0.0;
    }

    double twice_by_flags_us(double terms, double sums, Size world) const {
        return flags_us(terms, world) + flags_us(sums, world) -
               saved_us(static_cast<double>(world) * (terms + sums));
    }

    // Infinite where there are too many bytes, or no such way.
    double twice_by_mail_us(double terms, double sums, Size world) const {
        const double sent = static_cast<double>(world - 1) * (terms + sums);
        if (!mail_twice || !mail_twice->takes(sent)) return std::numeric_limits<double>::infinity();
        return mail_twice->sent_us(sent);
    }
};

enum class GemmOp { all_gather_gemm, gemm_reduce_scatter, gemm_all_reduce };

// The bytes that a rank sends to each peer: what its work reads, partial results, and results.
struct Payloads {
    double gather, scatter, spread;
};

// A call of a GEMM op on one node. Bytes are those of an element: of operands, and of partial results and of
// their sums as they travel.
struct GemmCall {
    GemmOp op;
    Size m, n, k, world, itemsize, of_partials, of_results;

    // `one_exchange`: all terms go to every rank, which adds them itself.
    Payloads payloads(bool one_exchange = false) const {
        const auto ranks = static_cast<double>(world), size = static_cast<double>(itemsize);
        const auto terms = static_cast<double>(of_partials), sums = static_cast<double>(of_results);
        if (op == GemmOp::all_gather_gemm) {
            return {static_cast<double>(Wide{m} * k) / ranks * size, 0.0, 0.0};
        }
        const double part = static_cast<double>(Wide{m} * n) / ranks;
        if (op == GemmOp::gemm_reduce_scatter) return {0.0, part * terms, 0.0};
        if (one_exchange) return {0.0, static_cast<double>(Wide{m} * n * of_partials), 0.0};
        return {0.0, part * terms, part * sums};
    }
};

// A call's times without its start; `tile` as in Product.
struct CallTimes {
    double compute_us, comm_us, pipelined_us;
    Size tile;
};

// What one path does with a GEMM op on one node (class PathConstants). `unhidden`: by op.
struct Path {
    Exchanges exchanges;
    Products products;
    double unhidden[3];

    double exchanges_us(const GemmCall& call) const {
        if (call.world == 1) return 0.0;
        const Payloads sent = call.payloads();
        switch (call.op) {
            case GemmOp::all_gather_gemm:
                return exchanges.once_us(sent.gather, call.world);
            case GemmOp::gemm_reduce_scatter:
                return exchanges.scattered_us(
                    sent.scatter,
                    static_cast<double>(call.of_results) / static_cast<double>(call.of_partials),
                    call.world);
            case GemmOp::gemm_all_reduce:
                break;
        }
        return exchanges.reduced_us(sent.scatter, sent.spread, call.payloads(true).scatter,
                                    call.world);
    }

    // One kernel that overlaps its product with the exchanges.
    CallTimes fused(const GemmCall& call, Size cores, double memory_gbs) const {
        const double comm = exchanges_us(call);
        const Size owners = call.op == GemmOp::gemm_all_reduce ? 1 : call.world;
        const Overlapped found = products.overlapped(owners, up(call.m, owners), call.n, call.k,
                                                     {cores, memory_gbs, call.itemsize}, comm,
                                                     unhidden[static_cast<int>(call.op)]);
        return {found.product.total_us, comm, found.pipelined_us, found.product.tile};
    }

    // A product, and exchanges before or behind it.
    CallTimes apart(const GemmCall& call, Size cores, double memory_gbs) const {
        const double comm = exchanges_us(call);
        const Product found =
            products.fastest(1, call.m, call.n, call.k, {cores, memory_gbs, call.itemsize});
        return {found.total_us, comm, found.total_us + comm, found.tile};
    }
};

}  // namespace mkernel::topology
