// The kernels of one instruction set. Compiled once for each, with -DPANTILE_ISA=<its name>; the
// table is the only symbol that leaves the object file.
#include "cpu/kernels.h"

#include "cpu/isa/forward.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

void run_forward(const ForwardJob& job, int item, void* scratch) {
#if defined(__AVX512BF16__)
  if (job.dtype == DType::bf16) {
    forward<PairMath>(job, item, scratch);
    return;
  }
#endif
  forward<FloatMath>(job, item, scratch);
}

}  // namespace

const KernelTable kKernels = {run_forward, nullptr, nullptr};

}  // namespace pantile::cpu::PANTILE_ISA
