// Work without the GIL, and calls of Python, while the interpreter may go away.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <exception>
#include <thread>
#include <utility>

namespace pantile::python {

// The end of a thread that Python does not let back in.
//
// A daemon thread may be in here when the interpreter shuts down. Whoever asks for the GIL then,
// and the interpreter itself between two instructions or around a wait, does not get it: Python
// before 3.14 ends the thread with pthread_exit. glibc carries that out as an exception of no type,
// which functions that are noexcept (of nanobind, and destructors) turn into std::terminate, the
// end of the process. Such a thread stops here instead, as it does in Python 3.14: the process ends
// around it. Leaving the block that caught the exception would abort the process, too.
[[noreturn]] inline void stop_for_ever() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

// Gives the GIL away for as long as it lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // no C++ exception comes from there
      stop_for_ever();
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Has the GIL for as long as it lives, on any thread.
class Locked {
 public:
  Locked() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {  // no C++ exception comes from there
      stop_for_ever();
    }
  }
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// A call of a function of Python, with the GIL, from C++ that is noexcept further out.
template <class... Arguments>
nanobind::object call_python(PyObject* function, Arguments&&... arguments) {
  try {
    return nanobind::handle(function)(std::forward<Arguments>(arguments)...);
  } catch (const std::exception&) {  // Python's errors too
    throw;
  } catch (...) {
    stop_for_ever();
  }
}

}  // namespace pantile::python
