// In place of Hopper's: there are no bulk copies.
#pragma once

namespace mkernel::hopper::ptx {

inline void fence_async_proxy() {}

}  // namespace mkernel::hopper::ptx
