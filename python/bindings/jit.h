// Kernels compiled at run time, for Python: the log, folders, and compiling for another machine.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <vector>

#include "hooks.h"
#include "pantile/pantile.h"
#include "planner.h"
#include "unlocked.h"

namespace pantile::python {

// Called by any thread, with or without the GIL, and by none of ours that holds a lock.
inline void log_to_python(jit::LogLevel level, const char* text) {
  if (!nb::is_alive() || hooks().jit_log == nullptr) {
    return;
  }
  const nb::gil_scoped_acquire locked;
  try {
    nb::handle(hooks().jit_log)(static_cast<int>(level), text);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("the log of pantile");
  }
}

inline void set_jit(const std::string& nvrtc_folders, const std::string& shipped_folders,
                    nb::handle log) {
  jit::set_nvrtc_folders(nvrtc_folders.c_str());
  jit::set_shipped_folders(shipped_folders.c_str());
  hooks().jit_log = log.inc_ref().ptr();
  jit::set_log(log_to_python);
}

// "13.0, /path/libnvrtc.so.13", or the reason why there is none.
inline nb::tuple find_nvrtc() {
  char text[512] = "";
  Status status;
  {
    const Unlocked unlocked;
    status = jit::find_nvrtc(text, sizeof text);
  }
  return nb::make_tuple(status.ok(), status.ok() ? text : status.message());
}

inline nb::dict facts_dict(const jit::KernelFacts& facts) {
  nb::dict dict;
  dict["name"] = facts.name;
  dict["file"] = facts.file;
  dict["registers"] = facts.registers;
  dict["spill_bytes"] = facts.spill_bytes;
  dict["shared_bytes"] = facts.shared_bytes;
  dict["bytes"] = facts.bytes;
  dict["advisories"] = facts.advisories;
  dict["seconds"] = facts.seconds;
  return dict;
}

inline nb::dict compile_kernel(const std::string& name, const std::string& source,
                               const std::string& entry, int arch, const std::string& folder) {
  jit::KernelFacts facts;
  Status status;
  {
    const Unlocked unlocked;
    status =
        jit::compile_to_folder(jit::KernelSource{name.c_str(), source.c_str(), entry.c_str(), arch},
                               folder.c_str(), &facts);
  }
  raise_unless_ok(status);
  return facts_dict(facts);
}

inline void bind_jit(nb::module_& module) {
  using namespace nb::literals;
  module.def("set_jit", &set_jit, "nvrtc_folders"_a, "shipped_folders"_a, "log"_a);
  module.def("find_nvrtc", &find_nvrtc);
  module.def("compile_kernel", &compile_kernel, "name"_a, "source"_a, "entry"_a, "arch"_a,
             "folder"_a);
}

}  // namespace pantile::python
