// Kernels compiled at run time, for Python: the log, folders, and compiling for another machine.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>

#include "hooks.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "request.h"
#include "unlocked.h"

namespace pantile::python {

// Called by any thread, with or without the GIL, and by none of ours that holds a lock.
inline void log_to_python(jit::LogLevel level, const char* text) {
  if (!nb::is_alive() || hooks().jit_log == nullptr) {
    return;
  }
  const Locked locked;
  try {
    call_python(hooks().jit_log, static_cast<int>(level), text);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the log of pantile");
  }
}

inline void set_jit(const std::string& nvrtc_folders, const std::string& shipped_folders,
                    nb::handle log) {
  jit::set_nvrtc_folders(nvrtc_folders.c_str());
  jit::set_shipped_folders(shipped_folders.c_str());
  hooks().jit_log = log.inc_ref().ptr();
  jit::set_log(log_to_python);
}

// Divided by colons: where kernels, and what was measured, are kept.
inline std::string cache_folders() {
  char text[16384] = "";
  raise_unless_ok(jit::cache_folders(text, sizeof text));
  return text;
}

// "13.0, /path/libnvrtc.so.13", or the reason why there is none.
inline nb::tuple find_nvrtc() {
  char text[512] = "";
  Status status;
  {
    const Unlocked unlocked;
    status = jit::find_nvrtc(text, sizeof text);
  }
  return nb::make_tuple(status.ok(), status.ok() ? text : status.message());
}

inline nb::dict facts_dict(const jit::KernelFacts& facts) {
  nb::dict dict;
  dict["name"] = facts.name;
  dict["file"] = facts.file;
  dict["registers"] = facts.registers;
  dict["spill_bytes"] = facts.spill_bytes;
  dict["shared_bytes"] = facts.shared_bytes;
  dict["bytes"] = facts.bytes;
  dict["advisories"] = facts.advisories;
  dict["seconds"] = facts.seconds;
  return dict;
}

inline nb::dict compile_kernel(const std::string& name, const std::string& source,
                               const std::string& entry, int arch, const std::string& folder) {
  jit::KernelFacts facts;
  Status status;
  {
    const Unlocked unlocked;
    status =
        jit::compile_to_folder(jit::KernelSource{name.c_str(), source.c_str(), entry.c_str(), arch},
                               folder.c_str(), &facts);
  }
  raise_unless_ok(status);
  return facts_dict(facts);
}

// ---- kernels of a variant, by what they depend on
// ------------------------------------------------

// One of a list: an attention that is planned for a GPU which need not be here.
struct AttentionRow {
  ForwardProblem forward;
  BackwardProblem backward;
  DeviceProps device;
  PlanOptions options;
};

template <class Value>
Value choice(const char* name, const std::string& text,
             std::initializer_list<std::pair<const char*, Value>> choices) {
  std::string allowed;
  for (const auto& [word, value] : choices) {
    if (text == word) {
      return value;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(word);
  }
  raise_value_error("%s is '%s'; it must be one of %s", name, text.c_str(), allowed.c_str());
}

// A H100 or an A100: what their families' kernels are compiled for.
inline DeviceProps example_device(Backend backend) {
  const bool hopper = backend == Backend::hopper;
  DeviceProps props;
  props.device = Device{DeviceType::cuda, 0};
  props.compute_major = hopper ? 9 : 8;
  props.multiprocessors = hopper ? 132 : 108;
  props.smem_optin_bytes = hopper ? 232448 : 166912;
  props.l2_bytes = std::int64_t{hopper ? 50 : 40} << 20;
  std::snprintf(props.name, sizeof props.name, hopper ? "H100" : "A100");
  return props;
}

// `sizes`: batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v.
inline AttentionRow attention_row(const std::string& backend, const std::string& dtype,
                                  const std::string& mask, const std::array<std::int64_t, 7>& sizes,
                                  bool softcap, bool alibi, const std::string& bias, bool dropout) {
  AttentionRow row;
  row.options.backend = choice<Backend>("backend", backend,
                                        {{"hopper", Backend::hopper}, {"ampere", Backend::ampere}});
  row.device = example_device(row.options.backend);
  ForwardProblem& p = row.forward;
  p.dtype = choice<DType>("dtype", dtype,
                          {{"bf16", DType::bf16}, {"f16", DType::f16}, {"f32", DType::f32}});
  std::tie(p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k, p.head_dim, p.head_dim_v) =
      std::tuple_cat(sizes);
  constexpr std::int64_t kSomeWindow = 128;  // its size is no part of a kernel
  const MaskKind kind = choice<MaskKind>(
      "mask", mask,
      {{"full", MaskKind::full}, {"causal", MaskKind::causal}, {"window", MaskKind::window}});
  p.window_left = kind == MaskKind::window ? kSomeWindow : kUnbounded;
  p.window_right = kind == MaskKind::full ? kUnbounded : 0;
  p.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  p.q = contiguous_layout(p.seqlen_q, p.heads_q, p.head_dim);
  p.k = contiguous_layout(p.seqlen_k, p.heads_k, p.head_dim);
  p.v = contiguous_layout(p.seqlen_k, p.heads_k, p.head_dim_v);
  p.o = contiguous_layout(p.seqlen_q, p.heads_q, p.head_dim_v);
  p.variant.softcap = softcap ? 30.0f : 0.0f;
  p.variant.has_alibi = alibi;
  p.variant.dropout = dropout ? 26 : 0;
  p.variant.has_bias = bias != "none";
  p.variant.bias_dtype =
      choice<DType>("bias", bias, {{"none", p.dtype}, {"f32", DType::f32}, {"as q", p.dtype}});
  p.variant.bias.query = p.seqlen_k;
  return row;
}

inline void plan_row(const AttentionRow& row, ForwardPlan* plan) {
  raise_unless_ok(plan_forward(row.forward, row.device, row.options, plan));
}

inline void plan_row(const AttentionRow& row, BackwardPlan* plan) {
  BackwardProblem problem = row.backward;
  problem.forward = row.forward;
  problem.grad_o = row.forward.o;
  problem.grad_q = row.forward.q;
  problem.grad_k = row.forward.k;
  problem.grad_v = row.forward.v;
  raise_unless_ok(plan_backward(problem, row.device, row.options, plan));
}

template <class Plan>
void compile_row(const AttentionRow& row, const std::string& folder, nb::list* made) {
  Plan plan;
  plan_row(row, &plan);
  constexpr int kMost = 8;
  jit::KernelFacts facts[kMost];
  int count = 0;
  Status status;
  {
    const Unlocked unlocked;
    status = jit::compile_to_folder(plan, folder.c_str(), facts, kMost, &count);
  }
  raise_unless_ok(status);
  for (int i = 0; i < std::min(count, kMost); ++i) {
    made->append(facts_dict(facts[i]));
  }
}

// The facts of each kernel; none when the library has it.
inline nb::list compile_attention(const std::string& pass, const std::string& backend,
                                  const std::string& dtype, const std::string& mask,
                                  const std::array<std::int64_t, 7>& sizes, bool softcap,
                                  bool alibi, const std::string& bias, bool dropout,
                                  bool deterministic, bool grad_alibi, bool grad_bias,
                                  const std::string& folder) {
  AttentionRow row = attention_row(backend, dtype, mask, sizes, softcap, alibi, bias, dropout);
  row.backward.deterministic = deterministic;
  row.backward.wants_grad_alibi = grad_alibi;
  row.backward.wants_grad_bias = grad_bias;
  nb::list made;
  if (choice<Pass>("pass", pass, {{"forward", Pass::forward}, {"backward", Pass::backward}}) ==
      Pass::forward) {
    compile_row<ForwardPlan>(row, folder, &made);
  } else {
    compile_row<BackwardPlan>(row, folder, &made);
  }
  return made;
}

inline void bind_jit(nb::module_& module) {
  using namespace nb::literals;
  module.def("set_jit", &set_jit, "nvrtc_folders"_a, "shipped_folders"_a, "log"_a);
  module.def("cache_folders", &cache_folders);
  module.def("find_nvrtc", &find_nvrtc);
  module.def("compile_kernel", &compile_kernel, "name"_a, "source"_a, "entry"_a, "arch"_a,
             "folder"_a);
  module.def("compile_attention", &compile_attention, "pass_"_a, "backend"_a, "dtype"_a, "mask"_a,
             "sizes"_a, "softcap"_a, "alibi"_a, "bias"_a, "dropout"_a, "deterministic"_a,
             "grad_alibi"_a, "grad_bias"_a, "folder"_a);
}

}  // namespace pantile::python
