// Where sequences and heads lie, against addresses counted one row at a time.
#include "core/sequence.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

using pantile::core::Heads;
using pantile::core::locate_sequence;
using pantile::core::Sequence;
using pantile::core::SequenceSide;

TEST(Sequence, DenseBatchesFollowTheirStrides) {
  for (int length = 0; length <= 5; ++length) {
    for (const std::int64_t batch_stride :
         {std::int64_t{0}, std::int64_t{7}, std::int64_t{1} << 33}) {
      SequenceSide side;
      side.batch_stride = batch_stride;
      side.seq_stride = 3;
      side.max_length = length;
      for (int b = 0; b <= 4; ++b) {
        const Sequence sequence = locate_sequence(side, b);
        ASSERT_EQ(sequence.offset, b * batch_stride);
        ASSERT_EQ(sequence.row, b * length);
        ASSERT_EQ(sequence.length, length);
      }
    }
  }
}

TEST(Sequence, PackedBatchesFollowTheirPrefixSums) {
  for (int pattern = 0; pattern < 4 * 4 * 4; ++pattern) {
    const int lengths[] = {pattern % 4, pattern / 4 % 4, pattern / 16};
    std::vector<std::int32_t> cu_seqlens = {0};
    for (const int length : lengths) {
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    SequenceSide side;
    side.cu_seqlens = cu_seqlens.data();
    side.seq_stride = 10;
    side.batch_stride = 12345;  // must not be used
    side.max_length = 1;        // must not be used
    int row = 0;
    for (int b = 0; b < 3; ++b) {
      const Sequence sequence = locate_sequence(side, b);
      ASSERT_EQ(sequence.row, row);
      ASSERT_EQ(sequence.offset, row * 10);
      ASSERT_EQ(sequence.length, lengths[b]);
      row += lengths[b];
    }
  }
}

TEST(Sequence, OffsetsBeyond32BitsAreExact) {
  const std::vector<std::int32_t> cu_seqlens = {0, 500'000'000, 500'000'001};
  SequenceSide packed;
  packed.cu_seqlens = cu_seqlens.data();
  packed.seq_stride = 1 << 20;
  EXPECT_EQ(locate_sequence(packed, 1).offset, 500'000'000LL << 20);
  SequenceSide dense;
  dense.max_length = 1 << 28;
  EXPECT_EQ(locate_sequence(dense, 100).row, 100LL << 28);
}

TEST(Sequence, SequsedShortensAndNeverLengthens) {
  const std::vector<std::int32_t> cu_seqlens = {0, 4, 9};
  for (int used = -2; used <= 8; ++used) {
    const std::vector<std::int32_t> seqused = {used, used};
    SequenceSide packed;
    packed.cu_seqlens = cu_seqlens.data();
    packed.seqused = seqused.data();
    packed.seq_stride = 1;
    SequenceSide dense;
    dense.max_length = 6;
    dense.seqused = seqused.data();
    EXPECT_EQ(locate_sequence(packed, 0).length, std::clamp(used, 0, 4));
    EXPECT_EQ(locate_sequence(packed, 1).length, std::clamp(used, 0, 5));
    EXPECT_EQ(locate_sequence(packed, 1).row, 4);
    EXPECT_EQ(locate_sequence(dense, 1).length, std::clamp(used, 0, 6));
  }
}

TEST(Sequence, DecreasingPrefixSumsGiveEmptySequences) {
  const std::vector<std::int32_t> cu_seqlens = {5, 3};
  const std::vector<std::int32_t> seqused = {2};
  SequenceSide side;
  side.cu_seqlens = cu_seqlens.data();
  EXPECT_EQ(locate_sequence(side, 0).length, 0);
  side.seqused = seqused.data();
  EXPECT_EQ(locate_sequence(side, 0).length, 0);
}

TEST(Sequence, LocationIsAConstantExpression) {
  constexpr SequenceSide side{100, 10, 8, nullptr, nullptr};
  constexpr Sequence sequence = locate_sequence(side, 3);
  EXPECT_EQ(sequence.offset, 300);
  EXPECT_EQ(sequence.row, 24);
  EXPECT_EQ(sequence.length, 8);
}

TEST(Heads, EveryQueryHeadBelongsToOneGroupInOrder) {
  for (int heads_k = 1; heads_k <= 8; ++heads_k) {
    for (int group = 1; group <= 8; ++group) {
      const Heads heads{heads_k * group, heads_k};
      ASSERT_EQ(heads.group(), group);
      int query_head = 0;
      for (int key_head = 0; key_head < heads_k; ++key_head) {
        ASSERT_EQ(heads.first_query_head(key_head), query_head);
        for (int member = 0; member < group; ++member) {
          ASSERT_EQ(heads.key_head(query_head++), key_head);
        }
      }
    }
  }
}

}  // namespace
