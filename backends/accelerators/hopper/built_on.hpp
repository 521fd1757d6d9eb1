// What `hopper` is built on has its names here too.
#pragma once

namespace mkernel::cuda {
namespace attention {}
namespace collectives {}
namespace moe {}
namespace ptx {}
namespace transfer {}
}  // namespace mkernel::cuda

namespace mkernel::hopper {

using namespace cuda;

namespace attention {
using namespace cuda::attention;
}
namespace moe {
using namespace cuda::moe;
}
namespace ptx {
using namespace cuda::ptx;
}

}  // namespace mkernel::hopper
