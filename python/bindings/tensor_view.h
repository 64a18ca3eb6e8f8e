// A tensor as the bindings see it: pointer, dtype, device, shape and strides, read from torch
// through the DLPack exchange table, from an older torch through its Python attributes, or from an
// array.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "dlpack.h"
#include "hooks.h"
#include "unlocked.h"

namespace pantile::python {

namespace nb = nanobind;

// Raises ValueError or TypeError with a PyErr_Format text.
template <class... Arguments>
[[noreturn]] void raise_value_error(const char* format, Arguments... arguments) {
  PyErr_Format(PyExc_ValueError, format, arguments...);
  throw nb::python_error();
}
template <class... Arguments>
[[noreturn]] void raise_type_error(const char* format, Arguments... arguments) {
  PyErr_Format(PyExc_TypeError, format, arguments...);
  throw nb::python_error();
}

inline constexpr int kMaxRank = 8;  // more dimensions are counted but not stored

struct TensorView {
  const char* name = "";  // the argument it came from, for messages
  void* data = nullptr;
  std::int32_t device_type = dlpack::kCpu;
  std::int32_t device_index = 0;
  std::uint8_t code = dlpack::kFloat;
  std::uint8_t bits = 0;
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};  // elements

  bool empty() const {
    return std::any_of(shape, shape + std::min(rank, kMaxRank),
                       [](std::int64_t size) { return size == 0; });
  }

  // Power of two that divides the address; more than 16 no kernel asks for, and plans are
  // remembered by it.
  int base_align_bytes() const {
    const auto address = reinterpret_cast<std::uintptr_t>(data) | 16u;
    return static_cast<int>(address & (~address + 1));
  }

  // Row-major without gaps.
  bool contiguous() const {
    std::int64_t expected = 1;
    for (int axis = std::min(rank, kMaxRank) - 1; axis >= 0; --axis) {
      if (stride[axis] != expected) {
        return false;
      }
      expected *= std::max<std::int64_t>(shape[axis], 1);
    }
    return true;
  }

  // What a fresh copy would be: contiguous, and aligned for vector loads.
  bool canonical() const { return contiguous() && base_align_bytes() >= 16; }

  void make_strides_canonical() {
    std::int64_t next = 1;
    for (int axis = std::min(rank, kMaxRank) - 1; axis >= 0; --axis) {
      stride[axis] = next;
      next *= std::max<std::int64_t>(shape[axis], 1);
    }
  }

  // A stride along an axis of one element is never used and may hold anything. Giving it the value
  // of a contiguous tensor lets alignment checks and the plan cache ignore the difference.
  void normalize_strides() {
    if (empty()) {
      make_strides_canonical();
      return;
    }
    std::int64_t next = 1;
    for (int axis = std::min(rank, kMaxRank) - 1; axis >= 0; --axis) {
      if (shape[axis] == 1) {
        stride[axis] = next;
      }
      next = stride[axis] * shape[axis];
    }
  }
};

inline std::string dtype_text(std::uint8_t code, std::uint8_t bits) {
  switch (code) {
    case dlpack::kInt: return "int" + std::to_string(bits);
    case dlpack::kUInt: return "uint" + std::to_string(bits);
    case dlpack::kFloat: return "float" + std::to_string(bits);
    case dlpack::kBfloat: return "bfloat" + std::to_string(bits);
    case dlpack::kComplex: return "complex" + std::to_string(bits);
    case dlpack::kBool: return "bool";
    case dlpack::kFloat8E4M3FN: return "float8_e4m3fn";
    case dlpack::kFloat8E5M2: return "float8_e5m2";
    default:
      return "DLPack type " + std::to_string(code) + " with " + std::to_string(bits) + " bits";
  }
}

inline std::string device_text(std::int32_t type, std::int32_t index) {
  if (type == dlpack::kCpu) {
    return "cpu";
  }
  if (type == dlpack::kCuda) {
    return "cuda:" + std::to_string(index);
  }
  return "DLPack device " + std::to_string(type);
}

inline TensorView view_of(const dlpack::Tensor& tensor, const char* name) {
  TensorView view;
  view.name = name;
  view.data = static_cast<char*>(tensor.data) + tensor.byte_offset;
  view.device_type = tensor.device.type;
  view.device_index = tensor.device.index;
  view.code = tensor.dtype.code;
  view.bits = tensor.dtype.bits;
  view.rank = tensor.ndim;
  const int stored = std::min(view.rank, kMaxRank);
  std::copy_n(tensor.shape, stored, view.shape);
  if (tensor.strides != nullptr) {
    std::copy_n(tensor.strides, stored, view.stride);
    view.normalize_strides();
  } else {
    view.make_strides_canonical();
  }
  return view;
}

// torch before 2.11: pantile._runtime.describe() answers (address, device type, device index, dtype
// code, bits, shape, strides) with DLPack's numbers.
inline TensorView view_from_attributes(nb::handle object, const char* name) {
  const nb::tuple fields = nb::cast<nb::tuple>(call_python(hooks().describe, object));
  TensorView view;
  view.name = name;
  view.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(fields[0]));
  view.device_type = nb::cast<std::int32_t>(fields[1]);
  view.device_index = nb::cast<std::int32_t>(fields[2]);
  view.code = nb::cast<std::uint8_t>(fields[3]);
  view.bits = nb::cast<std::uint8_t>(fields[4]);
  const nb::tuple shape = nb::cast<nb::tuple>(fields[5]);
  const nb::tuple stride = nb::cast<nb::tuple>(fields[6]);
  view.rank = static_cast<int>(nb::len(shape));
  for (int axis = 0; axis < std::min(view.rank, kMaxRank); ++axis) {
    view.shape[axis] = nb::cast<std::int64_t>(shape[axis]);
    view.stride[axis] = nb::cast<std::int64_t>(stride[axis]);
  }
  view.normalize_strides();
  return view;
}

// Arrays of other libraries. NumPy has no bfloat16: pantile._numpy passes such arrays as uint16 and
// lets no other uint16 array through.
inline TensorView view_of_array(nb::handle object, const char* name) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast<nb::ndarray<nb::ro>>(object, array, false)) {
    PyErr_Clear();
    raise_type_error("%s: expected a tensor or an array, got %R", name, Py_TYPE(object.ptr()));
  }
  TensorView view;
  view.name = name;
  view.data = const_cast<void*>(static_cast<const void*>(array.data()));
  view.device_type = array.device_type();
  view.device_index = array.device_id();
  view.code = array.dtype().code;
  view.bits = array.dtype().bits;
  if (view.code == dlpack::kUInt && view.bits == 16) {
    view.code = dlpack::kBfloat;
  }
  view.rank = static_cast<int>(array.ndim());
  for (int axis = 0; axis < std::min(view.rank, kMaxRank); ++axis) {
    view.shape[axis] = static_cast<std::int64_t>(array.shape(axis));
    view.stride[axis] = array.stride(axis);
  }
  view.normalize_strides();
  return view;
}

inline TensorView read_tensor(nb::handle object, const char* name) {
  const Hooks& torch = hooks();
  const bool is_torch = torch.tensor_type != nullptr &&
                        PyType_IsSubtype(Py_TYPE(object.ptr()), torch.tensor_type) != 0;
  if (!is_torch) {
    return view_of_array(object, name);
  }
  if (torch.exchange == nullptr) {
    return view_from_attributes(object, name);
  }
  dlpack::Tensor tensor{};
  if (torch.exchange->tensor_from_object(object.ptr(), &tensor) != 0) {
    throw nb::python_error();
  }
  return view_of(tensor, name);
}

}  // namespace pantile::python
