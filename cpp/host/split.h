// Split-KV forwards as plan and run see them: which problems the parts are, what a call lends, and
// the launches in their order (docs/design/split.md, core/forward_split.h).
#pragma once

#include "core/forward_split.h"
#include "host/kernel_table.h"
#include "pantile/plan.h"
#include "pantile/problem.h"
#include "pantile/status.h"

namespace pantile::host {

Status num_splits_rule(const ForwardProblem& problem);

// Ok, or why keys of a canonical problem cannot be cut, whatever the row.
Status split_rule(const ForwardProblem& problem);

// Whether a canonical problem asks for parts and has keys to cut.
bool is_split(const ForwardProblem& problem);

// Rows from the keys of one sequence to the next one's, where they are dense.
inline std::int64_t rows_between(const Layout& layout) {
  return layout.seq > 0 ? layout.batch / layout.seq : 0;
}

core::SplitForm split_form(const ForwardProblem& problem);

// What attends to the parts of a canonical problem that split_rule() accepts. All parts, or those
// of the prefix; and the tail, under a causal mask only.
ForwardProblem parts_problem(const ForwardProblem& problem, int splits);
ForwardProblem tail_problem(const ForwardProblem& problem);

// Ok, or why a row does not serve the parts of a canonical problem that is_split(). `prefix`: the
// row that launches the prefix of a causal one, else null.
Status find_split(const ForwardRow& row, const ForwardProblem& problem, const DeviceProps& device,
                  const ForwardRow** prefix);

// Sizes a plan whose problem.num_splits is above 1.
void configure_split(const ForwardRow& row, const ForwardRow* prefix, ForwardPlan* plan);

// Cuts the keys of a plan that a row has configured for whole sequences, if its problem asks for
// it, or the model of the time does.
void cut_keys(const ForwardRow& row, ForwardPlan* plan);

// The launches of such a plan: the arrays and the copies of Q, the parts, the tail, the merge.
Status run_split(const ForwardRow& row, const ForwardRow* prefix, const ForwardPlan& plan,
                 const ForwardTensors& tensors, void* workspace, void* stream);

// The plans of the launches over the parts, which may need kernels that are compiled at run time.
// Returns how many they are, 0 to 2.
int split_launches(const ForwardPlan& plan, ForwardPlan (&launches)[2]);

}  // namespace pantile::host
