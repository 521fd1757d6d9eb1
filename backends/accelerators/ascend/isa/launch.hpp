// The launch macro: a kernel's only statement of how it is started.
//
// A kernel is a class template over the core type, KERNEL<Core>(core, args).run(), which runs on
// every core of its kind. Each kernel's header ends, in its op's namespace, with
//
//   MKERNEL_ASCEND_KERNEL(CORES, OP, NAME, KERNEL, ARGS)
//
//   CORES   aic or aiv: the kind of core it runs on
//   OP_NAME unique among all kernels
//   run()   false where a wait was aborted or timed out
//
// Here that is a function template OP::NAME(core, args), for whatever core type the host has: the
// simulator's, or a test's. A device's build defines the macro before it includes a kernel, as its
// own entry point (docs/ascend-isa.md).
#pragma once

#ifndef MKERNEL_ASCEND_KERNEL
#define MKERNEL_ASCEND_KERNEL(CORES, OP, NAME, KERNEL, ARGS) \
    template <class Core>                                    \
    [[nodiscard]] bool NAME(Core& core, const ARGS& args) {  \
        return KERNEL<Core>(core, args).run();               \
    }
#endif
