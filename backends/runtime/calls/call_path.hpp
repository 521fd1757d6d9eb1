// The path of a world's calls: take the turn, look whether the world lives, number, start. Every call takes
// it: the first of a signature, which Python plans meanwhile, and all later ones, which Python does not see.
//
// The world's own state stays where Python has it (call numbers, the order of worlds, failures): this code
// reads and writes the same objects. It runs with the GIL. Errors are raised by the world's Python code, which
// is called where something is wrong or another thread has the turn.
//
// A known call may be used only while it needs no agreement and no new memory. All are therefore dropped
// whenever the world forgets shapes (`forget`), on all ranks at the same call.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "backends/contracts/call_starter.h"
#include "backends/runtime/calls/program.hpp"
#include "backends/runtime/calls/reference.hpp"
#include "backends/runtime/calls/signature.hpp"
#include "backends/runtime/calls/torch_view.hpp"
#include "backends/transport/signal_pad.hpp"

namespace mkernel::calls {

// The objects of one engine of a world, as `World` and its parts have them.
struct WorldState {
    Reference failure;           // FailureMonitor: call, notice, timeout_s
    Reference watchdog;          // its Watchdog: looked, behind_s; None: nobody watches
    Reference calls;             // Calls: _launched
    Reference running;           // deque of launches
    Reference turns;             // Turns, for what is rare
    Reference acquire, release;  // of the lock of the device's order
    Reference under_way;         // list of worlds whose calls are being made
    Reference worlds;            // set of those that the device has
    Reference last;              // dict: by whether it was captured, the last call's Queued
    Reference queued;            // that type: (world, stream, event or None)
    Reference name;
    transport::SignalPad pad;
    const transport::AbortRecord* record = nullptr;  // of kernels that do not write to the pad
    bool queues = false;  // calls are left to the device; else each is waited for
};

class CallPath;

struct KnownCall {
    Reference engine;          // keeps `path`
    CallPath* path = nullptr;  // of the engine that runs the call
    Program program;
    Reference capsule;                            // keeps `starter`
    const MkernelCallStarter* starter = nullptr;  // null: `start` starts the call
    Reference start;     // start(number, epoch, timeout_s, {name: tensor}) -> Launch
    Reference launches;  // of a starter: what to wait on for calls that it started
    Reference key;       // of the agreement
    Reference counter;   // bytearray with the number of its calls

    void count() const;
};

// The tensors of a call: what the caller gave, lists unfolded, then what steps made.
struct Slots {
    std::vector<Reference> objects;
    std::vector<TensorView> given;

    Slots() {
        objects.reserve(kUsual);
        given.reserve(kUsual);
    }

    // Adds what a signature has of tensors that share memory: which, and how far apart they begin.
    void add_overlaps(Signature& signature) const;

  private:
    static constexpr std::size_t kUsual = 16;
};

class CallPath {
  public:
    // The most calls kept, after which all are forgotten. More than a world has shapes.
    static constexpr std::size_t kMost = 4096;

    TorchView torch;
    WorldState world;

    // Finds a call by its signature; null: there is none.
    std::shared_ptr<const KnownCall> find(const Signature& signature) const;
    // Runs a known call. Returns its result; null without an exception: nothing was done, and Python is to
    // make the call.
    PyObject* run(const KnownCall& known, Slots& slots);
    // Runs a call that Python prepares in its turn: `prepare()` -> (key, start, waits), after which the number
    // of the call is that of `failure.call`. Returns the launch.
    PyObject* first(PyObject* prepare);

    // Says whether a tensor's memory is that of a user's symmetric buffer, and adds its place. `no`: it lies
    // across the edge of one.
    Answer place(const TensorView& view, Signature& signature) const;

    void learn(const Signature& signature, KnownCall call);
    void forget() { calls_.clear(); }
    // Leaves every later call to Python, and drops the references into the world.
    void close();
    [[nodiscard]] bool closed() const { return closed_; }
    // Adds a user's memory that all ranks have at one place; the n-th is buffer n of the world.
    void add_buffer(std::uint64_t address, std::uint64_t nbytes) {
        buffers_.push_back({address, nbytes});
    }

    int traverse(visitproc visit, void* arg) const;

  private:
    struct Buffer {
        std::uint64_t address, nbytes;
    };
    // What differs between a call that Python prepares and a known one.
    struct Start {
        const KnownCall* known = nullptr;
        Slots* slots = nullptr;
        PyObject* prepare = nullptr;
        Reference results;  // what the launch found out, of a call that has ended
        DlDevice device{};
        std::uint64_t stream = 0;
        std::uint64_t addresses[MKERNEL_CALL_TENSORS] = {};
        void* tensors[MKERNEL_CALL_TENSORS] = {};
    };

    // Queues a call and counts it, in the world's turn. Returns the launch, or the object that stands for it;
    // null without an exception where a starter declined.
    Reference begin(Start& how);
    void count_error() const;
    bool look_alive(bool several) const;
    bool look_if_behind(double timeout_s) const;
    // Queues the call after those of other worlds. `in_order`: it is by being on the same stream.
    bool follow(const Start& how, bool several, bool& in_order) const;
    bool note_queued(bool in_order) const;
    Reference start(const Start& how, const Reference& start, std::uint64_t number,
                    std::uint64_t epoch, double timeout_s) const;
    bool listed(const Reference& launch) const;
    // Runs what a call needs behind its launch, and returns the result.
    PyObject* finish(const KnownCall& known, Slots& slots, const Start& how,
                     const Reference& launch) const;

    bool closed_ = false;
    std::unordered_map<Signature, std::shared_ptr<const KnownCall>, SignatureHash> calls_;
    std::vector<Buffer> buffers_;
};

}  // namespace mkernel::calls
