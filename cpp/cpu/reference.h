// Textbook attention in double, row by row, straight from the formulas: the oracle of every test.
// It shares masks, sequences and heads with the kernels, but none of their arithmetic.
#pragma once

#include "cpu/kernels.h"

namespace pantile::cpu {

inline constexpr int kReferenceRows = 64;  // of one head, in one work item of the forward

// Doubles of scratch memory that one thread needs.
std::int64_t reference_forward_doubles(int max_keys);
std::int64_t reference_backward_doubles(int max_keys, int dim, int dim_v);

// Rows [rows.begin, rows.end) of one head of one sequence.
void reference_forward_rows(const ForwardJob& job, int batch, int head, core::Span rows,
                            double* scratch);

// Gradients of the variant's tensors, null unless wanted: in their shapes, shared by all heads.
struct VariantSums {
  double* slopes = nullptr;
  double* sinks = nullptr;
  double* bias = nullptr;
  double* const* captured = nullptr;  // of each captured tensor, null where not wanted
};

// All gradients of one key/value head of one sequence and of the query heads it serves. O and LSE
// are computed again, not read. Adds to the sums.
void reference_backward_head(const BackwardJob& job, int batch, int key_head, double* scratch,
                             const VariantSums& sums);

// Where sequences may share keys: one head of dK and dV, from the sums over all of them.
void reference_write_shared(const BackwardJob& job, int key_head);

// The forward on FP8 operands, likewise.
void reference_fp8_rows(const Fp8ForwardJob& job, int batch, int head, core::Span rows,
                        double* scratch);

}  // namespace pantile::cpu
