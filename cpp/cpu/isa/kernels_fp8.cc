// The FP8 backward of one instruction set, as kernels.cc.
#include "cpu/isa/backward_fp8.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

void run_prepare_fp8(const Fp8BackwardJob& job, int item, void*) {
  prepare_fp8(job, item);
}

void run_backward_fp8(const Fp8BackwardJob& job, int item, void* scratch) {
  backward_fp8(job, item, scratch);
}

}  // namespace

const Fp8KernelTable kFp8Kernels = {run_prepare_fp8, run_backward_fp8};

}  // namespace pantile::cpu::PANTILE_ISA
