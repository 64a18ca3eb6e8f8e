// The kernels of one instruction set. Compiled once for each, with -DPANTILE_ISA=<its name>; the
// table is the only symbol that leaves the object file.
#include "cpu/kernels.h"

#include "cpu/isa/backward.h"
#include "cpu/isa/bias_gradient.h"
#include "cpu/isa/captured_gradient.h"
#include "cpu/isa/decode.h"
#include "cpu/isa/forward.h"
#include "cpu/isa/forward_fp8.h"

namespace pantile::cpu::PANTILE_ISA {
namespace {

void run_forward(const ForwardJob& job, int item, void* scratch) {
  forward(job, item, scratch);
}

void run_prepare(const BackwardJob& job, int item, void*) {
  prepare(job, item);
}

void run_backward(const BackwardJob& job, int item, void* scratch) {
  backward(job, item, scratch);
}

void run_bias_gradient(const BackwardJob& job, int item, void* scratch) {
  bias_gradient(job, item, scratch);
}

void run_write_shared_keys(const BackwardJob& job, int item, void*) {
  write_shared_keys(job, item);
}

void run_captured_gradient(const BackwardJob& job, int item, void* scratch) {
  captured_gradient(job, item, scratch);
}

void run_forward_fp8(const Fp8ForwardJob& job, int item, void* scratch) {
  forward_fp8(job, item, scratch);
}

void run_decode(const DecodeJob& job, int item, void* scratch) {
  decode(job, item, scratch);
}

void run_merge_decode(const DecodeJob& job, int item, void* scratch) {
  merge_decode(job, item, scratch);
}

}  // namespace

const KernelTable kKernels = {
    run_forward,           run_prepare,     run_backward, run_bias_gradient, run_captured_gradient,
    run_write_shared_keys, run_forward_fp8, run_decode,   run_merge_decode,
};

}  // namespace pantile::cpu::PANTILE_ISA
