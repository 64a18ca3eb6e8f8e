// Work without the GIL.
#pragma once

#include <Python.h>

#include <chrono>
#include <thread>

namespace pantile::python {

// Gives the GIL away for as long as it lives.
//
// A daemon thread may be in here when the interpreter shuts down. It must not take the GIL then.
// Python before 3.14 ends such a thread with pthread_exit; glibc carries that out as an exception,
// which functions of nanobind that are noexcept turn into std::terminate, the end of the process.
// Such a thread stops here instead, as it does in Python 3.14: the process ends around it.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // no C++ exception comes from Python, so this is the end of the thread
      for (;;) {     // leaving this block would abort the process, too
        std::this_thread::sleep_for(std::chrono::hours(1));
      }
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace pantile::python
