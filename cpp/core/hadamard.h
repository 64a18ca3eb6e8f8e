// The rotation of Q and K before they are quantised: a Hadamard matrix with random signs. Scores do
// not change, outliers are spread over the channels of a group.
//
//   y = H (x * sign / group)      H: Sylvester's, unnormalised, so that H^T H = group
//
// The factor 1/group before the sums keeps finite rows finite. Two rotated rows have q . k / group
// as their product; the scale of Q makes up for it.
#pragma once

#include <cstdint>

#include "core/bits.h"
#include "core/host_device.h"

namespace pantile::core {

inline constexpr int kMaxRotatedDim = 256;

// Channels [group * i, group * (i + 1)) are rotated together: the largest power of two that divides
// head_dim, at most 256.
PANTILE_HD constexpr int hadamard_group(int head_dim) {
  const int group = head_dim & -head_dim;
  return group < kMaxRotatedDim ? group : kMaxRotatedDim;
}

// The power of two next to the root of `group`, from below. Rotated Q divided by it and rotated K
// multiplied by it are about as large as Q and K.
PANTILE_HD constexpr int rotation_balance(int group) {
  int balance = 1;
  while (4 * balance * balance <= group) {
    balance *= 2;
  }
  return balance;
}

// Bit c % 32 of word c / 32: channel c changes its sign.
PANTILE_HD constexpr std::uint32_t hadamard_sign_word(int word) {
  constexpr std::uint32_t kWords[kMaxRotatedDim / 32] = {
      0x9E3779B9u, 0x7F4A7C15u, 0xF39CC060u, 0x5CEDC834u,
      0x2545F491u, 0x4F6CDD1Du, 0xBF58476Du, 0x94D049BBu,
  };
  return kWords[word];
}

// What channel c is multiplied by before the sums: a power of two with a sign.
PANTILE_HD constexpr float hadamard_factor(int channel, int group) {
  const std::uint32_t word = hadamard_sign_word(channel / 32 % (kMaxRotatedDim / 32));
  const std::uint32_t sign = word >> (channel % 32) << 31;
  return bits_float(float_bits(1.0f / static_cast<float>(group)) | sign);
}

// In place on `dim` numbers. Distances ascend: 1, 2, 4, ..., group / 2. Every sum is one rounded
// float addition, and their order is part of the format: all quantisers give the same bits.
PANTILE_HD constexpr void hadamard_rotate(float* x, int dim, int group) {
  for (int c = 0; c < dim; ++c) {
    x[c] *= hadamard_factor(c, group);
  }
  for (int distance = 1; distance < group; distance *= 2) {
    for (int c = 0; c < dim; ++c) {
      if ((c & distance) == 0) {
        const float a = x[c];
        const float b = x[c + distance];
        x[c] = a + b;
        x[c + distance] = a - b;
      }
    }
  }
}

}  // namespace pantile::core
