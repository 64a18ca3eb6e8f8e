// What a variant (pantile/variant.h) changes of a tile: scores, before the mask, and weights, after
// the softmax. Called once a tile, and not at all by plain attention.
#pragma once

#include "core/dropout.h"
#include "cpu/isa/expression.h"
#include "cpu/isa/problem.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

// ---- softcap

// Scores of `rows` rows of `vectors` vectors, `ld` floats apart. `slopes` is null, or as large: it
// takes the derivatives.
inline void cap_scores(float softcap, int rows, int vectors, int ld, float* scores, float* slopes) {
  const Floats inverse = splat(1.0f / softcap);
  for (int i = 0; i < rows; ++i) {
    for (int at = i * ld; at < i * ld + vectors * kLanes; at += kLanes) {
      const Tanh capped = tanh(load(scores + at) * inverse);
      store(scores + at, capped.value * splat(softcap));
      if (slopes != nullptr) {
        store(slopes + at, capped.slope);
      }
    }
  }
}

// ---- ALiBi

// |first + step * lane| of each lane: distances of neighbours from one query or key.
template <int kStep>
PANTILE_INLINE Floats distances(int first) {
  const Floats away = to_floats(lane_numbers() * kStep + first);
  return from_bits(bits(away) & 0x7fffffffu);
}

PANTILE_INLINE float alibi_slope(const VariantJob& variant, int batch, int head) {
  return variant.slopes[batch * variant.slope_batch_stride + head];
}

// ---- bias

template <class Element>
PANTILE_INLINE const typename Element::Raw* bias_row(const VariantJob& variant, int batch, int head,
                                                     int row) {
  return static_cast<const typename Element::Raw*>(variant.bias) + batch * variant.bias_batch +
         head * variant.bias_head + row * variant.bias_query;
}

// Adds the bias to S, keys along the lanes.
inline void add_bias(const VariantJob& variant, int batch, int head, Span rows, Span keys, int ld,
                     float* scores) {
  with_element(variant.bias_dtype, [&](auto element) {
    using Element = decltype(element);
    for (int i = 0; i < rows.size(); ++i) {
      const auto* bias = bias_row<Element>(variant, batch, head, rows.begin + i);
      for (int j = 0; j < keys.size(); j += kLanes) {
        float* s = scores + i * ld + j;
        store(s, load(s) + read_row<Element>(bias, keys.begin + j, keys.end));
      }
    }
  });
}

// Adds the bias to S^T, queries along the lanes.
inline void add_bias_transposed(const VariantJob& variant, int batch, int head, Span rows,
                                Span keys, int ld, float* scores) {
  with_element(variant.bias_dtype, [&](auto element) {
    using Element = decltype(element);
    for (int i = 0; i < rows.size(); i += kLanes) {
      for (int j = 0; j < keys.size(); j += kLanes) {
        Floats block[kLanes];
        PANTILE_UNROLL for (int lane = 0; lane < kLanes; ++lane) {
          const int row = core::min_of(rows.begin + i + lane, rows.end - 1);
          block[lane] = read_row<Element>(bias_row<Element>(variant, batch, head, row),
                                          keys.begin + j, keys.end);
        }
        transpose(block);
        for (int lane = 0; lane < core::min_of(kLanes, keys.size() - j); ++lane) {
          float* s = scores + (j + lane) * ld + i;
          store(s, load(s) + block[lane]);
        }
      }
    }
  });
}

// ---- a score of the user's own

// In S^T, queries along the lanes.
inline void score_columns(const ScoreJob& score, int batch, int head, Span rows, Span keys, int ld,
                          float* scores) {
  Machine machine(score.value, score.captured, batch, head);
  const int vectors = core::ceil_div(rows.size(), kLanes);
  for (int j = 0; j < keys.size(); ++j) {
    float* s = scores + j * ld;
    machine.run_row(s,
                    PairRow{rows.begin, keys.begin + j, 1, 0, rows.end - 1, keys.end - 1, vectors});
    for (int at = 0; at < vectors * kLanes; at += kLanes) {
      store(s + at, machine.real(0, at));
    }
  }
}

// In S, keys along the lanes; with its derivatives.
inline void score_rows(const ScoreJob& score, int batch, int head, Span rows, Span keys, int ld,
                       float* scores, float* slopes) {
  Machine machine(score.value_and_slope, score.captured, batch, head);
  const int vectors = core::ceil_div(keys.size(), kLanes);
  for (int i = 0; i < rows.size(); ++i) {
    float* s = scores + i * ld;
    machine.run_row(s,
                    PairRow{rows.begin + i, keys.begin, 0, 1, rows.end - 1, keys.end - 1, vectors});
    for (int at = 0; at < vectors * kLanes; at += kLanes) {
      store(s + at, machine.real(0, at));
      store(slopes + i * ld + at, machine.real(1, at));
    }
  }
}

// ---- scores of a tile

// S^T of a tile, queries along the lanes, as the forward has it.
inline void change_columns(const VariantJob& variant, const core::ShiftedMask& mask, int batch,
                           int head, Span rows, Span keys, int ld, float* scores) {
  const int vectors = core::ceil_div(rows.size(), kLanes);
  if (variant.softcap > 0.0f) {
    cap_scores(variant.softcap, keys.size(), vectors, ld, scores, nullptr);
  }
  if (variant.slopes != nullptr) {
    const Floats slope = splat(alibi_slope(variant, batch, head));
    const int shift = mask.shift();
    for (int j = 0; j < keys.size(); ++j) {
      for (int v = 0; v < vectors; ++v) {
        float* s = scores + j * ld + v * kLanes;
        const int first = rows.begin + v * kLanes + shift - (keys.begin + j);
        store(s, load(s) - slope * distances<1>(first));
      }
    }
  }
  if (variant.bias != nullptr) {
    add_bias_transposed(variant, batch, head, rows, keys, ld, scores);
  }
  if (variant.score.exists) {
    score_columns(variant.score, batch, head, rows, keys, ld, scores);
  }
}

// What change_rows() writes beside the scores, [rows][ld]; null unless wanted or there.
struct ScoreSlopes {
  float* softcap = nullptr;  // derivatives of the softcap
  float* score = nullptr;    // of the score of the user's own: there is one
  float* inputs = nullptr;   // what that score is computed from
};

// S of a tile, keys along the lanes, as the backward has it.
inline void change_rows(const VariantJob& variant, const core::ShiftedMask& mask, int batch,
                        int head, Span rows, Span keys, int ld, float* scores,
                        const ScoreSlopes& slopes) {
  const int vectors = core::ceil_div(keys.size(), kLanes);
  if (variant.softcap > 0.0f) {
    cap_scores(variant.softcap, rows.size(), vectors, ld, scores, slopes.softcap);
  }
  if (variant.slopes != nullptr) {
    const Floats slope = splat(alibi_slope(variant, batch, head));
    const int shift = mask.shift();
    for (int i = 0; i < rows.size(); ++i) {
      for (int v = 0; v < vectors; ++v) {
        float* s = scores + i * ld + v * kLanes;
        const int first = rows.begin + i + shift - (keys.begin + v * kLanes);
        store(s, load(s) - slope * distances<-1>(first));
      }
    }
  }
  if (variant.bias != nullptr) {
    add_bias(variant, batch, head, rows, keys, ld, scores);
  }
  if (slopes.inputs != nullptr) {
    for (int at = 0; at < rows.size() * ld; at += kLanes) {
      store(slopes.inputs + at, load(scores + at));
    }
  }
  if (variant.score.exists) {
    score_rows(variant.score, batch, head, rows, keys, ld, scores, slopes.score);
  }
}

// ---- dropout

// The products of the words at even places, and of those at odd ones, with `factor`.
typedef std::uint64_t Wides __attribute__((vector_size(kLanes * 4)));

PANTILE_INLINE Wides multiply_even(Wides x, std::uint32_t factor) {
  const Wides by = Wides{} + factor;
#if defined(__AVX512F__)
  // The form with a mask: GCC 12 warns of an uninitialised value inside the other.
  return reinterpret_cast<Wides>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(by)));
#elif defined(__AVX2__)
  return reinterpret_cast<Wides>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(by)));
#elif defined(__x86_64__)
  return reinterpret_cast<Wides>(
      _mm_mul_epu32(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(by)));
#else
  return (x & 0xffffffffu) * by;
#endif
}

struct WideProducts {
  Words low, high;
};
PANTILE_INLINE WideProducts multiply_wide(Words x, std::uint32_t factor) {
  const auto pairs = reinterpret_cast<Wides>(x);
  const Wides even = multiply_even(pairs, factor);
  const Wides odd = multiply_even(pairs >> 32, factor);
  constexpr std::uint64_t kLow = 0xffffffffu;
  return WideProducts{reinterpret_cast<Words>((even & kLow) | (odd << 32)),
                      reinterpret_cast<Words>((even >> 32) | (odd & ~kLow))};
}

// core::philox4x32_10 of kLanes counters.
PANTILE_INLINE void philox(Words (&counter)[4], core::PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const WideProducts a = multiply_wide(counter[0], 0xD2511F53u);
    const WideProducts b = multiply_wide(counter[2], 0xCD9E8D57u);
    counter[0] = b.high ^ counter[1] ^ key.word[0];
    counter[1] = b.low;
    counter[2] = a.high ^ counter[3] ^ key.word[1];
    counter[3] = a.low;
    key.word[0] += core::kPhiloxWeyl[0];
    key.word[1] += core::kPhiloxWeyl[1];
  }
}

constexpr int kCellSide = 16;  // rows and keys of a block of the generator

// The 256 bytes of a block, row by row of `ld` bytes, or key by key.
template <bool kByKeys>
inline void block_bytes(const VariantJob& variant, std::uint32_t batch, std::uint32_t head,
                        std::uint32_t row_block, std::uint32_t key_block, int ld,
                        std::uint8_t* to) {
  constexpr int kCells = 16;
  std::uint32_t words[4][kCells];
  for (int first = 0; first < kCells; first += kLanes) {
    const auto cell = reinterpret_cast<Words>(lane_numbers() + first);
    Words counter[4] = {cell % 4 + key_block * 4, cell / 4 + row_block * 4, Words{} + head,
                        Words{} + batch};
    philox(counter, variant.key);
    for (int word = 0; word < 4; ++word) {
      store(words[word] + first, counter[word]);
    }
  }
  for (int word = 0; word < 4; ++word) {
    for (int cell = 0; cell < kCells; ++cell) {
      for (int byte = 0; byte < 4; ++byte) {
        const int row = 2 * (cell / 4) + word / 2 + 8 * (byte / 2);
        const int key = 2 * (cell % 4) + word % 2 + 8 * (byte % 2);
        to[kByKeys ? key * ld + row : row * ld + key] =
            static_cast<std::uint8_t>(words[word][cell] >> (8 * byte));
      }
    }
  }
}

// The random bytes of a tile: that of its element (i, j) is first[i * ld + j], where j counts along
// the lanes.
struct RandomBytes {
  const std::uint8_t* first;
  int ld;
};

// `memory` holds kRandomBytes. Rows and keys are those of a tile of either pass, rounded up to
// whole vectors along the lanes; kByKeys: queries lie along the lanes.
template <bool kByKeys>
inline RandomBytes random_bytes(const VariantJob& variant, int batch, int head, Span rows,
                                Span keys, std::uint8_t* memory) {
  const auto first_row = variant.query_offset + static_cast<std::uint32_t>(rows.begin);
  const auto first_key = variant.key_offset + static_cast<std::uint32_t>(keys.begin);
  const int skip_rows = static_cast<int>(first_row % kCellSide);
  const int skip_keys = static_cast<int>(first_key % kCellSide);
  const int row_blocks = core::ceil_div(skip_rows + rows.size(), kCellSide);
  const int key_blocks = core::ceil_div(skip_keys + keys.size(), kCellSide);
  const int ld = kCellSide * (kByKeys ? row_blocks : key_blocks);
  for (int r = 0; r < row_blocks; ++r) {
    for (int k = 0; k < key_blocks; ++k) {
      const int outer = kByKeys ? k : r;
      const int inner = kByKeys ? r : k;
      block_bytes<kByKeys>(variant, variant.batch_offset + static_cast<std::uint32_t>(batch),
                           variant.head_offset + static_cast<std::uint32_t>(head),
                           first_row / kCellSide + static_cast<std::uint32_t>(r),
                           first_key / kCellSide + static_cast<std::uint32_t>(k), ld,
                           memory + kCellSide * (outer * ld + inner));
    }
  }
  const int skip = kByKeys ? skip_keys * ld + skip_rows : skip_rows * ld + skip_keys;
  return RandomBytes{memory + skip, ld};
}

// Which of the kLanes weights from element (i, j) of the tile on stay.
PANTILE_INLINE Ints kept(const RandomBytes& random, int dropped, int i, int j) {
  typedef std::uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, random.first + i * random.ld + j, sizeof bytes);
  return __builtin_convertvector(bytes, Ints) >= dropped;
}

// Removes weights from P^T of the forward.
inline void drop_weights(const RandomBytes& random, int dropped, int keys, int vectors,
                         float* weights) {
  for (int k = 0; k < keys; ++k) {
    for (int v = 0; v < vectors; ++v) {
      float* p = weights + k * kForwardRows + v * kLanes;
      store(p, select(kept(random, dropped, k, v * kLanes), load(p), Floats{}));
    }
  }
}

}  // namespace
}  // namespace pantile::cpu::PANTILE_ISA
