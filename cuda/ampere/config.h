// Tile sizes of the ampere kernels and what they cost in shared memory. Plain C++17 without CUDA,
// so that plans and tests read the numbers the kernels are compiled with.
#pragma once

#include "build_options.h"
#include "pantile/registry.h"

namespace pantile::ampere {

// GPUs by the shared memory that one block may ask for (DeviceProps::smem_optin_bytes). A
// multiprocessor has 1 KB more, and each resident block uses up 1 KB besides its own.
enum class SharedClass {
  small,   //  99 KB: sm_86, sm_89, sm_120
  medium,  // 163 KB: sm_80, sm_87
  large,   // 227 KB: sm_90, sm_100
};

constexpr int shared_class_bytes(SharedClass shared) {
  return (shared == SharedClass::large ? 227 : shared == SharedClass::medium ? 163 : 99) * 1024;
}

// smem_optin_bytes is at least shared_class_bytes(small).
constexpr SharedClass shared_class(int smem_optin_bytes) {
  return smem_optin_bytes >= shared_class_bytes(SharedClass::large)    ? SharedClass::large
         : smem_optin_bytes >= shared_class_bytes(SharedClass::medium) ? SharedClass::medium
                                                                       : SharedClass::small;
}

// The class whose tiles the compiled 16-bit kernels have for such a GPU; those compiled at run time
// and those of fp32 have tiles for every class.
constexpr SharedClass compiled_class(int smem_optin_bytes) {
  const SharedClass shared = shared_class(smem_optin_bytes);
  return shared == SharedClass::large && !kAmpereLargeTiles ? SharedClass::medium : shared;
}

// How a warp orders the work of one key tile.
//   sequential  S, then softmax, then O; the exponentials of 16 keys run under the O products of
//               the 16 keys before them.
//   pipelined   S of the next tile and O of this one in one stream, 32 keys at a time, with this
//               tile's exponentials and the next one's maxima between them. Needs two stages, and
//               registers for two tiles of scores.
enum class Schedule { sequential, pipelined };

struct ForwardTile {
  int tile_q;  // query rows of a block
  int tile_k;  // keys of a tile
  int warps;   // each owns tile_q / warps query rows, a multiple of 16
  int stages;  // K, V tiles in shared memory; 1: K and V are refilled in turn
  int blocks_per_sm;
  bool q_in_registers;
  Schedule schedule;

  constexpr int threads() const { return warps * 32; }
};

// Where the sums of a row's P are taken.
//   vector   FADD on P in fp32: LSE to fp32 accuracy
//   operand  a product of the 16-bit P with ones: half a tensor instruction for four FADDs and no
//            shuffles at the end, P in fp32 dies at once; LSE is that of the rounded P
//   tf32     a product of the fp32 P, cut to 11 bits, with ones (the paper's)
enum class RowSum { vector, operand, tf32 };

// Which softmax work a forward kernel gives to the tensor cores: docs/design/flashattention-t.md.
struct SoftmaxKind {
  RowSum row_sum = RowSum::vector;
  int tensor_quarters = 0;        // how many of every four score tiles are scaled by a TF32 product
  bool by_rows = false;           // instead of key tiles, every second 16-row tile (quarters = 2)
  bool shared_reference = false;  // one reference for 16 rows; O is rescaled by a TF32 product
  bool fast_scale = false;        // scale folded into Q, reference into the first step of Q K^T
  // Warp barriers that keep the compiler from moving exponentials in front of the products they are
  // written between. Measured on an H200: +5-11 % at head dim 64, up to 1 % at 128. Other kinds
  // keep their order without, or lose by them.
  bool ordered = false;
};

// Each a kernel of its own.
enum class ForwardSoftmax {
  vector,
  tensor,         // the row sum by the 16-bit operand, nothing else
  quarter_share,  // tensor, and a quarter, half or all of the scores scaled by TF32 products
  half_share,
  full_share,
  row_share,  // half of them, by rows
  surrogate,  // as in the paper: shared reference, a quarter of the scores, TF32 row sum
  fast_scale,
};

constexpr SoftmaxKind softmax_kind(ForwardSoftmax softmax) {
  switch (softmax) {
    case ForwardSoftmax::vector: return {};
    case ForwardSoftmax::tensor: return {RowSum::operand, 0, false, false, false, true};
    case ForwardSoftmax::quarter_share: return {RowSum::operand, 1};
    case ForwardSoftmax::half_share: return {RowSum::operand, 2};
    case ForwardSoftmax::full_share: return {RowSum::operand, 4};
    case ForwardSoftmax::row_share: return {RowSum::operand, 2, true};
    case ForwardSoftmax::surrogate: return {RowSum::tf32, 1, false, true};
    case ForwardSoftmax::fast_scale: return {RowSum::operand, 0, false, false, true};
  }
  return {};
}

// A sequence with more keys than this may have takes the kernel that sums P V and P key tile by key
// tile, with the softmax on vector units. Tensor cores cut bits off when they add, towards zero: a
// mean of V of 1 then comes out 7e-9 too small for each key, as much as half of what an f16 O
// resolves at 70,000 keys, and at 1,000,000 seven times as much as all of it.
inline constexpr std::int64_t kLongRowKeys = 131072;

// Which kinds a row of cuda/kernels.def has.
constexpr bool has_softmax(DType dtype, int head_dim, int head_dim_v, MaskKind mask,
                           ForwardSoftmax softmax) {
  const bool measured = dtype != DType::f32 && head_dim == head_dim_v &&
                        (head_dim == 64 || head_dim == 128) &&
                        (mask == MaskKind::full || mask == MaskKind::causal);
  return softmax == ForwardSoftmax::vector || measured;
}

// Kinds to compare with, which are compiled with PANTILE_EXPERIMENTS only.
constexpr bool is_trial(ForwardSoftmax softmax) {
  return softmax != ForwardSoftmax::vector && softmax != ForwardSoftmax::tensor;
}

constexpr bool softmax_is_built(ForwardSoftmax softmax) {
  return kExperiments || !is_trial(softmax);
}

// The class whose tile a kernel takes, on a GPU of class `compiled`. Long rows have one tile, for
// every GPU. Softmax on tensor cores has none for the smallest: no GPU of them takes it by itself,
// and the tile for 163 KB also runs there, if with fewer blocks at a time.
constexpr SharedClass forward_tile_class(SharedClass compiled, ForwardSoftmax softmax,
                                         bool long_rows) {
  if (softmax == ForwardSoftmax::vector) {
    return long_rows ? SharedClass::small : compiled;
  }
  return compiled == SharedClass::small ? SharedClass::medium : compiled;
}

inline constexpr int kWorkBytes = 128;  // ForwardWork and BackwardWork (storage.cuh)

constexpr int forward_shared_bytes(const ForwardTile& tile, int head_dim, int head_dim_v) {
  return 2 * (tile.tile_q * head_dim + tile.stages * tile.tile_k * (head_dim + head_dim_v)) +
         kWorkBytes + 4 * tile.tile_q;  // row sums of earlier key tiles
}

// Two warps a scheduler (8 a multiprocessor) that drift apart keep the tensor cores fed; one alone
// cannot (measured on an H200: 62 % of the rate). 32 query rows a warp halve the shared-memory
// reads per product against 16 rows; 256 columns of O leave registers for 16 only.
// head_dim x head_dim_v is one of those in cuda/kernels.def.
constexpr ForwardTile forward_tile(int head_dim, int head_dim_v, MaskKind mask,
                                   SharedClass shared) {
  constexpr Schedule kSequential = Schedule::sequential;
  constexpr Schedule kPipelined = Schedule::pipelined;
  const bool window = mask == MaskKind::window || mask == MaskKind::any;
  const bool large = shared == SharedClass::large;
  const bool small = shared == SharedClass::small;
  switch (head_dim) {
    case 32: return {128, 64, 4, 2, 2, true, kPipelined};
    case 64: return {128, 64, 4, 2, 2, true, kPipelined};
    case 96: return {128, 64, 4, small ? 1 : 2, 2, false, kSequential};
    case 128:
      // Windows end in more partly seen tiles, where short ones waste less.
      return large && !window ? ForwardTile{128, 64, 4, 2, 2, false, kSequential}
             : small          ? ForwardTile{128, 32, 4, 1, 2, false, kSequential}
                              : ForwardTile{128, 32, 4, 2, 2, false, kSequential};
    case 192:
      if (head_dim_v == 128) {
        return large ? ForwardTile{128, 32, 4, 2, 2, false, kSequential}
                     : ForwardTile{128, 32, 4, 1, 2, false, kSequential};
      }
      return {64, 64, 4, 1, 2, false, kSequential};
    default:
      return shared == SharedClass::medium ? ForwardTile{128, 64, 8, 1, 1, false, kSequential}
                                           : ForwardTile{64, 64, 4, 1, 2, false, kSequential};
  }
}

// A tile of a 16-bit bias (ampere/bias.cuh), and whether it has a place beside those of a tile
// without blocks getting fewer: a multiprocessor has 1 KB more than a block may ask for, and each
// block uses up 1 KB.
constexpr int bias_tile_bytes(int tile_q, int tile_k) {
  return 2 * tile_q * tile_k;
}

constexpr bool has_bias_place(int blocks_per_sm, int bytes, SharedClass shared) {
  return bytes <= shared_class_bytes(shared) &&
         blocks_per_sm * (bytes + 1024) <= shared_class_bytes(shared) + 1024;
}

// `shared` is that of the GPU; the tile may be one for less.
constexpr bool has_bias_tile(const ForwardTile& tile, int head_dim, int head_dim_v,
                             SharedClass shared) {
  return has_bias_place(
      tile.blocks_per_sm,
      forward_shared_bytes(tile, head_dim, head_dim_v) + bias_tile_bytes(tile.tile_q, tile.tile_k),
      shared);
}

// When dQ += dS K of a step of rows is computed: within it, behind a barrier of its own, or within
// the next one, where dS has long been in shared memory. That takes a second buffer of dS.
enum class GradQueries { own_step, before_next_scores, after_next_products };

// The backward: a block owns tile_k keys and their dK and dV, and walks over the rows that see
// them.
struct BackwardTile {
  int tile_q;        // query rows of a step
  int tile_k;        // keys of a block
  int key_warps;     // warps along the keys; each owns tile_k / key_warps of them
  int column_warps;  // warps that share these keys: each owns 1 / column_warps of the columns of dK
                     // and dV. More than one: P and dS go through shared memory to all of them
  int passes;  // S and dP are computed for tile_q / passes rows at a time; 1 if column_warps > 1
  int grad_q_warps;  // warps along the rows of dQ; the others divide its columns
  int stages;        // of Q and dO
  int blocks_per_sm;
  GradQueries grad_queries;

  constexpr int grad_s_buffers() const { return grad_queries == GradQueries::own_step ? 1 : 2; }
  constexpr int warps() const { return key_warps * column_warps; }
  constexpr int threads() const { return warps() * 32; }
};

// Per row: minus LSE, minus delta, and the scale of integer sums (backward_rows.cuh).
inline constexpr int kRowTerms = 3;

constexpr int backward_shared_bytes(const BackwardTile& tile, int head_dim, int head_dim_v) {
  const int weights = tile.grad_s_buffers() + (tile.column_warps > 1 ? 1 : 0);  // dS, P if shared
  return 2 * (tile.tile_k + tile.stages * tile.tile_q) * (head_dim + head_dim_v) +
         2 * weights * tile.tile_k * tile.tile_q +
         4 * 2 * tile.grad_s_buffers() * kRowTerms * tile.tile_q + kWorkBytes;
}

// The same for the backward. A warp has one piece of a tile: passes take several.
constexpr bool has_bias_tile(const BackwardTile& tile, int head_dim, int head_dim_v,
                             SharedClass shared) {
  return tile.passes == 1 && has_bias_place(tile.blocks_per_sm,
                                            backward_shared_bytes(tile, head_dim, head_dim_v) +
                                                bias_tile_bytes(tile.tile_q, tile.tile_k),
                                            shared);
}

// The tile of a backward that copies its bias: with one stage of Q and dO where two leave no place.
// Their copies then run under dQ only.
constexpr BackwardTile with_bias_tile(BackwardTile tile, int head_dim, int head_dim_v,
                                      SharedClass shared) {
  const bool can_have_one = tile.grad_queries == GradQueries::own_step;
  if (can_have_one && !has_bias_tile(tile, head_dim, head_dim_v, shared)) {
    tile.stages = 1;
  }
  return tile;
}

// Where warps have their own keys, dQ comes last in a step: its additions to global memory run
// under the next scores. Eight column shares of 256 columns, and two blocks of 96, like it first.
// Measured on an H200 against dQ in its own step: 1.02 to 1.05x.
constexpr BackwardTile backward_tile(int head_dim, SharedClass shared) {
  constexpr GradQueries kOwnStep = GradQueries::own_step;
  constexpr GradQueries kBefore = GradQueries::before_next_scores;
  constexpr GradQueries kAfter = GradQueries::after_next_products;
  const bool large = shared == SharedClass::large;
  const bool small = shared == SharedClass::small;
  switch (head_dim) {
    case 32: return {64, 128, 4, 1, 2, 2, small ? 1 : 2, 2, kOwnStep};
    case 64:
      return small   ? BackwardTile{64, 64, 4, 1, 1, 2, 1, 2, kOwnStep}
             : large ? BackwardTile{64, 128, 4, 1, 2, 2, 2, 2, kAfter}
                     : BackwardTile{64, 128, 4, 1, 2, 2, 1, 2, kOwnStep};
    case 96:
      return small   ? BackwardTile{64, 64, 4, 1, 1, 2, 1, 1, kOwnStep}
             : large ? BackwardTile{64, 64, 2, 2, 1, 2, 2, 2, kBefore}
                     : BackwardTile{64, 64, 2, 2, 1, 2, 1, 2, kOwnStep};
    case 128:
      return small   ? BackwardTile{64, 64, 2, 2, 1, 2, 1, 1, kOwnStep}
             : large ? BackwardTile{64, 128, 4, 2, 1, 2, 2, 1, kAfter}
                     : BackwardTile{64, 128, 4, 2, 1, 2, 2, 1, kOwnStep};
    default:
      return small   ? BackwardTile{32, 32, 2, 2, 1, 1, 1, 1, kOwnStep}
             : large ? BackwardTile{64, 64, 2, 4, 1, 2, 2, 1, kBefore}
                     : BackwardTile{64, 64, 2, 4, 1, 2, 1, 1, kOwnStep};
  }
}

}  // namespace pantile::ampere
