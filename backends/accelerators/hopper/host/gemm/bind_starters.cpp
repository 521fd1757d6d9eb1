// Starters of a plan's calls without Python: one for each kind of the fused path's kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "backends/accelerators/cuda/device.hpp"
#include "backends/accelerators/cuda/host/call_starter.hpp"
#include "backends/accelerators/cuda/host/collectives/summed_rows.hpp"
#include "backends/accelerators/hopper/host/bindings.hpp"
#include "backends/accelerators/hopper/host/gemm/few_rows.hpp"
#include "backends/accelerators/hopper/host/gemm/gathered_copies.hpp"
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

// `copies`: of the rows, for calls that return them; else None.
class GatherStarter final : public CallStarter {
  public:
    GatherStarter(int device, py::object order, py::object calls, py::object copies,
                  Pitches pitches)
        : CallStarter(device, std::move(order)),
          kept_(std::move(calls)),
          kept_copies_(std::move(copies)),
          calls_(kept_.cast<PipelinedGather&>()),
          copies_(kept_copies_.is_none() ? nullptr : &kept_copies_.cast<GatheredCopies&>()),
          pitches_(pitches) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release
            released;  // the launch may wait for room in the device's queue
        const CallOnce once = pitches_.call_once(call);
        calls_.start(once);
        if (copies_ == nullptr) return;
        copies_->start(once, call.addresses[kGathered], call.addresses[kGatheredScale]);
    }

    py::object kept_, kept_copies_;
    PipelinedGather& calls_;
    GatheredCopies* copies_;
    Pitches pitches_;
};

// A kernel after it normalises its sums, if there is a norm.
class FewRowsStarter final : public CallStarter {
  public:
    FewRowsStarter(int device, py::object order, py::object calls, Pitches pitches,
                   std::optional<SummedRows> sums)
        : CallStarter(device, std::move(order)),
          kept_(std::move(calls)),
          calls_(kept_.cast<FewRowsCalls&>()),
          pitches_(pitches),
          sums_(sums) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        calls_.start(pitches_.call_once(call), prefetch(call));
        if (sums_) sums_->normalise(call, cuda::stream_at(call.stream));
    }

    py::object kept_;
    FewRowsCalls& calls_;
    Pitches pitches_;
    std::optional<SummedRows> sums_;
};

class ReduceStarter final : public CallStarter {
  public:
    ReduceStarter(int device, py::object order, py::object calls, Pitches pitches,
                  std::vector<std::uint64_t> outs, std::optional<SummedRows> sums)
        : CallStarter(device, std::move(order)),
          kept_(std::move(calls)),
          calls_(kept_.cast<PipelinedReduce&>()),
          pitches_(pitches),
          outs_(std::move(outs)),
          sums_(sums) {}

  private:
    void queue(const MkernelCall& call) override {
        const py::gil_scoped_release released;
        calls_.start(pitches_.call_once(call), outs_);
        if (sums_) sums_->normalise(call, cuda::stream_at(call.stream));
    }

    py::object kept_;
    PipelinedReduce& calls_;
    Pitches pitches_;
    std::vector<std::uint64_t> outs_;
    std::optional<SummedRows> sums_;
};

}  // namespace

void bind_starters(py::module_& module) {
    py::class_<GatheredCopies>(module, "GatheredCopies")
        .def(py::init<int, DeviceWorld, std::uint64_t, std::uint64_t>(), "device"_a, "world"_a,
             "row_bytes"_a, "scale_bytes"_a)
        .def(
            "start",
            [](GatheredCopies& copies, std::uint32_t number, double timeout_s,
               const GemmTensors& tensors, std::uint64_t rows, std::uint64_t scales,
               std::uint64_t stream) {
                copies.start({number, timeout_s, tensors, stream}, rows, scales);
            },
            "number"_a, "timeout_s"_a, "tensors"_a, "rows"_a, "scales"_a, "stream"_a,
            py::call_guard<py::gil_scoped_release>());
    module.def(
        "gather_starter",
        [](int device, py::object order, py::object calls, py::object copies, std::int64_t a_pitch,
           std::int64_t b_pitch) {
            return CallStarter::capsule(
                std::make_unique<GatherStarter>(device, std::move(order), std::move(calls),
                                                std::move(copies), Pitches{a_pitch, b_pitch}));
        },
        "device"_a, "order"_a, "calls"_a, "copies"_a, "a_pitch"_a, "b_pitch"_a);
    module.def(
        "few_rows_starter",
        [](int device, py::object order, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch, const std::optional<SummedRows>& sums) {
            return CallStarter::capsule(std::make_unique<FewRowsStarter>(
                device, std::move(order), std::move(calls), Pitches{a_pitch, b_pitch}, sums));
        },
        "device"_a, "order"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a, "sums"_a);
    module.def(
        "reduce_starter",
        [](int device, py::object order, py::object calls, std::int64_t a_pitch,
           std::int64_t b_pitch, std::vector<std::uint64_t> outs,
           const std::optional<SummedRows>& sums) {
            return CallStarter::capsule(
                std::make_unique<ReduceStarter>(device, std::move(order), std::move(calls),
                                                Pitches{a_pitch, b_pitch}, std::move(outs), sums));
        },
        "device"_a, "order"_a, "calls"_a, "a_pitch"_a, "b_pitch"_a, "outs"_a, "sums"_a);
}

}  // namespace mkernel::hopper
