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
#include <type_traits>
#include <utility>

#include "kv_plan.h"
#include "pantile/fields.h"
#include "request.h"
#include "unlocked.h"

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

// Every field that a plan depends on. Values, since structs have padding, which compares unequal.
class PlanKey {
 public:
  template <class Problem>
  PlanKey(const Problem& problem, const DeviceProps& device, const PlanOptions& options) {
    for_each_field(problem,
                   [this](const char*, const char*, const auto& value, Feature) { add(value); });
    add(device.device.type);
    add(device.device.index);
    add(device.threads);
    add(device.isa);
    add(options.backend);
  }

  bool operator==(const PlanKey& other) const { return fields_ == other.fields_; }

  std::uint64_t hash() const {
    // Four chains of multiplications, which the processor runs side by side.
    std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
    for (int i = 0; i < count_; i += 4) {
      for (int lane = 0; lane < 4; ++lane) {
        std::uint64_t& value = lanes[lane];
        value = (value ^ static_cast<std::uint64_t>(fields_[i + lane])) * 0x9E3779B97F4A7C15u;
        value ^= value >> 32;
      }
    }
    std::uint64_t value = 0;
    for (const std::uint64_t lane : lanes) {
      value = (value ^ lane) * 0x9E3779B97F4A7C15u;
      value ^= value >> 32;
    }
    return value;
  }

 private:
  template <class T>
  void add(const T& value) {
    if constexpr (std::is_same_v<T, float>) {  // by its bits, so that NaN equals itself
      std::int32_t bits = 0;
      std::memcpy(&bits, &value, sizeof bits);
      fields_.at(count_++) = bits;
    } else {
      fields_.at(count_++) = static_cast<std::int64_t>(value);
    }
  }

  std::array<std::int64_t, 160> fields_{};  // zeros behind count_, of which hash() may read three
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

inline const ForwardProblem& forward_part(const ForwardProblem& problem) {
  return problem;
}
inline const ForwardProblem& forward_part(const BackwardProblem& problem) {
  return problem.forward;
}
inline const ForwardProblem& forward_part(const QuantizeProblem& problem) {
  return problem.forward;
}

// Whether the run has this feature, for example writes or reads the low bits of O.
template <class Problem>
bool asks_for(const Problem& problem, Feature wanted) {
  bool result = false;
  for_each_field(problem, [&](const char*, const char*, const auto& value, Feature feature) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>) {
      result = result || (feature == wanted && value);
    }
  });
  return result;
}

// The log of a plan: the kernel, the shape, and by name every field that asks for a feature.
template <class Problem, class Plan>
std::string plan_text(const Problem& problem, const Plan& plan) {
  const ForwardProblem& p = forward_part(problem);
  char text[256];
  std::snprintf(text, sizeof text,
                "%s: batch %lld, heads %lld/%lld, length %lld x %lld, head_dim %lld/%lld, window "
                "(%lld, %lld); tile %d x %d, workspace %zu bytes",
                plan.kernel->name, static_cast<long long>(p.batch),
                static_cast<long long>(p.heads_q), static_cast<long long>(p.heads_k),
                static_cast<long long>(p.seqlen_q), static_cast<long long>(p.seqlen_k),
                static_cast<long long>(p.head_dim), static_cast<long long>(p.head_dim_v),
                static_cast<long long>(p.window_left), static_cast<long long>(p.window_right),
                plan.tile_q, plan.tile_k, plan.workspace.bytes);
  std::string result = text;
  for_each_field(problem, [&](const char*, const char* name, const auto& value, Feature feature) {
    if constexpr (std::is_same_v<std::decay_t<decltype(value)>, bool>) {
      if (feature != Feature::none && value) {
        result.append(", ").append(name);
      }
    }
  });
  return result;
}

template <class Problem, class Plan>
class PlanCache {
 public:
  // The plan, or null with the reason in `status`. Valid until the next call.
  const Plan* find(const Problem& problem, const DeviceProps& device, const PlanOptions& options,
                   Status* status) {
    PlanKey key(problem, device, options);
    const std::uint64_t hash = key.hash();
    Set& set = sets_[hash % sets_.size()];
    for (Entry& entry : set.entries) {
      if (entry.used && entry.hash == hash && entry.key == key) {
        return &entry.plan;
      }
    }
    Plan plan;
    *status = make_plan(problem, device, options, &plan);
    if (!status->ok()) {
      return nullptr;
    }
    if (hooks().plan_log != nullptr) {
      const std::string text = plan_text(problem, plan);
      call_python(hooks().plan_log, text.c_str());
    }
    Entry& oldest = set.entries[set.oldest];
    set.oldest = (set.oldest + 1) % set.entries.size();
    oldest = Entry{std::move(key), hash, plan, true};
    return &oldest.plan;
  }

  void clear() {
    for (Set& set : sets_) {
      for (Entry& entry : set.entries) {
        entry.used = false;
      }
    }
  }

 private:
  struct Entry {
    PlanKey key{Problem{}, DeviceProps{}, PlanOptions{}};
    std::uint64_t hash = 0;
    Plan plan;
    bool used = false;
  };
  // Of several ways, so that the calls of a loop do not push each other out by chance.
  struct Set {
    std::array<Entry, 4> entries;
    std::size_t oldest = 0;
  };
  std::array<Set, 16> sets_;
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
