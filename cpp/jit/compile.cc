#include "jit/compile.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>

#include "jit/headers.h"
#include "jit/log.h"

namespace pantile::jit {
namespace {

// A few registers that ptxas puts aside once a tile cost nothing that can be measured: kernels of
// the library spill up to 136 bytes (tools/kernel_budget.json).
constexpr int kFewSpillBytes = 64;

// A program of NVRTC for its lifetime.
class Program {
 public:
  explicit Program(const Nvrtc& nvrtc) : nvrtc_(nvrtc) {}
  ~Program() {
    if (handle != nullptr) {
      static_cast<void>(nvrtc_.destroy(&handle));
    }
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::string log() const {
    std::size_t bytes = 0;
    if (handle == nullptr || nvrtc_.log_bytes(handle, &bytes) != 0 || bytes <= 1) {
      return "";
    }
    std::string text(bytes, '\0');
    if (nvrtc_.log(handle, text.data()) != 0) {
      return "";
    }
    text.resize(bytes - 1);
    return text;
  }

  Nvrtc::Program handle = nullptr;

 private:
  const Nvrtc& nvrtc_;
};

// The number before `unit` at its last mention, or 0: "Used 168 registers".
int number_before(const std::string& line, const std::string& unit) {
  const std::size_t at = line.find(unit);
  if (at == std::string::npos) {
    return 0;
  }
  std::size_t begin = at;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(line[begin - 1])) != 0) {
    --begin;
  }
  return std::atoi(line.substr(begin, at - begin).c_str());
}

// The first line that says "error", or the first line.
std::string first_error(const std::string& log) {
  std::size_t at = log.find("error");
  at = at == std::string::npos ? 0 : at;
  const std::size_t begin = at == 0 ? 0 : log.rfind('\n', at) + 1;  // npos + 1 is 0
  return log.substr(begin, log.find('\n', at) - begin);
}

// Fills `code` and `symbol` of the image. 0, or NVRTC's error of the function named by `step`.
int make_code(const Nvrtc& nvrtc, const Request& request, Nvrtc::Program* program, Image* image,
              const char** step) {
  const HeaderList embedded = embedded_headers();
  std::vector<const char*> names;
  std::vector<const char*> texts;
  for (int i = 0; i < embedded.count; ++i) {
    names.push_back(embedded.headers[i].name);
    texts.push_back(embedded.headers[i].text);
  }
  const std::vector<std::string> options = compile_options(request.arch);
  std::vector<const char*> arguments;
  for (const std::string& option : options) {
    arguments.push_back(option.c_str());
  }
  const std::string entry = one_line(request.entry);  // NVRTC takes a name on one line

  *step = "nvrtcCreateProgram";
  int code = nvrtc.create(program, request.source.c_str(), "kernel.cu", embedded.count,
                          texts.data(), names.data());
  if (code == 0) {
    *step = "nvrtcAddNameExpression";
    code = nvrtc.add_name(*program, entry.c_str());
  }
  if (code == 0) {
    *step = "nvrtcCompileProgram";
    code = nvrtc.compile(*program, static_cast<int>(arguments.size()), arguments.data());
  }
  const char* symbol = nullptr;
  if (code == 0) {
    *step = "nvrtcGetLoweredName";
    code = nvrtc.lowered_name(*program, entry.c_str(), &symbol);
  }
  std::size_t bytes = 0;
  if (code == 0) {
    image->symbol = symbol;
    *step = "nvrtcGetCUBIN";
    code = nvrtc.cubin_bytes(*program, &bytes);
  }
  if (code == 0) {
    image->code.resize(bytes);
    code = nvrtc.cubin(*program, image->code.data());
  }
  return code;
}

}  // namespace

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

Status check_request(const Request& request) {
  if (request.source.empty() || request.entry.empty()) {
    return Status::error(StatusCode::invalid_argument, "the request for kernel '%s' has no %s",
                         request.name.c_str(), request.source.empty() ? "source" : "entry");
  }
  if (request.arch != 80 && request.arch != 90) {
    return Status::error(StatusCode::invalid_argument,
                         "the request for kernel '%s' has arch %d; it must be 80 or 90",
                         request.name.c_str(), request.arch);
  }
  return Status();
}

std::vector<std::string> compile_options(int arch) {
  return {arch == 90 ? "--gpu-architecture=sm_90a" : "--gpu-architecture=sm_80", "--std=c++20",
          "--device-as-default-execution-space", "-DPANTILE_STATIC", "--ptxas-options=-v"};
}

void read_facts(const std::string& log, Image* image) {
  std::size_t begin = 0;
  while (begin < log.size()) {
    std::size_t end = log.find('\n', begin);
    end = end == std::string::npos ? log.size() : end;
    const std::string line = log.substr(begin, end - begin);
    begin = end + 1;
    // A line for the kernel, and one for each function that it calls.
    image->registers = std::max(image->registers, number_before(line, " registers"));
    image->spill_bytes += number_before(line, " bytes spill stores");
    image->shared_bytes = std::max(image->shared_bytes, number_before(line, " bytes smem"));
    for (std::size_t at = line.find("C75"); at != std::string::npos;
         at = line.find("C75", at + 1)) {
      const std::string code = line.substr(at, 5);
      if (image->advisories.find(code) == std::string::npos) {
        image->advisories += (image->advisories.empty() ? "" : ",") + code;
      }
    }
  }
}

void warn_if_slow(const Image& image) {
  const bool spills = image.spill_bytes > kFewSpillBytes;
  if (!spills && image.advisories.empty()) {
    return;
  }
  std::string what;
  if (spills) {
    what = "spills " + std::to_string(image.spill_bytes) + " bytes of registers a thread";
  }
  if (!image.advisories.empty()) {
    what += (what.empty() ? "" : " and ") + ("has the compiler's advisory " + image.advisories);
  }
  log(LogLevel::warning, "kernel " + image.name + ", compiled by " + image.compiler + ", " + what +
                             ": its results are right, but it may be slow");
}

Status compile(const Nvrtc& nvrtc, const Request& request, Image* image) {
  if (const Status status = check_request(request); !status.ok()) {
    return status;
  }
  Program program(nvrtc);
  Image made;
  const char* step = "";
  const int code = make_code(nvrtc, request, &program.handle, &made, &step);
  const std::string text = program.log();
  if (code != 0) {
    log(LogLevel::warning, "compiling kernel " + request.name + " failed:\n" + text);
    return Status::error(StatusCode::unavailable, "compiling kernel %s by NVRTC %s: %s: %s: %s",
                         request.name.c_str(), nvrtc.version_text().c_str(), step,
                         nvrtc.error_string(code), first_error(text).c_str());
  }
  made.key = image_key(request);
  made.name = request.name;
  made.compiler = "nvrtc " + nvrtc.version_text();
  read_facts(text, &made);
  log(LogLevel::debug, "compiling kernel " + request.name + ":\n" + text);
  warn_if_slow(made);
  *image = made;
  return Status();
}

}  // namespace pantile::jit
