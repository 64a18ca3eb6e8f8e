// The kernel table: complete, in order, named by one rule.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "build_info.h"
#include "host/features.h"
#include "host/kernel_table.h"
#include "problems.h"

namespace pantile::testing {
namespace {

std::vector<KernelInfo> table() {
  std::vector<KernelInfo> rows;
  for (int i = 0; i < kernel_count(); ++i) {
    rows.push_back(kernel_info(i));
  }
  return rows;
}

bool on_gpu(const KernelInfo& row) {
  return row.backend == Backend::hopper || row.backend == Backend::ampere;
}

// kernels.def read by the preprocessor must agree with the same file read by cmake/kernels.cmake.
TEST(KernelTable, HoldsEveryRowOfKernelsDefInOrder) {
  const KernelInfo expected[] = {
#define PANTILE_KERNEL(backend, pass, dtype, head_dim, head_dim_v, mask, features) \
  {"",                                                                             \
   Backend::backend,                                                               \
   Pass::pass,                                                                     \
   DType::dtype,                                                                   \
   head_dim,                                                                       \
   head_dim_v,                                                                     \
   MaskKind::mask,                                                                 \
   true,                                                                           \
   host::feature_sets::features},
#include "kernels.def"
#undef PANTILE_KERNEL
  };
  for (const Pass pass :
       {Pass::forward, Pass::backward, Pass::quantize, Pass::decode, Pass::append}) {
    std::vector<KernelInfo> want, have;
    for (const KernelInfo& row : expected) {
      if (row.pass == pass) {
        want.push_back(row);
      }
    }
    for (const KernelInfo& row : table()) {
      if (row.pass == pass && on_gpu(row)) {
        have.push_back(row);
      }
    }
    ASSERT_EQ(have.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
      EXPECT_EQ(have[i].backend, want[i].backend) << have[i].name;
      EXPECT_EQ(have[i].dtype, want[i].dtype) << have[i].name;
      EXPECT_EQ(have[i].head_dim, want[i].head_dim) << have[i].name;
      EXPECT_EQ(have[i].head_dim_v, want[i].head_dim_v) << have[i].name;
      EXPECT_EQ(have[i].mask, want[i].mask) << have[i].name;
      EXPECT_EQ(have[i].features, want[i].features) << have[i].name;
    }
  }
}

TEST(KernelTable, NamesFollowTheirRows) {
  std::set<std::string> names;
  for (const KernelInfo& row : table()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name << " appears twice";
    std::string expected = std::string(backend_name(row.backend)) + "_" + pass_name(row.pass) +
                           "_" + dtype_name(row.dtype);
    if (on_gpu(row)) {
      expected += "_d" + std::to_string(row.head_dim);
      if (row.head_dim_v != row.head_dim) {
        expected += "x" + std::to_string(row.head_dim_v);
      }
      expected += std::string("_") + mask_kind_name(row.mask);
    }
    EXPECT_EQ(row.name, expected);
  }
}

TEST(KernelTable, GpuRowsThenCpuThenReference) {
  for (const Pass pass : {Pass::forward, Pass::backward, Pass::decode, Pass::append}) {
    int stage = 0;
    for (const KernelInfo& row : table()) {
      if (row.pass == pass) {
        const int own = on_gpu(row) ? 0 : row.backend == Backend::cpu ? 1 : 2;
        EXPECT_GE(own, stage) << row.name;
        stage = own;
      }
    }
    EXPECT_EQ(stage, 2) << pass_name(pass);
  }
}

TEST(KernelTable, CpuServesEveryDtypeBothWays) {
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    for (const Backend backend : {Backend::cpu, Backend::reference}) {
      std::set<DType> dtypes;
      for (const KernelInfo& row : table()) {
        if (row.pass == pass && row.backend == backend) {
          EXPECT_TRUE(row.compiled) << row.name;
          EXPECT_EQ(row.head_dim, row.dtype == DType::e4m3 ? 256 : kMaxHeadDim) << row.name;
          dtypes.insert(row.dtype);
        }
      }
      std::set<DType> expected = {DType::f32, DType::f16, DType::bf16};
      if (pass == Pass::forward || backend == Backend::cpu) {
        expected.insert(DType::e4m3);
      }
      EXPECT_EQ(dtypes, expected);
    }
  }
}

template <class Row>
void expect_run_exactly_when_compiled(host::RowList<Row> list) {
  for (int i = 0; i < list.count; ++i) {
    const Row& row = list.rows[i];
    EXPECT_EQ(row.run != nullptr, row.info.compiled) << row.info.name;
    EXPECT_EQ(row.info.compiled, PANTILE_HAS_CUDA || !on_gpu(row.info)) << row.info.name;
  }
}

TEST(KernelTable, CpuQuantisesEveryDtype) {
  for (const Backend backend : {Backend::cpu, Backend::reference}) {
    std::set<DType> dtypes;
    for (const KernelInfo& row : table()) {
      if (row.pass == Pass::quantize && row.backend == backend) {
        EXPECT_TRUE(row.compiled) << row.name;
        dtypes.insert(row.dtype);
      }
    }
    EXPECT_EQ(dtypes, (std::set<DType>{DType::f32, DType::f16, DType::bf16, DType::e4m3}));
  }
}

TEST(KernelTable, CpuDecodesAndAppendsEveryDtype) {
  for (const Pass pass : {Pass::decode, Pass::append}) {
    for (const Backend backend : {Backend::cpu, Backend::reference}) {
      std::set<DType> dtypes;
      for (const KernelInfo& row : table()) {
        if (row.pass == pass && row.backend == backend) {
          EXPECT_EQ(row.head_dim, kMaxKvHeadDim) << row.name;
          dtypes.insert(row.dtype);
        }
      }
      EXPECT_EQ(dtypes, (std::set<DType>{DType::f32, DType::f16, DType::bf16})) << pass_name(pass);
    }
  }
}

TEST(KernelTable, RowsRunExactlyWhenCompiled) {
  expect_run_exactly_when_compiled(host::forward_rows());
  expect_run_exactly_when_compiled(host::backward_rows());
  expect_run_exactly_when_compiled(host::quantize_rows());
  expect_run_exactly_when_compiled(host::decode_rows());
  expect_run_exactly_when_compiled(host::append_rows());
}

TEST(BuildInfo, SaysWhatWasBuilt) {
  const std::string info = build_info();
  EXPECT_EQ(info.front(), '{');
  EXPECT_EQ(info.back(), '}');
  const std::string version = std::to_string(PANTILE_VERSION_MAJOR) + "." +
                              std::to_string(PANTILE_VERSION_MINOR) + "." +
                              std::to_string(PANTILE_VERSION_PATCH);
  EXPECT_NE(info.find("\"version\": \"" + version + "\""), std::string::npos) << info;
  const char* cuda = PANTILE_HAS_CUDA ? "\"cuda\": true" : "\"cuda\": false";
  EXPECT_NE(info.find(cuda), std::string::npos) << info;
  // A build without CUDA says why, one with CUDA has nothing to explain.
  EXPECT_EQ(std::strlen(PANTILE_CUDA_REASON) > 0, PANTILE_HAS_CUDA == 0);
}

}  // namespace
}  // namespace pantile::testing
