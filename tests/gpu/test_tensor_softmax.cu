// The softmax steps of cuda/attn/tensor_softmax.cuh on the GPU at hand, register by register
// against the emulation in cpp/core that the CPU tests check.
#include "attn/tensor_softmax.cuh"

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>

#include "../core/tensor_emulation.h"
#include "prim/convert.cuh"
#include "prim/unpack.cuh"

namespace {

using namespace pantile;

// Everything one warp takes and gives.
struct Fragments {
  core::WarpQuads x;                               // accumulators
  core::WarpPairs row;                             // a value for each of a lane's rows
  float factor;                                    // of TF32 accuracy
  std::uint32_t p[32][4];                          // a 16-bit operand
  core::WarpQuads scaled;                          // factor * x + row
  core::WarpQuads rescaled;                        // factor * x
  core::WarpQuads sums_tf32, sums_bf16, sums_f16;  // start at `started`
  core::WarpQuads started_rows;                    // a product with ones that starts from `row`
  float started;
  float largest[32];
};

__global__ void run_steps(Fragments* all) {
  Fragments& f = all[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x);
  const auto load = [&](float (&to)[4], const core::WarpQuads& from) {
    for (int i = 0; i < 4; ++i) {
      to[i] = from[lane][i];
    }
  };
  const auto store = [&](core::WarpQuads& to, const float (&from)[4]) {
    for (int i = 0; i < 4; ++i) {
      to[lane][i] = from[i];
    }
  };
  const attn::TensorOperand factor = attn::shuffle_operand(prim::round_to_tf32(f.factor), lane);
  float x[4];
  load(x, f.x);
  attn::scale_and_add(x, factor, f.row[lane][0], f.row[lane][1]);
  store(f.scaled, x);
  load(x, f.x);
  attn::scale_rows(x, factor);
  store(f.rescaled, x);
  load(x, f.x);
  float sums[4] = {f.started, f.started, f.started, f.started};
  attn::add_row_sums(sums, x, attn::row_sum_operand(lane));
  store(f.sums_tf32, sums);
  std::uint32_t p[4];
  for (int i = 0; i < 4; ++i) {
    p[i] = f.p[lane][i];
    sums[i] = f.started;
  }
  attn::add_row_sums<DType::bf16>(sums, p);
  store(f.sums_bf16, sums);
  for (float& sum : sums) {
    sum = f.started;
  }
  attn::add_row_sums<DType::f16>(sums, p);
  store(f.sums_f16, sums);
  prim::mma_set_rows<DType::bf16>(sums, p, 0x3f803f80u, 0x3f803f80u, f.row[lane][0],
                                  f.row[lane][1]);
  store(f.started_rows, sums);
  f.largest[lane] = attn::warp_max(f.x[lane][0]);
}

float decode_bf16(std::uint16_t bits) {
  return core::bits_float(static_cast<std::uint32_t>(bits) << 16);
}

float decode_f16(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023) / 1024.0f;
  const float magnitude =
      exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1.0f + fraction, exponent - 15);
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

class TensorSoftmaxGpu : public ::testing::Test {
 protected:
  static constexpr int kWarps = 64;

  void SetUp() override {
    int devices = 0;
    cudaDeviceProp device;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0 ||
        cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
      GTEST_SKIP() << "no CUDA device";
    }
    // Found by this test: Ampere keeps one bit below the last place, Hopper two.
    kept_bits_ = device.major >= 9 ? 2 : 1;
    ASSERT_EQ(cudaMallocManaged(&warps_, kWarps * sizeof(Fragments)), cudaSuccess);
    std::mt19937 random(11);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::uniform_int_distribution<int> exponent(-6, 6);
    for (int w = 0; w < kWarps; ++w) {
      Fragments& f = warps_[w];
      f.factor = core::round_to_tf32(0.18033688f * (1.0f + static_cast<float>(w)));
      f.started = w % 2 == 0 ? 0.0f : 1.0f + 0.37f * static_cast<float>(w);
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i) {
          f.x[lane][i] =
              std::ldexp(normal(random), exponent(random)) - (w % 4 == 3 ? 500.0f : 0.0f);
          std::uint32_t pair = 0;
          for (int half = 0; half < 2; ++half) {
            // Finite in both formats: an f16 exponent of 31 is left out.
            const std::uint32_t bits = 0x3000u + (random() & 0x0fffu);
            pair |= bits << 16 * half;
          }
          f.p[lane][i] = pair;
        }
        for (int r = 0; r < 2; ++r) {  // the four lanes of a quad agree
          f.row[lane][r] = lane % 4 == 0 ? std::ldexp(normal(random), exponent(random))
                                         : f.row[lane - lane % 4][r];
        }
      }
    }
    run_steps<<<kWarps, 32>>>(warps_);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  void TearDown() override { cudaFree(warps_); }

  static int differences(const core::WarpQuads& found, const core::WarpQuads& expected) {
    int count = 0;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        count += core::float_bits(found[lane][i]) != core::float_bits(expected[lane][i]);
      }
    }
    return count;
  }

  static void copy(core::WarpQuads& to, const core::WarpQuads& from) {
    std::memcpy(&to, &from, sizeof to);
  }

  static void start(core::WarpQuads& sums, float value) {
    for (auto& lane : sums) {
      std::fill(lane, lane + 4, value);
    }
  }

  Fragments* warps_ = nullptr;
  int kept_bits_ = 0;
};

TEST_F(TensorSoftmaxGpu, ScaleAndAddEqualsItsEmulation) {
  int wrong = 0;
  for (int w = 0; w < kWarps; ++w) {
    core::WarpQuads expected;
    copy(expected, warps_[w].x);
    core::emulate_scale_and_add(expected, warps_[w].factor, warps_[w].row, kept_bits_);
    wrong += differences(warps_[w].scaled, expected);
  }
  EXPECT_EQ(wrong, 0) << "of " << kWarps * 128 << " elements";
}

TEST_F(TensorSoftmaxGpu, RescaleTruncatesAndNothingElse) {
  for (int w = 0; w < kWarps; ++w) {
    core::WarpQuads expected;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 4; ++i) {
        expected[lane][i] = core::truncate_to_tf32(warps_[w].x[lane][i]) * warps_[w].factor;
      }
    }
    EXPECT_EQ(differences(warps_[w].rescaled, expected), 0);
  }
}

TEST_F(TensorSoftmaxGpu, Tf32RowSumsEqualTheirEmulation) {
  int wrong = 0;
  for (int w = 0; w < kWarps; ++w) {
    core::WarpQuads sums;
    start(sums, warps_[w].started);
    core::emulate_row_sums_tf32(sums, warps_[w].x, kept_bits_);
    wrong += differences(warps_[w].sums_tf32, sums);
  }
  EXPECT_EQ(wrong, 0) << "of " << kWarps * 128 << " elements";
}

TEST_F(TensorSoftmaxGpu, OperandRowSumsEqualTheirEmulation) {
  int wrong[2] = {0, 0};
  for (int w = 0; w < kWarps; ++w) {
    float p[2][32][8];
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        const auto bits = static_cast<std::uint16_t>(warps_[w].p[lane][i / 2] >> 16 * (i % 2));
        p[0][lane][i] = decode_bf16(bits);
        p[1][lane][i] = decode_f16(bits);
      }
    }
    const core::WarpQuads* found[2] = {&warps_[w].sums_bf16, &warps_[w].sums_f16};
    for (int type = 0; type < 2; ++type) {
      core::WarpQuads sums;
      start(sums, warps_[w].started);
      core::emulate_row_sums_16bit(sums, p[type], kept_bits_);
      wrong[type] += differences(*found[type], sums);
    }
  }
  EXPECT_EQ(wrong[0], 0) << "of " << kWarps * 128 << " elements, bf16";
  EXPECT_EQ(wrong[1], 0) << "of " << kWarps * 128 << " elements, f16";
}

TEST_F(TensorSoftmaxGpu, ProductsStartFromAValueOfTheirRow) {
  int wrong = 0;
  for (int w = 0; w < kWarps; ++w) {
    float p[32][8];
    core::WarpQuads expected;
    for (int lane = 0; lane < 32; ++lane) {
      for (int i = 0; i < 8; ++i) {
        p[lane][i] =
            decode_bf16(static_cast<std::uint16_t>(warps_[w].p[lane][i / 2] >> 16 * (i % 2)));
      }
      for (int i = 0; i < 4; ++i) {
        expected[lane][i] = warps_[w].row[lane][i / 2];
      }
    }
    core::emulate_row_sums_16bit(expected, p, kept_bits_);
    wrong += differences(warps_[w].started_rows, expected);
  }
  EXPECT_EQ(wrong, 0) << "of " << kWarps * 128 << " elements";
}

TEST_F(TensorSoftmaxGpu, WarpMaxIsTheLargestOfAllLanes) {
  for (int w = 0; w < kWarps; ++w) {
    float most = -std::numeric_limits<float>::infinity();
    for (const auto& lane : warps_[w].x) {
      most = std::max(most, lane[0]);
    }
    for (const float found : warps_[w].largest) {
      EXPECT_EQ(found, most);
    }
  }
}

}  // namespace
