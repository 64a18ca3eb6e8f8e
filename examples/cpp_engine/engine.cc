// The attention step of a small engine: plan once, lend memory, run many times.
//
//   engine [tokens]          (default 1024; on the GPU too when the library has CUDA and finds one)
//
// For each device it prints the kernel that was chosen, the time of one call, and a check: causal
// row 0 sees only key 0, so its output must equal V's first row and its LSE the one score.
#include <pantile/pantile.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#if defined(ENGINE_CUDA)
#include <cuda_runtime.h>
#endif

namespace {

constexpr std::int64_t kHeads = 8, kKeyHeads = 2, kDim = 64;
constexpr int kRepeats = 5;

using bf16 = std::uint16_t;  // the upper half of a float

bf16 to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<bf16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // round to nearest even
}

float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

void must(const pantile::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message());
    std::exit(1);
  }
}

// Causal self-attention over `tokens` tokens, [1, tokens, heads, dim].
pantile::ForwardProblem make_problem(std::int64_t tokens) {
  pantile::ForwardProblem problem;
  problem.dtype = pantile::DType::bf16;
  problem.batch = 1;
  problem.heads_q = kHeads;
  problem.heads_k = kKeyHeads;
  problem.seqlen_q = problem.seqlen_k = tokens;
  problem.head_dim = problem.head_dim_v = kDim;
  problem.window_right = 0;
  problem.scale = 0.125f;
  problem.q = problem.o = pantile::Layout{tokens * kHeads * kDim, kHeads * kDim, kDim, 16};
  problem.k = problem.v = pantile::Layout{tokens * kKeyHeads * kDim, kKeyHeads * kDim, kDim, 16};
  return problem;
}

// Where tensors live: the heap, or a GPU.
struct Memory {
  std::function<void*(std::size_t)> allocate;  // zeroed, at least 256-byte aligned
  std::function<void(void*, const void*, std::size_t)> upload, download;
  std::function<void()> wait;
};

Memory heap() {
  const auto copy = [](void* to, const void* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
  };
  return {[](std::size_t bytes) {
            const std::size_t rounded = (bytes + 255) / 256 * 256;
            return std::memset(std::aligned_alloc(256, rounded), 0, rounded);
          },
          copy, copy, [] {}};
}

#if defined(ENGINE_CUDA)
void must(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

Memory gpu() {
  return {[](std::size_t bytes) {
            void* pointer = nullptr;
            must(cudaMalloc(&pointer, bytes));
            must(cudaMemset(pointer, 0, bytes));
            return pointer;
          },
          [](void* to, const void* from, std::size_t bytes) {
            must(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
          },
          [](void* to, const void* from, std::size_t bytes) {
            must(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
          },
          [] { must(cudaDeviceSynchronize()); }};
}
#endif

std::vector<bf16> random_tensor(std::int64_t elements, std::uint32_t seed) {
  std::vector<bf16> tensor(static_cast<std::size_t>(elements));
  for (bf16& value : tensor) {
    seed = seed * 1664525u + 1013904223u;
    value = to_bf16(static_cast<float>(seed >> 8) / (1 << 23) - 1.0f);
  }
  return tensor;
}

void run_on(const pantile::Device& where, const Memory& memory, std::int64_t tokens) {
  pantile::DeviceProps device;
  must(pantile::query_device(where, &device));
  pantile::ForwardPlan plan;
  must(pantile::plan_forward(make_problem(tokens), device, {}, &plan));

  const std::int64_t rows = tokens * kHeads, keys = tokens * kKeyHeads;
  const std::vector<bf16> q = random_tensor(rows * kDim, 1), k = random_tensor(keys * kDim, 2),
                          v = random_tensor(keys * kDim, 3);
  const auto place = [&](const std::vector<bf16>& tensor) {
    void* pointer = memory.allocate(tensor.size() * sizeof(bf16));
    memory.upload(pointer, tensor.data(), tensor.size() * sizeof(bf16));
    return pointer;
  };
  pantile::ForwardTensors tensors;
  tensors.q = place(q);
  tensors.k = place(k);
  tensors.v = place(v);
  tensors.o = memory.allocate(q.size() * sizeof(bf16));
  tensors.lse =
      static_cast<float*>(memory.allocate(static_cast<std::size_t>(rows) * sizeof(float)));
  void* workspace = plan.workspace.bytes > 0 ? memory.allocate(plan.workspace.bytes) : nullptr;

  double best_ms = 1e30;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    memory.wait();
    const auto start = std::chrono::steady_clock::now();
    must(pantile::run_forward(plan, tensors, workspace, nullptr));
    memory.wait();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best_ms = std::min(best_ms, taken.count());
  }

  bf16 o[kDim];  // row 0, head 0
  float lse = 0;
  memory.download(o, tensors.o, sizeof o);
  memory.download(&lse, tensors.lse, sizeof lse);
  double score = 0, error = 0;
  for (std::int64_t d = 0; d < kDim; ++d) {
    const auto i = static_cast<std::size_t>(d);
    score += 0.125 * to_float(q[i]) * to_float(k[i]);
    error = std::max(error, std::fabs(1.0 * to_float(o[i]) - to_float(v[i])));
  }
  const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(rows) * kDim;
  std::printf("%-28s %-28s %9.3f ms %8.1f GFLOP/s   o error %.1e   lse error %.1e\n", device.name,
              plan.kernel->name, best_ms, flops / best_ms * 1e-6, error, std::fabs(lse - score));
  if (!(error <= 1e-2) || !(std::fabs(lse - score) <= 1e-2)) {
    std::fprintf(stderr, "the check of row 0 failed\n");
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t tokens = argc > 1 ? std::atoll(argv[1]) : 1024;
  std::printf("%s\n", pantile::build_info());
  run_on({pantile::DeviceType::cpu, 0}, heap(), tokens);
#if defined(ENGINE_CUDA)
  pantile::Status why;
  if (pantile::cuda_device_count(&why) > 0) {
    run_on({pantile::DeviceType::cuda, 0}, gpu(), tokens);
  } else {
    std::printf("no GPU: %s\n", why.message());
  }
#endif
  return 0;
}
