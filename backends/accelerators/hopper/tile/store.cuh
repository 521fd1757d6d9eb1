// The storer's side of the slices: one thread of the block.
#pragma once

#include "backends/accelerators/hopper/tile/block.cuh"

namespace mkernel::hopper {

template <class C>
class Storer {
  public:
    __device__ explicit Storer(Shared<C>& shared) : shared_(shared) {}

    // Stores one tile. `store(slice, number)` starts the bulk stores of slice `number`; they are
    // complete, at whatever GPU, when this returns.
    template <class Store>
    __device__ void tile(Store&& store) {
        for (int number = 0; number < C::kSlices; ++number) {
            shared_.written[cursor_.slot].wait(cursor_.parity);
            store(shared_.slices[cursor_.slot], number);
            ptx::close_group();
            if (number > 0) {
                ptx::wait_groups_read<1>();
                shared_.drained[before_].arrive();
            }
            before_ = cursor_.slot;
            cursor_.next();
        }
        ptx::wait_groups_read<0>();
        shared_.drained[before_].arrive();
        ptx::wait_groups<0>();
    }

  private:
    Shared<C>& shared_;
    Cursor<C::kSliceSlots> cursor_;
    int before_ = 0;
};

}  // namespace mkernel::hopper
