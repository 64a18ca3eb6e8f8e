// One call as Python describes it beside its tensors: lengths of packed sequences, mask, scale and
// options. Made once and passed by reference. The fields are those of pantile/_schema.py, in its
// order; they are read and given back by one list, kCallFields.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "pantile/pantile.h"
#include "tensor_view.h"

namespace pantile::python {

enum class TensorSplit : std::uint8_t { keys, rows };

struct TensorShare {
  int quarters = kAutomaticShare;
};

struct Call {
  nb::object cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;  // tensors, or None
  nb::object k_begin, mask_shift, block_table;                  // the same
  std::int64_t max_seqlen_q = 0;
  std::int64_t max_seqlen_k = 0;
  std::optional<double> scale;  // default: head_dim to the power of -1/2
  std::int64_t window_left = kUnbounded;
  std::int64_t window_right = kUnbounded;
  Backend backend = Backend::automatic;
  bool backend_preferred = false;  // it gives way where it has no kernel that serves
  std::optional<Float32Precision> float32_precision;  // default: what the framework says
  std::int64_t num_splits = 1;                        // kAutomaticSplits: the plan decides
  SoftmaxUnit softmax = SoftmaxUnit::automatic;
  bool softmax_preferred = false;  // the softmax gives way where no kernel has it
  SoftmaxMode softmax_mode = SoftmaxMode::exact;
  TensorShare tensor_share;
  TensorSplit tensor_split = TensorSplit::keys;
  double rescale_threshold = 0.0;
  double p_max_offset = 0.0;
  double min_exponent_log2 = 0.0;
  bool exact_lse = false;

  bool packed() const { return !cu_seqlens_q.is_none(); }
  bool paged() const { return !block_table.is_none(); }
  bool has_k_begin() const { return !k_begin.is_none(); }

  float scale_for(std::int64_t head_dim) const {
    const auto dim = static_cast<double>(std::max<std::int64_t>(head_dim, 1));
    return static_cast<float>(scale.value_or(1.0 / std::sqrt(dim)));
  }

  SoftmaxOptions softmax_options() const {
    SoftmaxOptions options;
    options.unit = softmax;
    options.mode = softmax_mode;
    options.tensor_quarters = tensor_share.quarters;
    options.split_rows = tensor_split == TensorSplit::rows;
    options.rescale_threshold = static_cast<float>(rescale_threshold);
    options.p_max_offset = static_cast<float>(p_max_offset);
    options.min_exponent_log2 = static_cast<float>(min_exponent_log2);
    options.exact_lse = exact_lse;
    return options;
  }
};

template <class Value>
struct CallField {
  const char* name;
  Value Call::* member;
};
template <class Value>
CallField(const char*, Value Call::*) -> CallField<Value>;

inline constexpr std::tuple kCallFields{
    CallField{"cu_seqlens_q", &Call::cu_seqlens_q},
    CallField{"cu_seqlens_k", &Call::cu_seqlens_k},
    CallField{"seqused_q", &Call::seqused_q},
    CallField{"seqused_k", &Call::seqused_k},
    CallField{"k_begin", &Call::k_begin},
    CallField{"mask_shift", &Call::mask_shift},
    CallField{"block_table", &Call::block_table},
    CallField{"max_seqlen_q", &Call::max_seqlen_q},
    CallField{"max_seqlen_k", &Call::max_seqlen_k},
    CallField{"scale", &Call::scale},
    CallField{"window_left", &Call::window_left},
    CallField{"window_right", &Call::window_right},
    CallField{"backend", &Call::backend},
    CallField{"backend_preferred", &Call::backend_preferred},
    CallField{"float32_precision", &Call::float32_precision},
    CallField{"num_splits", &Call::num_splits},
    CallField{"softmax", &Call::softmax},
    CallField{"softmax_preferred", &Call::softmax_preferred},
    CallField{"softmax_mode", &Call::softmax_mode},
    CallField{"tensor_share", &Call::tensor_share},
    CallField{"tensor_split", &Call::tensor_split},
    CallField{"rescale_threshold", &Call::rescale_threshold},
    CallField{"p_max_offset", &Call::p_max_offset},
    CallField{"min_exponent_log2", &Call::min_exponent_log2},
    CallField{"exact_lse", &Call::exact_lse},
};
inline constexpr std::size_t kCallFieldCount = std::tuple_size_v<decltype(kCallFields)>;

// Calls visit(field) for each field, in order.
template <class Visit>
void for_each_call_field(const Visit& visit) {
  std::apply([&](const auto&... field) { (visit(field), ...); }, kCallFields);
}

// ---- values from Python ----------------------------------------------------------------------

inline void read_field(nb::handle value, const char*, nb::object* field) {
  *field = nb::borrow(value);
}

inline void read_field(nb::handle value, const char* name, std::int64_t* field) {
  if (!nb::try_cast(value, *field, false)) {
    raise_type_error("%s is %R; it must be an integer of at most 64 bits", name, value.ptr());
  }
}

inline void read_field(nb::handle value, const char* name, double* field) {
  const bool number = PyFloat_Check(value.ptr()) != 0 || PyLong_CheckExact(value.ptr()) != 0;
  if (!number || !nb::try_cast(value, *field, true)) {
    PyErr_Clear();
    raise_type_error("%s is %R; it must be a real number", name, value.ptr());
  }
}

inline void read_field(nb::handle value, const char* name, std::optional<double>* field) {
  field->reset();
  if (!value.is_none()) {
    read_field(value, name, &field->emplace());
  }
}

inline void read_field(nb::handle value, const char* name, std::string* field) {
  if (!nb::try_cast(value, *field, false)) {
    raise_type_error("%s is %R; it must be a text", name, value.ptr());
  }
}

inline void read_field(nb::handle value, const char* name, bool* field) {
  if (value.ptr() != Py_True && value.ptr() != Py_False) {
    raise_type_error("%s is %R; it must be True or False", name, value.ptr());
  }
  *field = value.ptr() == Py_True;
}

inline void read_field(nb::handle value, const char* name, TensorShare* field) {
  std::optional<double> share;
  read_field(value, name, &share);
  *field = TensorShare{};
  if (!share) {
    return;
  }
  for (const int quarters : {0, 1, 2, 4}) {
    if (*share == quarters / 4.0) {
      field->quarters = quarters;
      return;
    }
  }
  raise_value_error("%s is %R; it must be one of 0, 0.25, 0.5, 1, or None for the table", name,
                    value.ptr());
}

// One of `values` by its name.
template <class Value>
void read_name(nb::handle text, const char* name, std::initializer_list<Value> values,
               const char* (*name_of)(Value), Value* field) {
  std::string allowed;
  for (const Value value : values) {
    if (PyUnicode_Check(text.ptr()) != 0 &&
        PyUnicode_CompareWithASCIIString(text.ptr(), name_of(value)) == 0) {
      *field = value;
      return;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(name_of(value));
  }
  raise_value_error("%s is %R; it must be one of %s", name, text.ptr(), allowed.c_str());
}

inline const char* tensor_split_name(TensorSplit split) {
  return split == TensorSplit::rows ? "rows" : "keys";
}

inline constexpr const char* kAutomaticPrecision = "auto";

inline const char* precision_name(std::optional<Float32Precision> precision) {
  return precision ? float32_precision_name(*precision) : kAutomaticPrecision;
}

inline void read_field(nb::handle value, const char* name, Backend* field) {
  read_name(
      value, name,
      {Backend::automatic, Backend::hopper, Backend::ampere, Backend::cpu, Backend::reference},
      backend_name, field);
}

inline void read_field(nb::handle value, const char* name, std::optional<Float32Precision>* field) {
  using Precision = std::optional<Float32Precision>;
  read_name<Precision>(value, name,
                       {Precision(), Float32Precision::highest, Float32Precision::tf32},
                       precision_name, field);
}

inline void read_field(nb::handle value, const char* name, SoftmaxUnit* field) {
  read_name(value, name, {SoftmaxUnit::automatic, SoftmaxUnit::vector, SoftmaxUnit::tensor},
            softmax_unit_name, field);
}

inline void read_field(nb::handle value, const char* name, SoftmaxMode* field) {
  read_name(value, name, {SoftmaxMode::exact, SoftmaxMode::surrogate, SoftmaxMode::fast_scale},
            softmax_mode_name, field);
}

inline void read_field(nb::handle value, const char* name, TensorSplit* field) {
  read_name(value, name, {TensorSplit::keys, TensorSplit::rows}, tensor_split_name, field);
}

// ---- values for Python -----------------------------------------------------------------------

inline nb::object to_python(const nb::object& value) {
  return value;
}
inline nb::object to_python(std::int64_t value) {
  return nb::int_(value);
}
inline nb::object to_python(double value) {
  return nb::float_(value);
}
inline nb::object to_python(const std::optional<double>& value) {
  return value ? nb::object(nb::float_(*value)) : nb::none();
}
inline nb::object to_python(bool value) {
  return nb::bool_(value);
}
inline nb::object to_python(TensorShare share) {
  return share.quarters == kAutomaticShare ? nb::none()
                                           : nb::object(nb::float_(share.quarters / 4.0));
}
inline nb::object to_python(Backend value) {
  return nb::str(backend_name(value));
}
inline nb::object to_python(std::optional<Float32Precision> value) {
  return nb::str(precision_name(value));
}
inline nb::object to_python(SoftmaxUnit value) {
  return nb::str(softmax_unit_name(value));
}
inline nb::object to_python(SoftmaxMode value) {
  return nb::str(softmax_mode_name(value));
}
inline nb::object to_python(TensorSplit value) {
  return nb::str(tensor_split_name(value));
}

// ---- the class -------------------------------------------------------------------------------

inline Call read_call(const nb::args& values) {
  if (values.size() != kCallFieldCount) {
    raise_type_error("a call has %zu fields; %zu were given", kCallFieldCount, values.size());
  }
  Call call;
  std::size_t index = 0;
  for_each_call_field(
      [&](const auto& field) { read_field(values[index++], field.name, &(call.*field.member)); });
  return call;
}

// A copy with other values of the named fields.
inline Call replace(const Call& call, const nb::kwargs& changes) {
  Call changed = call;
  std::size_t found = 0;
  for_each_call_field([&](const auto& field) {
    if (changes.contains(field.name)) {
      read_field(changes[field.name], field.name, &(changed.*field.member));
      ++found;
    }
  });
  if (found != changes.size()) {
    raise_type_error("a call has no such field: %R", changes.ptr());
  }
  return changed;
}

inline nb::list fields_of(const Call& call) {
  nb::list values;
  for_each_call_field([&](const auto& field) { values.append(to_python(call.*field.member)); });
  return values;
}

inline void bind_call(nb::module_& module) {
  // A module that is imported a second time in one process (pantile/_once.py) has the same type.
  if (const nb::handle known = nb::type<Call>(); known.is_valid()) {
    module.attr("Call") = known;
    return;
  }
  nb::class_<Call> type(module, "Call");
  type.def("__init__", [](Call* self, nb::args values) { new (self) Call(read_call(values)); });
  type.def("__iter__", [](const Call& call) { return nb::iter(fields_of(call)); });
  type.def("_replace", [](const Call& call, nb::kwargs changes) { return replace(call, changes); });
  type.def_prop_ro("packed", &Call::packed);
  nb::list names;
  for_each_call_field([&](const auto& field) {
    const auto member = field.member;
    names.append(field.name);
    type.def_prop_ro(field.name, [member](const Call& call) { return to_python(call.*member); });
  });
  type.attr("_fields") = nb::tuple(names);
}

}  // namespace pantile::python
