// Host half of decode on GPUs: how blocks share the line of tiles, tiles and their memory, plans,
// what is refused.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "decode/config.h"
#include "decode/line.h"
#include "decode/plan.h"
#include "pantile/kv.h"
#include "problems.h"

namespace pantile::testing {
namespace {

TEST(GpuDecode, EveryCellHasOneOwnerAndSharesDifferByOne) {
  for (int line = 1; line <= 60; ++line) {
    for (int blocks = 1; blocks <= line; ++blocks) {
      EXPECT_EQ(decode::line_begin(0, line, blocks), 0);
      EXPECT_EQ(decode::line_begin(blocks, line, blocks), line);
      for (int block = 0; block < blocks; ++block) {
        const int begin = decode::line_begin(block, line, blocks);
        const int end = decode::line_begin(block + 1, line, blocks);
        EXPECT_GE(end - begin, line / blocks);
        EXPECT_LE(end - begin, line / blocks + 1);
        for (int cell = begin; cell < end; ++cell) {
          EXPECT_EQ(decode::line_owner(cell, line, blocks), block) << line << " " << blocks;
        }
      }
    }
  }
  constexpr int kMost = 2147483647;
  EXPECT_EQ(decode::line_owner(kMost - 1, kMost, 264), 263);
  EXPECT_EQ(decode::line_begin(264, kMost, 264), kMost);
}

TEST(GpuDecode, FewTilesTakeOneBlockOfAMultiprocessor) {
  for (const bool tiles : {false, true}) {
    for (const int line : {1, 5, 131, 132, 133, 263, 264, 265, 1024, 1056, 2111, 2112, 100000}) {
      const int blocks = decode::active_blocks(264, 2, line, tiles);
      EXPECT_GE(blocks, 1);
      EXPECT_LE(blocks, line);
      EXPECT_LE(blocks, 264);
    }
  }
  EXPECT_EQ(decode::active_blocks(264, 2, 1024, true), 132);
  EXPECT_EQ(decode::active_blocks(264, 2, 1024, false), 264);
  EXPECT_EQ(decode::active_blocks(264, 2, 1600, true), 200);
  EXPECT_EQ(decode::active_blocks(264, 2, 4096, true), 264);
  EXPECT_EQ(decode::active_blocks(3, 1, 1, true), 1);
}

TEST(GpuDecode, TilesFitTheirMemoryAndHaveTwoStages) {
  using decode::Shape;
  using decode::SharedClass;
  constexpr CacheFormat kPlain = CacheFormat::plain;
  const Shape shapes[] = {{64, 64, kPlain, false},
                          {80, 80, kPlain, false},
                          {96, 96, kPlain, false},
                          {128, 128, kPlain, false},
                          {192, 128, kPlain, false},
                          {256, 256, kPlain, false},
                          {64, 64, CacheFormat::int8, false},
                          {128, 128, CacheFormat::e4m3, false},
                          {256, 256, CacheFormat::int8, false},
                          {576, 512, kPlain, true},
                          {576, 512, CacheFormat::e4m3, true}};
  for (const Shape& shape : shapes) {
    for (const SharedClass shared : {SharedClass::large, SharedClass::small}) {
      for (int columns = 8; columns <= 64; columns *= 2) {
        if (!decode::has_columns(shape, columns, shared)) {
          continue;
        }
        const int blocks = decode::resident_blocks(shape, columns, shared);
        const int stages = decode::stages(shape, columns, shared, blocks);
        EXPECT_GE(stages, 2) << shape.head_dim << " " << columns;
        EXPECT_LE(stages * decode::slices(shape, columns, shared) * decode::slice_bytes(shape) +
                      decode::fixed_bytes(shape, columns, shared),
                  decode::shared_limit(shared, blocks));
        EXPECT_LE(decode::threads(shape, columns, shared) * blocks, 256);
        EXPECT_EQ(decode::row_pitch_bytes(shape.head_dim, shape.element_bytes()) / 16 % 2, 1);
      }
    }
  }
}

KvProblem gpu_problem() {
  KvProblem p;
  p.batch = 2;
  p.heads_q = 32;
  p.heads_k = 8;
  p.head_dim = p.head_dim_v = 128;
  p.seqlen_q = 1;
  p.blocks = 1024;
  p.page_size = 16;
  p.table_rows = 2;
  p.table_pages = p.table_stride = 512;
  p.window_right = 0;
  p.scale = 0.1f;
  p.q = p.o = Layout{4096, 4096, 128, 16};
  p.k = p.v = CacheLayout{16384, 1024, 128, 16};
  return p;
}

DecodePlan plan_of(const std::function<void(KvProblem*)>& change) {
  KvProblem p = gpu_problem();
  change(&p);
  DecodePlan plan;
  plan.kernel = nullptr;
  p.split_keys = p.split == KvSplit::fixed ? p.split_keys : 0;
  const KernelInfo row{"row", Backend::hopper, Pass::decode, DType::bf16, 128,
                       128,   MaskKind::any,   true};
  static KernelInfo kept;
  kept = row;
  plan.problem = p;
  plan.device = h100();
  plan.kernel = &kept;
  decode::configure(&plan, decode::SharedClass::large);
  return plan;
}

TEST(GpuDecode, PlansFollowFromCapacitiesOnly) {
  const DecodePlan plan = plan_of([](KvProblem*) {});
  EXPECT_EQ(plan.tile_q, 8);
  EXPECT_EQ(plan.tile_k, 64);
  EXPECT_EQ(plan.blocks, 264);
  EXPECT_EQ(plan.workspace.zeroed_bytes, 256u);  // 16 pairs, rounded up
  EXPECT_EQ(plan.workspace.bytes, 256u + 2u * 264u * 8u * 130u * 4u);
  EXPECT_EQ(plan_of([](KvProblem* p) { p->seqlen_q = 16; }).tile_q, 64);
  EXPECT_EQ(plan_of([](KvProblem* p) { p->seqlen_q = 16; }).blocks, 132);
  EXPECT_EQ(plan_of([](KvProblem* p) { p->seqlen_q = 0; }).blocks, 0);
  // 16 parts of a sequence at most, and one more where slot 0 is behind a window.
  EXPECT_EQ(plan_of([](KvProblem* p) { p->split = KvSplit::invariant; }).workspace.bytes,
            256u + 16u * 17u * 8u * 130u * 4u);
}

std::string refusal(const std::function<void(KvProblem*)>& change) {
  KvProblem p = gpu_problem();
  change(&p);
  const KernelInfo row{"row", Backend::hopper, Pass::decode, DType::bf16, 128,
                       128,   MaskKind::any,   true};
  return decode::accept(row, p, decode::SharedClass::large).message();
}

TEST(GpuDecode, RefusalsNameTheField) {
  EXPECT_EQ(refusal([](KvProblem*) {}), "");
  EXPECT_EQ(refusal([](KvProblem* p) { p->scale = -1.0f; }), "needs scale >= 0, it is -1");
  EXPECT_EQ(refusal([](KvProblem* p) { p->head_dim = 100; }),
            "needs head_dim to be a multiple of 8, it is 100");
  EXPECT_EQ(refusal([](KvProblem* p) { p->k.slot = 1028; }),
            "needs the stride of k along slot to be a multiple of 8 below 2^39, it is 1028");
  EXPECT_EQ(refusal([](KvProblem* p) { p->v.base_align_bytes = 8; }),
            "needs v aligned to 16 bytes, it is to 8");
  EXPECT_EQ(refusal([](KvProblem* p) { p->batch = 1 << 24; }),
            "has 31-bit tile numbers: batch 16777216 x heads_k 8 x 8192 slots x 1 queries are too "
            "many");
}

}  // namespace
}  // namespace pantile::testing
