// Times the Ampere forward with one stage of its softmax left out at a time. What comes out is not
// attention; the difference in time is what the stage costs beyond what the products hide. Started
// by flashattention_t.py. Prints lines of
//   head dim, mask, unit, stage that is left out, milliseconds, change against the whole kernel
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "ampere/forward/launch.cuh"
#include "backend.h"

namespace pantile::ampere {

enum class Stage { none, max, exp2, scale, row_sum, rescale, all };

constexpr const char* stage_name(Stage stage) {
  constexpr const char* kNames[] = {"nothing", "max", "exp2", "scale", "row sum", "rescale", "all"};
  return kNames[static_cast<int>(stage)];
}

// A configuration of its own type, so that the softmax below takes the place of the library's.
template <class Base, Stage kLeftOut>
struct Reduced : Base {};

template <class Base, Stage kLeftOut, DType kDType>
struct SoftmaxRows<Reduced<Base, kLeftOut>, kDType> : SoftmaxRows<Base, kDType> {
  using Whole = SoftmaxRows<Base, kDType>;
  using Scores = typename Whole::Scores;
  static constexpr bool without(Stage stage) { return kLeftOut == stage || kLeftOut == Stage::all; }

  // References are not raised: they start where the scores are, so that P stays finite.
  PANTILE_DEVICE void clear(float logit_scale) {
    Whole::clear(logit_scale);
#pragma unroll
    for (int m = 0; m < Whole::kRowTiles; ++m) {
      if constexpr (without(Stage::max) || without(Stage::rescale)) {
        this->minus_max[m][0] = this->minus_max[m][1] = 0.0f;
      }
    }
  }

  PANTILE_DEVICE void take_max(const Scores& s, int m, int j) {
    if constexpr (!without(Stage::max)) {
      Whole::take_max(s, m, j);
    }
  }
  PANTILE_DEVICE void take_max(const Scores& s) {
    if constexpr (!without(Stage::max)) {
      Whole::take_max(s);
    }
  }
  PANTILE_DEVICE void raise_references(Scores& s, const ReferenceRules& rules,
                                       float* earlier_sums) {
    if constexpr (!without(Stage::rescale) && !without(Stage::max)) {
      Whole::raise_references(s, rules, earlier_sums);
    } else if constexpr (!without(Stage::max)) {
#pragma unroll
      for (int m = 0; m < Whole::kRowTiles; ++m) {  // maxima are not to be optimised away
        asm volatile("" ::"f"(this->tile_max[m][0]), "f"(this->tile_max[m][1]));
      }
    }
  }
  template <bool kMasked>
  PANTILE_DEVICE void exponentials(Scores& s, int m, int j) {
    if constexpr (kLeftOut == Stage::exp2 || kLeftOut == Stage::scale) {
#pragma unroll
      for (float& x : s[m][j]) {
        x = kLeftOut == Stage::exp2 ? fmaf(x, this->scale, this->minus_max[m][0])
                                    : prim::exp2_approx(x);
      }
    } else if constexpr (kLeftOut != Stage::all) {
      Whole::template exponentials<kMasked>(s, m, j);
    }
  }
  template <bool kMasked>
  PANTILE_DEVICE void pack(const Scores& s, int m, int group, std::uint32_t (&p)[4]) {
    if constexpr (without(Stage::row_sum)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float (&x)[4] = s[m][2 * group + half];
        p[2 * half] = prim::pack<kDType>(x[0], x[1]);
        p[2 * half + 1] = prim::pack<kDType>(x[2], x[3]);
      }
    } else {
      Whole::template pack<kMasked>(s, m, group, p);
    }
  }
};

namespace {

constexpr int kLength = 4096;
constexpr int kHidden = 2048;
constexpr int kBatch = 4;
constexpr DType kType = DType::f16;

void require(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

struct Tensors {
  ForwardTensors pointers;
  Tensors() {
    const std::size_t count = std::size_t{kBatch} * kLength * kHidden;
    std::vector<std::uint16_t> host(count);
    std::uint32_t state = 1;
    for (std::uint16_t& x : host) {  // +-0.25 to +-1.75
      state = state * 1664525u + 1013904223u;
      x = static_cast<std::uint16_t>((state >> 16 & 0x8000u) | (0x3400u + (state >> 20 & 0xbffu)));
    }
    void* buffers[4];
    for (void*& buffer : buffers) {
      require(cudaMalloc(&buffer, 2 * count));
      require(cudaMemcpy(buffer, host.data(), 2 * count, cudaMemcpyHostToDevice));
    }
    pointers.q = buffers[0];
    pointers.k = buffers[1];
    pointers.v = buffers[2];
    pointers.o = buffers[3];
  }
};

ForwardPlan make_plan(const DeviceProps& device, int head_dim, bool causal) {
  ForwardPlan plan;
  ForwardProblem& p = plan.problem;
  p.dtype = kType;
  p.batch = kBatch;
  p.heads_q = p.heads_k = kHidden / head_dim;
  p.seqlen_q = p.seqlen_k = kLength;
  p.total_q = p.total_k = kBatch * kLength;
  p.head_dim = p.head_dim_v = head_dim;
  p.window_right = causal ? 0 : kUnbounded;
  p.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  p.wants_lse = false;
  p.q = p.k = p.v = p.o = Layout{std::int64_t{kLength} * kHidden, kHidden, head_dim, 16};
  plan.device = device;
  plan.softmax.tensor_quarters = 0;
  return plan;
}

template <class Config, MaskKind kMask>
double milliseconds(ForwardPlan plan, const Tensors& tensors) {
  plan.tile_q = Config::kTileQ;
  const int blocks = forward_order(plan.problem, plan.device, Config::kTileQ).count();
  ForwardParams params = forward_params(plan, tensors.pointers);
  constexpr int kSharedBytes = sizeof(SummedStorage<Config>);
  params.q_pass_bytes = params.q.seq * Config::QCopy::kPassRows * 2;
  params.k_pass_bytes = params.k.seq * Config::KCopy::kPassRows * 2;
  params.v_pass_bytes = params.v.seq * Config::VCopy::kPassRows * 2;
  params.k_tile_bytes = params.v_tile_bytes = params.k.seq * Config::kTileK * 2;
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < 6; ++round) {
    float elapsed = 0.0f;
    require(cudaEventRecord(begin));
    const Status status = launch("stages", forward_kernel<Config, kType, kMask>, blocks,
                                 Config::kThreads, kSharedBytes, nullptr, params);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.message());
      std::exit(1);
    }
    require(cudaEventRecord(end));
    require(cudaEventSynchronize(end));
    require(cudaEventElapsedTime(&elapsed, begin, end));
    times.push_back(elapsed);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <int kHeadDim, MaskKind kMask, ForwardSoftmax kSoftmax, SharedClass kShared>
void time_stages(const DeviceProps& device, const Tensors& tensors, const char* unit,
                 float threshold) {
  constexpr ForwardTile kTile = forward_tile(kHeadDim, kHeadDim, kMask, kShared);
  using Base = ForwardConfig<kHeadDim, kHeadDim, kTile, softmax_kind(kSoftmax)>;
  ForwardPlan plan = make_plan(device, kHeadDim, kMask == MaskKind::causal);
  plan.softmax.rescale_threshold = threshold;
  const double whole = milliseconds<Base, kMask>(plan, tensors);
  const auto report = [&](Stage stage, double ms) {
    std::printf("%d,%s,%s,%s,%.4f,%.4f\n", kHeadDim, kMask == MaskKind::full ? "full" : "causal",
                unit, stage_name(stage), ms, ms / whole - 1.0);
  };
  report(Stage::none, whole);
  report(Stage::max, milliseconds<Reduced<Base, Stage::max>, kMask>(plan, tensors));
  report(Stage::exp2, milliseconds<Reduced<Base, Stage::exp2>, kMask>(plan, tensors));
  report(Stage::scale, milliseconds<Reduced<Base, Stage::scale>, kMask>(plan, tensors));
  report(Stage::row_sum, milliseconds<Reduced<Base, Stage::row_sum>, kMask>(plan, tensors));
  report(Stage::rescale, milliseconds<Reduced<Base, Stage::rescale>, kMask>(plan, tensors));
  report(Stage::all, milliseconds<Reduced<Base, Stage::all>, kMask>(plan, tensors));
}

template <int kHeadDim, SharedClass kShared>
void time_modes(const DeviceProps& device, const Tensors& tensors) {
  constexpr MaskKind kFull = MaskKind::full;
  time_stages<kHeadDim, kFull, ForwardSoftmax::vector, kShared>(device, tensors, "vector always",
                                                                0.0f);
  time_stages<kHeadDim, kFull, ForwardSoftmax::tensor, kShared>(device, tensors, "tensor", 8.0f);
}

}  // namespace
}  // namespace pantile::ampere

int main() {
  using namespace pantile;
  DeviceProps device;
  const Status status = cuda::query_device(0, &device);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message());
    return 1;
  }
  const ampere::Tensors tensors;
  if (ampere::shared_class(device.smem_optin_bytes) == ampere::SharedClass::large) {
    ampere::time_modes<64, ampere::SharedClass::large>(device, tensors);
    ampere::time_modes<128, ampere::SharedClass::large>(device, tensors);
  } else {
    ampere::time_modes<64, ampere::SharedClass::small>(device, tensors);
    ampere::time_modes<128, ampere::SharedClass::small>(device, tensors);
  }
  return 0;
}
