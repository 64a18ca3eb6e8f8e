// check_sequences: contents of cu_seqlens and seqused.
#include <gtest/gtest.h>

#include <vector>

#include "problems.h"

namespace pantile::testing {
namespace {

// Three sequences of 3, 0 and 4 rows; keys dense.
class Sequences : public ::testing::Test {
 protected:
  Sequences() {
    problem_ = forward_problem();
    problem_.batch = 3;
    problem_.seqlen_q = 4;
    problem_.packed_q = true;
    problem_.total_q = 7;
    problem_.has_seqused_q = true;
    problem_.has_seqused_k = true;
  }

  const char* check() {
    ForwardTensors tensors;
    tensors.cu_seqlens_q = offsets_.data();
    tensors.seqused_q = used_q_.data();
    tensors.seqused_k = used_k_.data();
    status_ = check_sequences(problem_, tensors);
    return status_.message();
  }

  ForwardProblem problem_;
  std::vector<std::int32_t> offsets_{0, 3, 3, 7};
  std::vector<std::int32_t> used_q_{3, 0, 2};
  std::vector<std::int32_t> used_k_{0, 1024, 5};
  Status status_;
};

TEST_F(Sequences, Good) {
  check();
  EXPECT_TRUE(status_.ok()) << status_.message();
}

TEST_F(Sequences, MustStartAtZero) {
  offsets_ = {1, 3, 3, 7};
  EXPECT_STREQ(check(), "cu_seqlens_q[0] is 1; it must be 0");
}

TEST_F(Sequences, MustNotDecrease) {
  offsets_ = {0, 3, 2, 7};
  EXPECT_STREQ(check(), "cu_seqlens_q[2] is 2; it must be at least cu_seqlens_q[1], 3");
}

TEST_F(Sequences, MustNotExceedTheLongest) {
  offsets_ = {0, 1, 2, 7};
  EXPECT_STREQ(
      check(),
      "cu_seqlens_q makes sequence 2 5 long; it must be at most max_seqlen_q (seqlen_q), 4");
}

TEST_F(Sequences, MustEndAtTheTotal) {
  offsets_ = {0, 3, 3, 6};
  EXPECT_STREQ(check(), "cu_seqlens_q[3] is 6; the last offset must be total_q, 7");
}

TEST_F(Sequences, UsedRowsOfPackedSequence) {
  used_q_ = {3, 1, 2};
  EXPECT_STREQ(check(), "seqused_q[1] is 1; it must be from 0 to 0");
}

TEST_F(Sequences, UsedKeysOfDenseSequence) {
  used_k_ = {0, 1025, 5};
  EXPECT_STREQ(check(), "seqused_k[1] is 1025; it must be from 0 to 1024");
  used_k_ = {0, -1, 5};
  EXPECT_STREQ(check(), "seqused_k[1] is -1; it must be from 0 to 1024");
}

TEST_F(Sequences, OffsetsThatWrapAround) {
  offsets_ = {0, 2147483647, -2147483647 - 1, 7};
  EXPECT_STREQ(check(),
               "cu_seqlens_q makes sequence 0 2147483647 long; it must be at most max_seqlen_q "
               "(seqlen_q), 4");
}

TEST_F(Sequences, MissingArrays) {
  ForwardTensors tensors;
  EXPECT_STREQ(check_sequences(problem_, tensors).message(),
               "cu_seqlens_q is null; it must hold batch + 1 offsets");
  tensors.cu_seqlens_q = offsets_.data();
  EXPECT_STREQ(check_sequences(problem_, tensors).message(),
               "seqused_q is null; it must hold batch lengths");
}

TEST_F(Sequences, ChecksTheProblemFirst) {
  problem_.head_dim = 0;
  EXPECT_STREQ(check(), "head_dim is 0; it must be from 1 to 512");
}

}  // namespace
}  // namespace pantile::testing
