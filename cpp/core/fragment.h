// Which element of a matrix each register of a tensor-core operand holds.
//
// `lane` is 0..31 in a warp, `thread` 0..127 in a warpgroup. `element` counts what a thread holds
// in the order of its registers, the low part of a register first: fp32 accumulators have one
// element a register, 16-bit operands two, 8-bit operands four. Source: PTX ISA, "Matrix fragments
// for mma" and "Register fragments for wgmma".
#pragma once

#include "core/host_device.h"

namespace pantile::core {

struct Element {
  int row, column;
};

// ---- mma.sync: A is 16 x k (row, column = k), B is k x 8 (row = k), C and D are 16 x 8
// ------------

// C and D of every shape: 4 elements.
PANTILE_HD constexpr Element mma_accumulator(int lane, int element) {
  return Element{lane / 4 + 8 * (element / 2), 2 * (lane % 4) + element % 2};
}

// m16n8k16, 16-bit A: 8 elements.
PANTILE_HD constexpr Element mma_k16_a(int lane, int element) {
  return Element{lane / 4 + 8 * (element / 2 % 2),
                 2 * (lane % 4) + element % 2 + 8 * (element / 4)};
}

// m16n8k16, 16-bit B: 4 elements.
PANTILE_HD constexpr Element mma_k16_b(int lane, int element) {
  return Element{2 * (lane % 4) + element % 2 + 8 * (element / 2), lane / 4};
}

// m16n8k8, 16-bit A: 4 elements.
PANTILE_HD constexpr Element mma_k8_a(int lane, int element) {
  return Element{lane / 4 + 8 * (element / 2), 2 * (lane % 4) + element % 2};
}

// m16n8k8, 16-bit B: 2 elements.
PANTILE_HD constexpr Element mma_k8_b(int lane, int element) {
  return Element{2 * (lane % 4) + element, lane / 4};
}

// m16n8k8, tf32 A: 4 elements.
PANTILE_HD constexpr Element mma_tf32_a(int lane, int element) {
  return Element{lane / 4 + 8 * (element % 2), lane % 4 + 4 * (element / 2)};
}

// m16n8k8, tf32 B: 2 elements.
PANTILE_HD constexpr Element mma_tf32_b(int lane, int element) {
  return Element{lane % 4 + 4 * element, lane / 4};
}

// ---- wgmma: each warp of the warpgroup has 16 of the 64 rows
// --------------------------------------

// D of m64nN: N / 2 elements. (fp16 accumulators hold the same elements, two a register.)
PANTILE_HD constexpr Element wgmma_accumulator(int thread, int element) {
  return Element{thread / 32 * 16 + thread % 32 / 4 + 8 * (element / 2 % 2),
                 8 * (element / 4) + 2 * (thread % 4) + element % 2};
}

// A in registers, 16-bit, k16: 8 elements. Elements 8 s .. 8 s + 7 of an accumulator are, in order,
// the A operand of k-step s: P needs no shuffle between the two products of attention.
PANTILE_HD constexpr Element wgmma_a16(int thread, int element) {
  const Element in_warp = mma_k16_a(thread % 32, element);
  return Element{thread / 32 * 16 + in_warp.row, in_warp.column};
}

// A in registers, 8-bit, k32: 16 elements.
PANTILE_HD constexpr Element wgmma_a8(int thread, int element) {
  const int reg = element / 4;
  return Element{thread / 32 * 16 + thread % 32 / 4 + 8 * (reg % 2),
                 4 * (thread % 4) + element % 4 + 16 * (reg / 2)};
}

// An 8-bit A operand taken from an accumulator without a shuffle: element `element` of k-step s is
// element 16 s + fp8_accumulator_element(element) of the accumulator. Its keys then stand in
// another order, in which V must be stored: slot `slot` of every 16 keys holds key
// fp8_key_of_slot(slot).
PANTILE_HD constexpr int fp8_accumulator_element(int element) {
  const int reg = element / 4;
  return element % 2 + 4 * (element / 2 % 2) + 2 * (reg % 2) + 8 * (reg / 2);
}

PANTILE_HD constexpr int fp8_key_of_slot(int slot) {
  return slot % 2 + 2 * (slot / 4) + 8 * (slot / 2 % 2);
}

}  // namespace pantile::core
