// The Python module `_cost`: closed forms of products' and exchanges' times, for planners.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "topology/cost.hpp"

namespace py = pybind11;
using namespace py::literals;
using namespace mkernel::topology;

namespace {

using TileFields = std::tuple<Size, Size, Size, double>;
using StreamedFields = std::tuple<Size, double, double, double, double, double>;
using LoadedFields = std::tuple<Size, double, double>;

Products made(const std::vector<TileFields>& tiles, const std::optional<StreamedFields>& streamed,
              const std::optional<LoadedFields>& loaded, std::vector<Size> splits, double tile_us,
              double split_us) {
    if (tiles.empty() || splits.empty()) throw std::invalid_argument("no tiles, or no splits");
    Products products{{}, {}, {}, std::move(splits), tile_us, split_us};
    for (const auto& tile : tiles) products.tiles.push_back(std::make_from_tuple<Tile>(tile));
    if (streamed) products.streamed = std::make_from_tuple<Streamed>(*streamed);
    if (loaded) products.loaded = std::make_from_tuple<LoadedLines>(*loaded);
    return products;
}

using MailFields = std::tuple<Size, double, double>;

Exchanges exchanges_of(double egress_gbs, double exchange_us,
                       std::optional<double> scattered_sums_gbs,
                       std::optional<std::pair<Size, Size>> one_shot,
                       std::optional<std::pair<Size, double>> brief,
                       const std::optional<MailFields>& mail,
                       const std::optional<MailFields>& mail_twice) {
    Exchanges found{egress_gbs, exchange_us, scattered_sums_gbs, one_shot, brief, {}, {}};
    if (mail) found.mail = std::make_from_tuple<Exchanges::Mail>(*mail);
    if (mail_twice) found.mail_twice = std::make_from_tuple<Exchanges::Mail>(*mail_twice);
    return found;
}

GemmOp op_of(std::string_view name) {
    if (name == "all_gather_gemm") return GemmOp::all_gather_gemm;
    if (name == "gemm_reduce_scatter") return GemmOp::gemm_reduce_scatter;
    if (name == "gemm_all_reduce" || name == "all_reduce") return GemmOp::gemm_all_reduce;
    throw std::invalid_argument("no sum and no GEMM: " + std::string(name));
}

using Fields = std::tuple<double, double, double, Size>;

Fields fields(const CallTimes& times) {
    return {times.compute_us, times.comm_us, times.pipelined_us, times.tile};
}

}  // namespace

PYBIND11_MODULE(_cost, m) {
    m.doc() = "Closed forms of products' and exchanges' times (topology/cost.hpp).";
    m.def("gemm_tile_us", &gemm_tile_us, "tile_m"_a, "tile_n"_a, "k"_a, "tflops_per_core"_a);
    m.def("gemm_us", &gemm_us, "m"_a, "n"_a, "k"_a, py::kw_only(), "tile_m"_a, "tile_n"_a,
          "cores"_a, "tflops_per_core"_a, "memory_gbs"_a, "itemsize"_a, "out_itemsize"_a);
    py::class_<Product>(m, "Product")
        .def_readonly("total_us", &Product::total_us)
        .def_readonly("tile_us", &Product::tile_us)
        .def_readonly("tile", &Product::tile, "The number of the kind of tiles; -1: no waves.");
    py::class_<Exchanges>(m, "Exchanges")
        .def(py::init(&exchanges_of), "egress_gbs"_a, "exchange_us"_a, "scattered_sums_gbs"_a,
             "one_shot"_a, "brief"_a, "mail"_a, "mail_twice"_a)
        .def("by_mail", &Exchanges::by_mail, "nbytes"_a, "world"_a)
        .def("in_one", &Exchanges::in_one, "nbytes"_a, "world"_a)
        .def("twice_by_mail", &Exchanges::twice_by_mail, "terms"_a, "sums"_a, "world"_a);
    py::class_<Products>(m, "Products")
        .def(py::init(&made), "tiles"_a, "streamed"_a, "loaded"_a, "splits"_a, "tile_us"_a,
             "split_us"_a)
        .def(
            "each",
            [](const Products& self, Size owners, Size rows, Size n, Size k, Size cores,
               double memory_gbs, Size itemsize) {
                std::vector<Product> found;
                self.each(owners, rows, n, k, {cores, memory_gbs, itemsize},
                          [&found](const Product& one) { found.push_back(one); });
                return found;
            },
            "owners"_a, "rows"_a, "n"_a, "k"_a, "cores"_a, "memory_gbs"_a, "itemsize"_a)
        .def(
            "fastest",
            [](const Products& self, Size owners, Size rows, Size n, Size k, Size cores,
               double memory_gbs, Size itemsize) {
                return self.fastest(owners, rows, n, k, {cores, memory_gbs, itemsize});
            },
            "owners"_a, "rows"_a, "n"_a, "k"_a, "cores"_a, "memory_gbs"_a, "itemsize"_a);
    py::class_<GemmCall>(m, "GemmCall")
        .def(py::init([](std::string_view op, Size m, Size n, Size k, Size world, Size itemsize,
                         Size of_partials, Size of_results) {
                 return GemmCall{op_of(op), m, n, k, world, itemsize, of_partials, of_results};
             }),
             "op"_a, "m"_a, "n"_a, "k"_a, "world"_a, "itemsize"_a, "of_partials"_a, "of_results"_a)
        .def(
            "payloads",
            [](const GemmCall& self, bool one_exchange) {
                const Payloads found = self.payloads(one_exchange);
                return std::make_tuple(found.gather, found.scatter, found.spread);
            },
            "one_exchange"_a, "-> (gather, scatter, spread)");
    py::class_<Path>(m, "Path")
        .def(py::init([](const Exchanges& exchanges, const Products& products, double gathers,
                         double scatters, double reduces) {
                 return Path{exchanges, products, {gathers, scatters, reduces}};
             }),
             "exchanges"_a, "products"_a, "unhidden_gather"_a, "unhidden_scatter"_a,
             "unhidden_reduce"_a)
        .def("exchanges_us", &Path::exchanges_us, "call"_a)
        .def(
            "fused",
            [](const Path& self, const GemmCall& call, Size cores, double memory_gbs) {
                return fields(self.fused(call, cores, memory_gbs));
            },
            "call"_a, "cores"_a, "memory_gbs"_a, "-> (compute, comm, pipelined, tile)")
        .def(
            "apart",
            [](const Path& self, const GemmCall& call, Size cores, double memory_gbs) {
                return fields(self.apart(call, cores, memory_gbs));
            },
            "call"_a, "cores"_a, "memory_gbs"_a, "-> (compute, comm, pipelined, tile)");
}
