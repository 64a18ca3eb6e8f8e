// What a variant changes of the backward, as a math thread sees it that holds scores transposed:
// two keys, and of every 8 queries two neighbours. The hooks of attn/variant.cuh, and their
// gradients:
//
//   additive terms  P = exp2(S * scale_log2 + term); S starts from -lse / scale, as without them
//   softcap         S is raw. With t = tanh(S * inner), P = exp2(t * cap_log2 + term - lse_log2),
//                   and dS is multiplied by the slope 1 - t^2. P is packed at once: what stays in
//                   the registers of S is P times the slope
//   dropout         dV takes P where it was kept. dS = P * (kept ? dP - d : -d), where dV, dQ and
//                   dK are multiplied by keep_scale in the end, and d is delta divided by it
//   ALiBi's slopes  the sum of dS times the distance, over a tile of keys and all rows of a head
//   bias            dS, added to fp32 in global memory; stored where no two pairs share an element,
//                   so that a step that is done again changes nothing
//   expressions     s + something: an additive term. Others: as a softcap, with its value and
//                   slope. A mask hides pairs after that. Gradients of captured tensors come from
//                   dS before the slope, note_raw(): a kernel that keeps P and the scores for it
//                   has them, others for additive scores only
#pragma once

#include <cstdint>
#include <type_traits>

#include "attn/dropout.cuh"
#include "attn/tile_mask.cuh"
#include "attn/variant.cuh"
#include "prim/global_add.cuh"
#include "prim/unpack.cuh"

namespace pantile::attn {

// The hooks of a backward kernel. None: plain attention.
struct GradHooks {
  bool softcap = false;
  bool exact = false;  // softcap
  bool alibi = false;
  bool behind = false;  // ALiBi: some row may see keys behind its position
  bool bias = false;
  DType bias_dtype = DType::bf16;
  bool dropout = false;
  bool grad_alibi = false;
  bool grad_bias = false;
  bool bias_alone = false;  // no two pairs share an element of that gradient
  bool lists = false;       // a mask beside the window: the walk is over lists of tiles
  // Expressions: structs of UserHooks<user>. raw_score: not s + something.
  int user = 0;
  bool score = false;
  bool raw_score = false;
  bool bounded_slopes = false;  // these are finite wherever scores are
  bool mask = false;
  bool grad_captured = false;
  // A mask of tensors that is asked about every pair: the arguments of StoredMask.
  std::uint32_t stored_forms = 0;
  bool stored_clauses = false;
  bool bias_tile = false;  // the kernel adds the bias, which it has in shared memory

  constexpr bool any() const {
    return softcap || alibi || bias || dropout || score || mask || lists || stored_forms != 0;
  }
  constexpr bool adds() const { return alibi || bias || (!raw() && (score || mask)); }
  constexpr bool grads() const { return grad_alibi || grad_bias || grad_captured; }
  // S is raw, without the row term of LSE.
  constexpr bool raw() const { return softcap || raw_score; }
};

// A hidden score behind Softcap: P vanishes, and P times the slope is still 0 and not NaN.
inline constexpr float kHiddenCapped = -1e18f;

// Where the fragment of a step lies; rows and keys count from the start of their sequence.
struct TransposedPlace {
  int row, key;    // of the thread's first query and key; the other key is 8 further
  int rows, keys;  // of the sequence
  int distance;    // key less the position of that row
};

// Key of register e of a transposed fragment, in units of 8 keys; its query is column_of(e).
PANTILE_DEVICE constexpr int key_of(int e) {
  return e / 2 % 2;
}

// Of one head of queries at a time. The thread's registers, kQueries / 2 a fragment.
template <GradHooks kHooks, int kQueries>
class GradVariant : UserState<kHooks.user> {
 public:
  static constexpr int kCount = kQueries / 2;
  static constexpr int kSlices = kQueries / 16;  // of 16 queries
  // Slopes are finite, so that a weight of 0 times one is 0.
  static constexpr bool kBoundedSlopes = kHooks.bounded_slopes;

  PANTILE_DEVICE void begin_head(const VariantParams& p, int batch, int head) {
    if constexpr (kHooks.stored_forms != 0) {
      batch_ = batch;
      head_ = head;
    }
    if constexpr (kHooks.alibi) {
      slope_ = p.alibi_slopes[batch * p.alibi_batch + head] * core::kLog2E;
    }
    if constexpr (kHooks.grad_alibi) {
      grad_slope_ = 0.0f;
    }
    if constexpr (kHooks.dropout) {
      stream_.start(p.dropout_seed, p.dropout_add, p.head_offset + static_cast<std::uint32_t>(head),
                    p.batch_offset + static_cast<std::uint32_t>(batch));
    }
    if constexpr (kHooks.bias) {
      bias_ = batch * p.bias_batch + head * p.bias_head;
    }
    if constexpr (kHooks.score) {
      this->user_score.begin(p, batch, head);
    }
    if constexpr (kHooks.mask) {
      this->user_mask.begin(p, batch, head);
    }
    if constexpr (kHooks.grad_bias) {
      grad_bias_ = batch * p.grad_bias_batch + head * p.grad_bias_head;
    }
  }

  // Which weights of the step are kept. `aligned`: the tile begins with a cell of core/dropout.h.
  PANTILE_DEVICE void fetch(const VariantParams& p, const TransposedPlace& at, bool aligned) {
    if constexpr (kHooks.dropout) {
      const std::uint32_t row = p.row_offset + static_cast<std::uint32_t>(at.row);
      const std::uint32_t key = p.key_offset + static_cast<std::uint32_t>(at.key);
      if (aligned) {
        fetch_cells(row, key);
      } else {
        fetch_elements(row, key);
      }
      prim::pin(kept_);  // here, where products run
    }
  }

  // Softcap: its function in place of the raw scores; before masks.
  PANTILE_DEVICE void cap(const VariantParams& p, float (&S)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      S[e] = capped<kHooks.exact>(S[e], p.cap_inner);
    }
  }

  // Adds the additive terms to base-2 logits.
  PANTILE_DEVICE void add_terms(const VariantParams& p, const TransposedPlace& at,
                                float (&logits)[kCount]) const {
    if constexpr (kHooks.alibi) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if constexpr (kHooks.behind) {
          logits[e] = fmaf(-slope_, fabsf(distance(at, e)), logits[e]);
        } else {
          logits[e] = fmaf(slope_, distance(at, e), logits[e]);
        }
      }
    }
    if constexpr (kHooks.bias && !kHooks.bias_tile) {
      add_bias(p, at, logits);
    }
    if constexpr (kHooks.score && !kHooks.raw_score) {
      this->user_score.add(p, at, logits);
    }
    if constexpr (kHooks.mask && !kHooks.raw()) {
      this->user_mask.hide(p, at, logits, -core::kInfinity);
    }
  }

  // A score that is not additive: raw scores become its slopes, and `values` its values.
  PANTILE_DEVICE void weigh(const VariantParams& p, const TransposedPlace& at, float (&S)[kCount],
                            float (&values)[kCount]) const {
    this->user_score.weigh(p, at, S, values);
  }

  // What a mask hides behind a function whose slopes stand in S.
  PANTILE_DEVICE void hide_raw(const VariantParams& p, const TransposedPlace& at,
                               float (&S)[kCount], float (&values)[kCount]) const {
    if constexpr (kHooks.mask) {
      this->user_mask.hide(p, at, values, kHiddenCapped);
      this->user_mask.hide(p, at, S, 0.0f);
    }
  }

  // Asks the mask of tensors about the pairs of a step.
  PANTILE_DEVICE void ask(const VariantParams& p, const TransposedPlace& at) {
    if constexpr (kHooks.stored_forms != 0) {
      StoredMask<kHooks.stored_forms, kHooks.stored_clauses>::template fragment<true, kQueries / 8>(
          p.mask, MaskPlace{batch_, head_, at.rows, at.keys, at.keys - at.rows}, at.row, at.key,
          shown_);
    }
  }

  // Zeros where one of the masks beside the window hides a pair; ask() came before.
  PANTILE_DEVICE void hide_pairs(const VariantParams& p, const TransposedPlace& at,
                                 float (&x)[kCount]) const {
    if constexpr (kHooks.mask) {
      this->user_mask.hide(p, at, x, 0.0f);
    }
    if constexpr (kHooks.stored_forms != 0) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        x[e] = (shown_[key_of(e)] >> (e / 4 * 2 + e % 2) & 1u) != 0 ? x[e] : 0.0f;
      }
    }
  }

  // Zeroes the packed weights of slice k that are not kept.
  PANTILE_DEVICE void drop(std::uint32_t (&P)[4], int k) const {
    P[0] &= kept_halves<0>(kept_[k][0], kept_[k][1]);
    P[1] &= kept_halves<1>(kept_[k][0], kept_[k][1]);
    P[2] &= kept_halves<2>(kept_[k][0], kept_[k][1]);
    P[3] &= kept_halves<3>(kept_[k][0], kept_[k][1]);
  }

  PANTILE_DEVICE void drop(std::uint32_t (&P)[kSlices][4]) const {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
      drop(P[k], k);
    }
  }

  // Packed weights of slice k, the two of each word swapped, with the sign bits of those set that
  // are not kept.
  PANTILE_DEVICE uint4 with_signs(int k, const uint4& words) const {
    if constexpr (kHooks.dropout) {
      constexpr std::uint32_t kSigns = 0x80008000u;
      const std::uint32_t even = kept_[k][0], odd = kept_[k][1];
      return make_uint4(words.x | (~kept_halves<0>(odd, even) & kSigns),
                        words.y | (~kept_halves<1>(odd, even) & kSigns),
                        words.z | (~kept_halves<2>(odd, even) & kSigns),
                        words.w | (~kept_halves<3>(odd, even) & kSigns));
    } else {
      return words;
    }
  }

  // `kept` where element e is kept, else `dropped`.
  PANTILE_DEVICE float select(int e, float kept, float dropped) const {
    // The sign bit of byte e / 2 % 4, four times.
    const std::uint32_t selector = 0x8888u + 0x1111u * static_cast<std::uint32_t>(e / 2 % 4);
    std::uint32_t mask;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(kept_[e / 8][e % 2]), "r"(selector));
    return __uint_as_float((__float_as_uint(kept) & mask) | (__float_as_uint(dropped) & ~mask));
  }

  // Of the step whose dS is noted next, element by element.
  PANTILE_DEVICE void begin_notes(const VariantParams& p, const TransposedPlace& at) {
    noted_ = at;
    if constexpr (kHooks.grad_bias) {
      bias_step_ = static_cast<std::int32_t>(p.grad_bias_query) * 4;
      bias_last_row_ = at.rows - 1 - at.row;
      float* const row = p.grad_bias + grad_bias_ + at.row * p.grad_bias_query;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = at.key + 8 * i;
        bias_to_[i] = row + core::min_of(key, at.keys - 1);
        bias_last_[i] = key < at.keys ? bias_last_row_ : -1;
      }
    }
  }

  PANTILE_DEVICE void note(const VariantParams& p, int e, float dS) {
    const TransposedPlace& at = noted_;
    if constexpr (kHooks.grad_alibi) {
      grad_slope_ = fmaf(dS, fabsf(distance(at, e)), grad_slope_);
    }
    if constexpr (kHooks.grad_bias) {
      const bool exists = column_of(e) <= bias_last_[key_of(e)];
      const float gradient = kHooks.dropout ? dS * p.keep_scale : dS;
      if constexpr (kHooks.bias_alone) {
        float* const to = prim::advance(bias_to_[key_of(e)], column_of(e), bias_step_);
        prim::global_store_if(exists, to, gradient);
      } else {
        // ptxas makes a branch of each addition with a predicate; 0 may go to any element.
        const int column = core::min_of(column_of(e), bias_last_row_);
        prim::global_add(prim::advance(bias_to_[key_of(e)], column, bias_step_),
                         exists ? gradient : 0.0f);
      }
    }
    if constexpr (kHooks.grad_captured && !kHooks.raw_score) {
      this->user_score.note(p, at, e, dS);
    }
  }

  // Of a score that is not additive: dS before its slope, and the raw scores.
  PANTILE_DEVICE void note_raw(const VariantParams& p, int e, float dS, const float (&S)[kCount]) {
    this->user_score.note(p, noted_, e, dS, S);
  }

  // All rows of a head are done.
  PANTILE_DEVICE void finish_head(const VariantParams& p) {
    if constexpr (kHooks.grad_captured) {
      this->user_score.finish(p);
    }
  }

  // The sum over the warp of dS times the distance, of the rows of the head; in all lanes.
  PANTILE_DEVICE float slope_sum() const {
    float sum = grad_slope_;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(prim::kAllLanes, sum, step);
    }
    return sum;
  }

 private:
  // Key less position of element e.
  static PANTILE_DEVICE float distance(const TransposedPlace& at, int e) {
    return static_cast<float>(at.distance) + static_cast<float>(8 * key_of(e) - column_of(e));
  }

  // Rows past the end have P = 0, whatever is added, and so do keys, which read the last one.
  PANTILE_DEVICE void add_bias(const VariantParams& p, const TransposedPlace& at,
                               float (&logits)[kCount]) const {
    using Element = std::conditional_t<kHooks.bias_dtype == DType::f32, float, std::uint16_t>;
    const Element* line = static_cast<const Element*>(p.bias) + bias_ + at.row * p.bias_query +
                          core::min_of(at.key, at.keys - 1);
    const int other = core::min_of(8, core::max_of(at.keys - 1 - at.key, 0));
    const int left = at.rows - at.row;
#pragma unroll
    for (int e = 0; e < kCount; e += 4) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Element* const from = line + c * p.bias_query;
        if (column_of(e + c) < left) {
          logits[e + c] = fmaf(value_of(__ldg(from)), core::kLog2E, logits[e + c]);
          logits[e + 2 + c] = fmaf(value_of(__ldg(from + other)), core::kLog2E, logits[e + 2 + c]);
        }
      }
      line += 8 * p.bias_query;
    }
  }

  static PANTILE_DEVICE float value_of(float x) { return x; }
  static PANTILE_DEVICE float value_of(std::uint16_t bits) {
    return prim::unpack<kHooks.bias_dtype == DType::f32 ? DType::bf16 : kHooks.bias_dtype>(bits).x;
  }

  PANTILE_DEVICE void fetch_cells(std::uint32_t row, std::uint32_t key) {
    core::PhiloxWords cell = core::dropout_cell(stream_.batch, stream_.head, row, key);
#pragma unroll
    for (int k = 0; k < kSlices; k += 2) {
      const CellPair cells = stream_.pair<1, 1>(cell, 4, (key & 1u) != 0);
      kept_[k][0] = cells.first[0], kept_[k][1] = cells.first[1];
      kept_[k + 1][0] = cells.second[0], kept_[k + 1][1] = cells.second[1];
      cell.word[1] += 8;
    }
  }

  // The same where the tile's first row or key is no multiple of 16, because those before see
  // nothing: a call of the generator an element.
  PANTILE_DEVICE void fetch_elements(std::uint32_t row, std::uint32_t key) {
#pragma unroll
    for (int k = 0; k < kSlices; ++k) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        std::uint32_t bytes = 0;
#pragma unroll 1
        for (std::uint32_t byte = 0; byte < 4; ++byte) {
          const std::uint32_t at = row + static_cast<std::uint32_t>(16 * k + c) + 8 * (byte / 2);
          bytes |= stream_.byte(at, key + 8 * (byte % 2)) << (8 * byte);
        }
        kept_[k][c] = stream_.kept(bytes);
      }
    }
  }

  float slope_, grad_slope_;
  DropoutStream stream_;
  std::int64_t bias_, grad_bias_;  // of the head, in elements
  std::uint32_t kept_[kSlices][2];
  TransposedPlace noted_;
  // Of the gradient of a bias. For each of the thread's keys: the first element of the step, and
  // the last query from there on, -1 without the key.
  float* bias_to_[2];
  int bias_last_[2];
  int bias_last_row_;       // of the sequence
  std::int32_t bias_step_;  // bytes between queries
  int batch_, head_;        // these two: of a mask of tensors
  std::uint32_t shown_[2];  // as its fragment()
};

}  // namespace pantile::attn
