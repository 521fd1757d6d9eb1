/* The call starter, which an accelerator backend may give the world beside a launch, so that later
 * calls of the same signature start without Python (`Launch.again` in accelerator.py).
 *
 * A backend returns a PyCapsule of the name MKERNEL_CALL_STARTER, which holds a MkernelCallStarter
 * and owns what its `self` points to. The world calls `start` with the GIL held, in its turn among all
 * worlds of the process, on the device of the tensors. Plan, workspace, peers and the places of
 * tensors in symmetric memory are those of the call that was launched; tensors have the same shapes,
 * strides, dtypes and device. */
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MKERNEL_CALL_STARTER "mkernel.call_starter.4"
#define MKERNEL_CALL_TENSORS 16 /* at most, of a starter */

typedef struct {
    uint64_t number;  /* the call's, in its world; refused calls count */
    uint64_t epoch;   /* the call's, in its world; refused calls do not count */
    double timeout_s; /* limit of every wait of the call */
    uint64_t stream;  /* torch's current stream of the tensors' device; 0 where it has none */
    const uint64_t* addresses; /* of the tensors that `Again.tensors` names; 0: there is none */
    void* const* tensors; /* the same as PyObject*, borrowed, as the launch had them; None: there
                           * is none */
} MkernelCall;

typedef enum {
    MKERNEL_CALL_RAISED = -1, /* a Python exception is set, as a launch would raise it */
    MKERNEL_CALL_QUEUED = 0,
    MKERNEL_CALL_DECLINED = 1, /* nothing was done: the world launches the call from Python, which
                                * raises what a kernel has recorded */
} MkernelCallResult;

typedef struct {
    MkernelCallResult (*start)(void* self, const MkernelCall* call);
    void* self;
    uint64_t alignment; /* in bytes, of every address; others are launched from Python */
} MkernelCallStarter;

#ifdef __cplusplus
}
#endif
