// What the bindings need of the torch that is loaded, if any. Set once by pantile._runtime.
#pragma once

#include <Python.h>

#include <cstdint>

#include "dlpack.h"

namespace pantile::python {

// Same signature as torch_get_num_threads(), which libtorch_cpu exports from torch 2.11 on.
using ThreadCount = std::int32_t (*)(std::uint32_t* out);

// What a plain call asks torch (plain.h); all null until pantile._ops has set them.
struct PlainHooks {
  PyTypeObject* parameter_type = nullptr;                      // torch.nn.Parameter
  PyObject* grad_enabled = nullptr;                            // is autograd recording?
  PyObject* is_excluded = nullptr;                             // is a dispatch key?
  PyObject *autograd_cpu = nullptr, *autograd_cuda = nullptr;  // dispatch keys
  PyObject* watchers = nullptr;  // a tuple of functions; true: something watches
  Py_ssize_t watcher_count = 0;
  PyObject* empty_like = nullptr;
  PyObject *float32 = nullptr, *int8 = nullptr, *contiguous_format = nullptr;  // of torch
  PyObject *named_dtype = nullptr, *named_format = nullptr;  // ("dtype",), ("memory_format",)
  // Names of attributes of a tensor.
  PyObject *requires_grad = nullptr, *is_neg = nullptr, *is_zerotensor = nullptr;
  PyObject *is_cuda = nullptr, *new_empty = nullptr;
};

// Owned references that are never given back: the interpreter may be gone when statics are
// destroyed.
struct Hooks {
  PyTypeObject* tensor_type = nullptr;              // torch.Tensor
  const dlpack::ExchangeTable* exchange = nullptr;  // torch >= 2.11
  PyObject* describe = nullptr;                     // older torch: the fields of a tensor
  PyObject* current_stream = nullptr;               // older torch: CUDA stream of a device
  PyObject* lend_workspace = nullptr;               // CUDA scratch memory
  PyObject* is_capturing = nullptr;                 // is the current stream being captured?
  ThreadCount thread_count = nullptr;               // torch's intra-op threads
  PyObject* plan_log = nullptr;                     // called with one line for each new plan
  PyObject* jit_log = nullptr;                      // called with a level and a text
  PlainHooks plain;
};

inline Hooks& hooks() {
  static Hooks instance;
  return instance;
}

}  // namespace pantile::python
