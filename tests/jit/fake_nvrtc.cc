// A library with NVRTC's functions and a compiler that only pretends: its machine code is "code of
// " and the source. FAKE_MAJOR and FAKE_MINOR are its version. Words of the source choose what
// happens: "broken" fails, "spills" and "serialised" are in the log as ptxas would say it, "slow"
// takes 50 ms.
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>

namespace {

struct Program {
  std::string source, log, name;
  int headers = 0;
};

int copy(const std::string& text, char* to) {
  std::memcpy(to, text.data(), text.size());
  return 0;
}

bool has(const Program& program, const char* word) {
  return program.source.find(word) != std::string::npos;
}

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default")))

FAKE const char* nvrtcGetErrorString(int) {
  return "NVRTC_ERROR_FAKE";
}
FAKE int nvrtcVersion(int* major, int* minor) {
  *major = FAKE_MAJOR;
  *minor = FAKE_MINOR;
  return 0;
}
FAKE int nvrtcCreateProgram(Program** program, const char* source, const char*, int headers,
                            const char* const*, const char* const*) {
  *program = new Program{source, "", "", headers};
  return 0;
}
FAKE int nvrtcDestroyProgram(Program** program) {
  delete *program;
  *program = nullptr;
  return 0;
}
FAKE int nvrtcAddNameExpression(Program* program, const char* name) {
  program->name = name;
  return program->name.find('\n') == std::string::npos ? 0 : 10;
}
FAKE int nvrtcCompileProgram(Program* program, int, const char* const*) {
  if (has(*program, "slow")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  if (has(*program, "broken")) {
    program->log = "note\nkernel.cu(1): error: this source is broken\n  here\n";
    return 6;
  }
  program->log =
      "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
      "ptxas         .     8 bytes stack frame, " +
      std::string(has(*program, "spills many") ? "200"
                  : has(*program, "spills")    ? "12"
                                               : "0") +
      " bytes spill stores, 16 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 2 barriers, 48 bytes smem\n";
  if (has(*program, "serialised")) {
    program->log +=
        "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized\nptxas info    : (C7515) again\nptxas info    : (C7510) another\n";
  }
  return 0;
}
FAKE int nvrtcGetLoweredName(Program* program, const char* name, const char** lowered) {
  if (program->name != name) {
    return 9;
  }
  program->name = "lowered_" + program->name;
  *lowered = program->name.c_str();
  return 0;
}
FAKE int nvrtcGetCUBINSize(Program* program, std::size_t* bytes) {
  *bytes = program->source.size() + 8;
  return 0;
}
FAKE int nvrtcGetCUBIN(Program* program, char* to) {
  return copy("code of " + program->source, to);
}
FAKE int nvrtcGetProgramLogSize(Program* program, std::size_t* bytes) {
  *bytes = program->log.size() + 1;
  return 0;
}
FAKE int nvrtcGetProgramLog(Program* program, char* to) {
  return copy(program->log + '\0', to);
}
