// Sequences of a cache and how their keys are cut: by brute force.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/kv_sequence.h"
#include "core/kv_split.h"

namespace pantile::core {
namespace {

TEST(Kv, PartsOfInvariantSplitsArePowersOfTwoNearASixteenth) {
  for (int keys = 0; keys <= 200000; keys += keys < 9000 ? 1 : 511) {
    const int part = invariant_part_keys(keys);
    EXPECT_EQ(part & (part - 1), 0) << keys;
    EXPECT_GE(part, 256) << keys;
    EXPECT_LE(part, 4096) << keys;
    if (part > 256) {
      EXPECT_LT(part / 2 * 16, keys);
    }
    if (part < 4096) {
      EXPECT_GE(part * 16, keys);
    }
  }
}

TEST(Kv, MostPartsBoundThoseOfEveryLength) {
  for (const int capacity : {0, 1, 255, 256, 257, 4095, 4096, 4097, 65536, 65537, 70000, 131072}) {
    int most = 0;
    for (int keys = 0; keys <= capacity; ++keys) {
      const int part = invariant_part_keys(keys);
      const int count = part_count(keys, part);
      EXPECT_EQ(count, (keys + part - 1) / part);
      most = max_of(most, count);
    }
    EXPECT_EQ(most_invariant_parts(capacity), most) << capacity;
  }
}

TEST(Kv, SequencesAreLocatedAndClamped) {
  const std::vector<std::int32_t> lengths = {5, -3, 90, 2147483647};
  const std::vector<std::int32_t> cu_q = {0, 2, 2, 7, 8};
  const std::vector<std::int32_t> cu_new = {0, 1, 4, 3, 9};
  const std::vector<std::int32_t> leftpad = {2, 1, 1000, -4};
  const std::vector<std::int32_t> index = {3, 0, 1, 7};
  KvArrays arrays;
  arrays.lengths = lengths.data();
  arrays.seqlen_q = 3;
  arrays.seqlen_new = 4;
  arrays.capacity = 100;
  KvSequence s = locate_kv_sequence(arrays, 2);
  EXPECT_EQ(s.query_row, 6);
  EXPECT_EQ(s.new_row, 8);
  EXPECT_EQ(s.queries, 3);
  EXPECT_EQ(s.added, 4);
  EXPECT_EQ(s.before, 90);
  EXPECT_EQ(s.keys, 94);
  EXPECT_EQ(s.first_key, 0);
  EXPECT_EQ(s.cache_row, 2);
  EXPECT_EQ(locate_kv_sequence(arrays, 1).keys, 4);
  EXPECT_EQ(locate_kv_sequence(arrays, 3).keys, 100);
  arrays.cu_seqlens_q = cu_q.data();
  arrays.cu_seqlens_new = cu_new.data();
  arrays.leftpad = leftpad.data();
  arrays.cache_index = index.data();
  s = locate_kv_sequence(arrays, 0);
  EXPECT_EQ(s.first_key, 2);
  EXPECT_EQ(s.keys, 6);
  EXPECT_EQ(s.cache_row, 3);
  s = locate_kv_sequence(arrays, 2);
  EXPECT_EQ(s.query_row, 2);
  EXPECT_EQ(s.queries, 5);
  EXPECT_EQ(s.new_row, 4);
  EXPECT_EQ(s.added, 0);  // bounds that decrease
  EXPECT_EQ(s.first_key, s.keys);
  EXPECT_EQ(locate_kv_sequence(arrays, 3).first_key, 0);
}

TEST(Kv, VisibleKeysAgreeWithTheirDefinition) {
  for (const int keys : {0, 1, 5, 9}) {
    for (const int queries : {1, 3, 12}) {
      for (const int first : {0, 2}) {
        KvSequence s{};
        s.keys = keys;
        s.queries = queries;
        s.first_key = min_of(first, keys);
        for (int left = -1; left < 12; ++left) {
          for (int right = -1; right < 12; ++right) {
            for (int query = 0; query < queries; ++query) {
              const KeyRange range = visible_keys(s, query, left, right);
              EXPECT_LE(range.begin, range.end);
              for (int key = 0; key < keys; ++key) {
                const int at = query + keys - queries;
                const bool seen = key >= s.first_key && (left < 0 || key >= at - left) &&
                                  (right < 0 || key <= at + right);
                EXPECT_EQ(key >= range.begin && key < range.end, seen);
              }
            }
          }
        }
      }
    }
  }
}

TEST(Kv, TreeMasksHideDraftTokensOnly) {
  KvSequence s{};
  s.keys = 70;
  s.queries = 64;
  for (int key = 0; key < 70; ++key) {
    EXPECT_EQ(tree_hides(s, 0, key), key >= 6) << key;
    EXPECT_FALSE(tree_hides(s, ~std::uint64_t{0}, key)) << key;
    for (int bit = 0; bit < 64; ++bit) {
      EXPECT_EQ(tree_hides(s, std::uint64_t{1} << bit, key), key >= 6 && key - 6 != bit);
    }
  }
}

}  // namespace
}  // namespace pantile::core
