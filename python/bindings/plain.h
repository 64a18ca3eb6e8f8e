// The plain eager call: torch tensors, nothing of torch that watches. What Python would look up for
// it one by one is looked up here, because that takes longer than planning and launching.
#pragma once

#include <initializer_list>

#include "hooks.h"
#include "tensor_view.h"

namespace pantile::python {

inline bool is_true(const nb::object& answer) {
  const int truth = PyObject_IsTrue(answer.ptr());
  if (truth < 0) {
    throw nb::python_error();
  }
  return truth != 0;
}

// An ordinary dense tensor, if it can be read at all: what is sparse, nested, wrapped or has no
// memory cannot be. Two kinds can, but do not hold their values: they are negated lazily, or zeros.
inline bool is_plain_tensor(nb::handle x) {
  const PlainHooks& torch = hooks().plain;
  if (Py_TYPE(x.ptr()) != hooks().tensor_type && Py_TYPE(x.ptr()) != torch.parameter_type) {
    return false;
  }
  return !is_true(x.attr(nb::handle(torch.is_neg))()) &&
         !is_true(x.attr(nb::handle(torch.is_zerotensor))());
}

// What torch does around a call: nothing; nothing, but autograd must record it; or more.
enum class Around { nothing, autograd, more };

// Of a call with these tensors. `more`: some mode, transform, tracer, autocast or profiler sees it.
// Below autograd, inside another operator's kernel, there is nothing to record.
inline Around what_is_around(std::initializer_list<nb::handle> tensors) {
  const PlainHooks& torch = hooks().plain;
  if (torch.watchers == nullptr) {
    return Around::more;
  }
  for (const nb::handle x : tensors) {
    if (!is_plain_tensor(x)) {
      return Around::more;
    }
  }
  for (Py_ssize_t i = 0; i < torch.watcher_count; ++i) {
    if (is_true(nb::handle(PyTuple_GetItem(torch.watchers, i))())) {
      return Around::more;
    }
  }
  if (is_true(nb::handle(torch.grad_enabled)())) {
    for (const nb::handle x : tensors) {
      if (is_true(nb::getattr(x, nb::handle(torch.requires_grad)))) {
        const bool on_gpu = is_true(nb::getattr(x, nb::handle(torch.is_cuda)));
        PyObject* const key = on_gpu ? torch.autograd_cuda : torch.autograd_cpu;
        const bool below = is_true(nb::handle(torch.is_excluded)(nb::handle(key)));
        return below ? Around::nothing : Around::autograd;
      }
    }
  }
  return Around::nothing;
}

}  // namespace pantile::python
