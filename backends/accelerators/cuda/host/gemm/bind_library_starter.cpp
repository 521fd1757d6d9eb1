// The starter of the library path's calls without Python: torch's product and a collective of our own, one
// after the other.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/collectives/landing.hpp"
#include "backends/accelerators/cuda/host/collectives/summed_rows.hpp"
#include "backends/accelerators/cuda/host/gemm/library_product.hpp"
#include "backends/accelerators/cuda/kernels/collectives/collectives.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

void* pointer_to(std::uint64_t address) {
    return reinterpret_cast<void*>(address);
}

// The parts that all calls of a plan have in common.
struct LibraryPlan {
    collectives::Collective together;
    collectives::Element element;
    collectives::Way way;
    bool gathers, scatters;
    std::uint64_t elements;  // of the product's results, in rows of `columns`
    std::uint32_t columns;
    std::uint64_t shard_bytes, scale_bytes;  // of a rank's `a` and of its scales
    std::uint64_t between_bytes;             // of all rows of `a`, or of the product's results
    collectives::Outs outs;
    Outputs outputs;
    SummedRows sums;
    bool inside;  // rows are summed and normalised by one kernel
};

// `scratch()` is a tensor between the two, where the product has no room for it, `scales()` one for gathered
// scales; torch's allocator keeps both in the order of the stream.
class LibraryStarter final : public CallStarter {
  public:
    LibraryStarter(int device, py::object order, std::shared_ptr<LibraryProduct> product,
                   Allocation scratch, std::optional<Allocation> scales, const LibraryPlan& plan)
        : CallStarter(device, std::move(order)),
          product_(std::move(product)),
          scratch_(std::move(scratch)),
          scales_(std::move(scales)),
          plan_(plan) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::handle a = tensor_of(call, kA), own = tensor_of(call, kAScale);
        const py::handle bias = tensor_of(call, kBias), out = tensor_of(call, kOut);
        const py::handle gathered = tensor_of(call, kGathered);
        const py::handle gathered_scale = tensor_of(call, kGatheredScale);
        if (plan_.together.workspace.world == 1) {
            if (!gathered.is_none()) gathered.attr("copy_")(a);
            if (!gathered_scale.is_none()) gathered_scale.attr("copy_")(own);
            product_->multiply(call, a, own, bias, out);
            normalise(call);
            return;
        }
        plan_.together.limits.call = call_number(call);
        plan_.together.limits.timeout_ns = static_cast<std::uint64_t>(call.timeout_s * 1e9);
        plan_.together.landings = plan_.outputs.landings(call.addresses[kOut]);
        plan_.together.prefetch = prefetch(call);
        const bool by_address =
            (bias.is_none() || !plan_.gathers) && product_->takes_addresses(rows());
        const std::uint64_t room =
            by_address && gathered.is_none() ? product_->room(plan_.between_bytes) : 0;
        py::object between = py::none();
        if (room == 0) between = gathered.is_none() ? scratch_() : borrowed(gathered);
        const std::uint64_t at = room == 0 ? address_of(between) : room;
        if (plan_.gathers) {
            py::object scales = borrowed(gathered_scale);
            if (scales_ && scales.is_none()) scales = (*scales_)();
            gather(call, pointer_to(at), scales_ ? pointer_to(address_of(scales)) : nullptr);
            if (by_address) {
                product_->multiply_at(call, at, rows(), call.addresses[kOut]);
            } else {
                product_->multiply(call, between, scales, bias, out);
            }
            return;
        }
        if (by_address) {
            product_->multiply_at(call, call.addresses[kA], rows(), at);
        } else {
            product_->multiply(call, a, own, py::none(), between);
        }
        sum(call, pointer_to(at));
        if (!plan_.inside) normalise(call);
    }

    static py::object borrowed(py::handle tensor) {
        return py::reinterpret_borrow<py::object>(tensor);
    }

    void normalise(const MkernelCall& call) const {
        const py::gil_scoped_release released;
        plan_.sums.normalise(call, cuda::stream_at(call.stream));
    }

    [[nodiscard]] std::int64_t rows() const {
        return static_cast<std::int64_t>(plan_.elements / plan_.columns);
    }

    void gather(const MkernelCall& call, void* rows, void* scales) const {
        collectives::Outs whole;
        whole.at[plan_.together.workspace.rank] = rows;
        const collectives::Beside beside{reinterpret_cast<const void*>(call.addresses[kAScale]),
                                         plan_.scale_bytes, scales};
        const py::gil_scoped_release released;
        collectives::all_gather(plan_.together, reinterpret_cast<const void*>(call.addresses[kA]),
                                plan_.shard_bytes, whole, cuda::stream_at(call.stream), beside);
    }

    void sum(const MkernelCall& call, void* partials) const {
        const collectives::Collective& together = plan_.together;
        auto* const out = reinterpret_cast<void*>(call.addresses[kOut]);
        const collectives::Bias bias{reinterpret_cast<const void*>(call.addresses[kBias]),
                                     plan_.columns};
        const cudaStream_t stream = cuda::stream_at(call.stream);
        const py::gil_scoped_release released;
        if (plan_.inside) {
            sum_rows(together.workspace, together.limits,
                     plan_.sums.of(call, partials, together.prefetch), stream);
            return;
        }
        if (plan_.scatters) {
            const std::uint64_t part = plan_.elements / together.workspace.world;
            collectives::reduce_scatter(together, plan_.element, partials, part, out, bias, stream);
            return;
        }
        collectives::Outs outs = plan_.outs;
        if (!outs.symmetric) outs.at[together.workspace.rank] = out;
        collectives::all_reduce(together, plan_.element, partials, plan_.elements, outs, plan_.way,
                                bias, stream);
    }

    std::shared_ptr<LibraryProduct> product_;
    Allocation scratch_;
    std::optional<Allocation> scales_;
    LibraryPlan plan_;
};

LibraryPlan library_plan(const collectives::Collective& together, collectives::Element element,
                         collectives::Way way, const std::string& op, std::uint64_t elements,
                         std::uint32_t columns, std::uint64_t shard_bytes,
                         std::uint64_t scale_bytes, const std::vector<std::uint64_t>& outs,
                         const Outputs& outputs, const SummedRows& sums, bool inside) {
    if (!outs.empty() && outs.size() != static_cast<std::size_t>(together.workspace.world)) {
        throw py::value_error("outs: none, or one address a rank");
    }
    const bool gathers = op == "all_gather_gemm";
    const auto ranks = static_cast<std::uint64_t>(together.workspace.world);
    LibraryPlan plan{together,
                     element,
                     way,
                     gathers,
                     op == "gemm_reduce_scatter",
                     elements,
                     columns,
                     shard_bytes,
                     scale_bytes,
                     gathers ? ranks * shard_bytes : elements * collectives::source_bytes(element),
                     {},
                     outputs,
                     sums,
                     inside};
    plan.outs.symmetric = !outs.empty();
    std::ranges::transform(outs, plan.outs.at,
                           [](std::uint64_t at) { return reinterpret_cast<void*>(at); });
    return plan;
}

}  // namespace

void bind_library_starter(py::module_& module) {
    module.def(
        "library_starter",
        [](int device, py::object order, std::shared_ptr<LibraryProduct> product,
           const py::object& scratch, const py::object& scales,
           const collectives::Collective& together, collectives::Element element,
           collectives::Way way, const std::string& op, std::uint64_t elements,
           std::uint32_t columns, std::uint64_t shard_bytes, std::uint64_t scale_bytes,
           const std::vector<std::uint64_t>& outs, const Outputs& outputs, const SummedRows& sums,
           bool inside) {
            return CallStarter::capsule(std::make_unique<LibraryStarter>(
                device, std::move(order), std::move(product), allocation(scratch).value(),
                allocation(scales),
                library_plan(together, element, way, op, elements, columns, shard_bytes,
                             scale_bytes, outs, outputs, sums, inside)));
        },
        "device"_a, "order"_a, "product"_a, "scratch"_a, "scales"_a, "together"_a, "element"_a,
        "way"_a, "op"_a, "elements"_a, "columns"_a, "shard_bytes"_a, "scale_bytes"_a, "outs"_a,
        "outputs"_a, "sums"_a, "inside"_a);
}

}  // namespace mkernel::cuda
