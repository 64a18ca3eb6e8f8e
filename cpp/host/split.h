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

core::SplitForm split_form(const ForwardProblem& problem);

// What attends to the parts of a canonical problem that split_rule() accepts. All parts, or those
// of the prefix; and the tail, under a causal mask only.
ForwardProblem parts_problem(const ForwardProblem& problem, int splits);
ForwardProblem tail_problem(const ForwardProblem& problem);

// By core::SplitModel, of a plan that was made for num_splits = 1.
int automatic_splits(const ForwardPlan& plan);

// Fills a plan whose problem, device and kernel are set and whose problem.num_splits is above 1.
// `prefix`: the row of the prefix, or null.
void configure_split(const ForwardRow& row, const ForwardRow* prefix, ForwardPlan* plan);

// The launches of such a plan: the arrays and the copies of Q, the parts, the tail, the merge.
Status run_split(const ForwardRow& row, const ForwardRow* prefix, const ForwardPlan& plan,
                 const ForwardTensors& tensors, void* workspace, void* stream);

// The plans of the launches over the parts, which may need kernels that are compiled at run time.
// Returns how many they are, 0 to 2.
int split_launches(const ForwardPlan& plan, ForwardPlan (&launches)[2]);

}  // namespace pantile::host
