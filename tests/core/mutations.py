"""Shows that the tests of cpp/core can fail: each mutation below breaks one header in one place,
and the test it names must notice.

    python tests/core/mutations.py             # all, about a minute on two cores
    python tests/core/mutations.py geometry.h  # one header
    CXX=clang++ python tests/core/mutations.py

A mutant that passes its test is an error, and so are a mutant that does not compile, an original
text that is not found exactly once, and a test that fails or does not exist without any mutation.
Needs a C++17 compiler and GoogleTest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CORE = TESTS.parents[1] / "cpp" / "core"
RUN_LIMIT_SECONDS = 60


@dataclass(frozen=True)
class Mutation:
    header: str
    test: str  # as GoogleTest names it; its first part names the file: Geometry -> test_geometry.cc
    original: str
    replacement: str

    @property
    def source(self) -> Path:
        return TESTS / FILE_OF_SUITE[self.test.split(".")[0]]

    def __str__(self) -> str:
        return f"{self.header}: {self.original!r} -> {self.replacement!r}"


FILE_OF_SUITE = {
    "BiasPiece": "test_bias_piece.cc",
    "Blocked": "test_blocked.cc",
    "Dropout": "test_dropout.cc",
    "ForwardSplit": "test_forward_split.cc",
    "Fp8Steps": "test_fp8_steps.cc",
    "Fragment": "test_fragment.cc",
    "Geometry": "test_geometry.cc",
    "Hadamard": "test_hadamard.cc",
    "Heads": "test_sequence.cc",
    "Integer": "test_integer.cc",
    "IntegerSum": "test_integer_sum.cc",
    "IntegerUnit": "test_integer_unit.cc",
    "Kv": "test_kv.cc",
    "LowBits": "test_low_bits.cc",
    "Scaling": "test_scaling.cc",
    "Sequence": "test_sequence.cc",
    "SoftmaxState": "test_softmax_state.cc",
    "Swizzle": "test_swizzle.cc",
    "TensorSoftmax": "test_tensor_softmax.cc",
    "TileOrder": "test_tile_order.cc",
}

# header: (test, original, replacement)
LISTED = {
    "dropout.h": [
        ("Dropout.PhiloxKnownAnswers", "round < 10", "round < 9"),
        ("Dropout.PhiloxKnownAnswers", "counter.word[3] ^ key1", "counter.word[3] ^ key0"),
        ("Dropout.ElementsHaveBytesOfTheirOwn", "row / 16 * 4 + row % 8 / 2", "row / 16 * 4"),
        ("Dropout.ElementsHaveBytesOfTheirOwn", "[2 * (row % 2) + key % 2]", "[2 * (row % 2)]"),
        ("Dropout.ElementsHaveBytesOfTheirOwn", "(row / 8 % 2) + key / 8 % 2)", "(row / 8 % 2))"),
        ("Dropout.KeysOfCallsDiffer", "seed ^ mixed ^ (mixed >> 31)", "seed"),
        ("Dropout.ScaleAndThreshold", ">= static_cast<std::uint32_t>(dropped)", "> 0u"),
        ("Dropout.ScaleAndThreshold", "256.0f / static_cast<float>(256 - dropped)", "1.0f"),
        ("Dropout.BytesAreUniformAndIndependent", "0xD2511F53u", "0xD2511F00u"),
    ],
    "forward_split.h": [
        ("ForwardSplit.PartsSeeEachVisiblePairOnce", "mask.keys - mask.rows + 1", "mask.keys"),
        ("ForwardSplit.PartsSeeEachVisiblePairOnce", "seen / tile * tile", "seen"),
        ("ForwardSplit.PartsSeeEachVisiblePairOnce", "clamp(at, split.cut.begin", "clamp(at, 0"),
        (
            "ForwardSplit.PartsSeeEachVisiblePairOnce",
            "visible_keys(mask, mask.rows - 1).end",
            "visible_keys(mask, 0).end",
        ),
        (
            "ForwardSplit.PartsDifferByOneTile",
            "tiles * number / split.parts",
            "min_of<std::int64_t>(tiles, ceil_div<std::int64_t>(tiles, split.parts) * number)",
        ),
        (
            "ForwardSplit.LongKeysDoNotOverflow",
            "const std::int64_t tiles = ceil_div",
            "const int tiles = ceil_div",
        ),
        (
            "ForwardSplit.CopiesOfQueriesArePackedSequences",
            "std::int64_t{part} * rows.capacity",
            "std::int64_t{part} * rows.used",
        ),
        (
            "ForwardSplit.CopiesOfQueriesArePackedSequences",
            "job.cu_seqlens_q[middle + 1] <= row",
            "job.cu_seqlens_q[middle] <= row",
        ),
        ("ForwardSplit.ArraysNameThePartsKeys", "shift - keys.begin;", "shift;"),
        ("ForwardSplit.ArraysNameThePartsKeys", "batch * job.key_rows", "batch * job.seqlen_k"),
        (
            "ForwardSplit.ResultsLieWhereTheirRowsDo",
            "head * (job.total_q * parts)",
            "head * job.total_q",
        ),
        ("ForwardSplit.MergeIsTheLogarithmOfTheSum", "return b > a ? b : a;", "return b;"),
        (
            "ForwardSplit.MergeIsTheLogarithmOfTheSum",
            "softmax_shift(reference)) * kLog2E",
            "softmax_shift(reference))",
        ),
        ("ForwardSplit.ModelTakesTheFastestNumber", "splits == 1 ? 0.0 : ", ""),
        ("ForwardSplit.ModelTakesTheFastestNumber", "model.query_tiles * splits", "splits"),
        ("ForwardSplit.ModelTakesTheFastestNumber", "kLeastGain = 0.9", "kLeastGain = 1.0"),
    ],
    "kv_split.h": [
        (
            "Kv.PartsOfInvariantSplitsArePowersOfTwoNearASixteenth",
            "part * 16 < keys",
            "part * 8 < keys",
        ),
        (
            "Kv.MostPartsBoundThoseOfEveryLength",
            "(keys - 1) / part_keys + 1",
            "keys / part_keys + 1",
        ),
    ],
    "kv_sequence.h": [
        (
            "Kv.SequencesAreLocatedAndClamped",
            "max_of(s.before, 0)) + s.added",
            "s.before) + s.added",
        ),
        (
            "Kv.SequencesAreLocatedAndClamped",
            "clamp(arrays.leftpad[batch], 0, s.keys)",
            "arrays.leftpad[batch]",
        ),
        (
            "Kv.VisibleKeysAgreeWithTheirDefinition",
            "clamp<std::int64_t>(low, s.first_key, s.keys)",
            "clamp<std::int64_t>(low, 0, s.keys)",
        ),
        ("Kv.VisibleKeysAgreeWithTheirDefinition", "at + window_right + 1", "at + window_right"),
        ("Kv.TreeMasksHideDraftTokensOnly", "draft >= 0 && ", ""),
    ],
    "integer_sum.h": [
        (
            "IntegerSum.SmallTermsAreRoundedToNearest",
            "kHeldOffset = 3.0f;",
            "kHeldOffset = 2.5f;",
        ),
        (
            "IntegerSum.OneTermOutOfRangeShowsAmongMany",
            "(bits & 0xff800000u)",
            "(bits & 0x7f800000u)",
        ),
        (
            "IntegerSum.LargeTermsAreFoundAndKeepTheirTopBits",
            "fmaf(held, 0x1p26f, -kHeldOffset * 0x1p26f)",
            "held * 0x1p26f",
        ),
        (
            "IntegerSum.NoTermIsHeldAsZero",
            "kHeldScale = 0x1.000002p-22f;",
            "kHeldScale = 0x1p-22f;",
        ),
        (
            "IntegerSum.RoundingOfLargeTermsHasNoBias",
            "fmaf(held, 0x1p-4f,",
            "fmaf(held, 0x1.000002p-4f,",
        ),
        (
            "IntegerSum.OneTermOutOfRangeShowsAmongMany",
            "return bits < 0x800000u;",
            "return bits < 0x80000000u;",
        ),
        (
            "IntegerSum.SmallTermsSurviveTheConversionsOfLargeOnes",
            "float_bits(held) * 16 - 15 * kHeldZero",
            "float_bits(held) * 16 - 16 * kHeldZero",
        ),
        (
            "IntegerSum.SumsDoNotDependOnTheOrder",
            "words - terms * kHeldZero",
            "words - kHeldZero",
        ),
    ],
    "tensor_softmax.h": [
        (
            "TensorSoftmax.Tf32IsTheUpperElevenBits",
            "kTf32Ignored = 0x1fffu",
            "kTf32Ignored = 0x0fffu",
        ),
        (
            "TensorSoftmax.Tf32IsTheUpperElevenBits",
            "float_bits(x) + 0x1000u",
            "float_bits(x) + 0x0fffu",
        ),
        (
            "TensorSoftmax.ScaleAndAddIsElementWise",
            "2 * (at.row % 4) + at.row / 4",
            "at.row",
        ),
        (
            "TensorSoftmax.ScaleAndAddIsElementWise",
            "return element % 2 * 2 + element / 2;",
            "return element;",
        ),
        (
            "TensorSoftmax.Tf32RowSumsKeepRowsApart",
            "return at.row / 4 == at.column % 2;",
            "return true;",
        ),
        (
            "TensorSoftmax.IntegerReductionsFindTheLargestFloat",
            "return largest < 0 ? smallest : largest;",
            "return largest;",
        ),
    ],
    "geometry.h": [
        (
            "Geometry.RowsSeeExactlyTheKeysOfTheDefinition",
            "int shift() const { return keys - rows; }",
            "int shift() const { return 0; }",
        ),
        (
            "Geometry.AnyShiftIsTheOneGiven",
            "int shift() const { return given; }",
            "int shift() const { return keys - rows; }",
        ),
        (
            "Geometry.AnyShiftIsTheOneGiven",
            "clamp(shift, -kNoBound, kNoBound)",
            "shift",
        ),
        (
            "Geometry.RowsSeeExactlyTheKeysOfTheDefinition",
            "clamp(position + mask.right + 1, 0, mask.keys)",
            "clamp(position + mask.right, 0, mask.keys)",
        ),
        (
            "Geometry.RowsSeeExactlyTheKeysOfTheDefinition",
            "clamp(position - mask.left, 0, mask.keys)",
            "clamp(position - mask.left + 1, 0, mask.keys)",
        ),
        (
            "Geometry.RowsSeeExactlyTheKeysOfTheDefinition",
            "key >= span.begin && key < span.end",
            "key >= span.begin && key <= span.end",
        ),
        (
            "Geometry.KeysAreSeenByExactlyTheRowsOfTheDefinition",
            "clamp(position - mask.right, 0, mask.rows)",
            "clamp(position - mask.left, 0, mask.rows)",
        ),
        (
            "Geometry.KeysAreSeenByExactlyTheRowsOfTheDefinition",
            "clamp(position + mask.left + 1, 0, mask.rows)",
            "clamp(position + mask.left, 0, mask.rows)",
        ),
        (
            "Geometry.KeysAreSeenByExactlyTheRowsOfTheDefinition",
            "clamp(position - mask.right, 0, mask.rows)",
            "clamp(position - mask.right, 0, mask.keys)",
        ),
        (
            "Geometry.RowTilePlansAreExact",
            "ceil_div(touched.end, tile)}",
            "touched.end / tile + 1}",
        ),
        (
            "Geometry.RowTilePlansAreExact",
            "const int end = common.end / tile;",
            "const int end = ceil_div(common.end, tile);",
        ),
        (
            "Geometry.RowTilePlansAreExact",
            "const int begin = ceil_div(common.begin, tile);",
            "const int begin = common.begin / tile;",
        ),
        (
            "Geometry.RowTilePlansAreExact",
            "plan.full = Span{plan.visit.begin, plan.visit.begin};",
            "plan.full = Span{0, 0};",
        ),
        ("Geometry.RowTilePlansAreExact", "if (begin < end) {", "if (begin <= end) {"),
        (
            "Geometry.RowTilePlansAreExact",
            "visible_keys(mask, rows.end - 1);",
            "visible_keys(mask, rows.end);",
        ),
        (
            "Geometry.PlansOfRealTilesAreExact",
            "visible_keys(mask, rows.end - 1);",
            "visible_keys(mask, rows.begin);",
        ),
        (
            "Geometry.KeyTilePlansAreExact",
            "visible_rows(mask, keys.end - 1);",
            "visible_rows(mask, keys.end);",
        ),
        (
            "Geometry.KeyTilePlansAreExact",
            "visible_rows(mask, keys.begin);",
            "visible_rows(mask, keys.end - 1);",
        ),
        (
            "Geometry.NegativeWindowsAreUnboundedOnTheirOwnSideOnly",
            "window_left < 0 ? kNoBound",
            "window_right < 0 ? kNoBound",
        ),
        (
            "Geometry.LongestSequencesAndWidestWindowsStayExact",
            "static_cast<int>(min_of(window_right, no_bound))",
            "static_cast<int>(window_right)",
        ),
        (
            "Geometry.LongestSequencesAndWidestWindowsStayExact",
            "static_cast<int>(min_of(window_left, no_bound))",
            "static_cast<int>(window_left)",
        ),
        (
            "Geometry.SpanCountsNothingWhenItIsEmptyOrReversed",
            "return end > begin ? end - begin : 0;",
            "return end - begin;",
        ),
        (
            "Geometry.SpanCountsNothingWhenItIsEmptyOrReversed",
            "return end <= begin;",
            "return end == begin;",
        ),
    ],
    "integer.h": [
        ("Integer.MinMaxAndClampAgreeWithComparison", "a < b ? a : b", "a < b ? b : a"),
        ("Integer.MinMaxAndClampAgreeWithComparison", "a > b ? a : b", "a > b ? b : a"),
        (
            "Integer.MinMaxAndClampAgreeWithComparison",
            "x < low ? low : x > high ? high : x",
            "x < low ? low : x",
        ),
        ("Integer.QuotientsRoundAsTheirNamesSay", "return (a + b - 1) / b;", "return (a + b) / b;"),
        (
            "Integer.QuotientsRoundAsTheirNamesSay",
            "return ceil_div(a, b) * b;",
            "return a / b * b;",
        ),
        ("Integer.FastDivisionIsExactUpTo31Bits", "+ d - 1) / d)", ") / d)"),
        ("Integer.FastDivisionIsExactForSmallNumbers", "<< shift_) < d)", "<< shift_) <= d)"),
        ("Integer.FastDivisionIsExactUpTo31Bits", "<< (31 + shift_)", "<< (30 + shift_)"),
        (
            "Integer.FastDivisionIsExactForSmallNumbers",
            "n - quotient * divisor_",
            "n - quotient * shift_",
        ),
    ],
    "sequence.h": [
        ("Heads.EveryQueryHeadBelongsToOneGroupInOrder", "return heads_q / heads_k;", "return 1;"),
        (
            "Heads.EveryQueryHeadBelongsToOneGroupInOrder",
            "return query_head / group();",
            "return query_head % heads_k;",
        ),
        (
            "Heads.EveryQueryHeadBelongsToOneGroupInOrder",
            "return key_head * group();",
            "return key_head * heads_k;",
        ),
        (
            "Sequence.PackedBatchesFollowTheirPrefixSums",
            "begin * side.seq_stride",
            "batch * side.batch_stride",
        ),
        (
            "Sequence.DenseBatchesFollowTheirStrides",
            "sequence.offset = batch * side.batch_stride;",
            "sequence.offset = batch * side.max_length * side.seq_stride;",
        ),
        (
            "Sequence.OffsetsBeyond32BitsAreExact",
            "static_cast<std::int64_t>(batch) * side.max_length",
            "batch * side.max_length",
        ),
        (
            "Sequence.OffsetsBeyond32BitsAreExact",
            "sequence.offset = begin * side.seq_stride;",
            "sequence.offset = begin * static_cast<int>(side.seq_stride);",
        ),
        (
            "Sequence.DecreasingPrefixSumsGiveEmptySequences",
            "max_of(side.cu_seqlens[batch + 1] - begin, 0)",
            "side.cu_seqlens[batch + 1] - begin",
        ),
        (
            "Sequence.SequsedShortensAndNeverLengthens",
            "clamp(side.seqused[batch], 0, sequence.length)",
            "side.seqused[batch]",
        ),
        (
            "Sequence.SequsedShortensAndNeverLengthens",
            "side.seqused != nullptr",
            "side.seqused != nullptr && side.cu_seqlens == nullptr",
        ),
        (
            "Sequence.PackedBatchesFollowTheirPrefixSums",
            "sequence.row = begin;",
            "sequence.row = 0;",
        ),
    ],
    "softmax_state.h": [
        (
            "SoftmaxState.RowsThatSeeNothingAreExactlyZero",
            "return max == -kInfinity ? 0.0f : max;",
            "return max;",
        ),
        (
            "SoftmaxState.EveryBlockingGivesTheTwoPassResult",
            "SoftmaxState{-kInfinity, 0.0f}",
            "SoftmaxState{0.0f, 0.0f}",
        ),
        (
            "SoftmaxState.RowsThatSeeNothingAreExactlyZero",
            "state.sum == 0.0f ? 0.0f : 1.0f / state.sum",
            "1.0f / state.sum",
        ),
        (
            "SoftmaxState.EveryBlockingGivesTheTwoPassResult",
            "(state.max + log2(state.sum)) * kLn2",
            "state.max * kLn2 + log2(state.sum)",
        ),
        (
            "SoftmaxState.RowsThatSeeNothingAreExactlyZero",
            "state.sum == 0.0f ? -kInfinity :",
            "state.sum == 0.0f ? 0.0f :",
        ),
        (
            "SoftmaxState.AttendedNaNAndInfinityReachTheResult",
            "state.sum == 0.0f ? 0.0f : 1.0f / state.sum",
            "state.sum > 0.0f ? 1.0f / state.sum : 0.0f",
        ),
        ("SoftmaxState.ConstantsAreTheNearestFloats", "1.4426950408889634f", "1.4426949f"),
        ("SoftmaxState.ConstantsAreTheNearestFloats", "0.6931471805599453f", "0.693147f"),
    ],
    "tile_order.h": [
        (
            "TileOrder.SlotsOfPackedSequencesLeadBackToThem",
            "cu_seqlens[b] / tile_size + b",
            "(cu_seqlens[b] + b) / tile_size",
        ),
        (
            "TileOrder.SlotsOfPackedSequencesLeadBackToThem",
            "first_slot(cu_seqlens, tile_size, middle) <= slot",
            "first_slot(cu_seqlens, tile_size, middle) < slot",
        ),
        (
            "TileOrder.DenseOrderIsTheListedOneForEveryShape",
            "last_tile_ < 0 ? place.quotient : last_tile_ - place.quotient",
            "place.quotient",
        ),
        (
            "TileOrder.DenseOrderIsTheListedOneForEveryShape",
            "section.quotient * section_.divisor() + place.remainder",
            "section.quotient + place.remainder",
        ),
        (
            "TileOrder.DenseOrderIsTheListedOneForEveryShape",
            "max_of(all_heads % size, 1)",
            "size",
        ),
        (
            "TileOrder.EveryTileOfALargeBatchIsNamedOnce",
            "section.quotient < whole_sections_",
            "section.quotient <= whole_sections_",
        ),
        (
            "TileOrder.EveryTileOfALargeBatchIsNamedOnce",
            "FastDivmod(size * tiles)",
            "FastDivmod(size * tiles + 1)",
        ),
        (
            "TileOrder.TheLargestCountsAreExactAtBothEnds",
            "min_of(section, all_heads)",
            "section",
        ),
        (
            "TileOrder.OrdersAreConstantExpressions",
            "WorkTile{tile, head.remainder, head.quotient}",
            "WorkTile{tile, head.quotient, head.remainder}",
        ),
        (
            "TileOrder.CountsBeyond31BitsAreRefused",
            "tiles <= kMost / (heads * batch)",
            "tiles <= kMost",
        ),
        ("TileOrder.CountsBeyond31BitsAreRefused", "heads <= kMost / batch", "heads <= kMost"),
        (
            "TileOrder.SectionsFillTheCacheAndKeepGroupsTogether",
            "heads * 2 * bytes_per_key_head <= l2_bytes",
            "heads * 2 * bytes_per_key_head < l2_bytes",
        ),
        (
            "TileOrder.SectionsFillTheCacheAndKeepGroupsTogether",
            "heads * 2 * query_heads_per_key_head <= all_heads",
            "heads * 2 <= all_heads",
        ),
        (
            "TileOrder.SectionsFillTheCacheAndKeepGroupsTogether",
            "heads * query_heads_per_key_head, 1,",
            "heads, 1,",
        ),
    ],
    "bias_piece.h": [
        (
            "BiasPiece.LanesGetTheBiasOfTheirScores",
            "row16 * 16 + lane % 16",
            "row16 * 16 + lane / 2",
        ),
        (
            "BiasPiece.LanesGetTheBiasOfTheirScores",
            "key16 * 2 + lane / 16)",
            "key16 * 2 + lane % 2)",
        ),
        (
            "BiasPiece.LanesGetTheBiasOfTheirScores",
            "row16 * 16 + lane / 16 * 8 + lane % 8",
            "row16 * 16 + lane / 8 % 2 * 8 + lane % 8",
        ),
        (
            "BiasPiece.LanesGetTheBiasOfTheirScores",
            "key16 * 2 + lane / 8 % 2",
            "key16 * 2 + lane / 16",
        ),
        ("BiasPiece.LanesGetTheBiasOfTheirScores", "bytes < 0 ? 0 :", "bytes < 0 ? 2 :"),
        ("BiasPiece.LanesGetTheBiasOfTheirScores", "kCopyRows = 32 / kChunks", "kCopyRows = 8"),
        (
            "BiasPiece.ReadsHaveNoBankConflicts",
            "return ldmatrix_offset(kRowBytes, row, chunk);",
            "return static_cast<std::uint32_t>(row * kRowBytes + chunk * 16);",
        ),
        ("BiasPiece.CopiesAreRunsOfARow", "2 * (keys - key)", "2 * (keys - key) + 2"),
        ("BiasPiece.CopiesAreRunsOfARow", "return lane % kChunks;", "return (lane + 1) % kChunks;"),
    ],
    "blocked.h": [
        (
            "Blocked.DenseSequencesFollowEachOther",
            "ceil_div(side.max_length, kBlockedRows)",
            "(side.max_length / kBlockedRows)",
        ),
        (
            "Blocked.PackedSequencesNeverShareABlock",
            "first_packed_block(side.cu_seqlens[batch], batch, kBlockedRows)",
            "side.cu_seqlens[batch] / kBlockedRows",
        ),
        (
            "Blocked.ColumnsOfVAreAPermutation",
            "(key % 8 / 2) * 4 + (key / 8 % 2) * 2",
            "(key % 8 / 2) * 4 + (1 - key / 8 % 2) * 2",
        ),
        ("Blocked.ColumnsOfVAreAPermutation", "(column / 2 % 2) * 8", "(column / 2 % 2) * 4"),
        (
            "Blocked.FourNeighbouringColumnsBelongToOneThread",
            "(column / 4 % 4) * 2",
            "(3 - column / 4 % 4) * 2",
        ),
        (
            "Blocked.FoldsHalvesOntoEachOther",
            "o = count / 2; o > 0; o /= 2",
            "o = 1; o < count; o *= 2",
        ),
        ("Blocked.MeansAreFinite", "return is_finite(x) ? x : 0.0f;", "return x;"),
        (
            "Blocked.MeansAreFinite",
            "return mean_term(sum / static_cast<float>(length));",
            "return sum / static_cast<float>(length);",
        ),
    ],
    "hadamard.h": [
        (
            "Hadamard.GroupIsTheLargestPowerOfTwoThatDivides",
            "head_dim & -head_dim",
            "head_dim & ~(head_dim - 1) & 128",
        ),
        (
            "Hadamard.GroupIsTheLargestPowerOfTwoThatDivides",
            "return group < kMaxRotatedDim ? group : kMaxRotatedDim;",
            "return group;",
        ),
        ("Hadamard.RotatesByItsDefinition", "x[c + distance] = a - b;", "x[c + distance] = b - a;"),
        ("Hadamard.RotatesByItsDefinition", "1.0f / static_cast<float>(group)", "1.0f"),
        (
            "Hadamard.SumsNeighboursFirst",
            "int distance = 1; distance < group; distance *= 2",
            "int distance = group / 2; distance > 0; distance /= 2",
        ),
        ("Hadamard.SignsAreBalanced", "0x9E3779B9u, 0x7F4A7C15u", "0xFFFFFFFFu, 0xFFFFFFFFu"),
        (
            "Hadamard.FiniteRowsStayFiniteAndOthersDoNot",
            "x[c] *= hadamard_factor(c, group);",
            "x[c] *= hadamard_factor(c, 1);",
        ),
    ],
    "fp8_steps.h": [
        ("Fp8Steps.ProductsWithValuesFitFp16", "? 0.0625f : 0.03125f", "? 0.125f : 0.03125f"),
        ("Fp8Steps.ProductsWithValuesFitFp16", "? 0.0625f : 0.03125f", "? 0.0625f : 0.0625f"),
        (
            "Fp8Steps.ScalesOfWeightsHaveInversesInFp16",
            "scale.scale < kLeast",
            "scale.scale < -kLeast",
        ),
        (
            "Fp8Steps.LargeWeightsUseAllOfE4m3",
            "block_scale(amax, kE4m3Max);\n  return scale",
            "block_scale(amax, 2.0f * kE4m3Max);\n  return scale",
        ),
    ],
    "scaling.h": [
        (
            "Scaling.BlocksOfZerosChangeNoUnit",
            "return amax > 0.0f ? block.scale * descale : 0.0f;",
            "return block.scale * descale;",
        ),
        (
            "Scaling.BlocksOfZerosChangeNoUnit",
            "return stored > 0.0f ? stored : before;",
            "return stored;",
        ),
        (
            "Scaling.TiesGoToEvenAndTheirNeighboursDoNot",
            "magnitude + 0x7ffffu + (magnitude >> 20 & 1u)",
            "magnitude + 0x80000u",
        ),
        (
            "Scaling.FloatsOfAllMagnitudesEncodeToTheNearestCode",
            "magnitude + 0x7ffffu + (magnitude >> 20 & 1u)",
            "magnitude",
        ),
        (
            "Scaling.LargeNumbersSaturateAndNaNStays",
            "magnitude >= float_bits(kE4m3Max)",
            "magnitude >= kInfinityBits",
        ),
        (
            "Scaling.LargeNumbersSaturateAndNaNStays",
            "if (magnitude > kInfinityBits) {",
            "if (magnitude >= kInfinityBits) {",
        ),
        (
            "Scaling.FloatsOfAllMagnitudesEncodeToTheNearestCode",
            "kSmallestNormal = 0.015625f",
            "kSmallestNormal = 0.0078125f",
        ),
        (
            "Scaling.EveryCodeDecodesToItsDefinitionAndEncodesBack",
            "kDenormalShift = 16384.0f",
            "kDenormalShift = 8192.0f",
        ),
        (
            "Scaling.EveryCodeDecodesToItsDefinitionAndEncodesBack",
            "(code & 0x80u) << 24",
            "(code & 0x80u) << 23",
        ),
        (
            "Scaling.EveryCodeDecodesToItsDefinitionAndEncodesBack",
            "if (magnitude < 8u) {",
            "if (magnitude < 7u) {",
        ),
        (
            "Scaling.RowsAndBlocksCountFromTheStartOfTheSequence",
            "return ceil_div(length, block_rows);",
            "return length / block_rows + 1;",
        ),
        (
            "Scaling.BlocksOfPackedSequencesNeverOverlap",
            "return begin / block_rows + batch;",
            "return begin / block_rows;",
        ),
        (
            "Scaling.BlocksOfPackedSequencesNeverOverlap",
            "return total_rows / block_rows + batch;",
            "return total_rows / block_rows + batch - 1;",
        ),
        (
            "Scaling.AmaxTakesFiniteMagnitudesOnly",
            "magnitude > amax && magnitude <= kLargestFloat",
            "magnitude > amax",
        ),
        ("Scaling.AmaxTakesFiniteMagnitudesOnly", "x < 0.0f ? -x : x", "x"),
        (
            "Scaling.DegenerateBlocksHaveHarmlessScales",
            "if (!(amax > 0.0f)) {",
            "if (amax == 0.0f) {",
        ),
        (
            "Scaling.DegenerateBlocksHaveHarmlessScales",
            "if (amax <= kSmallestScale * limit) {",
            "if (amax <= 0.0f) {",
        ),
        (
            "Scaling.ScalesAreTheSmallestSufficientPowersOfTwo",
            "} else if (amax < largest * limit) {",
            "} else {",
        ),
        (
            "Scaling.ScalesAreTheSmallestSufficientPowersOfTwo",
            "+ 0x7fffffu) & 0x7f800000u",
            "+ 0x800000u) & 0x7f800000u",
        ),
        (
            "Scaling.ScalesAreTheSmallestSufficientPowersOfTwo",
            "+ 0x7fffffu) & 0x7f800000u",
            "+ 0x7ffffeu) & 0x7f800000u",
        ),
        (
            "Scaling.FunctionsAreConstantExpressions",
            "bits_float((254u << 23) - float_bits(scale))",
            "bits_float((253u << 23) - float_bits(scale))",
        ),
        (
            "Scaling.NonFiniteElementsBecomeNaNAndSpareTheirBlock",
            "x >= -kLargestFloat && x <= kLargestFloat",
            "x == x",
        ),
        (
            "Scaling.NonFiniteElementsBecomeNaNAndSpareTheirBlock",
            "encode_e4m3(clamp(x * block.inverse, -limit, limit))",
            "encode_e4m3(x * block.inverse)",
        ),
        (
            "Scaling.QuantizedBlocksAreWithinHalfAStep",
            "clamp(x * block.inverse, -limit, limit)",
            "clamp(x * block.scale, -limit, limit)",
        ),
        ("Scaling.ScoreCodesFitFp16Sums", "head_dim <= 128 ? 16.0f : 15.0f", "16.0f"),
        (
            "Scaling.StoredScalesAreFinite",
            "block.scale < kLargestPower / factor ? block.scale * factor : kLargestPower",
            "block.scale * factor",
        ),
        (
            "Scaling.RatiosOfScalesAreExactAndFinite",
            "from.scale * to.inverse",
            "to.scale * from.inverse",
        ),
        (
            "Scaling.RatiosOfScalesAreExactAndFinite",
            "ratio < kLargestFloat ? ratio : kLargestFloat",
            "ratio",
        ),
    ],
    "integer_unit.h": [
        ("IntegerUnit.AMagnitudeIsItsNumber", "exponent = -kDenormalShift", "exponent = 0"),
        ("IntegerUnit.AMagnitudeIsItsNumber", "(bits >> 23) - 127", "(bits >> 23) - 126"),
        (
            "IntegerUnit.ProductsAndSumsLeaveNoRange",
            "a.exponent + b.exponent",
            "a.exponent - b.exponent",
        ),
        ("IntegerUnit.ProductsAndSumsLeaveNoRange", "a.exponent >= b.exponent", "true"),
        ("IntegerUnit.ProductsAndSumsLeaveNoRange", "b.mantissa == 0.0f ||", ""),
        ("IntegerUnit.BoundsTakeThirtyBits", "29 - bound.exponent", "31 - bound.exponent"),
        ("IntegerUnit.BoundsTakeThirtyBits", "magnitude_of(1.1f * bound", "magnitude_of(bound"),
        ("IntegerUnit.LoudKeysAreMeasured", "mantissa_bits > 8 ? 5 : 8", "true ? 8 : 8"),
        ("IntegerUnit.LoudKeysAreMeasured", "!is_finite_bits(bounds.max_v)", "false"),
        ("IntegerUnit.SlotsAreFiniteNumbers", "(low & 0x4000u) << 1", "(low & 0x4000u)"),
        ("IntegerUnit.SlotsAreFiniteNumbers", "(word >> 31) << 29", "(word >> 31) << 28"),
        ("IntegerUnit.RowSumsHaveTheUnitOfUsualKeys", "bounds.keys_k, -126", "1, -126"),
        ("IntegerUnit.RowSumsHaveTheUnitOfUsualKeys", "bounds.keys_k == 0", "bounds.keys_v == 0"),
        ("IntegerUnit.KeysAreCounted", "k != 0 && is_finite", "is_finite"),
        ("IntegerUnit.KeysAreCounted", "v != 0 && is_finite_bits(v)", "v != 0"),
        (
            "IntegerUnit.BoundsOfPartsUniteToThoseOfAll",
            "a.exponents_k + b.exponents_k",
            "a.exponents_k",
        ),
        ("IntegerUnit.BoundsOfPartsUniteToThoseOfAll", "max_of(a.max_v, b.max_v)", "a.max_v"),
        ("IntegerUnit.SamplesOfKeys", "(2 * i + 1) * keys", "(2 * i) * keys"),
        ("IntegerUnit.BoundsOfRows", "magnitude_of(delta)", "magnitude_of(0.0f)"),
        ("IntegerUnit.BoundsOfRows", "static_cast<float>(additions)", "1.0f"),
    ],
    "low_bits.h": [
        ("LowBits.StepsFillHalfAnInterval", "kLowShiftBf16 = 8", "kLowShiftBf16 = 9"),
        ("LowBits.StepsFillHalfAnInterval", "kLowShiftF16 = 5", "kLowShiftF16 = 4"),
        ("LowBits.NumbersThatRoundToAHalf", "distance + (1 << (kShift - 1))", "distance"),
        ("LowBits.NumbersThatRoundToAHalf", "(1 << (kShift - 1))", "(1 << (kShift - 1)) - 1"),
        ("LowBits.NumbersThatRoundToAHalf", "clamp(steps, -128, 127)", "steps"),
        ("LowBits.NumbersThatRoundToAHalf", "clamp(steps, -128, 127)", "clamp(steps, -127, 127)"),
        ("LowBits.EveryHalfWithEveryStep", "std::int32_t{low}", "std::uint8_t(low)"),
        (
            "LowBits.EveryHalfWithEveryStep",
            "bits_float(float_bits(rounded) + steps) : rounded",
            "bits_float(float_bits(rounded) + steps) : 0.0f",
        ),
        (
            "LowBits.AHalfComesBackAsItIs",
            "float_bits(rounded) + steps)",
            "float_bits(rounded) + steps + (1u << (kShift - 1)))",
        ),
        ("LowBits.NoneOfZeroInfinityAndNaN", " - 1u < 0x7f7fffffu", " < 0x7f800000u"),
        ("LowBits.NoneOfZeroInfinityAndNaN", "0x7f7fffffu", "0x7f800000u"),
        (
            "LowBits.NoneOfZeroInfinityAndNaN",
            "(float_bits(rounded) & 0x7fffffffu)",
            "(float_bits(rounded))",
        ),
    ],
    "bits.h": [
        (
            "Scaling.TiesGoToEvenAndTheirNeighboursDoNot",
            "__builtin_bit_cast(std::uint32_t, x)",
            "static_cast<std::uint32_t>(x)",
        ),
        (
            "Scaling.EveryCodeDecodesToItsDefinitionAndEncodesBack",
            "__builtin_bit_cast(float, bits)",
            "static_cast<float>(bits)",
        ),
    ],
    "swizzle.h": [
        (
            "Swizzle.ChunksMoveAsTheTablesOfTheHardwareSay",
            "byte >> 3 & chunk_bits",
            "byte >> 4 & chunk_bits",
        ),
        (
            "Swizzle.IsItsOwnInverseAndStaysInItsAtom",
            "byte ^ (byte >> 3 & chunk_bits)",
            "byte + (byte >> 3 & chunk_bits)",
        ),
        (
            "Swizzle.EightRowsOfAColumnOfChunksCostOnePass",
            "byte ^ (byte >> 3 & chunk_bits)",
            "byte ^ (byte >> 4 & chunk_bits)",
        ),
        (
            "Swizzle.IsItsOwnInverseAndStaysInItsAtom",
            "return 8 * panel_bytes(mode);",
            "return 4 * panel_bytes(mode);",
        ),
        (
            "Swizzle.PanelsFillATileWithoutHolesOrOverlap",
            "(panel * rows + row) * width",
            "(panel + row * 2) * width",
        ),
        (
            "Swizzle.LdmatrixRowsCostOnePassAtEveryWidth",
            "row_bytes < 128 ? 128 / row_bytes : 1",
            "1",
        ),
        (
            "Swizzle.LdmatrixTilesHaveNoHolesAndKeepTheirRows",
            "row_bytes < 128 ? row_bytes / kChunkBytes : 8",
            "8",
        ),
        (
            "Swizzle.LdmatrixAgreesWithTmaWhereRowsAreOnePanel",
            "chunk ^ (row / rows_per_line % chunks)",
            "chunk ^ (chunks - 1 - row / rows_per_line % chunks)",
        ),
        (
            "Swizzle.LdmatrixRowsCostOnePassAtEveryWidth",
            "chunk ^ (row / rows_per_line % chunks)",
            "chunk",
        ),
    ],
    "fragment.h": [
        (
            "Fragment.PointsOfTheFiguresAreWhereTheyAre",
            "8 * (element / 2 % 2), 2 * (lane % 4) + element % 2 + 8 * (element / 4)}",
            "8 * (element / 4), 2 * (lane % 4) + element % 2 + 8 * (element / 2 % 2)}",
        ),
        (
            "Fragment.LdmatrixDeliversTheOperands",
            "Element{2 * (lane % 4) + element % 2 + 8 * (element / 2), lane / 4}",
            "Element{2 * (lane % 4) + element / 2 + 8 * (element % 2), lane / 4}",
        ),
        (
            "Fragment.LdmatrixDeliversTheOperands",
            "Element{2 * (lane % 4) + element, lane / 4}",
            "Element{lane % 4 + 4 * element, lane / 4 }",
        ),
        (
            "Fragment.LdmatrixDeliversTheOperands",
            "lane % 4 + 4 * (element / 2)",
            "3 - lane % 4 + 4 * (element / 2)",
        ),
        (
            "Fragment.PointsOfTheFiguresAreWhereTheyAre",
            "Element{lane % 4 + 4 * element, lane / 4}",
            "Element{2 * (lane % 4) + element, lane / 4 }",
        ),
        (
            "Fragment.EveryElementHasOneOwner",
            "thread / 32 * 16 + thread % 32 / 4 + 8 * (element / 2 % 2)",
            "thread / 32 * 16 + thread % 32 / 4",
        ),
        (
            "Fragment.AccumulatorsAreTheNextOperand",
            "8 * (element / 4) + 2 * (thread % 4) + element % 2",
            "8 * (element / 4) + thread % 4 + 4 * (element % 2)",
        ),
        (
            "Fragment.AccumulatorsAreTheNextOperand",
            "Element{thread / 32 * 16 + in_warp.row, in_warp.column}",
            "Element{thread / 32 * 16 + (in_warp.row + 8) % 16, in_warp.column}",
        ),
        (
            "Fragment.PointsOfTheFiguresAreWhereTheyAre",
            "4 * (thread % 4) + element % 4 + 16 * (reg / 2)",
            "8 * (thread % 4) + element % 4 + 4 * (reg / 2)",
        ),
        (
            "Fragment.Fp8OperandsComeFromTheAccumulatorInTheOrderOfTheSlots",
            "slot % 2 + 2 * (slot / 4) + 8 * (slot / 2 % 2)",
            "slot",
        ),
        (
            "Fragment.Fp8OperandsComeFromTheAccumulatorInTheOrderOfTheSlots",
            "element % 2 + 4 * (element / 2 % 2) + 2 * (reg % 2) + 8 * (reg / 2)",
            "element",
        ),
    ],
}

MUTATIONS = [
    Mutation(header, test, original, replacement)
    for header, entries in LISTED.items()
    for test, original, replacement in entries
]


def angled_includes(files: Iterable[Path]) -> str:
    """The library headers that the files include, each once."""
    lines = (line for path in files for line in path.read_text().splitlines())
    return "".join(f"{line}\n" for line in sorted({x for x in lines if x.startswith("#include <")}))


class Toolchain:
    """Compiles one test file against the headers."""

    def __init__(self, folder: Path) -> None:
        self.compiler = os.environ.get("CXX", "g++")
        # Mutants fail early, so that compiling is what takes time: no optimisation, and all library
        # headers precompiled. They are used only where every option is the same, -pthread too; a
        # compiler that cannot use them so reads the header beside it.
        self.flags = ["-std=c++17", "-O0", "-w", "-pthread"]
        header = folder / "library_headers.h"
        header.write_text(angled_includes([*TESTS.glob("*.cc"), *TESTS.glob("*.h")]))
        subprocess.run(
            [self.compiler, *self.flags, "-x", "c++-header", header, "-o", f"{header}.gch"],
            check=True,
            capture_output=True,
        )
        self.flags += ["-include", str(header)]

    def compile(self, source: Path, program: Path, mutated: Path | None = None) -> str:
        """Returns what the compiler said if it failed, else an empty text. Headers in the folder
        `mutated` go before those of the project."""
        folders = [folder for folder in (mutated, CORE.parent, TESTS) if folder is not None]
        command = [self.compiler, *self.flags, *(f"-I{folder}" for folder in folders)]
        command += [str(source), "-o", str(program), "-lgtest_main", "-lgtest"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return "" if result.returncode == 0 else result.stderr or "the compiler failed"


def missing_tools() -> str:
    """Says why the mutations cannot run here; empty if they can."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"no C++ compiler: {compiler} was not found"
    with tempfile.TemporaryDirectory() as folder:
        program = [compiler, "-std=c++17", "-x", "c++", "-", "-o", f"{folder}/probe"]
        result = subprocess.run(
            [*program, "-lgtest_main", "-lgtest", "-pthread"],
            input="#include <gtest/gtest.h>\n",
            capture_output=True,
            text=True,
            check=False,
        )
    return "" if result.returncode == 0 else "GoogleTest was not found (Debian: libgtest-dev)"


def passes(program: Path, test: str) -> tuple[bool, int]:
    """Whether the test passes, and how many tests of that name ran. A mutant may never end: it may
    use so much processor time, which does not depend on what else the machine does."""
    limited = ["sh", "-c", f'ulimit -t {RUN_LIMIT_SECONDS}; exec "$@"', "sh"]
    command = [*limited, str(program), f"--gtest_filter={test}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    ran = re.search(r"\[==========\] (\d+) tests? from \d+ test suites? ran", result.stdout)
    return result.returncode == 0, int(ran.group(1)) if ran else 1


def check_unmutated(toolchain: Toolchain, folder: Path, source: Path, tests: set[str]) -> list[str]:
    program = folder / f"unmutated_{source.stem}"
    complaint = toolchain.compile(source, program)
    if complaint:
        return [f"{source.name} does not compile:\n{complaint}"]
    errors = []
    for test in sorted(tests):
        passed, ran = passes(program, test)
        if ran != 1:
            errors.append(f"{source.name} has no test {test}")
        elif not passed:
            errors.append(f"{test} fails without any mutation")
    return errors


def mutate(mutation: Mutation) -> tuple[str, str]:
    """Returns the header's mutated text, and what is wrong with the mutation, if anything."""
    text = (CORE / mutation.header).read_text()
    # Line breaks and indents are the formatter's: a space matches any of them.
    pattern = r"\s+".join(re.escape(word) for word in mutation.original.split())
    found = len(re.findall(pattern, text))
    if found != 1:
        return "", f"the original text stands {found} times in the header, not once"
    return re.sub(pattern, lambda _: mutation.replacement, text), ""


def only(text: str, test: str) -> str:
    """A test file without the other tests, whose lines stay, empty: half the time to compile."""
    suite, name = test.split(".")
    return re.sub(
        r"^TEST\((\w+), (\w+)\) \{\n.*?^\}\n",
        lambda m: m[0] if (m[1], m[2]) == (suite, name) else "\n" * m[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def check_mutant(toolchain: Toolchain, folder: Path, number: int, mutation: Mutation) -> str:
    """Returns what is wrong, or an empty text if the test caught the mutant."""
    text, complaint = mutate(mutation)
    if complaint:
        return f"{mutation}: {complaint}"
    place = folder / f"mutant_{number}"
    (place / "core").mkdir(parents=True)
    (place / "core" / mutation.header).write_text(text)
    source = place / mutation.source.name
    source.write_text(only(mutation.source.read_text(), mutation.test))
    program = place / "test"
    complaint = toolchain.compile(source, program, place)
    if complaint:
        return f"{mutation}: the mutant does not compile:\n{complaint}"
    passed, _ = passes(program, mutation.test)
    shutil.rmtree(place)
    return f"{mutation}: SURVIVES {mutation.test}" if passed else ""


def run(mutations: list[Mutation], jobs: int, verbose: bool) -> list[str]:
    """Returns the errors; an empty list means that every test caught its mutants."""
    with tempfile.TemporaryDirectory(prefix="core_mutations_") as name:
        folder = Path(name)
        toolchain = Toolchain(folder)
        with ThreadPoolExecutor(jobs) as pool:
            tests_of: dict[Path, set[str]] = {}
            for mutation in mutations:
                tests_of.setdefault(mutation.source, set()).add(mutation.test)
            unmutated = pool.map(
                lambda item: check_unmutated(toolchain, folder, *item), tests_of.items()
            )
            errors = [error for found in unmutated for error in found]
            if errors:
                return errors
            results = pool.map(
                lambda item: check_mutant(toolchain, folder, *item), enumerate(mutations)
            )
            for mutation, error in zip(mutations, results, strict=True):
                if verbose:
                    print(f"{'ERROR ' if error else 'caught'} {mutation.header:17}{mutation.test}")
                if error:
                    errors.append(error)
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("headers", nargs="*", metavar="header.h", help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    for header in arguments.headers:
        if header not in LISTED:
            parser.error(f"no mutations of {header!r}; there are some of {', '.join(LISTED)}")
    missing = missing_tools()
    if missing:
        print(f"cannot run: {missing}", file=sys.stderr)
        return 2
    chosen = [m for m in MUTATIONS if not arguments.headers or m.header in arguments.headers]
    errors = run(chosen, arguments.jobs, verbose=True)
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{len(chosen)} mutations, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
