// The starter of calls of 16-bit operands in parts without Python: the steps of a plan's executor, in order.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/error.hpp"
#include "backends/accelerators/cuda/host/bindings.hpp"
#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/collectives/summed_rows.hpp"
#include "backends/accelerators/cuda/host/gemm/library_product.hpp"
#include "backends/accelerators/cuda/host/gemm/parts.hpp"
#include "backends/accelerators/cuda/kernels/attention/parts.hpp"
#include "backends/accelerators/cuda/kernels/gemm/sum_parts.hpp"
#include "backends/accelerators/cuda/kernels/rendezvous.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::cuda {
namespace {

// An offset in bytes into a tensor of the call, or, with `here`, an address.
enum class Base : std::uint8_t { here, a, partial, out, gathered };
struct Place {
    Base base;
    std::uint64_t offset;
};

// The steps; each is described at the method of PartsProgram, below, of its name.
struct Fork {};
struct Join {};
struct Push {
    int peer;
    Place from;
    std::uint64_t nbytes, to;
    std::int64_t flag;
};
struct Wait {
    int source;
    std::uint32_t flag;
};
struct Multiply {
    py::object rows;  // None: `count` of the call's a, from `first` on
    std::int64_t first, count, to;
    Place from, into;  // of the same rows, and of their results
};
struct Sum {
    std::vector<Place> parts;
    std::uint64_t elements;
    Place out;
    bool ends;
};
struct Copy {
    Place from, to;
    std::uint64_t nbytes;
};
struct End {
    std::vector<Copy> copies;
};
struct Normalise {
    SummedRows sums;
};
using Step = std::variant<Fork, Join, End, Push, Wait, Multiply, Sum, Copy, Normalise>;

// The steps that all calls of a plan share. `partial`: makes the partial results, where products go there and
// not to the call's out.
struct PartsProgram {
    DeviceWorld world;
    std::shared_ptr<LibraryProduct> product;
    std::optional<Allocation> partial;
    collectives::Element element;
    std::uint32_t blocks, columns;
    std::vector<Step> steps;
};

Base base_of(const std::string& name) {
    if (name == "here") return Base::here;
    if (name == "a") return Base::a;
    if (name == "partial") return Base::partial;
    if (name == "out") return Base::out;
    if (name == "gathered") return Base::gathered;
    throw py::value_error("a place in '" + name + "'; one of: here, a, partial, out, gathered");
}

py::object rows_of(py::handle tensor, std::int64_t first, std::int64_t count) {
    return tensor.attr("narrow")(0, first, count);
}

// The steps of one call, run with the GIL held.
class RunningParts {
  public:
    RunningParts(const PartsProgram& program, const MkernelCall& call, CallOrder& order)
        : program_(program), call_(call), order_(order), world_(program.world) {
        world_.call = call_number(call);
        world_.timeout_s = call.timeout_s;
        if (program.partial) partial_ = (*program.partial)();
        at_[static_cast<int>(Base::a)] = call.addresses[kA];
        at_[static_cast<int>(Base::out)] = call.addresses[kOut];
        at_[static_cast<int>(Base::gathered)] = call.addresses[kGathered];
        if (program.partial) at_[static_cast<int>(Base::partial)] = address_of(partial_);
    }

    void run() {
        try {
            for (const Step& step : program_.steps)
                std::visit([&](const auto& each) { take(each); }, step);
        } catch (...) {
            if (forked_) order_.join(call_.stream);
            throw;
        }
    }

  private:
    void take(const Fork& /*step*/) {
        copies_ = order_.fork(call_.stream);
        forked_ = true;
    }
    void take(const Join& /*step*/) {
        forked_ = false;
        order_.join(call_.stream);
    }
    void take(const End& step) {
        LastCopies copies;
        for (const Copy& each : step.copies) {
            copies.add(address(each.to), address(each.from), each.nbytes);
        }
        const py::gil_scoped_release released;
        rendezvous(workspace_of(world_), limits_of(world_), copies, stream());
    }
    void take(const Push& step) {
        const py::gil_scoped_release released;
        push_part(world_, step.peer, address(step.from), step.nbytes, step.to, step.flag, copies_);
    }
    void take(const Wait& step) {
        const py::gil_scoped_release released;
        attention::await_part(workspace_of(world_), limits_of(world_), step.source, step.flag,
                              stream());
    }
    void take(const Multiply& step) {
        const py::handle bias = program_.partial ? py::none() : tensor_of(call_, kBias);
        if (bias.is_none() && program_.product->takes_addresses(step.count)) {
            program_.product->multiply_at(call_, address(step.from), step.count,
                                          address(step.into));
            return;
        }
        const py::object none = py::none();
        const py::object rows =
            step.rows.is_none() ? rows_of(tensor_of(call_, kA), step.first, step.count) : step.rows;
        const py::handle results = program_.partial ? partial_ : tensor_of(call_, kOut);
        const py::object into = rows_of(results, step.to, step.count);
        program_.product->multiply(call_, rows, none, bias, into);
    }
    void take(const Sum& step) {
        collectives::Parts parts{};
        for (const Place& each : step.parts) {
            parts.at[parts.count++] = reinterpret_cast<const void*>(address(each));
        }
        parts.elements = step.elements;
        parts.out = reinterpret_cast<void*>(address(step.out));
        const collectives::Bias bias{reinterpret_cast<const void*>(call_.addresses[kBias]),
                                     program_.columns};
        const py::gil_scoped_release released;
        collectives::sum_parts(workspace_of(world_), limits_of(world_), program_.element, parts,
                               bias, program_.blocks, step.ends, stream());
    }
    void take(const Copy& step) {
        const py::gil_scoped_release released;
        cuda::check(cudaMemcpyAsync(reinterpret_cast<void*>(address(step.to)),
                                    reinterpret_cast<const void*>(address(step.from)), step.nbytes,
                                    cudaMemcpyDeviceToDevice, stream()),
                    "copying rows");
    }
    void take(const Normalise& step) {
        const py::gil_scoped_release released;
        step.sums.normalise(call_, stream());
    }

    [[nodiscard]] std::uint64_t address(const Place& place) const {
        return at_[static_cast<int>(place.base)] + place.offset;
    }
    [[nodiscard]] cudaStream_t stream() const { return cuda::stream_at(call_.stream); }

    const PartsProgram& program_;
    const MkernelCall& call_;
    CallOrder& order_;
    DeviceWorld world_;
    py::object partial_ = py::none();
    std::uint64_t at_[5] = {};  // by Base
    std::uint64_t copies_ = 0;
    bool forked_ = false;
};

class PartsStarter final : public CallStarter {
  public:
    PartsStarter(int device, py::object order, PartsProgram program)
        : CallStarter(device, std::move(order)), program_(std::move(program)) {}

  private:
    void queue(const MkernelCall& call) override { RunningParts(program_, call, order()).run(); }

    PartsProgram program_;
};

}  // namespace

void bind_parts_starter(py::module_& module) {
    using Pair = std::pair<std::string, std::uint64_t>;
    const auto place = [](const Pair& pair) { return Place{base_of(pair.first), pair.second}; };
    using Copied = std::tuple<Pair, Pair, std::uint64_t>;
    py::class_<PartsProgram>(module, "PartsProgram")
        .def(py::init([](const DeviceWorld& world, std::shared_ptr<LibraryProduct> product,
                         const py::object& partial, collectives::Element element,
                         std::uint32_t blocks, std::uint32_t columns) {
                 return PartsProgram{
                     world, std::move(product), allocation(partial), element, blocks, columns, {}};
             }),
             "world"_a, "product"_a, "partial"_a, "element"_a, "blocks"_a, "columns"_a)
        .def("fork", [](PartsProgram& program) { program.steps.emplace_back(Fork{}); })
        .def("join", [](PartsProgram& program) { program.steps.emplace_back(Join{}); })
        .def(
            "end",
            [place](PartsProgram& program, const std::vector<Copied>& copies) {
                End end;
                for (const auto& [from, to, nbytes] : copies) {
                    end.copies.push_back({place(from), place(to), nbytes});
                }
                program.steps.emplace_back(std::move(end));
            },
            "copies"_a)
        .def(
            "push",
            [place](PartsProgram& program, int peer, const Pair& from, std::uint64_t nbytes,
                    std::uint64_t to, std::int64_t flag) {
                program.steps.emplace_back(Push{peer, place(from), nbytes, to, flag});
            },
            "peer"_a, "from_"_a, "nbytes"_a, "to"_a, "flag"_a)
        .def(
            "wait",
            [](PartsProgram& program, int source, std::uint32_t flag) {
                program.steps.emplace_back(Wait{source, flag});
            },
            "source"_a, "flag"_a)
        .def(
            "multiply",
            [place](PartsProgram& program, py::object rows, std::int64_t first, std::int64_t count,
                    std::int64_t to, const Pair& from, const Pair& into) {
                program.steps.emplace_back(
                    Multiply{std::move(rows), first, count, to, place(from), place(into)});
            },
            "rows"_a, "first"_a, "count"_a, "to"_a, "from_"_a, "into"_a)
        .def(
            "sum",
            [place](PartsProgram& program, const std::vector<Pair>& parts, std::uint64_t elements,
                    const Pair& out, bool ends) {
                if (parts.size() > static_cast<std::size_t>(kMaxRanks)) {
                    throw py::value_error("a sum of " + std::to_string(parts.size()) +
                                          " parts; at most " + std::to_string(kMaxRanks));
                }
                std::vector<Place> places;
                for (const Pair& each : parts) places.push_back(place(each));
                program.steps.emplace_back(Sum{std::move(places), elements, place(out), ends});
            },
            "parts"_a, "elements"_a, "out"_a, "ends"_a)
        .def(
            "copy",
            [place](PartsProgram& program, const Pair& from, const Pair& to, std::uint64_t nbytes) {
                program.steps.emplace_back(Copy{place(from), place(to), nbytes});
            },
            "from_"_a, "to"_a, "nbytes"_a)
        .def(
            "normalise",
            [](PartsProgram& program, const SummedRows& sums) {
                program.steps.emplace_back(Normalise{sums});
            },
            "sums"_a);
    module.def(
        "parts_starter",
        [](int device, py::object order, const PartsProgram& program) {
            return CallStarter::capsule(
                std::make_unique<PartsStarter>(device, std::move(order), program));
        },
        "device"_a, "order"_a, "program"_a);
}

}  // namespace mkernel::cuda
