// Plans of decode and append for the plan cache (planner.h), and their lines in the log of plans.
#pragma once

#include <cstdio>
#include <string>

#include "pantile/pantile.h"

namespace pantile::python {

inline Status make_plan(const KvProblem& problem, const DeviceProps& device,
                        const PlanOptions& options, DecodePlan* plan) {
  return plan_decode(problem, device, options, plan);
}
inline Status make_plan(const KvProblem& problem, const DeviceProps& device,
                        const PlanOptions& options, AppendPlan* plan) {
  return plan_append(problem, device, options, plan);
}

inline std::string plan_text(const KvProblem& p, const DecodePlan& plan) {
  char text[256];
  std::snprintf(text, sizeof text,
                "%s: batch %lld, heads %lld/%lld, queries %lld, head_dim %lld/%lld, capacity %lld, "
                "page %lld, cache %s, split %s; tile %d x %d, blocks %d, workspace %zu bytes",
                plan.kernel->name, static_cast<long long>(p.batch),
                static_cast<long long>(p.heads_q), static_cast<long long>(p.heads_k),
                static_cast<long long>(p.seqlen_q), static_cast<long long>(p.head_dim),
                static_cast<long long>(p.head_dim_v), static_cast<long long>(capacity(p)),
                static_cast<long long>(p.page_size), cache_format_name(p.format),
                kv_split_name(p.split), plan.tile_q, plan.tile_k, plan.blocks,
                plan.workspace.bytes);
  return text;
}
inline std::string plan_text(const KvProblem& p, const AppendPlan& plan) {
  char text[192];
  std::snprintf(text, sizeof text,
                "%s: batch %lld, heads %lld, new keys %lld, cache %s, rotary %lld",
                plan.kernel->name, static_cast<long long>(p.batch),
                static_cast<long long>(p.heads_k), static_cast<long long>(p.seqlen_new),
                cache_format_name(p.format), static_cast<long long>(p.rotary_dim));
  return text;
}

}  // namespace pantile::python
