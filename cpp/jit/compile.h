// One kernel through NVRTC: source and embedded headers in, machine code and facts out.
#pragma once

#include <string>
#include <vector>

#include "jit/image.h"
#include "jit/kernel.h"
#include "jit/nvrtc.h"
#include "pantile/status.h"

namespace pantile::jit {

// Refuses a request that lacks something or asks for an architecture without kernels.
Status check_request(const Request& request);

std::vector<std::string> compile_options(int arch);

std::string one_line(std::string text);  // line ends become blanks

// Needs no GPU. Errors of the source go to the log whole and into the status as far as they fit.
Status compile(const Nvrtc& nvrtc, const Request& request, Image* image);

// Registers, spills, shared memory and advisories from ptxas's remarks in a log.
void read_facts(const std::string& log, Image* image);

// Warns if the compiler spilled many registers or serialised products: the kernel is right, but
// slow.
void warn_if_slow(const Image& image);

}  // namespace pantile::jit
