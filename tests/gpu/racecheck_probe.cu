// What racecheck sees of the order between reads of shared memory by four warps and the next bulk
// copy into it, by a thread that waits on an mbarrier. Each kernel but the last one has that order.
//
//   nvcc -arch=sm_90a -O3 -o probe tests/gpu/racecheck_probe.cu
//   compute-sanitizer --tool racecheck --print-limit 100000 --show-backtrace no ./probe
//
// With CUDA 13.0: no hazard where each lane arrives. Where lane 0 arrives for its
// warp, after __syncwarp() or also a named barrier, those of the other lanes' reads, and none of
// lane 0's.
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

enum class Order { each_lane, lane0, lane0_behind_barrier, none };

constexpr int kThreads = 128, kRounds = 3, kBytes = kThreads * 4;

__device__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init(std::uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ void wait(std::uint64_t& barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}

__device__ void arrive(std::uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

__device__ void load(float* to, const float* from, std::uint64_t& full) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full)),
      "r"(kBytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(kBytes), "r"(shared_address(&full))
      : "memory");
}

template <Order kOrder>
__global__ void probe(const float* from, float* to) {
  __shared__ alignas(128) float words[kThreads];
  __shared__ std::uint64_t full, empty;
  if (threadIdx.x == 0) {
    init(full, 1);
    init(empty, kOrder == Order::each_lane ? kThreads : kThreads / 32);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= kThreads) {
    for (int i = 0; threadIdx.x == kThreads && i < kRounds; ++i) {
      if (kOrder != Order::none) {
        wait(empty, (i & 1) ^ 1);
      }
      load(words, from + i * kThreads, full);
    }
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < kRounds; ++i) {
    wait(full, i & 1);
    sum += words[threadIdx.x];
    if (kOrder == Order::each_lane) {
      arrive(empty);
    } else {
      if (kOrder == Order::lane0_behind_barrier) {
        asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        arrive(empty);
      }
    }
  }
  to[threadIdx.x] = sum;
}

template <Order kOrder>
void run(const char* name, float* memory) {
  probe<kOrder><<<1, kThreads + 32>>>(memory, memory + kRounds * kThreads);
  const cudaError_t error = cudaDeviceSynchronize();
  std::printf("ran %s: %s\n", name, cudaGetErrorString(error));
  std::fflush(stdout);
}

int main() {
  float* memory = nullptr;
  if (cudaMalloc(&memory, (kRounds + 1) * kBytes) != cudaSuccess ||
      cudaMemset(memory, 0, (kRounds + 1) * kBytes) != cudaSuccess) {
    return 1;
  }
  run<Order::each_lane>("each lane arrives", memory);
  run<Order::lane0>("lane 0 arrives after __syncwarp()", memory);
  run<Order::lane0_behind_barrier>("lane 0 arrives behind a named barrier", memory);
  run<Order::none>("nobody is waited for", memory);
  return 0;
}
