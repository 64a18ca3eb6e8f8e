#include "case.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace pantile::testing {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

DeviceProps device_of(const Target& target) {
  DeviceProps device;
  EXPECT_TRUE(query_device(Device{}, &device).ok());
  device.isa = target.isa;
  device.threads = target.threads;
  return device;
}

PlanOptions options_of(const Target& target) {
  PlanOptions options;
  options.backend = target.backend;
  return options;
}

// Workspace as the caller lends it: aligned, full of NaN, its first bytes zero.
Buffer lend(const Workspace& workspace) {
  Buffer block(DType::f32, static_cast<std::int64_t>(workspace.bytes / 4 + 128));
  block.fill(kNan);
  return block;
}

void* aligned_start(Buffer& block, const Workspace& workspace) {
  if (workspace.bytes == 0) {
    return nullptr;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(block.data());
  void* start = reinterpret_cast<void*>((address + 255) / 256 * 256);
  std::memset(start, 0, workspace.zeroed_bytes);
  return start;
}

// Lengths that sum up to a total, one of them the longest.
std::vector<std::int32_t> random_starts(int batch, int longest, std::mt19937& random) {
  std::vector<std::int32_t> starts{0};
  const int full = batch == 0 ? 0 : static_cast<int>(random() % static_cast<unsigned>(batch));
  for (int b = 0; b < batch; ++b) {
    const int length =
        b == full ? longest : static_cast<int>(random() % static_cast<unsigned>(longest + 1));
    starts.push_back(starts.back() + length);
  }
  return starts;
}

std::vector<std::int32_t> random_used(int batch, int longest, std::mt19937& random) {
  std::vector<std::int32_t> used;
  for (int b = 0; b < batch; ++b) {
    used.push_back(static_cast<std::int32_t>(random() % static_cast<unsigned>(longest + 1)));
  }
  return used;
}

}  // namespace

std::vector<CpuIsa> usable_isas() {
  std::vector<CpuIsa> isas;
  for (const CpuIsa isa : {CpuIsa::baseline, CpuIsa::avx2, CpuIsa::avx512}) {
    // Running a plan is refused, not crashed, when the processor lacks the instructions.
    Case probe(Shape{}, 1);
    DeviceProps device = device_of(Target{Backend::cpu, isa, 1});
    ForwardPlan plan;
    EXPECT_TRUE(plan_forward(probe.problem, device, PlanOptions{}, &plan).ok());
    Buffer o(DType::f32, 64);
    Buffer lse(DType::f32, 1);
    Buffer block = lend(plan.workspace);
    ForwardTensors tensors;
    tensors.q = probe.q.buffer.data();
    tensors.k = probe.k.buffer.data();
    tensors.v = probe.v.buffer.data();
    tensors.o = o.data();
    tensors.lse = static_cast<float*>(lse.data());
    const Status status = run_forward(plan, tensors, aligned_start(block, plan.workspace), nullptr);
    if (status.ok()) {
      isas.push_back(isa);
    } else {
      EXPECT_EQ(status.code(), StatusCode::unavailable) << status.message();
    }
  }
  return isas;
}

Case::Case(const Shape& wanted, unsigned seed) : shape(wanted) {
  std::mt19937 random(seed);
  if (shape.packed_q) {
    cu_q = random_starts(shape.batch, shape.rows, random);
  }
  if (shape.packed_k) {
    cu_k = random_starts(shape.batch, shape.keys, random);
  }
  if (shape.used_q) {
    used_q = random_used(shape.batch, shape.rows, random);
  }
  if (shape.used_k) {
    used_k = random_used(shape.batch, shape.keys, random);
  }
  lay_out();
  std::normal_distribution<double> normal;
  for (Tensor* t : {&q, &k, &v, &grad_o}) {
    const double spread = t == &q || t == &k ? shape.spread : 1.0;
    for (std::int64_t i = 0; i < t->buffer.size(); ++i) {
      t->buffer.set(i, normal(random) * spread);
    }
  }
  for (std::int64_t i = 0; i < grad_lse.size(); ++i) {
    grad_lse.set(i, normal(random));
  }
}

Tensor Case::tensor(bool queries, int dim) const {
  const bool packed = queries ? shape.packed_q : shape.packed_k;
  const std::int64_t rows = packed    ? (queries ? cu_q : cu_k).back()
                            : queries ? shape.rows
                                      : shape.keys;
  Tensor t;
  t.queries = queries;
  t.dim = dim;
  t.heads = queries ? heads().heads_q : shape.heads_k;
  if (shape.strided) {
    t.layout.seq = dim + 3;
    t.layout.head = rows * t.layout.seq + 5;
    t.layout.batch = t.heads * t.layout.head + 7;
  } else {
    t.layout.head = dim;
    t.layout.seq = t.heads * dim;
    t.layout.batch = rows * t.layout.seq;
  }
  t.layout.base_align_bytes = dtype_bytes(shape.dtype);
  const std::int64_t batches = packed ? 1 : shape.batch;
  const std::int64_t elements =
      shape.strided ? batches * t.layout.batch : batches * rows * t.heads * dim;
  t.buffer = Buffer(shape.dtype, elements);
  return t;
}

void Case::lay_out() {
  problem = ForwardProblem();
  problem.dtype = shape.dtype;
  problem.batch = shape.batch;
  problem.heads_q = heads().heads_q;
  problem.heads_k = shape.heads_k;
  problem.seqlen_q = shape.rows;
  problem.seqlen_k = shape.keys;
  problem.head_dim = shape.dim;
  problem.head_dim_v = shape.dim_v;
  problem.packed_q = shape.packed_q;
  problem.packed_k = shape.packed_k;
  problem.total_q = shape.packed_q ? cu_q.back() : std::int64_t{shape.batch} * shape.rows;
  problem.total_k = shape.packed_k ? cu_k.back() : std::int64_t{shape.batch} * shape.keys;
  problem.has_seqused_q = shape.used_q;
  problem.has_seqused_k = shape.used_k;
  problem.window_left = shape.left;
  problem.window_right = shape.right;
  problem.scale =
      static_cast<float>(shape.scale != 0.0 ? shape.scale : 1.0 / std::sqrt(double(shape.dim)));
  q = tensor(true, shape.dim);
  k = tensor(false, shape.dim);
  v = tensor(false, shape.dim_v);
  o = tensor(true, shape.dim_v);
  grad_o = tensor(true, shape.dim_v);
  grad_q = tensor(true, shape.dim);
  grad_k = tensor(false, shape.dim);
  grad_v = tensor(false, shape.dim_v);
  problem.q = q.layout;
  problem.k = k.layout;
  problem.v = v.layout;
  problem.o = o.layout;
  grad_lse = Buffer(DType::f32, problem.total_q * problem.heads_q);
}

int Case::length(bool queries, int batch) const {
  const auto& starts = queries ? cu_q : cu_k;
  const auto& used = queries ? used_q : used_k;
  int length = queries ? shape.rows : shape.keys;
  const auto b = static_cast<std::size_t>(batch);
  if (!starts.empty()) {
    length = starts[b + 1] - starts[b];
  }
  return used.empty() ? length : std::min(length, used[b]);
}

std::int64_t Case::offset(const Tensor& t, int batch) const {
  const auto& starts = t.queries ? cu_q : cu_k;
  return starts.empty() ? batch * t.layout.batch
                        : starts[static_cast<std::size_t>(batch)] * t.layout.seq;
}

std::int64_t Case::lse_at(int batch, int head, int row) const {
  if (shape.packed_q) {
    return head * problem.total_q + cu_q[static_cast<std::size_t>(batch)] + row;
  }
  return (batch * problem.heads_q + head) * problem.seqlen_q + row;
}

std::int64_t Case::low_at(int batch, int head, int row, int d) const {
  const std::int64_t first =
      shape.packed_q ? cu_q[static_cast<std::size_t>(batch)] : std::int64_t{batch} * shape.rows;
  return ((first + row) * problem.heads_q + head) * shape.dim_v + d;
}

void Case::for_each_row(const std::function<void(int, int, int, core::Span)>& visit) const {
  for (int b = 0; b < shape.batch; ++b) {
    const core::Mask m = mask(b);
    for (int h = 0; h < heads().heads_q; ++h) {
      for (int row = 0; row < m.rows; ++row) {
        visit(b, h, row, core::visible_keys(m, row));
      }
    }
  }
}

ForwardTensors Case::tensors(const Outputs& outputs) {
  ForwardTensors t;
  t.q = q.buffer.data();
  t.k = k.buffer.data();
  t.v = v.buffer.data();
  t.o = const_cast<void*>(outputs.o.data());
  t.lse = static_cast<float*>(const_cast<void*>(outputs.lse.data()));
  t.o_low = static_cast<std::int8_t*>(const_cast<void*>(outputs.low.data()));
  t.cu_seqlens_q = cu_q.empty() ? nullptr : cu_q.data();
  t.cu_seqlens_k = cu_k.empty() ? nullptr : cu_k.data();
  t.seqused_q = shape.used_q ? used_q.data() : nullptr;
  t.seqused_k = shape.used_k ? used_k.data() : nullptr;
  return t;
}

Outputs Case::forward(const Target& target) {
  ForwardProblem asked = problem;
  asked.wants_o_low = shape.low;
  return run_forward_problem(asked, target);
}

Outputs Case::forward_unrounded(const Target& target) {
  ForwardProblem asked = problem;
  asked.output_f32 = true;
  asked.o.base_align_bytes = 4;
  return run_forward_problem(asked, target);
}

Outputs Case::run_forward_problem(const ForwardProblem& asked, const Target& target) {
  Outputs outputs{Buffer(output_dtype(asked), o.buffer.size()), Buffer(DType::f32, grad_lse.size()),
                  Buffer()};
  outputs.o.fill(kNan);
  outputs.lse.fill(kNan);
  if (asked.wants_o_low) {
    const std::int64_t bytes = problem.total_q * problem.heads_q * shape.dim_v;
    outputs.low = Buffer(DType::e4m3, bytes);
    std::memset(outputs.low.data(), kUnwritten, static_cast<std::size_t>(bytes));
  }
  ForwardPlan plan;
  Status status = plan_forward(asked, device_of(target), options_of(target), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  Buffer block = lend(plan.workspace);
  status = run_forward(plan, tensors(outputs), aligned_start(block, plan.workspace), nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return outputs;
}

Gradients Case::backward(const Target& target, const Outputs& outputs) {
  Gradients gradients{Buffer(shape.dtype, q.buffer.size()), Buffer(shape.dtype, k.buffer.size()),
                      Buffer(shape.dtype, v.buffer.size())};
  for (Buffer* buffer : {&gradients.q, &gradients.k, &gradients.v}) {
    buffer->fill(kNan);
  }
  BackwardProblem backward;
  backward.forward = problem;
  backward.has_grad_lse = true;
  backward.has_o_low = shape.low;
  backward.grad_o = grad_o.layout;
  backward.grad_q = grad_q.layout;
  backward.grad_k = grad_k.layout;
  backward.grad_v = grad_v.layout;
  BackwardPlan plan;
  Status status = plan_backward(backward, device_of(target), options_of(target), &plan);
  EXPECT_TRUE(status.ok()) << status.message();
  Buffer block = lend(plan.workspace);
  BackwardTensors t;
  t.forward = tensors(outputs);
  t.o_low = t.forward.o_low;
  t.forward.o_low = nullptr;
  t.grad_o = grad_o.buffer.data();
  t.grad_lse = static_cast<const float*>(grad_lse.data());
  t.grad_q = gradients.q.data();
  t.grad_k = gradients.k.data();
  t.grad_v = gradients.v.data();
  status = run_backward(plan, t, aligned_start(block, plan.workspace), nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
  return gradients;
}

void Case::poison(double value) {
  std::vector<std::pair<Tensor*, std::vector<char>>> kept;
  for (Tensor* t : {&q, &grad_o, &k, &v}) {
    kept.emplace_back(t, std::vector<char>(static_cast<std::size_t>(t->buffer.size()), 0));
  }
  std::vector<char> kept_lse(static_cast<std::size_t>(grad_lse.size()), 0);
  const auto keep_row = [&](int which, int batch, int head, int row) {
    const Tensor& t = *kept[static_cast<std::size_t>(which)].first;
    const auto begin = static_cast<std::size_t>(at(t, batch, head, row));
    std::fill_n(
        kept[static_cast<std::size_t>(which)].second.begin() + static_cast<std::ptrdiff_t>(begin),
        t.dim, char{1});
  };
  for_each_row([&](int batch, int head, int row, core::Span keys) {
    if (keys.empty()) {
      return;
    }
    keep_row(0, batch, head, row);
    keep_row(1, batch, head, row);
    kept_lse[static_cast<std::size_t>(lse_at(batch, head, row))] = 1;
    for (int key = keys.begin; key < keys.end; ++key) {
      keep_row(2, batch, heads().key_head(head), key);
      keep_row(3, batch, heads().key_head(head), key);
    }
  });
  for (auto& [tensor, keep] : kept) {
    for (std::size_t i = 0; i < keep.size(); ++i) {
      if (keep[i] == 0) {
        tensor->buffer.set(static_cast<std::int64_t>(i), value);
      }
    }
  }
  for (std::size_t i = 0; i < kept_lse.size(); ++i) {
    if (kept_lse[i] == 0) {
      grad_lse.set(static_cast<std::int64_t>(i), value);
    }
  }
}

Case Case::widened() const {
  Case wide;
  wide.shape = shape;
  wide.shape.dtype = DType::f32;
  wide.shape.low = false;
  wide.cu_q = cu_q;
  wide.cu_k = cu_k;
  wide.used_q = used_q;
  wide.used_k = used_k;
  wide.lay_out();
  const auto widen = [](const Buffer& from, Buffer& to) {
    for (std::int64_t i = 0; i < from.size(); ++i) {
      to.set(i, from.get(i));
    }
  };
  widen(q.buffer, wide.q.buffer);
  widen(k.buffer, wide.k.buffer);
  widen(v.buffer, wide.v.buffer);
  widen(grad_o.buffer, wide.grad_o.buffer);
  widen(grad_lse, wide.grad_lse);
  return wide;
}

double rms(const std::vector<double>& x) {
  double sum = 0.0;
  for (const double value : x) {
    sum += value * value;
  }
  return x.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(x.size()));
}

std::vector<double> values(const Case& c, const Tensor& t, const Buffer& buffer) {
  std::vector<double> result;
  for (int b = 0; b < c.shape.batch; ++b) {
    const int rows = t.queries ? c.rows_of(b) : c.keys_of(b);
    for (int h = 0; h < static_cast<int>(t.heads); ++h) {
      for (int row = 0; row < rows; ++row) {
        for (int d = 0; d < static_cast<int>(t.dim); ++d) {
          result.push_back(buffer.get(c.at(t, b, h, row, d)));
        }
      }
    }
  }
  return result;
}

std::vector<double> lse_values(const Case& c, const Buffer& lse) {
  std::vector<double> result;
  c.for_each_row([&](int batch, int head, int row, core::Span) {
    result.push_back(lse.get(c.lse_at(batch, head, row)));
  });
  return result;
}

Shape random_shape(unsigned seed) {
  std::mt19937 random(seed * 2654435761u + 1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const auto pick = [&](std::initializer_list<int> list) {
    return list.begin()[below(static_cast<int>(list.size()))];
  };
  Shape s;
  s.dtype = static_cast<DType>(below(3));
  s.batch = pick({1, 1, 2, 3});
  s.heads_k = pick({1, 1, 2});
  s.group = pick({1, 1, 2, 3});
  s.rows = pick({0, 1, 2, 5, 16, 47, 48, 49, 95, 96, 97, 130, 193, 200});
  s.keys = pick({0, 1, 3, 12, 24, 47, 48, 50, 95, 96, 98, 131, 192, 193, 210});
  s.dim = pick({1, 2, 3, 8, 16, 17, 31, 32, 33, 40, 64, 64, 72, 80, 96, 112, 128, 192, 256, 512});
  s.dim_v = below(2) == 0 ? s.dim : pick({1, 3, 8, 16, 24, 33, 48, 64, 80, 100, 128, 160, 257});
  switch (below(4)) {
    case 0: break;
    case 1: s.right = 0; break;
    case 2: s.left = pick({0, 3, 20, 100}); break;
    default: s.left = pick({-1, 0, 7, 64}); s.right = pick({0, 1, 5, 30, 99});
  }
  s.packed_q = below(3) == 0;
  s.packed_k = below(3) == 0;
  s.used_q = below(4) == 0;
  s.used_k = below(4) == 0;
  s.strided = below(3) == 0;
  s.scale = pick({0, 0, 0, 1}) * (below(2) == 0 ? 0.7 : -0.25);
  s.spread = pick({1, 1, 2});
  s.low = below(2) == 0 && s.dtype != DType::f32;
  return s;
}

}  // namespace pantile::testing
