// Plans for requests: remembered by problem, device and backend, so that a repeated call skips
// validation and the walk over the kernel table; and the copies without which no kernel accepts.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "request.h"

namespace pantile::python {

// ---- errors ----------------------------------------------------------------------------------

// Becomes pantile.UnsupportedError, a NotImplementedError.
struct UnsupportedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void raise_unless_ok(const Status& status) {
  switch (status.code()) {
    case StatusCode::ok: return;
    case StatusCode::invalid_argument: throw nb::value_error(status.message());
    case StatusCode::unsupported: throw UnsupportedError(status.message());
    case StatusCode::unavailable:
    case StatusCode::device_error: break;
  }
  throw std::runtime_error(status.message());
}

// ---- devices ---------------------------------------------------------------------------------

// The CPU's properties, kept until the number of threads changes: torch's when torch is loaded.
class CpuProperties {
 public:
  const DeviceProps& get() {
    std::uint32_t threads = 0;
    if (hooks().thread_count != nullptr && hooks().thread_count(&threads) == 0) {
      set_threads(static_cast<int>(threads));
    }
    if (!known_) {
      raise_unless_ok(query_device(Device{DeviceType::cpu, 0}, &props_));
      known_ = true;
    }
    return props_;
  }

  void set_threads(int threads) {
    if (threads != threads_) {
      set_cpu_threads(threads);
      threads_ = threads;
      known_ = false;
    }
  }

 private:
  DeviceProps props_;
  int threads_ = 0;
  bool known_ = false;
};

inline CpuProperties& cpu_properties() {
  static CpuProperties instance;
  return instance;
}

inline DeviceProps properties_of(Device device) {
  if (device.type == DeviceType::cpu) {
    return cpu_properties().get();
  }
  // The driver is asked once; later calls take a copy.
  static std::array<std::optional<DeviceProps>, 64> known;
  const auto index = static_cast<std::size_t>(device.index);
  if (index < known.size() && known[index]) {
    return *known[index];
  }
  DeviceProps props;
  raise_unless_ok(query_device(device, &props));
  if (index < known.size()) {
    known[index] = props;
  }
  return props;
}

// ---- the plan cache --------------------------------------------------------------------------

// Every field that a plan depends on. An explicit list: structs have padding, which compares
// unequal.
class PlanKey {
 public:
  PlanKey(const ForwardProblem& problem, const DeviceProps& device, const PlanOptions& options) {
    append(problem);
    append(device, options);
  }
  PlanKey(const BackwardProblem& problem, const DeviceProps& device, const PlanOptions& options) {
    append(problem.forward);
    add({problem.deterministic, problem.has_grad_lse, problem.has_o_low});
    for (const Layout* layout :
         {&problem.grad_o, &problem.grad_q, &problem.grad_k, &problem.grad_v}) {
      append(*layout);
    }
    append(device, options);
  }
  PlanKey(const QuantizeProblem& problem, const DeviceProps& device, const PlanOptions& options) {
    append(problem.forward);
    add({static_cast<std::int64_t>(problem.dtype), problem.hadamard});
    for (const Layout* layout : {&problem.q, &problem.k, &problem.v}) {
      append(*layout);
    }
    append(device, options);
  }

  bool operator==(const PlanKey& other) const { return fields_ == other.fields_; }

  std::uint64_t hash() const {
    std::uint64_t value = 0;
    for (int i = 0; i < count_; ++i) {
      value = (value ^ static_cast<std::uint64_t>(fields_[i])) * 0x9E3779B97F4A7C15u;
      value ^= value >> 32;
    }
    return value;
  }

 private:
  void add(std::initializer_list<std::int64_t> values) {
    for (const std::int64_t value : values) {
      fields_.at(count_++) = value;
    }
  }

  void append(const Layout& layout) {
    add({layout.batch, layout.seq, layout.head, layout.base_align_bytes});
  }

  void append(const ForwardProblem& p) {
    std::int32_t scale_bits = 0;
    std::memcpy(&scale_bits, &p.scale, sizeof scale_bits);
    append(p.softmax);
    add({static_cast<std::int64_t>(p.dtype), p.batch, p.heads_q, p.heads_k, p.seqlen_q, p.seqlen_k,
         p.head_dim, p.head_dim_v, p.packed_q, p.packed_k, p.total_q, p.total_k, p.has_seqused_q,
         p.has_seqused_k, p.window_left, p.window_right, scale_bits});
    add({p.wants_lse, p.wants_max_logit, p.output_f32, p.wants_o_low,
         static_cast<std::int64_t>(p.float32_precision)});
    for (const Layout* layout : {&p.q, &p.k, &p.v, &p.o}) {
      append(*layout);
    }
    add({static_cast<std::int64_t>(p.fp8.output), static_cast<std::int64_t>(p.fp8.exp),
         p.fp8.block_q, p.fp8.block_k, p.fp8.smooth_k});
  }

  void append(const SoftmaxOptions& softmax) {
    add({static_cast<std::int64_t>(softmax.unit), static_cast<std::int64_t>(softmax.mode),
         softmax.tensor_quarters, softmax.split_rows, softmax.exact_lse});
    for (const float x :
         {softmax.rescale_threshold, softmax.p_max_offset, softmax.min_exponent_log2}) {
      std::int32_t bits = 0;
      std::memcpy(&bits, &x, sizeof bits);
      add({bits});
    }
  }

  void append(const DeviceProps& device, const PlanOptions& options) {
    add({static_cast<std::int64_t>(device.device.type), device.device.index, device.threads,
         static_cast<std::int64_t>(device.isa), static_cast<std::int64_t>(options.backend)});
  }

  std::array<std::int64_t, 96> fields_{};
  int count_ = 0;
};

// Overloads by problem, so that both passes share the code below.
inline Status make_plan(const ForwardProblem& problem, const DeviceProps& device,
                        const PlanOptions& options, ForwardPlan* plan) {
  return plan_forward(problem, device, options, plan);
}
inline Status make_plan(const BackwardProblem& problem, const DeviceProps& device,
                        const PlanOptions& options, BackwardPlan* plan) {
  return plan_backward(problem, device, options, plan);
}

inline Status make_plan(const QuantizeProblem& problem, const DeviceProps& device,
                        const PlanOptions& options, QuantizePlan* plan) {
  return plan_quantize(problem, device, options, plan);
}

inline std::string plan_text(const ForwardProblem& p, bool o_low, const KernelInfo& kernel,
                             int tile_q, int tile_k, std::size_t workspace_bytes) {
  char text[256];
  std::snprintf(text, sizeof text,
                "%s: batch %lld, heads %lld/%lld, length %lld x %lld, head_dim %lld/%lld, window "
                "(%lld, %lld); tile %d x %d, workspace %zu bytes%s",
                kernel.name, static_cast<long long>(p.batch), static_cast<long long>(p.heads_q),
                static_cast<long long>(p.heads_k), static_cast<long long>(p.seqlen_q),
                static_cast<long long>(p.seqlen_k), static_cast<long long>(p.head_dim),
                static_cast<long long>(p.head_dim_v), static_cast<long long>(p.window_left),
                static_cast<long long>(p.window_right), tile_q, tile_k, workspace_bytes,
                o_low ? ", o_low" : "");
  return text;
}

inline const ForwardProblem& forward_part(const ForwardProblem& problem) {
  return problem;
}
inline const ForwardProblem& forward_part(const BackwardProblem& problem) {
  return problem.forward;
}
inline const ForwardProblem& forward_part(const QuantizeProblem& problem) {
  return problem.forward;
}

// Whether the run writes or reads the low bits of O.
inline bool uses_o_low(const ForwardProblem& problem) {
  return problem.wants_o_low;
}
inline bool uses_o_low(const BackwardProblem& problem) {
  return problem.has_o_low;
}
inline bool uses_o_low(const QuantizeProblem&) {
  return false;
}

template <class Problem, class Plan>
class PlanCache {
 public:
  // The plan, or null with the reason in `status`. Valid until the next call.
  const Plan* find(const Problem& problem, const DeviceProps& device, const PlanOptions& options,
                   Status* status) {
    PlanKey key(problem, device, options);
    Entry& entry = entries_[key.hash() % entries_.size()];
    if (entry.used && entry.key == key) {
      return &entry.plan;
    }
    Plan plan;
    *status = make_plan(problem, device, options, &plan);
    if (!status->ok()) {
      return nullptr;
    }
    if (hooks().plan_log != nullptr) {
      const std::string text = plan_text(forward_part(problem), uses_o_low(problem), *plan.kernel,
                                         plan.tile_q, plan.tile_k, plan.workspace.bytes);
      nb::handle(hooks().plan_log)(text.c_str());
    }
    entry = Entry{std::move(key), plan, true};
    return &entry.plan;
  }

 private:
  struct Entry {
    PlanKey key{Problem{}, DeviceProps{}, PlanOptions{}};
    Plan plan;
    bool used = false;
  };
  std::array<Entry, 64> entries_;
};

// One cache for each pass, guarded by the GIL.
template <class Problem, class Plan>
PlanCache<Problem, Plan>& plan_cache() {
  static auto* instance = new PlanCache<Problem, Plan>;
  return *instance;
}

// ---- copies ----------------------------------------------------------------------------------

// Copy bits: the answer of forward() and backward(): inputs that Python must copy before it asks
// again.
inline constexpr unsigned kCopyQ = 1, kCopyK = 2, kCopyV = 4, kCopyGradO = 8, kCopyO = 16,
                          kCopyLse = 32, kCopyGradLse = 64;

// An input and where its layout stands in the problem.
struct Operand {
  const TensorView* view;
  Layout* layout;
  unsigned bit;
};

inline Layout fresh_layout(const TensorView& view) {
  return fresh_layout(view, view.shape[view.rank - 1]);
}

// Inputs that a Layout cannot describe: the last axis is not dense, an axis runs backwards, or the
// address is not a multiple of the element size.
inline unsigned inexpressible(std::initializer_list<Operand> operands) {
  unsigned copies = 0;
  for (const Operand& operand : operands) {
    const TensorView& view = *operand.view;
    bool expressible = view.stride[view.rank - 1] == 1 &&
                       view.base_align_bytes() * 8 >= static_cast<int>(view.bits);
    for (int axis = 0; axis < view.rank; ++axis) {
      expressible = expressible && view.stride[axis] >= 0;
    }
    if (!expressible) {
      copies |= operand.bit;
      *operand.layout = fresh_layout(view);
    }
  }
  return copies;
}

// The smallest set, found greedily, of inputs whose copies make some kernel accept the problem that
// all refuse as it is; 0 when copies do not help. Layouts in the set are replaced in the problem.
template <class Accepts>
unsigned copies_that_help(std::initializer_list<Operand> operands, const Accepts& accepts) {
  struct Candidate {
    Operand operand;
    Layout original;
  };
  std::array<Candidate, 8> candidates;
  int count = 0;
  for (const Operand& operand : operands) {
    if (!operand.view->canonical()) {
      candidates[count++] = {operand, *operand.layout};
      *operand.layout = fresh_layout(*operand.view);
    }
  }
  const bool help = count > 0 && accepts();
  unsigned copies = 0;
  for (int i = 0; i < count; ++i) {
    Layout& layout = *candidates[i].operand.layout;
    const Layout fresh = layout;
    layout = candidates[i].original;
    if (help && !accepts()) {
      layout = fresh;
      copies |= candidates[i].operand.bit;
    }
  }
  return copies;
}

}  // namespace pantile::python
