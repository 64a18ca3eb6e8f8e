// Kernels compiled at run time, on the GPU: launched by their handle, from the disk, in CUDA
// graphs, on two threads. Skipped without a GPU or without NVRTC (PANTILE_NVRTC=<folder of
// libnvrtc.so.13>).
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "driver.h"
#include "hopper/forward/launch.cuh"
#include "jit/store.h"
#include "pantile/pantile.h"

namespace pantile {
namespace {

// Device memory of `count` elements.
template <class T>
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess);
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice),
              cudaSuccess);
  }
  ~Array() { static_cast<void>(cudaFree(data_)); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* get() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> all(count_);
    EXPECT_EQ(cudaMemcpy(all.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return all;
  }

 private:
  std::size_t count_;
  T* data_ = nullptr;
};

class JitOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    Status status;
    if (cuda_device_count(&status) == 0) {
      GTEST_SKIP() << status.message();
    }
    char text[512];
    const Status found = jit::find_nvrtc(text, sizeof text);
    if (!found.ok()) {
      GTEST_SKIP() << found.message();
    }
    ASSERT_TRUE(query_device(Device{DeviceType::cuda, 0}, &device_).ok());
    std::string pattern = ::testing::TempDir() + "pantile-jit-XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    jit::set_cache_folders(folder_.c_str());
    ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
  }
  void TearDown() override {
    jit::set_cache_folders(nullptr);
    if (!folder_.empty()) {
      std::filesystem::remove_all(folder_);
      static_cast<void>(cudaStreamDestroy(stream_));
    }
  }

  // Writes value + its index; uses `words` 4-byte words of dynamic shared memory on the way.
  jit::Request fill(int value) const {
    const std::string source =
        "#include \"core/integer.h\"\n"
        "extern \"C\" __global__ void fill(int* to, int words) {\n"
        "  extern __shared__ int shared[];\n"
        "  shared[words - 1 - threadIdx.x] = threadIdx.x;\n"
        "  __syncthreads();\n"
        "  to[threadIdx.x] = shared[words - 1 - threadIdx.x] + " +
        std::to_string(value) + ";\n}\n";
    return jit::Request{"fill " + std::to_string(value), source, "fill",
                        device_.compute_major == 9 ? 90 : 80};
  }
  Status launch(const jit::Kernel& kernel, int* to, int words) {
    cuda::Launch how{dim3(1), dim3(64), 4 * words, stream_};
    how.prepared = &kernel.prepared;
    how.device = 0;
    void* parameters[] = {&to, &words};
    return cuda::launch("filling", how, kernel.handle, parameters);
  }
  void expect_filled(const Array<int>& array, int value) const {
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    const std::vector<int> found = array.values();
    for (int i = 0; i < 64; ++i) {
      ASSERT_EQ(found[static_cast<std::size_t>(i)], value + i);
    }
  }

  DeviceProps device_;
  std::string folder_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(JitOnGpu, LaunchesByHandle) {
  const jit::Kernel* kernel = nullptr;
  const Status status = jit::find_kernel(fill(100), stream_, &kernel);
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(kernel->origin, "compiled");
  EXPECT_GT(kernel->registers, 0);
  Array<int> to(64);
  for (const int words : {64, 20000}) {  // 80 KB: more than is allowed without asking
    const Status launched = launch(*kernel, to.get(), words);
    ASSERT_TRUE(launched.ok()) << launched.message();
    expect_filled(to, 100);
  }
}

TEST_F(JitOnGpu, FromTheDiskInMilliseconds) {
  const jit::Request request = fill(200);
  for (const char* origin : {"compiled", "disk: "}) {
    // As a new process would; never destroyed, as kernels are not.
    jit::Store& store = *new jit::Store(jit::this_machine());
    const jit::Kernel* kernel = nullptr;
    const Status status = store.find(request, stream_, &kernel);
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(kernel->origin.find(origin), 0u) << kernel->origin;
    std::printf("%s %.2f ms\n", kernel->origin.c_str(), 1e3 * kernel->seconds);
    Array<int> to(64);
    ASSERT_TRUE(launch(*kernel, to.get(), 64).ok());
    expect_filled(to, 200);
    constexpr int kLookups = 100000;
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kLookups; ++i) {
      ASSERT_TRUE(store.find(request, stream_, &kernel).ok());
    }
    const std::chrono::duration<double, std::nano> taken = std::chrono::steady_clock::now() - begin;
    std::printf("in memory: %.0f ns\n", taken.count() / kLookups);
  }
}

TEST_F(JitOnGpu, ACaptureNeedsItLoadedAndSurvivesTheError) {
  const jit::Kernel* kernel = nullptr;
  Array<int> to(64);
  cudaStream_t own = nullptr;  // of another thread
  ASSERT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status refused = jit::find_kernel(fill(300), stream_, &kernel);
  EXPECT_EQ(refused.code(), StatusCode::unavailable);
  EXPECT_NE(std::string(refused.message()).find("pantile.compile"), std::string::npos);
  // Another thread, whose stream is not captured, may load meanwhile.
  std::thread other([&] {
    const Status status = jit::find_kernel(fill(300), own, &kernel);
    EXPECT_TRUE(status.ok()) << status.message();
  });
  other.join();
  ASSERT_TRUE(jit::find_kernel(fill(300), stream_, &kernel).ok());
  ASSERT_TRUE(launch(*kernel, to.get(), 64).ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphExec_t program = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&program, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaMemset(to.get(), 0, 64 * sizeof(int)), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(program, stream_), cudaSuccess);
  expect_filled(to, 300);
  static_cast<void>(cudaStreamDestroy(own));
  static_cast<void>(cudaGraphExecDestroy(program));
  static_cast<void>(cudaGraphDestroy(graph));
}

TEST_F(JitOnGpu, DamagedMachineCodeIsAnErrorOfItsName) {
  jit::Machine machine = jit::this_machine();
  machine.compile = [](const jit::Settings&, const jit::Request& request, jit::Image* image) {
    image->key = jit::image_key(request);
    image->symbol = "fill";
    image->code = "this is no machine code";
    return Status();
  };
  jit::Store store(machine);
  const jit::Kernel* kernel = nullptr;
  const Status status = store.find(fill(400), stream_, &kernel);
  EXPECT_EQ(status.code(), StatusCode::device_error);
  EXPECT_NE(std::string(status.message()).find("cudaLibraryLoadData of fill"), std::string::npos)
      << status.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// ---- the Hopper forward, from the library and compiled at run time ----

class HopperForward : public JitOnGpu {
 protected:
  static constexpr int kBatch = 2, kHeads = 3, kRows = 640, kDim = 128;
  static constexpr std::size_t kCount = std::size_t{kBatch} * kHeads * kRows * kDim;
  using Element = __nv_bfloat16;
  using Variant = hopper::ForwardVariant<kDim, kDim, MaskKind::causal, false>;

  ForwardProblem problem() const {
    ForwardProblem p;
    p.batch = kBatch;
    p.heads_q = p.heads_k = kHeads;
    p.seqlen_q = p.seqlen_k = kRows;
    p.head_dim = p.head_dim_v = kDim;
    p.window_right = 0;
    p.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
    p.q = p.k = p.v = p.o =
        Layout{std::int64_t{kRows} * kHeads * kDim, std::int64_t{kHeads} * kDim, kDim, 16};
    return p;
  }
  static std::vector<Element> random(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<Element> values(kCount);
    for (Element& value : values) {
      value = __float2bfloat16(normal(generator));
    }
    return values;
  }
  static std::vector<double> wide(const std::vector<Element>& values) {
    std::vector<double> all;
    for (const Element value : values) {
      all.push_back(static_cast<double>(__bfloat162float(value)));
    }
    return all;
  }
  static double error(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      sum += (a[i] - b[i]) * (a[i] - b[i]);
    }
    return std::sqrt(sum / static_cast<double>(a.size()));
  }
  // The reference takes the same problem with host memory.
  std::vector<double> reference(const std::vector<Element>& q, const std::vector<Element>& k,
                                const std::vector<Element>& v) const {
    DeviceProps cpu;
    EXPECT_TRUE(query_device({}, &cpu).ok());
    ForwardPlan plan;
    EXPECT_TRUE(plan_forward(problem(), cpu, {Backend::reference}, &plan).ok());
    std::vector<Element> o(kCount);
    std::vector<float> lse(std::size_t{kBatch} * kHeads * kRows);
    ForwardTensors tensors;
    tensors.q = q.data(), tensors.k = k.data(), tensors.v = v.data();
    tensors.o = o.data(), tensors.lse = lse.data();
    std::vector<char> scratch(plan.workspace.bytes);
    EXPECT_TRUE(run_forward(plan, tensors, scratch.data(), nullptr).ok());
    return wide(o);
  }
};

TEST_F(HopperForward, GivesWhatTheLibrarysKernelGives) {
  ForwardPlan plan;
  const Status planned = plan_forward(problem(), device_, {Backend::hopper}, &plan);
  if (!planned.ok() || plan.tile_q != Variant::kConfig.tile_q()) {
    GTEST_SKIP() << "no Hopper GPU, or another tile: " << planned.message();
  }
  const std::vector<Element> q = random(1), k = random(2), v = random(3);
  const Array<Element> dq(q), dk(k), dv(v);
  Array<Element> from_library(kCount), compiled(kCount);
  Array<float> lse(std::size_t{kBatch} * kHeads * kRows);
  Array<char> workspace(std::vector<char>(std::max<std::size_t>(plan.workspace.bytes, 1)));
  ForwardTensors tensors;
  tensors.q = dq.get(), tensors.k = dk.get(), tensors.v = dv.get();
  tensors.o = from_library.get(), tensors.lse = lse.get();
  const Status run = run_forward(plan, tensors, workspace.get(), stream_);
  ASSERT_TRUE(run.ok()) << run.message();

  const jit::Request request{
      "hopper_forward_bf16_d128_causal", "#include \"hopper/forward/kernel.cuh\"\n",
      "pantile::hopper::forward_kernel<pantile::hopper::ForwardVariant<128, 128, "
      "pantile::MaskKind::causal, false>, pantile::DType::bf16>",
      90};
  const jit::Kernel* kernel = nullptr;
  const Status found = jit::find_kernel(request, stream_, &kernel);
  ASSERT_TRUE(found.ok()) << found.message();
  EXPECT_EQ(kernel->advisories, "");
  EXPECT_EQ(kernel->spill_bytes, 0);
  std::printf("%s: %.2f s, %d registers\n", kernel->compiler.c_str(), kernel->seconds,
              kernel->registers);

  tensors.o = compiled.get();
  hopper::ForwardMaps maps;
  ASSERT_TRUE(hopper::forward_maps(Variant::kConfig, plan.problem, tensors, &maps).ok());
  hopper::ForwardParams params =
      hopper::forward_params(Variant::kConfig, plan, tensors, workspace.get());
  cuda::Launch how{dim3(static_cast<unsigned>(plan.blocks)), dim3(Variant::kConfig.threads()),
                   Variant::kConfig.shared_bytes(), stream_};
  how.prepared = &kernel->prepared;
  void* parameters[] = {&maps, &params};
  const Status launched = cuda::launch("the compiled forward", how, kernel->handle, parameters);
  ASSERT_TRUE(launched.ok()) << launched.message();
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);

  const std::vector<double> expected = reference(q, k, v);
  const double mine = error(wide(compiled.values()), expected);
  const double library = error(wide(from_library.values()), expected);
  std::printf("error against the reference: compiled %.3e, library %.3e\n", mine, library);
  EXPECT_GT(library, 0.0);
  EXPECT_LE(mine, 1.05 * library);
}

}  // namespace
}  // namespace pantile
