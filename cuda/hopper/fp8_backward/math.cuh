// A math warpgroup of the FP8 backward: 64 of the tile's 128 keys, step by step.
//
// Thread t of the warpgroup, warp w, lane l, holds S, P, dP and dS of keys 16 w + l / 4 + 8 i and
// queries 8 j + 2 (l % 4) + {0, 1}: register 2 j + i of 16, a pair each.
#pragma once

#include <cstddef>

#include "common/quad_transpose.cuh"
#include "hopper/fp8_backward/storage.cuh"
#include "prim/convert.cuh"
#include "prim/e4m3.cuh"
#include "prim/half2.cuh"
#include "prim/math.cuh"
#include "prim/matrix.cuh"
#include "prim/named_barrier.cuh"
#include "prim/registers.cuh"
#include "prim/special_registers.cuh"
#include "prim/tma.cuh"
#include "prim/warp.cuh"
#include "prim/wgmma_e4m3_parts.cuh"

namespace pantile::hopper {

// Numbers of named barriers, of both math warpgroups.
enum Fp8BackwardBarrier : int { kLargestKnown = 1, kScoreGradsStored = 2 };

template <int kDim>
class Fp8BackwardMath {
 public:
  PANTILE_DEVICE Fp8BackwardMath(Fp8BackwardStorage<kDim>& s, const Fp8BackwardParams& p,
                                 int warpgroup)
      : s_(s), p_(p), wg_(warpgroup), base_(prim::descriptor(prim::shared_address(&s))) {
    const int r = prim::lane_index() & 7;
    const int chunk = wg_ * 4 + warp();
    store_ = prim::shared_address(s.dS[0]) + (8 * (prim::lane_index() >> 3) + r) * 128 +
             ((chunk ^ r) * 16);
  }

  // The tile is seen by some query.
  PANTILE_DEVICE void run() {
    const Fp8KeyTile& tile = s_.tile;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      dK_[i] = dV_[i] = 0.0f;
    }
    prim::pin(dK_);  // or ptxas makes the zeros before the warps have their registers
    prim::pin(dV_);
    prim::wait(s_.keys_full, 0);
    int number = 0;
    for (int head = 0; head < p_.group; ++head) {
      for (int i = tile.rows.visit.begin; i < tile.rows.visit.end; ++i) {
        step(i, number++);
      }
    }
    write(p_.grad_v, p_.grad_v_layout, dV_, 1.0f);
    write(p_.grad_k, p_.grad_k_layout, dK_, p_.scale_k);
  }

 private:
  using Config = Fp8BackwardConfig;
  static constexpr int kRowBytes = fp8_row_bytes(kDim);
  static constexpr int kHalf = kDim / 2;   // columns of a part
  static constexpr int kPart = kHalf / 2;  // its registers
  using Part = float[kPart];
  using Products = prim::E4m3Part<kHalf>;
  using Storage = Fp8BackwardStorage<kDim>;
  using Rows = RowImage<kDim>;
  using Keys = KeyImage<kDim>;

  // Worked out again where it is used: the loop has no registers to spare.
  PANTILE_DEVICE static int warp() { return (prim::fresh_thread_index() & 127) / 32; }

  // Descriptors, from the distance to the storage's first byte.
  PANTILE_DEVICE std::uint64_t wide(int offset) const {
    return prim::whole_descriptor(base_ + prim::descriptor_step(offset), prim::kSwizzle128High);
  }
  PANTILE_DEVICE std::uint64_t narrow(int offset) const {
    return prim::whole_descriptor(base_ + prim::descriptor_step(offset), prim::kSwizzle64High);
  }
  PANTILE_DEVICE std::uint64_t rows(int offset) const {
    return kRowBytes == 128 ? wide(offset) : narrow(offset);
  }
  PANTILE_DEVICE static std::uint64_t moved(std::uint64_t base, int bytes) {
    return base + prim::descriptor_step(bytes);
  }
  // Of a member of an image of queries.
  PANTILE_DEVICE int staged(int offset) const {
    return static_cast<int>(offsetof(Storage, stages)) + offset +
           prim::uniform(stage_) * static_cast<int>(sizeof(Rows));
  }

  PANTILE_DEVICE void issue_scores(std::uint32_t (&d)[16], std::uint64_t a, std::uint64_t b) {
    prim::wgmma_e4m3_f16_n64_ss<true>(d, a, b);
#pragma unroll
    for (int k = 1; k < kDim / 32; ++k) {
      prim::wgmma_e4m3_f16_n64_ss<false>(d, moved(a, 32 * k), moved(b, 32 * k));
    }
    prim::wgmma_commit();
  }

  // Half `half` of the columns of A B, A of 64 queries.
  PANTILE_DEVICE void issue_part(Part& part, const std::uint32_t (&a)[2][4], std::uint64_t b,
                                 int half) {
    prim::wgmma_fence();
    b = moved(b, half * kHalf * 64);
    Products::template rs<true>(part, a[0], b);
    Products::template rs<false>(part, a[1], moved(b, 32));
    prim::wgmma_commit();
  }

  PANTILE_DEVICE void issue_dQ(Part& dQ, int buffer) {
    const std::uint64_t a = wide(static_cast<int>(offsetof(Storage, dS)) +
                                 prim::uniform(buffer) * static_cast<int>(sizeof(s_.dS[0])));
    const std::uint64_t b = wide(static_cast<int>(offsetof(Keys, k_t)) + wg_ * kHalf * 128);
    Products::template ss<true>(dQ, a, b);
#pragma unroll
    for (int k = 1; k < 4; ++k) {
      Products::template ss<false>(dQ, moved(a, 32 * k), moved(b, 32 * k));
    }
    prim::wgmma_commit();
  }

  // The second level of accumulation.
  template <int kWhich>
  PANTILE_DEVICE void take(float (&sum)[kDim / 2], Part& part, float factor) {
    prim::pin(part);
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      sum[kPart * kWhich + i] = fmaf(part[i], factor, sum[kPart * kWhich + i]);
    }
  }

  // P in units of 1 / kWeightUnits as fp16 and dS as bf16 in place of S and dP, 0 where the mask
  // hides.
  template <bool kMasked>
  PANTILE_DEVICE void weigh(std::uint32_t (&S)[16], std::uint32_t (&dP)[16], int row_tile, float f,
                            float g) {
    const Rows& terms = s_.stages[stage_];
    const int column = 2 * (prim::lane_index() & 3);
    core::Span seen[2];
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key =
            s_.tile.tile * Config::kKeys + wg_ * 64 + warp() * 16 + prim::lane_index() / 4 + 8 * i;
        const core::Span whole =
            key < s_.tile.keys ? core::visible_rows(s_.tile.mask, key) : core::Span{0, 0};
        const int first = row_tile * Config::kRows + column;
        seen[i] = core::Span{whole.begin - first, whole.end - first};
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(&terms.lse[8 * j + column]);
      const float2 delta = *reinterpret_cast<const float2*>(&terms.delta[8 * j + column]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        std::uint32_t& s = S[2 * j + i];
        std::uint32_t& ds = dP[2 * j + i];
        float p0 = prim::exp2_approx(fmaf(prim::low_float(s), f, lse.x));
        float p1 = prim::exp2_approx(fmaf(prim::high_float(s), f, lse.y));
        float d0 = p0 * fmaf(prim::low_float(ds), g, delta.x);
        float d1 = p1 * fmaf(prim::high_float(ds), g, delta.y);
        if constexpr (kMasked) {
          const bool first = 8 * j >= seen[i].begin && 8 * j < seen[i].end;
          const bool second = 8 * j + 1 >= seen[i].begin && 8 * j + 1 < seen[i].end;
          p0 = first ? p0 : 0.0f;
          d0 = first ? d0 : 0.0f;
          p1 = second ? p1 : 0.0f;
          d1 = second ? d1 : 0.0f;
        }
        s = prim::half_pair(p0, p1);
        ds = prim::pack<DType::bf16>(d0, d1);
      }
    }
  }

  // core::block_scale() of 448 without a branch, which would cut the batches of products; of 0 its
  // least scale, because there is nothing to scale.
  PANTILE_DEVICE static core::BlockScale scale_of(float amax, float least) {
    const auto above = static_cast<int>(__float_as_uint(amax) - core::float_bits(core::kE4m3Max) +
                                        (127u << 23) + 0x7fffffu);
    const int bits = core::max_of(above, static_cast<int>(core::float_bits(least)));
    const std::uint32_t scale = static_cast<std::uint32_t>(bits) & 0x7f800000u;
    return core::BlockScale{__uint_as_float(scale), __uint_as_float((254u << 23) - scale)};
  }

  // Codes of P as A of dV, and what they stand for.
  PANTILE_DEVICE float round_weights(const std::uint32_t (&P)[16], std::uint32_t (&P8)[2][4]) {
    std::uint32_t most = P[0];
#pragma unroll
    for (int i = 1; i < 16; ++i) {
      most = prim::max2(most, P[i]);
    }
    most = __reduce_max_sync(prim::kAllLanes, prim::max2(most, most >> 16) & 0xffffu);
    const core::BlockScale scale = scale_of(prim::low_float(most), core::kLeastWeightScale);
    const std::uint32_t inverse = prim::half_pair(scale.inverse, scale.inverse);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        P8[j / 4][j % 4 + i] =
            prim::pack_e4m3(times(P[2 * j + i], inverse), times(P[2 * j + 2 + i], inverse));
      }
    }
    return scale.scale;
  }

  PANTILE_DEVICE static std::uint32_t times(std::uint32_t a, std::uint32_t b) {
    return prim::fma2(a, b, 0x80008000u);  // - 0: keeps the sign of 0
  }

  PANTILE_DEVICE static std::uint32_t largest_bf16(std::uint32_t a, std::uint32_t b) {
    std::uint32_t r;
    asm("{ .reg .b32 x; abs.bf16x2 x, %2; max.bf16x2 %0, %1, x; }" : "=r"(r) : "r"(a), "r"(b));
    return r;
  }

  // Makes the largest dS of the warp known to all.
  PANTILE_DEVICE void publish_largest(const std::uint32_t (&dS)[16]) {
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      most = largest_bf16(most, dS[i]);
    }
    most = __reduce_max_sync(prim::kAllLanes, core::max_of(most & 0xffffu, most >> 16));
    if (prim::lane_index() == 0) {
      s_.largest_dS[wg_ * 4 + warp()] = most << 16;
    }
  }

  PANTILE_DEVICE core::BlockScale shared_scale() const {
    const uint4 a = reinterpret_cast<const uint4*>(s_.largest_dS)[0];
    const uint4 b = reinterpret_cast<const uint4*>(s_.largest_dS)[1];
    const std::uint32_t most =
        core::max_of(core::max_of(core::max_of(a.x, a.y), core::max_of(a.z, a.w)),
                     core::max_of(core::max_of(b.x, b.y), core::max_of(b.z, b.w)));
    return scale_of(__uint_as_float(most), core::kSmallestScale);
  }

  // Codes of dS, [query][key] for dQ: a 16-bit unit holds keys k and k + 8 of a query, the two
  // that a thread has, so that stmatrix may transpose units. And as A of dK.
  PANTILE_DEVICE void store_dS(const std::uint32_t (&dS)[16], float inverse, int buffer,
                               std::uint32_t (&dS8)[2][4]) {
    std::uint32_t units[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const std::uint32_t a = dS[2 * j];
      const std::uint32_t b = dS[2 * j + 1];
      units[j] = prim::pack_e4m3(
          __uint_as_float(a << 16) * inverse, __uint_as_float(b << 16) * inverse,
          __uint_as_float(a & 0xffff0000u) * inverse, __uint_as_float(b & 0xffff0000u) * inverse);
    }
    const std::uint32_t to = store_ + buffer * static_cast<int>(sizeof(s_.dS[0]));
    prim::store_matrix_x4_transposed(to, units[0], units[1], units[2], units[3]);
    prim::store_matrix_x4_transposed(to + 32 * 128, units[4], units[5], units[6], units[7]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int j = 4 * k + 2 * (r >> 1);
        dS8[k][r] = __byte_perm(units[j], units[j + 1], (r & 1) != 0 ? 0x7531 : 0x6420);
      }
    }
  }

  // Products in order: S dP | dV dV dQ dK dK, a part of dV or dK at a time; the exponentials run
  // behind S and dP, the codes of dS under the first part of dV.
  PANTILE_DEVICE void step(int row_tile, int number) {
    std::uint32_t S[16], dP[16], P8[2][4], dS8[2][4];
    Part part, dQ;
    const int buffer = number & 1;
    prim::wait(s_.full[stage_], parity_);
    prim::wgmma_fence();
    const int keys = wg_ * 64 * kRowBytes;
    issue_scores(S, rows(keys), rows(staged(0)));
    issue_scores(dP, rows(static_cast<int>(offsetof(Keys, v)) + keys),
                 rows(staged(static_cast<int>(offsetof(Rows, grad)))));
    prim::wgmma_wait<0>();
    prim::pin(S);
    prim::pin(dP);
    const core::Span full = s_.tile.rows.full;
    if (prim::any(row_tile >= full.begin && row_tile < full.end)) {
      weigh<false>(S, dP, row_tile, s_.tile.score_factor * s_.stages[stage_].scale_q,
                   s_.tile.grad_factor * s_.stages[stage_].scale_grad);
    } else {
      weigh<true>(S, dP, row_tile, s_.tile.score_factor * s_.stages[stage_].scale_q,
                  s_.tile.grad_factor * s_.stages[stage_].scale_grad);
    }
    publish_largest(dP);
    const float dv = round_weights(S, P8) * s_.stages[stage_].scale_grad / core::kWeightUnits;
    issue_part(part, P8, narrow(staged(static_cast<int>(offsetof(Rows, grad_t)))), 0);
    prim::barrier_sync(kLargestKnown, 256);
    const core::BlockScale scale = shared_scale();
    store_dS(dP, scale.inverse, buffer, dS8);
    prim::fence_async_proxy();
    prim::barrier_sync(kScoreGradsStored, 256);
    prim::wgmma_wait<0>();
    take<0>(dV_, part, dv);
    issue_part(part, P8, narrow(staged(static_cast<int>(offsetof(Rows, grad_t)))), 1);
    issue_dQ(dQ, buffer);
    prim::wgmma_wait<1>();
    take<1>(dV_, part, dv);
    issue_part(part, dS8, narrow(staged(static_cast<int>(offsetof(Rows, q_t)))), 0);
    prim::wait(s_.dq_empty[wg_], static_cast<std::uint32_t>(buffer) ^ 1);
    prim::wgmma_wait<1>();
    send(dQ, p_.scale_q * s_.tile.scale_k * scale.scale);
    const float dk = scale.scale * s_.stages[stage_].scale_q;
    prim::wgmma_wait<0>();
    take<0>(dK_, part, dk);
    issue_part(part, dS8, narrow(staged(static_cast<int>(offsetof(Rows, q_t)))), 1);
    prim::wgmma_wait<0>();
    take<1>(dK_, part, dk);
    if (prim::lane_index() == 0) {
      prim::arrive(s_.empty[stage_]);
    }
    if (++stage_ == Config::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  PANTILE_DEVICE void send(Part& dQ, float factor) {
    prim::pin(dQ);
    auto* to = reinterpret_cast<float4*>(s_.dQ[wg_]) + (threadIdx.x & 127);
#pragma unroll
    for (int i = 0; i < kPart / 4; ++i) {
      to[128 * i] = float4{dQ[4 * i] * factor, dQ[4 * i + 1] * factor, dQ[4 * i + 2] * factor,
                           dQ[4 * i + 3] * factor};
    }
    __syncwarp();
    if (prim::lane_index() == 0) {
      prim::arrive(s_.dq_full[wg_]);
    }
  }

  // dK or dV. Keys that no sequence uses get zeros.
  PANTILE_DEVICE void write(std::uint16_t* out, const Layout& layout, const float (&sum)[kDim / 2],
                            float factor) {
    const Fp8KeyTile& tile = s_.tile;
    const int first = tile.tile * Config::kKeys + wg_ * 64 + warp() * 16 + prim::lane_index() / 4;
    const std::int64_t sequence =
        p_.keys.cu_seqlens != nullptr ? tile.key_row * layout.seq : tile.batch * layout.batch;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first + 8 * i;
      const float by = key < tile.keys ? factor : 0.0f;
      std::uint16_t* row = out + sequence + tile.head * layout.head + key * layout.seq;
#pragma unroll
      for (int j = 0; j < kDim / 8; j += 4) {
        std::uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int at = 4 * (j + c) + 2 * i;
          const float a = key < tile.keys ? sum[at] * by : 0.0f;
          const float b = key < tile.keys ? sum[at + 1] * by : 0.0f;
          words[c] = p_.is_f16 ? prim::pack<DType::f16>(a, b) : prim::pack<DType::bf16>(a, b);
        }
        common::quad_transpose(words);
        const int column = 8 * (j + (prim::lane_index() & 3));
        if (key < tile.capacity && column < p_.head_dim) {
          *reinterpret_cast<uint4*>(row + column) =
              make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    }
  }

  Fp8BackwardStorage<kDim>& s_;
  const Fp8BackwardParams& p_;
  const int wg_;
  const std::uint32_t base_;  // low word of a descriptor of the storage
  std::uint32_t store_;       // where the thread stores dS, of buffer 0
  int stage_ = 0;
  std::uint32_t parity_ = 0;
  float dK_[kDim / 2], dV_[kDim / 2];
};

}  // namespace pantile::hopper
