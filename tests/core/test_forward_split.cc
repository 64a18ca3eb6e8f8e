// Where the keys of a split forward are cut, the arrays of the parts, and the merge: by brute
// force.
#include "core/forward_split.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace pantile::core {
namespace {

constexpr SplitForm kForms[] = {SplitForm::full, SplitForm::causal, SplitForm::shifted};

struct Window {
  int left, right;
};

std::vector<Window> windows_of(SplitForm form) {
  if (form == SplitForm::full) {
    return {{kNoBound, kNoBound}};
  }
  if (form == SplitForm::causal) {
    return {{kNoBound, 0}};
  }
  return {{kNoBound, 0}, {3, 0}, {0, 2}, {5, kNoBound}, {kNoBound, kNoBound}};
}

// Whether the kernel that attends to a part shows it a pair.
bool seen_in_part(SplitForm form, const ShiftedMask& whole, Span keys, int row, int key) {
  if (form == SplitForm::full || form == SplitForm::causal) {
    return true;
  }
  const Mask part{whole.rows, keys.size(), whole.left, whole.right};
  return is_visible(with_shift(part, whole.given - keys.begin), row, key - keys.begin);
}

bool seen_in_tail(const ShiftedMask& whole, Span keys, int row, int key) {
  return is_visible(Mask{whole.rows, keys.size(), kNoBound, 0}, row, key - keys.begin);
}

void expect_parts(SplitForm form, const ShiftedMask& mask, int splits, int tile) {
  const KeySplit split = split_keys(form, mask, splits, tile);
  ASSERT_EQ(split.parts, form == SplitForm::causal ? splits - 1 : splits);
  int end = split.cut.begin;
  for (int part = 0; part < split.parts; ++part) {
    const Span keys = part_keys(split, part);
    ASSERT_EQ(keys.begin, end);
    ASSERT_LE(keys.begin, keys.end);
    end = keys.end;
    ASSERT_TRUE(keys.end % tile == 0 || keys.end == split.cut.end || keys.empty());
    ASSERT_LE(keys.size(), most_part_keys(mask.keys, split.parts));
  }
  ASSERT_EQ(end, split.cut.end);
  if (form == SplitForm::causal) {
    ASSERT_EQ(split.cut.end % tile, 0);
  }
  ASSERT_LE(split.tail.size(), most_tail_keys(mask.keys, mask.rows));
  ASSERT_GE(split.cut.begin, 0);
  ASSERT_LE(split.cut.end, mask.keys);
  // Each visible pair once, and no other.
  for (int row = 0; row < mask.rows; ++row) {
    for (int key = 0; key < mask.keys; ++key) {
      int seen = 0;
      for (int part = 0; part < split.parts; ++part) {
        const Span keys = part_keys(split, part);
        seen += key >= keys.begin && key < keys.end && seen_in_part(form, mask, keys, row, key);
      }
      if (!split.tail.empty() && key >= split.tail.begin && key < split.tail.end) {
        seen += seen_in_tail(mask, split.tail, row, key);
      }
      ASSERT_EQ(seen, is_visible(mask, row, key))
          << "form " << static_cast<int>(form) << " rows " << mask.rows << " keys " << mask.keys
          << " row " << row << " key " << key << " splits " << splits << " tile " << tile;
    }
  }
}

TEST(ForwardSplit, PartsSeeEachVisiblePairOnce) {
  for (const SplitForm form : kForms) {
    for (const Window window : windows_of(form)) {
      for (int rows = 0; rows <= 7; rows += rows == 4 ? 3 : 1) {
        for (int keys = 0; keys <= 19; ++keys) {
          for (const int splits : {2, 3, 7, 30}) {
            for (const int tile : {1, 4, 5}) {
              const Mask mask{rows, keys, window.left, window.right};
              expect_parts(form, with_shift(mask, mask.shift()), splits, tile);
              if (form == SplitForm::shifted) {
                for (const int shift : {-9, -2, 0, 6, 30}) {
                  expect_parts(form, with_shift(mask, shift), splits, tile);
                }
              }
              if (HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

// The longest part of any cut decides when the last block ends.
TEST(ForwardSplit, PartsDifferByOneTile) {
  for (int keys = 0; keys <= 3000; keys += 37) {
    for (const int splits : {2, 3, 5, 16, 100}) {
      const KeySplit split =
          split_keys(SplitForm::full, Mask{8, keys, kNoBound, kNoBound}, splits, 16);
      int least = keys;
      int most = 0;
      for (int part = 0; part < splits; ++part) {
        const Span span = part_keys(split, part);
        const int tiles = ceil_div(span.size(), 16);
        least = min_of(least, tiles);
        most = max_of(most, tiles);
      }
      EXPECT_LE(most - least, 1) << keys << " keys, " << splits;
    }
  }
}

TEST(ForwardSplit, LongKeysDoNotOverflow) {
  constexpr int kKeys = (1 << 29) - 1;
  const KeySplit split = split_keys(SplitForm::full, Mask{8, kKeys, kNoBound, kNoBound}, 256, 1);
  EXPECT_EQ(part_keys(split, 255).end, kKeys);
  EXPECT_EQ(part_keys(split, 0).size(), kKeys / 256);
  EXPECT_EQ(part_keys(split, 128).begin, kKeys / 2);
}

// Two packed sequences with unused rows and keys, and an empty one between them.
struct Arrays {
  std::vector<std::int32_t> cu_q{0, 5, 5, 12}, cu_k{0, 40, 60, 130};
  std::vector<std::int32_t> used_q{4, 0, 7}, used_k{33, 20, 70}, begins{50, 3, 20};
  std::vector<std::int32_t> q_begin, q_used, part_begin, part_used, part_shift, tail_begin,
      tail_used;
  SplitJob job;

  Arrays(SplitForm form, bool packed, bool ranges, int splits) {
    job.form = form;
    job.splits = splits;
    job.tile = 8;
    job.batch = 3;
    job.heads_q = 2;
    job.seqlen_q = packed ? 7 : 4;
    job.seqlen_k = 70;
    job.total_q = 12;
    job.key_rows = 90;
    job.window_right = form == SplitForm::full ? kNoBound : 0;
    job.window_left = form == SplitForm::shifted ? 50 : kNoBound;
    job.cu_seqlens_q = packed ? cu_q.data() : nullptr;
    job.cu_seqlens_k = packed && !ranges ? cu_k.data() : nullptr;
    job.seqused_q = packed ? used_q.data() : nullptr;
    job.seqused_k = used_k.data();
    job.k_begin = ranges ? begins.data() : nullptr;
    const auto parts = static_cast<std::size_t>(job.batch * job.parts());
    q_begin.resize(parts + 1, -1);
    part_begin.resize(parts + 1, -1);
    for (auto* array : {&q_used, &part_used, &part_shift}) {
      array->resize(parts, -1);
    }
    tail_begin.resize(4, -1);
    tail_used.resize(3, -1);
    job.q_begin = q_begin.data();
    job.q_used = packed ? q_used.data() : nullptr;
    job.part_begin = part_begin.data();
    job.part_used = part_used.data();
    job.part_shift = form == SplitForm::shifted ? part_shift.data() : nullptr;
    job.tail_begin = form == SplitForm::causal ? tail_begin.data() : nullptr;
    job.tail_used = form == SplitForm::causal ? tail_used.data() : nullptr;
    for (int batch = 0; batch < job.batch; ++batch) {
      place_parts(job, batch);
    }
  }

  int first_key(int batch) const {
    return job.k_begin != nullptr        ? begins[static_cast<std::size_t>(batch)]
           : job.cu_seqlens_k != nullptr ? cu_k[static_cast<std::size_t>(batch)]
                                         : batch * 90;
  }
};

// Each row of Q has a copy for each part, at a row of its own, and those of a part follow each
// other from where the arrays say.
TEST(ForwardSplit, CopiesOfQueriesArePackedSequences) {
  for (const bool packed : {false, true}) {
    const Arrays a(SplitForm::full, packed, false, 5);
    std::set<std::int64_t> taken;
    for (int batch = 0; batch < 3; ++batch) {
      const SplitRows rows = split_rows(a.job, batch);
      for (int part = 0; part < 5; ++part) {
        const auto at = static_cast<std::size_t>(batch * 5 + part);
        EXPECT_EQ(a.q_begin[at + 1] - a.q_begin[at], rows.capacity);
        if (packed) {
          EXPECT_EQ(a.q_used[at], rows.used);
        }
        for (int i = 0; i < rows.capacity; ++i) {
          const std::int64_t row = part_row(a.job, rows, part, i);
          EXPECT_EQ(row, a.q_begin[at] + i);
          EXPECT_TRUE(taken.insert(row).second);
          EXPECT_EQ(sequence_of_row(a.job, rows.row + i), batch);
        }
      }
    }
    EXPECT_EQ(taken.size(), 60u);
    EXPECT_EQ(*taken.rbegin(), 59);
  }
  Arrays a(SplitForm::full, true, false, 2);
  EXPECT_EQ(sequence_of_row(a.job, 12), 3);  // behind the last sequence
}

TEST(ForwardSplit, ArraysNameThePartsKeys) {
  for (const SplitForm form : kForms) {
    for (const bool packed : {false, true}) {
      for (const bool ranges : {false, true}) {
        if (ranges && !packed) {
          continue;
        }
        const Arrays a(form, packed, ranges, 4);
        const int parts = a.job.parts();
        for (int batch = 0; batch < 3; ++batch) {
          const int rows = split_rows(a.job, batch).used;
          const int keys = a.used_k[static_cast<std::size_t>(batch)];
          const Mask mask{rows, keys, a.job.window_left, a.job.window_right};
          const KeySplit split = split_keys(form, with_shift(mask, keys - rows), 4, 8);
          for (int part = 0; part < parts; ++part) {
            const auto at = static_cast<std::size_t>(batch * parts + part);
            const Span span = part_keys(split, part);
            EXPECT_EQ(a.part_begin[at], a.first_key(batch) + span.begin);
            EXPECT_EQ(a.part_used[at], span.size());
            // As cu_seqlens: what follows begins behind the part.
            if (!ranges) {
              EXPECT_GE(a.part_begin[at + 1], a.part_begin[at] + a.part_used[at]);
            }
            if (form == SplitForm::shifted) {
              EXPECT_EQ(a.part_shift[at], keys - rows - span.begin);
            }
          }
          if (form == SplitForm::causal) {
            const auto b = static_cast<std::size_t>(batch);
            EXPECT_EQ(a.tail_begin[b], a.first_key(batch) + split.tail.begin);
            EXPECT_EQ(a.tail_used[b], split.tail.size());
            if (!ranges) {
              EXPECT_GE(a.tail_begin[b + 1], a.tail_begin[b] + a.tail_used[b]);
            }
          }
        }
      }
    }
  }
}

TEST(ForwardSplit, ResultsLieWhereTheirRowsDo) {
  for (const bool packed : {false, true}) {
    Arrays a(SplitForm::causal, packed, false, 3);
    a.job.head_dim_v = 4;
    std::vector<float> part_lse(24 * 2), part_o(24 * 2 * 4), tail_lse(12 * 2), tail_o(12 * 2 * 4);
    for (std::size_t i = 0; i < part_lse.size(); ++i) {
      part_lse[i] = static_cast<float>(i);
    }
    for (std::size_t i = 0; i < tail_lse.size(); ++i) {
      tail_lse[i] = 1000.0f + static_cast<float>(i);
    }
    a.job.part_lse = part_lse.data();
    a.job.part_o = part_o.data();
    a.job.tail_lse = tail_lse.data();
    a.job.tail_o = tail_o.data();
    for (int batch = 0; batch < 3; ++batch) {
      const SplitRows rows = split_rows(a.job, batch);
      for (int head = 0; head < 2; ++head) {
        for (int i = 0; i < rows.capacity; ++i) {
          for (int part = 0; part < 2; ++part) {
            const std::int64_t row = part_row(a.job, rows, part, i);
            EXPECT_EQ(core::part_lse(a.job, rows, batch, head, i, part),
                      static_cast<float>(head * 24 + row));
            EXPECT_EQ(part_output(a.job, rows, head, i, part) - part_o.data(),
                      (row * 2 + head) * 4);
          }
          const std::int64_t at = packed ? head * 12 + rows.row + i : (batch * 2 + head) * 4 + i;
          EXPECT_EQ(core::part_lse(a.job, rows, batch, head, i, 2),
                    1000.0f + static_cast<float>(at));
          EXPECT_EQ(part_output(a.job, rows, head, i, 2) - tail_o.data(),
                    ((rows.row + i) * 2 + head) * 4);
        }
      }
    }
  }
}

float merged(const std::vector<float>& lses, float (*weights)[8]) {
  const auto exp2 = [](float x) { return std::exp2(x); };
  PartSum all{-kInfinity, 0.0f};
  for (const float lse : lses) {
    all.reference = larger(all.reference, lse);
  }
  int at = 0;
  for (const float lse : lses) {
    (*weights)[at] = part_weight(lse, all.reference, exp2);
    all.sum += (*weights)[at++];
  }
  return merged_lse(all, [](float x) { return std::log2(x); });
}

TEST(ForwardSplit, MergeIsTheLogarithmOfTheSum) {
  float weights[8];
  for (const float base : {-2000.0f, -3.0f, 0.0f, 88.0f, 5000.0f}) {
    const std::vector<float> lses{base, base + 1.5f, -kInfinity, base - 4.0f};
    const double sum = 1.0 + std::exp(1.5) + std::exp(-4.0);
    EXPECT_NEAR(merged(lses, &weights), static_cast<double>(base) + std::log(sum), 1e-3);
    EXPECT_NEAR(weights[0], std::exp(-1.5), 1e-5);
    EXPECT_NEAR(weights[1], 1.0, 0.0);
    EXPECT_EQ(weights[2], 0.0f);
  }
  EXPECT_EQ(merged({-kInfinity, -kInfinity}, &weights), -kInfinity);
  EXPECT_EQ(weights[0], 0.0f);
  for (const std::vector<float>& lses :
       {std::vector<float>{NAN, 1.0f}, {1.0f, NAN}, {NAN, -kInfinity}, {-kInfinity, NAN}}) {
    EXPECT_TRUE(std::isnan(merged(lses, &weights)));
  }
}

TEST(ForwardSplit, ModelTakesTheFastestNumber) {
  SplitModel model{};
  model.processors = 132;
  model.most_splits = 256;
  model.tile_clocks = 3000.0;
  model.block_clocks = 6000.0;
  model.part_clocks = 500.0;
  model.constant_clocks = 10000.0;
  for (std::int64_t tiles = 1; tiles <= 1000; tiles += 13) {
    for (const std::int64_t keys : {1, 2, 16, 500, 2000}) {
      model.query_tiles = tiles;
      model.key_tiles = keys;
      const int best = best_splits(model);
      ASSERT_GE(best, 1);
      ASSERT_LE(best, keys);
      for (std::int64_t other = 1; other <= min_of<std::int64_t>(256, keys); ++other) {
        const double clocks = predicted_clocks(model, other);
        if (best == 1) {
          ASSERT_LE(0.9 * predicted_clocks(model, 1), clocks);
        } else {
          ASSERT_LE(predicted_clocks(model, best), clocks);
          ASSERT_LT(predicted_clocks(model, best), other < best ? clocks : clocks + 1.0);
        }
      }
      ASSERT_LE(predicted_clocks(model, best),
                (best == 1 ? 1.0 : 0.9) * predicted_clocks(model, 1));
    }
  }
  // 16 tiles of rows: eight parts fill one wave. As many tiles as processors: nothing to gain.
  model.query_tiles = 16;
  model.key_tiles = 500;
  EXPECT_EQ(best_splits(model), 8);
  model.query_tiles = 132;
  EXPECT_EQ(best_splits(model), 1);
  // Five waves of 500 tiles, or in parts 4.75: less than a tenth.
  model.processors = 108;
  model.query_tiles = 512;
  EXPECT_EQ(best_splits(model), 1);
  model.processors = 132;
  model.query_tiles = 16;
  model.key_tiles = 4;
  EXPECT_EQ(best_splits(model), 1);  // the launches cost more
  // The time itself: two waves of 250 tiles.
  model.query_tiles = 132;
  model.key_tiles = 500;
  EXPECT_EQ(predicted_clocks(model, 1), 500 * 3000.0 + 6000.0);
  EXPECT_EQ(predicted_clocks(model, 2), 2 * (250 * 3000.0 + 6000.0) + 10000.0 + 1000.0);
}

}  // namespace
}  // namespace pantile::core
