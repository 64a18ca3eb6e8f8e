// Statistics of the keys (KeyStatistics of pantile/problem.h) on the CPU, whose own backward sums
// dQ in fp32 in the order of the keys: it has no unit that depends on them, and takes no mean away.
#include "cpu/key_statistics.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/integer_unit.h"
#include "core/sequence.h"
#include "cpu/elements.h"

namespace pantile::cpu {
namespace {

static_assert(sizeof(core::KeyBounds) <= kKeyStatisticsBounds * sizeof(std::int32_t));

// The bits of max |x_i| and of the norm; a NaN is above all. Double, in which no square of a float
// overflows or vanishes; a finite norm is at most the largest float.
std::uint32_t largest_bits(const std::vector<float>& row) {
  std::uint32_t most = 0;
  for (const float x : row) {
    most = core::max_of(most, core::float_bits(std::fabs(x)));
  }
  return most;
}

std::uint32_t norm_bits(const std::vector<float>& row) {
  double sum = 0.0;
  for (const float x : row) {
    sum += static_cast<double>(x) * x;
  }
  const auto norm = static_cast<float>(std::sqrt(sum));
  const std::uint32_t most = largest_bits(row);
  constexpr std::uint32_t kLargestFloat = 0x7f7fffffu;
  return core::is_finite_bits(most) ? core::min_of(core::float_bits(norm), kLargestFloat) : most;
}

}  // namespace

void write_key_statistics(const ForwardProblem& problem, const BackwardTensors& tensors) {
  core::SequenceSide side;
  side.batch_stride = problem.k.batch;
  side.seq_stride = problem.k.seq;
  side.max_length = static_cast<int>(problem.seqlen_k);
  side.cu_seqlens = tensors.forward.cu_seqlens_k;
  side.seqused = tensors.forward.seqused_k;
  core::SequenceSide side_v = side;
  side_v.batch_stride = problem.v.batch;
  side_v.seq_stride = problem.v.seq;
  std::vector<float> k(static_cast<std::size_t>(problem.head_dim));
  std::vector<float> v(static_cast<std::size_t>(problem.head_dim_v));
  const std::int64_t ints = key_statistics_ints(problem);
  for (std::int64_t i = 0; i < problem.batch * problem.heads_k; ++i) {
    const std::int64_t head = i % problem.heads_k;
    const int batch = static_cast<int>(i / problem.heads_k);
    const core::Sequence keys = core::locate_sequence(side, batch);
    const core::Sequence values = core::locate_sequence(side_v, batch);
    core::KeyBounds bounds{};
    for (std::int64_t j = 0; j < keys.length; ++j) {
      load_row(problem.dtype, tensors.forward.k,
               keys.offset + j * problem.k.seq + head * problem.k.head, static_cast<int>(k.size()),
               k.data());
      load_row(problem.dtype, tensors.forward.v,
               values.offset + j * problem.v.seq + head * problem.v.head,
               static_cast<int>(v.size()), v.data());
      core::count_key(&bounds, largest_bits(k), norm_bits(v));
    }
    std::int32_t* const to = tensors.key_statistics + i * ints;
    std::memset(to, 0, static_cast<std::size_t>(ints) * sizeof *to);
    std::memcpy(to, &bounds, sizeof bounds);
  }
}

}  // namespace pantile::cpu
