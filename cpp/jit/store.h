// The kernels of a process: find_kernel() with its ties to the machine as parameters, so that tests
// run it without a GPU or a compiler.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>

#include "jit/image.h"
#include "jit/kernel.h"
#include "jit/settings.h"
#include "pantile/status.h"

namespace pantile::jit {

struct Machine {
  std::function<Status(Settings*)> settings;
  std::function<Status(const Settings&, const Request&, Image*)> compile;
  std::function<Status(const Image&, const void** handle)> load;
  std::function<bool(void* stream)> is_capturing;
};

// settings.h, nvrtc.h and compile.h, load.h.
Machine this_machine();

class Store {
 public:
  explicit Store(Machine machine) : machine_(std::move(machine)) {}

  Status find(const Request& request, void* stream, const Kernel** kernel);

  // Where find() would take it from, and what is known of it.
  Status look_up(const Request& request, KernelState* state);

 private:
  // Threads that ask for the same kernel wait for the first; others do not.
  struct Entry {
    std::mutex mutex;
    std::atomic<const Kernel*> ready{nullptr};
    std::unique_ptr<Kernel> kernel;
  };

  Entry& entry_of(const Request& request);
  Status make(const Request& request, std::unique_ptr<Kernel>* kernel) const;
  bool read_from_disk(const Settings& settings, const Request& request, Image* image,
                      std::string* origin) const;
  Status image_of(const Settings& settings, const Request& request, Image* image,
                  std::string* origin) const;
  Status compile(const Settings& settings, const Request& request, Image* image) const;

  Machine machine_;
  std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Entry>> entries_;
};

}  // namespace pantile::jit
