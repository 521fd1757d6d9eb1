// The ends of Hopper's calls in every interleaving (device/call.cuh, call_state.hpp): of kernels of two blocks, on two
// ranks of one node and of two. Ascend's are in test_ascend_model.cpp.
#include <array>
#include <string>
#include <vector>

#include "tests/native/model/device.hpp"
#include "tests/native/model/protocol.hpp"
// clang-format off: these are compiled as for a device
#include "backends/accelerators/cuda/device/call.cuh"
// clang-format on

using namespace mkernel;
using mkernel::model::scenario;

namespace {

constexpr int kRanks = 2, kBlocks = 2;

// How a call ends, and what is wrong with it.
enum class End {
    whole,  // finish_call: every rank hears that every other is done
    nodes,  // the same, between nodes
    brief,  // finish_brief_call: nobody waits; memory of even and of odd calls
    ahead,  // BriefBlock: the same, counted when blocks begin, and looked at when they have sent
    one_memory,        // planted: brief, with the same memory in every call
    ahead_one_memory,  // planted: the same of ahead
    early,             // planted: whole, but blocks are done before they have read
    one_block,         // planted: the first block that is done ends the call
    no_fences,         // planted
    ahead_no_fences,   // planted
    recounted,         // planted: ahead, but a block is counted before it has the epoch
};

// Calls of kernels: each block writes into the peer's memory and sets its flag there, waits for its own, and
// reads what came. Blocks of one call start when those of the call before have ended.
class Calls : public model::Scenario {
  public:
    Calls(End end, std::uint64_t calls) : end_(end), calls_(calls) {
        model::fences = end != End::no_fences && end != End::ahead_no_fences;
        gridDim.x = end == End::one_block ? 1 : kBlocks;
        for (Rank& rank : ranks_) {
            for (auto& word : rank.control.finished) model::name(&word, "finished");
            for (auto& word : rank.control.words) model::name(&word, "told by the NIC");
            for (auto& word : rank.arrived) model::name(&word, "arrived");
            model::name(&rank.control.state.blocks_done, "blocks done");
        }
    }

    std::vector<std::function<void()>> threads() override {
        std::vector<std::function<void()>> all;
        for (int rank = 0; rank < kRanks; ++rank) {
            for (int block = 0; block < kBlocks; ++block) {
                all.emplace_back([this, rank, block] { run(rank, block); });
            }
        }
        return all;
    }
    std::string wrong() override {
        for (const Rank& rank : ranks_) {
            const auto& words = rank.control.words;
            const std::uint64_t told = words[0].value + words[1].value;
            if (told != (end_ == End::nodes ? calls_ : 0)) return "the NIC did not tell each call";
            if (rank.control.state.epoch != calls_ + 1) return "the epoch was not moved on";
            if (rank.control.state.blocks_done != 0) return "blocks of a call are still counted";
        }
        return "";
    }

  private:
    struct Rank {
        cuda::Control control;
        std::array<transport::SetWord, kBlocks> arrived;
        int inbox[kBlocks][2]{};  // plain, by block and by parity of the call
        std::uint64_t ended = 0;  // blocks, of all calls
    };

    void run(int rank, int block) {
        cuda::Workspace workspace;
        workspace.rank = workspace.network.rank = rank;
        workspace.one_node = end_ != End::nodes;
        for (int each = 0; each < kRanks; ++each) {
            workspace.controls[each] = workspace.network.controls[each] = &ranks_[each].control;
        }
        Rank& own = ranks_[rank];
        for (std::uint64_t call = 1; call <= calls_; ++call) {
            model::reads(&own.control.state.epoch);
            model::require(own.control.state.epoch == call, "a call has another number");
            kernel(workspace, ranks_[1 - rank], own, block, call);
            transport::fetch_add_release(&own.ended, 1);
            while (transport::load_acquire(&own.ended) < call * kBlocks) model::yield();
        }
    }

    void kernel(const cuda::Workspace& workspace, Rank& peer, Rank& own, int block,
                std::uint64_t epoch) {
        const auto waiter = cuda::waiter_of(workspace, {}, transport::Waiter::kernel);
        const bool ahead =
            end_ == End::ahead || end_ >= End::ahead_no_fences || end_ == End::ahead_one_memory;
        std::uint64_t& number = own.control.state.epoch;
        std::optional<cuda::BriefBlock> brief;
        if (ahead) {
            if (end_ != End::recounted) model::reads(&number);
            brief.emplace(workspace);
            if (end_ == End::recounted) model::reads(&number);
            model::require(brief->epoch() == epoch, "a block has another number");
        }
        const std::size_t half =
            end_ != End::ahead_one_memory && (ahead || end_ == End::brief) ? epoch & 1 : 0;
        model::writes(&peer.inbox[block][half]);
        peer.arrived[block].set(epoch);
        const auto read = [&] {
            (void)waiter.until(own.arrived[block], epoch, {});
            model::reads(&own.inbox[block][half]);
        };
        if (ahead) {  // no other thread runs meanwhile: there is no atomic operation
            const std::uint64_t before = number;
            brief->move_on(workspace);
            if (number != before) model::writes(&number);
        }
        if (end_ != End::early) read();
        if (end_ == End::brief || end_ == End::one_memory) {
            cuda::finish_brief_call(workspace, epoch);
        } else if (!ahead) {
            cuda::finish_call(workspace, waiter, epoch);
        }
        if (end_ == End::early) read();
    }

    End end_;
    std::uint64_t calls_;
    std::array<Rank, kRanks> ranks_{};
};

bool right(const char* what, End end, std::uint64_t calls, int deviations) {
    model::Settings settings;
    settings.deviations = deviations;
    return model::holds(what, scenario<Calls>(end, calls), settings).wrong.empty();
}

TEST(calls_end) {
    CHECK(right("one node", End::whole, 2, 2));
    CHECK(right("two nodes", End::nodes, 2, 2));
    CHECK(right("brief", End::brief, 3, 2));
    CHECK(right("brief, counted ahead", End::ahead, 3, 2));
}

TEST(orders) {
    model::Settings settings;
    settings.deviations = 2;
    const auto surprises = model::orders_count(
        {{scenario<Calls>(End::whole, std::uint64_t{2}), settings},
         {scenario<Calls>(End::nodes, std::uint64_t{2}), settings},
         {scenario<Calls>(End::brief, std::uint64_t{3}), settings},
         {scenario<Calls>(End::ahead, std::uint64_t{3}), settings}},
        {{"change of told by the NIC, release as relaxed",
          "here the sender's own fence is behind it, as the NIC is no thread"}});
    CHECK(surprises.empty());
}

TEST(planted) {
    CHECK(!right("brief, one memory", End::one_memory, 2, 2));
    CHECK(!right("counted ahead, one memory", End::ahead_one_memory, 2, 2));
    CHECK(!right("done before it has read", End::early, 2, 2));
    CHECK(!right("not the last block", End::one_block, 2, 2));
    CHECK(!right("no fences", End::no_fences, 2, 2));
    CHECK(!right("counted ahead, no fences", End::ahead_no_fences, 2, 2));
    CHECK(!right("counted before it has the epoch", End::recounted, 2, 2));
}

}  // namespace

int main(int argc, char** argv) {
    return nics::testing::run(argc, argv);
}
