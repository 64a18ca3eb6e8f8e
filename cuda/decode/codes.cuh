// Operands of the products from the cache: 16-bit elements as they lie there, 8-bit codes made f16
// on the way to the registers. e4m3 and int8 are exact in f16.
//
// The order of dims within 16 is free, as long as K and Q, or V and O, have the same one. Codes:
//   K, Q   columns 2t, 2t + 1, 2t + 8, 2t + 9 of operands A and B are dims 4t .. 4t + 3
//   V, O   rows g and g + 8 of operand A are dims 2g and 2g + 1
#pragma once

#include <cstdint>

#include "core/softmax_state.h"
#include "decode/storage.cuh"
#include "pantile/dtype.h"
#include "prim/convert.cuh"
#include "prim/e4m3.cuh"
#include "prim/int8.cuh"
#include "prim/matrix.cuh"
#include "prim/mma_sync.cuh"
#include "prim/nonfinite.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::decode {

// Four codes as two pairs of f16.
template <CacheFormat kFormat>
PANTILE_DEVICE void unpack_codes(std::uint32_t codes, std::uint32_t& first, std::uint32_t& second) {
  if constexpr (kFormat == CacheFormat::e4m3) {
    first = prim::unpack_e4m3(codes);
    second = prim::unpack_e4m3(codes >> 16);
  } else {
    prim::unpack_s8(codes, first, second);
  }
}

// Infinity, minus infinity, NaN.
inline constexpr int kNonfiniteKinds = 3;

PANTILE_DEVICE float nonfinite_value(int kind) {
  return __uint_as_float(kind == 0 ? 0x7f800000u : kind == 1 ? 0xff800000u : 0x7fc00000u);
}

// Of a pair of elements: 1 where one is of this kind, else 0.
template <DType kDType>
PANTILE_DEVICE std::uint32_t ones_where(std::uint32_t pair, int kind) {
  constexpr std::uint32_t kInf = prim::kExponentBits<kDType>;
  constexpr std::uint32_t kOne = kDType == DType::bf16 ? 0x3f80u : 0x3c00u;
  const auto one = [kind](std::uint32_t x) {
    const int is = (x & 0x7fffu) > kInf ? 2 : (x & 0x7fffu) < kInf ? 3 : static_cast<int>(x >> 15);
    return is == kind ? kOne : 0u;
  };
  return one(pair & 0xffffu) | one(pair >> 16) << 16;
}

template <class Config, DType kDType>
struct Codes {
  static constexpr bool kPlain = Config::kFormat == CacheFormat::plain;
  static constexpr DType kProduct = kPlain ? kDType : DType::f16;  // type of the operands

  // The row that this lane addresses for load_keys(), load_values() and load_q().
  static PANTILE_DEVICE std::uint32_t key_row(std::uint32_t k) {
    const int lane = prim::lane_index();
    return k + lane % 16 * Config::kKPitch + lane / 16 * 16;
  }
  static PANTILE_DEVICE std::uint32_t value_row(std::uint32_t v) {
    const int lane = prim::lane_index();
    return kPlain ? v + (lane % 8 + lane / 16 * 8) * Config::kVPitch + lane / 8 % 2 * 16
                  : v + lane % 16 * Config::kVPitch + lane / 16 * 16;
  }
  static PANTILE_DEVICE std::uint32_t q_row(std::uint32_t q) {
    const int lane = prim::lane_index();
    return kPlain ? q + lane % 8 * Config::kQPitch + lane / 8 * 16
                  : q + lane / 4 * Config::kQPitch + lane % 4 * 8;
  }

  // Operand A of steps 2 * pair and, if there is one, 2 * pair + 1.
  static PANTILE_DEVICE void load_keys(std::uint32_t (&a)[2][4], std::uint32_t row, int pair) {
    if constexpr (kPlain) {
      prim::load_matrix_x4(a[0], row + pair * 64);
      if (2 * pair + 1 < Config::kKSteps) {
        prim::load_matrix_x4(a[1], row + pair * 64 + 32);
      }
    } else {
      std::uint32_t codes[4];
      prim::load_matrix_x4(codes, row + pair * 32);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        unpack_codes<Config::kFormat>(codes[2 * step], a[step][0], a[step][2]);
        unpack_codes<Config::kFormat>(codes[2 * step + 1], a[step][1], a[step][3]);
      }
    }
  }

  // Operand B of the same steps; the second half is unused behind an odd number of steps.
  static PANTILE_DEVICE void load_q(std::uint32_t (&b)[4], std::uint32_t row, int pair) {
    if constexpr (kPlain) {
      prim::load_matrix_x4(b, row + pair * 64);
    } else {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(b[2 * step]), "=r"(b[2 * step + 1])
                     : "r"(row + pair * 64 + step * 32)
                     : "memory");
      }
    }
  }

  // Operand A of V^T, dims 32 * pair .. + 31; the second tile is unused behind an odd number.
  static PANTILE_DEVICE void load_values(std::uint32_t (&a)[2][4], std::uint32_t row, int pair) {
    if constexpr (kPlain) {
      prim::load_matrix_x4_transposed(a[0], row + pair * 64);
      if (2 * pair + 1 < Config::kVTiles) {
        prim::load_matrix_x4_transposed(a[1], row + pair * 64 + 32);
      }
    } else {
      std::uint32_t codes[4];
      prim::load_matrix_x4_transposed(codes, row + pair * 32);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // keys 0..7, 8..15
          // Two dims of key 2t, then of key 2t + 1: to two keys of a dim, then of the next.
          const std::uint32_t by_dim = __byte_perm(codes[2 * tile + half], 0, 0x3120);
          unpack_codes<Config::kFormat>(by_dim, a[tile][2 * half], a[tile][2 * half + 1]);
        }
      }
    }
  }

  // Infinities and NaN of a slice's values in shared memory, by a warp. int8 has none.
  static PANTILE_DEVICE bool has_nonfinite(const unsigned char* v) {
    bool found = false;
    each_chunk(v, [&](uint4 x, const unsigned char*) {
      const uint4 y = finite(x);
      found |= x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w;
    });
    return prim::any(found);
  }
  // Adds those of a slice's values to the outputs whose queries see their key (`seen`: operand B of
  // ones). They are counted by a product: a sum with one is what that makes it, whatever the
  // weights.
  static PANTILE_DEVICE void add_nonfinite(float (&output)[Config::kVTiles][Config::kQTiles][4],
                                           const std::uint32_t (&seen)[Config::kQTiles][2],
                                           std::uint32_t row) {
#pragma unroll 1
    for (int kind = 0; kind < kNonfiniteKinds; ++kind) {
      const float value = nonfinite_value(kind);
#pragma unroll
      for (int m = 0; m < Config::kVTiles; ++m) {
        std::uint32_t a[2][4];
        load_values(a, row, m / 2);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          a[m % 2][r] = ones_where<kProduct>(a[m % 2][r], kind);
        }
#pragma unroll
        for (int n = 0; n < Config::kQTiles; ++n) {
          float count[4];
          prim::mma_set<kProduct>(count, a[m % 2], seen[n][0], seen[n][1]);
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            output[m][n][c] += count[c] > 0.0f ? value : 0.0f;
          }
        }
      }
    }
  }

  static PANTILE_DEVICE void zero_nonfinite(unsigned char* v) {
    each_chunk(v, [](uint4 x, const unsigned char* at) {
      *reinterpret_cast<uint4*>(const_cast<unsigned char*>(at)) = finite(x);
    });
  }

  // Dim of O that accumulators c and c + 1 of tile `m` hold, c = 2 * half.
  static PANTILE_DEVICE int dim_of(int m, int half) {
    const int g = prim::lane_index() / 4;
    return m * 16 + (kPlain ? g + half * 8 : 2 * g + half);
  }

 private:
  template <class F>
  static PANTILE_DEVICE void each_chunk(const unsigned char* v, F&& f) {
    constexpr int kChunks = Config::kHeadDimV * Config::kBytes / kChunkBytes;
#pragma unroll 1
    for (int i = prim::lane_index(); i < kSliceKeys * kChunks; i += 32) {
      const unsigned char* const at = v + i / kChunks * Config::kVPitch + i % kChunks * kChunkBytes;
      f(*reinterpret_cast<const uint4*>(at), at);
    }
  }

  static PANTILE_DEVICE std::uint32_t finite(std::uint32_t x) {
    if constexpr (kPlain) {
      return prim::zero_nonfinite<kDType>(x);
    } else if constexpr (Config::kFormat == CacheFormat::e4m3) {
      std::uint32_t nan = __vcmpeq4(x & 0x7f7f7f7fu, 0x7f7f7f7fu);
      return x & ~nan;
    } else {
      return x;
    }
  }
  static PANTILE_DEVICE uint4 finite(const uint4& x) {
    return make_uint4(finite(x.x), finite(x.y), finite(x.z), finite(x.w));
  }
};

// The power of two below `most`, kept where it and its inverse are normal; 1 for what is not
// finite.
PANTILE_DEVICE float unit_of(float most) {
  const int exponent = core::clamp(static_cast<int>(__float_as_uint(most) >> 23), 1, 253);
  return most < core::kInfinity ? __uint_as_float(static_cast<std::uint32_t>(exponent) << 23)
                                : 1.0f;
}

// 1 / unit of what unit_of() gives.
PANTILE_DEVICE float inverse_unit(float unit) {
  return __uint_as_float(0x7f000000u - __float_as_uint(unit));
}

}  // namespace pantile::decode
