// Starters of a plan's calls without Python: one for each kind of the fused path's kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/call_starter.hpp"
#include "backends/accelerators/hopper/host/gemm/few_rows.hpp"
#include "backends/accelerators/hopper/host/gemm/pipelined.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace mkernel::hopper {
namespace {

// The pitches of tensors whose calls differ in their addresses alone.
struct Pitches {
    std::int64_t a, b;

    [[nodiscard]] CallOnce call_once(const MkernelCall& call) const {
        const std::uint64_t* const at = call.addresses;
        return {call_number(call),
                call.timeout_s,
                {at[kA], at[kB], at[kOut], at[kBias], a, b, at[kAScale], at[kBScale]},
                call.stream};
    }
};

// The starter of calls that differ in their tensors' addresses alone: PipelinedGather, FewRowsCalls.
template <class Calls>
class TensorStarter final : public CallStarter {
  public:
    TensorStarter(int device, py::object order, py::object control, py::object calls,
                  Pitches pitches)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<Calls&>()),
          pitches_(pitches) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release
            released;  // the launch may wait for room in the device's queue
        calls_.start(pitches_.call_once(call));
    }

    py::object kept_;
    Calls& calls_;
    Pitches pitches_;
};

class ReduceStarter final : public CallStarter {
  public:
    ReduceStarter(int device, py::object order, py::object control, py::object calls,
                  Pitches pitches, std::vector<std::uint64_t> outs)
        : CallStarter(device, std::move(order), std::move(control)),
          kept_(std::move(calls)),
          calls_(kept_.cast<PipelinedReduce&>()),
          pitches_(pitches),
          outs_(std::move(outs)) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        calls_.start(pitches_.call_once(call), outs_);
    }

    py::object kept_;
    PipelinedReduce& calls_;
    Pitches pitches_;
    std::vector<std::uint64_t> outs_;
};

template <class Calls>
void def_tensor_starter(py::module_& module, const char* name) {
    module.def(
        name,
        [](int device, py::object order, py::object control, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch) {
            return CallStarter::capsule(std::make_unique<TensorStarter<Calls>>(
                device, std::move(order), std::move(control), std::move(calls),
                Pitches{a_pitch, b_pitch}));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a);
}

}  // namespace

void bind_starters(py::module_& module) {
    def_tensor_starter<PipelinedGather>(module, "gather_starter");
    def_tensor_starter<FewRowsCalls>(module, "few_rows_starter");
    module.def(
        "reduce_starter",
        [](int device, py::object order, py::object control, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch, std::vector<std::uint64_t> outs) {
            return CallStarter::capsule(std::make_unique<ReduceStarter>(
                device, std::move(order), std::move(control), std::move(calls),
                Pitches{a_pitch, b_pitch}, std::move(outs)));
        },
        "device"_a, "order"_a, "control"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a, "outs"_a);
}

}  // namespace mkernel::hopper
