#include "ampere/forward/tuned.h"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>

#include "pantile/tuning.h"

namespace pantile::ampere {
namespace {

using Class = std::tuple<std::string, std::string, int, int>;  // kernel, device, keys, queries

struct Choices {
  std::mutex mutex;
  std::map<Class, TunedChoice> by_class;
  std::set<std::string> sources;  // plans hold pointers to them
};

// Never destroyed: plans may be made while the process ends.
Choices& choices() {
  static Choices* const all = new Choices;
  return *all;
}

}  // namespace

bool find_tuned(const KernelInfo& row, const ForwardProblem& problem, const DeviceProps& device,
                TunedChoice* choice) {
  Choices& all = choices();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.by_class.empty()) {
    return false;
  }
  const auto found =
      all.by_class.find(Class{row.name, device.name, rounded_up_log2(problem.seqlen_k),
                              rounded_up_log2(problem.batch * problem.heads_q * problem.seqlen_q)});
  if (found == all.by_class.end()) {
    return false;
  }
  *choice = found->second;
  return true;
}

}  // namespace pantile::ampere

namespace pantile {

void set_tuned_softmax(const TunedSoftmax* given, int count) {
  ampere::Choices& all = ampere::choices();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.by_class.clear();
  for (int i = 0; i < count; ++i) {
    const TunedSoftmax& x = given[i];
    const std::string& source = *all.sources.insert(x.source).first;
    all.by_class[ampere::Class{x.kernel, x.device, x.log2_keys, x.log2_queries}] =
        ampere::TunedChoice{x.unit, source.c_str()};
  }
}

}  // namespace pantile
