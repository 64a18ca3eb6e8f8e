// Choices of the softmax that pantile.autotune measured, for plans made from then on.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

#include "call.h"
#include "pantile/pantile.h"
#include "planner.h"

namespace pantile::python {

// Each a tuple (kernel, device, log2_keys, log2_queries, unit, source).
inline void set_tuned_softmax(const nb::list& rows) {
  std::vector<std::string> texts;
  texts.reserve(3 * nb::len(rows));  // what the choices point to must not move
  std::vector<TunedSoftmax> choices;
  for (const nb::handle row : rows) {
    const auto text = [&](int at) {
      return texts.emplace_back(nb::cast<std::string>(row[at])).c_str();
    };
    TunedSoftmax choice;
    choice.kernel = text(0);
    choice.device = text(1);
    choice.log2_keys = nb::cast<int>(row[2]);
    choice.log2_queries = nb::cast<int>(row[3]);
    read_field(row[4], "unit", &choice.unit);
    choice.source = text(5);
    choices.push_back(choice);
  }
  pantile::set_tuned_softmax(choices.data(), static_cast<int>(choices.size()));
  plan_cache<ForwardProblem, ForwardPlan>().clear();
}

}  // namespace pantile::python
