// The kernel before the FP8 backward: images of queries and keys (storage.cuh), one block of 128
// rows of a head a block of threads, and zeros in the sums of dQ.
//
// Queries: dO is read once; its largest element gives the scale, then its codes, with delta of
// these codes and of O. Codes of Q and dO are laid out by rows and transposed, from shared memory.
// Keys: codes of K by rows and transposed, codes of V by rows.
#pragma once

#include "hopper/fp8_backward/storage.cuh"
#include "prim/convert.cuh"
#include "prim/e4m3.cuh"
#include "prim/grid_dependency.cuh"
#include "prim/half2.cuh"
#include "prim/unpack.cuh"
#include "prim/warp.cuh"

namespace pantile::hopper {

inline constexpr int kFp8PrepareThreads = 256;

struct Fp8PrepareParams {
  core::SequenceSide queries, keys;
  int heads_q, batch, q_blocks, k_blocks, head_dim;
  float limit;  // largest code of dO
  float value_factor;
  float scale;  // softmax scale
  const std::uint8_t *codes_q, *codes_k, *codes_v;
  const float* scale_q;     // [heads_q][q_blocks]
  const float* q_dot_mean;  // or null
  const std::uint16_t *o, *grad_o;
  Layout o_layout, grad_o_layout;
  const float *lse, *grad_lse;  // the second may be null
  std::int64_t lse_batch, lse_head;
  std::uint8_t *row_images, *key_images;
  float* dq_sum;
  std::int32_t *turns, *ticket;  // null unless deterministic
  bool is_f16;
};

// A block of 128 rows of a head; `rows` of them are in use, none in a block of no sequence.
struct Fp8Block {
  int batch, head, block;  // block: among those of the head
  int first, rows;         // first: in its sequence
  std::int64_t row;        // packed: rows before the sequence
};

PANTILE_DEVICE Fp8Block locate_fp8_block(const core::SequenceSide& side, int batch, int blocks,
                                         int work) {
  Fp8Block found;
  found.head = work / blocks;
  found.block = work % blocks;
  found.batch =
      side.cu_seqlens == nullptr
          ? found.block / core::ceil_div(side.max_length, core::kBlockedRows)
          : core::sequence_of_slot(side.cu_seqlens, batch, core::kBlockedRows, found.block);
  const core::Sequence sequence = core::locate_sequence(side, found.batch);
  found.row = sequence.row;
  found.first =
      (found.block - static_cast<int>(core::first_block(side, found.batch))) * core::kBlockedRows;
  found.rows = core::clamp(sequence.length - found.first, 0, core::kBlockedRows);
  return found;
}

// Place of 16 bytes in a tile of rows of kBytes, swizzled as the products read it.
template <int kBytes>
PANTILE_DEVICE int swizzled_chunk(int row, int chunk) {
  const int moved = kBytes == 128 ? chunk ^ (row & 7) : chunk ^ (row >> 1 & 3);
  return row * kBytes + moved * 16;
}

// A code, 0 in place of NaN: a hidden pair must not carry it on.
PANTILE_DEVICE std::uint32_t without_nan(std::uint32_t code) {
  return (code & 0x7fu) == 0x7fu ? 0u : code;
}

// Word `word` of 16 codes of column `column`, of rows row_of(0), ..., row_of(15).
template <int kPitch, class RowOf>
PANTILE_DEVICE std::uint32_t column_word(const std::uint8_t* tile, int column, int word,
                                         const RowOf& row_of) {
  std::uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t code = tile[row_of(4 * word + i) * kPitch + column];
    result |= without_nan(code) << (8 * i);
  }
  return result;
}

template <int kPitch, class RowOf>
PANTILE_DEVICE uint4 column_chunk(const std::uint8_t* tile, int column, const RowOf& row_of) {
  return make_uint4(
      column_word<kPitch>(tile, column, 0, row_of), column_word<kPitch>(tile, column, 1, row_of),
      column_word<kPitch>(tile, column, 2, row_of), column_word<kPitch>(tile, column, 3, row_of));
}

template <int kDim>
class Fp8Prepare {
 public:
  PANTILE_DEVICE Fp8Prepare(const Fp8PrepareParams& p, std::uint8_t* memory)
      : p_(p), a_(memory), b_(memory + core::kBlockedRows * kPitch) {}

  PANTILE_DEVICE void run() {
    const int work = static_cast<int>(blockIdx.x);
    if (p_.ticket != nullptr && work == 0 && threadIdx.x == 0) {
      *p_.ticket = 0;
    }
    const int row_blocks = p_.heads_q * p_.q_blocks;
    prim::wait_for_previous_grid();
    if (work < row_blocks) {
      const Fp8Block block = locate_fp8_block(p_.queries, p_.batch, p_.q_blocks, work);
      if (block.rows > 0) {
        clear_sums(block);
        load_codes(p_.codes_q, p_.q_blocks, block, a_);
        quantize(block);
        __syncthreads();
        write_rows(block);
      }
    } else {
      const Fp8Block block = locate_fp8_block(p_.keys, p_.batch, p_.k_blocks, work - row_blocks);
      if (block.rows > 0) {
        load_codes(p_.codes_k, p_.k_blocks, block, a_);
        load_values(block);
        __syncthreads();
        write_keys(block);
      }
    }
  }

  // Odd multiples of 4 bytes between rows: columns are read without bank conflicts.
  static constexpr int kPitch = kDim + 4;
  static constexpr int kValuePitch = core::kBlockedRows + 4;
  static constexpr int kSharedBytes =
      core::kBlockedRows * kPitch + core::max_of(core::kBlockedRows * kPitch, kDim* kValuePitch);

 private:
  static constexpr int kRows = core::kBlockedRows;
  static constexpr int kLanes = kDim == 64 ? 8 : 16;  // of a row of dO, 8 elements each
  static constexpr int kPassRows = kFp8PrepareThreads / kLanes;
  static constexpr int kPasses = kRows / kPassRows;

  PANTILE_DEVICE static int thread() { return static_cast<int>(threadIdx.x); }

  // 128 rows of codes of Q or K, zeros past the head dim.
  PANTILE_DEVICE void load_codes(const std::uint8_t* codes, int blocks, const Fp8Block& block,
                                 std::uint8_t* to) {
    const int width = core::round_up(p_.head_dim, core::kCodeAlign);
    const std::uint8_t* from =
        codes + (std::int64_t{block.head} * blocks + block.block) * kRows * width;
    for (int i = thread(); i < kRows * (kDim / 16); i += kFp8PrepareThreads) {
      const int row = i / (kDim / 16);
      const int column = i % (kDim / 16) * 16;
      const uint4 chunk = column < width
                              ? *reinterpret_cast<const uint4*>(from + row * width + column)
                              : make_uint4(0, 0, 0, 0);
      auto* words = reinterpret_cast<std::uint32_t*>(to + row * kPitch + column);
      words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    }
  }

  // Codes of V, [channel][column of a key], zeros past the head dim.
  PANTILE_DEVICE void load_values(const Fp8Block& block) {
    const std::uint8_t* from =
        p_.codes_v + (std::int64_t{block.head} * p_.k_blocks + block.block) * p_.head_dim * kRows;
    for (int i = thread(); i < kDim * (kRows / 16); i += kFp8PrepareThreads) {
      const int channel = i / (kRows / 16);
      const int column = i % (kRows / 16) * 16;
      const uint4 chunk = channel < p_.head_dim
                              ? *reinterpret_cast<const uint4*>(from + channel * kRows + column)
                              : make_uint4(0, 0, 0, 0);
      auto* words = reinterpret_cast<std::uint32_t*>(b_ + channel * kValuePitch + column);
      words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    }
  }

  PANTILE_DEVICE void clear_sums(const Fp8Block& block) {
    constexpr int kFloats = kRows * kDim;
    const std::int64_t index = std::int64_t{block.head} * p_.q_blocks + block.block;
    auto* to = reinterpret_cast<uint4*>(p_.dq_sum + index * kFloats);
    for (int i = thread(); i < kFloats / 4; i += kFp8PrepareThreads) {
      to[i] = make_uint4(0, 0, 0, 0);
    }
    if (p_.turns != nullptr && thread() < 4) {
      p_.turns[index * 4 + thread()] = 0;
    }
  }

  PANTILE_DEVICE float2 numbers(std::uint32_t pair) const {
    return p_.is_f16 ? prim::unpack<DType::f16>(pair) : prim::unpack<DType::bf16>(pair);
  }

  PANTILE_DEVICE std::int64_t row_of(const Layout& layout, const Fp8Block& block, int row) const {
    const std::int64_t sequence =
        p_.queries.cu_seqlens != nullptr ? block.row * layout.seq : block.batch * layout.batch;
    return sequence + block.head * layout.head + (block.first + row) * layout.seq;
  }

  PANTILE_DEVICE RowImage<kDim>& image(const Fp8Block& block, int half) const {
    return reinterpret_cast<RowImage<kDim>*>(
        p_.row_images)[2 * (std::int64_t{block.head} * p_.q_blocks + block.block) + half];
  }

  // Codes of dO to b_, terms and scales to the images.
  PANTILE_DEVICE void quantize(const Fp8Block& block) {
    __shared__ std::uint32_t largest;
    if (thread() == 0) {
      largest = 0;
    }
    __syncthreads();
    const int lane = thread() % kLanes;
    const int column = 8 * lane;
    uint4 raw[kPasses];
    float amax = 0.0f;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = pass * kPassRows + thread() / kLanes;
      raw[pass] = make_uint4(0, 0, 0, 0);
      if (row < block.rows && column < p_.head_dim) {
        raw[pass] = *reinterpret_cast<const uint4*>(p_.grad_o +
                                                    row_of(p_.grad_o_layout, block, row) + column);
      }
      const std::uint32_t pairs[4] = {raw[pass].x, raw[pass].y, raw[pass].z, raw[pass].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x = numbers(pairs[i]);
        amax = core::raise_amax(core::raise_amax(amax, x.x), x.y);
      }
    }
    const std::uint32_t most = __reduce_max_sync(prim::kAllLanes, __float_as_uint(amax));
    if (prim::lane_index() == 0) {
      atomicMax(&largest, most);
    }
    __syncthreads();
    const core::BlockScale scale = core::block_scale(__uint_as_float(largest), p_.limit);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      quantize_row(block, pass * kPassRows + thread() / kLanes, lane, raw[pass], scale);
    }
    if (thread() < 2) {
      RowImage<kDim>& to = image(block, thread());
      to.scale_q = p_.scale_q[std::int64_t{block.head} * p_.q_blocks + block.block];
      to.scale_grad = scale.scale;
    }
  }

  // One row by kLanes lanes.
  PANTILE_DEVICE void quantize_row(const Fp8Block& block, int row, int lane, const uint4& raw,
                                   const core::BlockScale& scale) {
    const bool exists = row < block.rows && 8 * lane < p_.head_dim;
    uint4 o = make_uint4(0, 0, 0, 0);
    if (exists) {
      o = *reinterpret_cast<const uint4*>(p_.o + row_of(p_.o_layout, block, row) + 8 * lane);
    }
    const std::uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
    const std::uint32_t outputs[4] = {o.x, o.y, o.z, o.w};
    std::uint32_t words[2];
    float sum = 0.0f;
    float lost = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      float x[4];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float2 pair = numbers(pairs[i + c]);
        x[2 * c] = pair.x;
        x[2 * c + 1] = pair.y;
      }
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (!core::is_finite(x[c])) {
          lost = 1.0f;
          x[c] = 0.0f;
        }
        x[c] = core::clamp(x[c] * scale.inverse, -p_.limit, p_.limit);
      }
      words[i / 2] = prim::pack_e4m3(x[0], x[1], x[2], x[3]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::uint32_t codes = prim::unpack_e4m3(words[i / 2] >> (16 * c) & 0xffffu);
        const float2 out = numbers(outputs[i + c]);
        sum = fmaf(prim::low_float(codes), out.x, sum);
        sum = fmaf(prim::high_float(codes), out.y, sum);
      }
    }
    if (8 * lane < kDim) {
      auto* to = reinterpret_cast<std::uint32_t*>(b_ + row * kPitch + 8 * lane);
      to[0] = words[0];
      to[1] = words[1];
    }
#pragma unroll
    for (int o_ = kLanes / 2; o_ > 0; o_ /= 2) {
      sum += __shfl_xor_sync(prim::kAllLanes, sum, o_);
      lost += __shfl_xor_sync(prim::kAllLanes, lost, o_);
    }
    if (lane == 0) {
      write_terms(block, row, sum * scale.scale, lost > 0.0f);
    }
  }

  PANTILE_DEVICE void write_terms(const Fp8Block& block, int row, float delta, bool lost) {
    float term = -__int_as_float(0x7f800000);
    float negated = 0.0f;
    const bool packed = p_.queries.cu_seqlens != nullptr;
    const std::int64_t at = block.head * p_.lse_head +
                            (packed ? block.row : block.batch * p_.lse_batch) + block.first + row;
    if (row < block.rows && p_.lse[at] != term) {
      if (p_.grad_lse != nullptr) {
        delta -= p_.grad_lse[at];
      }
      const std::int64_t own = (std::int64_t{block.head} * p_.q_blocks + block.block) * kRows + row;
      const float shift = p_.q_dot_mean == nullptr ? 0.0f : p_.scale * p_.q_dot_mean[own];
      constexpr float kUnits = 8.0f;  // log2(kWeightUnits)
      const float nan = __int_as_float(0x7fffffff);
      term = lost ? nan : kUnits - (p_.lse[at] - shift) * 1.4426950408889634f;
      negated = core::is_finite(delta) ? -delta / core::kWeightUnits : nan;
    }
    RowImage<kDim>& to = image(block, row / 64);
    to.lse[row % 64] = term;
    to.delta[row % 64] = negated;
  }

  PANTILE_DEVICE void write_rows(const Fp8Block& block) {
    constexpr int kBytes = fp8_row_bytes(kDim);
    constexpr int kChunks = kDim / 16;
    for (int i = thread(); i < kRows * kChunks; i += kFp8PrepareThreads) {
      const int row = i / kChunks;
      const int chunk = i % kChunks;
      RowImage<kDim>& to = image(block, row / 64);
      const int at = swizzled_chunk<kBytes>(row % 64, chunk);
      const auto copy = [&](std::uint8_t* image_rows, const std::uint8_t* from) {
        const auto* words =
            reinterpret_cast<const std::uint32_t*>(from + row * kPitch + 16 * chunk);
        *reinterpret_cast<uint4*>(image_rows + at) =
            make_uint4(words[0], words[1], words[2], words[3]);
      };
      copy(to.q, a_);
      copy(to.grad, b_);
    }
    for (int i = thread(); i < kRows / 16 * kDim; i += kFp8PrepareThreads) {
      const int column = i % kDim;
      const int sixteen = i / kDim;  // of the block's rows
      const auto place = [&](int k) { return core::value_key(16 * sixteen + k); };
      RowImage<kDim>& to = image(block, sixteen / 4);
      const int at = swizzled_chunk<64>(column, sixteen % 4);
      *reinterpret_cast<uint4*>(to.q_t + at) = column_chunk<kPitch>(a_, column, place);
      *reinterpret_cast<uint4*>(to.grad_t + at) = column_chunk<kPitch>(b_, column, place);
    }
  }

  // Two codes of V times value_factor.
  PANTILE_DEVICE std::uint32_t scaled_pair(std::uint32_t codes) const {
    const std::uint32_t factor = prim::half_pair(p_.value_factor, p_.value_factor);
    return prim::fma2(prim::unpack_e4m3(codes), factor, 0x80008000u);
  }

  PANTILE_DEVICE void write_keys(const Fp8Block& block) {
    constexpr int kBytes = fp8_row_bytes(kDim);
    constexpr int kChunks = kDim / 16;
    KeyImage<kDim>& to = reinterpret_cast<KeyImage<kDim>*>(
        p_.key_images)[std::int64_t{block.head} * p_.k_blocks + block.block];
    for (int i = thread(); i < kRows * kChunks; i += kFp8PrepareThreads) {
      const int key = i % kRows;
      const int chunk = i / kRows;
      const int at = swizzled_chunk<kBytes>(key, chunk);
      const auto* words = reinterpret_cast<const std::uint32_t*>(a_ + key * kPitch + 16 * chunk);
      *reinterpret_cast<uint4*>(to.k + at) = make_uint4(words[0], words[1], words[2], words[3]);
      const int column = core::value_column(key);
      std::uint32_t values[4];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        std::uint32_t codes[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          codes[c] = b_[(16 * chunk + 4 * word + c) * kValuePitch + column];
        }
        values[word] = prim::pack_e4m3(scaled_pair(codes[0] | codes[1] << 8),
                                       scaled_pair(codes[2] | codes[3] << 8));
      }
      *reinterpret_cast<uint4*>(to.v + at) = make_uint4(values[0], values[1], values[2], values[3]);
    }
    for (int i = thread(); i < kRows / 16 * kDim; i += kFp8PrepareThreads) {
      const int column = i % kDim;
      const int sixteen = i / kDim;
      // Place k of 16 holds key k / 2 + 8 (k % 2).
      const auto place = [&](int k) { return 16 * sixteen + k / 2 + 8 * (k & 1); };
      *reinterpret_cast<uint4*>(to.k_t + swizzled_chunk<128>(column, sixteen)) =
          column_chunk<kPitch>(a_, column, place);
    }
  }

  const Fp8PrepareParams& p_;
  std::uint8_t *a_, *b_;  // codes of Q or K; of dO or V
};

template <int kDim>
__global__ void __launch_bounds__(kFp8PrepareThreads)
    prepare_backward_fp8(const __grid_constant__ Fp8PrepareParams p) {
  __shared__ alignas(16) std::uint8_t memory[Fp8Prepare<kDim>::kSharedBytes];
  Fp8Prepare<kDim>(p, memory).run();
}

}  // namespace pantile::hopper
