# The CPU backend's sources. PANTILE_CPU_ISA_SOURCES are compiled once for each instruction set in
# PANTILE_CPU_ISAS, with -DPANTILE_ISA=<name> and PANTILE_CPU_ISA_FLAGS_<name>.
set(PANTILE_CPU_SOURCES
  ${CMAKE_CURRENT_LIST_DIR}/backend.cc
  ${CMAKE_CURRENT_LIST_DIR}/backward_fp8.cc
  ${CMAKE_CURRENT_LIST_DIR}/dequantize.cc
  ${CMAKE_CURRENT_LIST_DIR}/job.cc
  ${CMAKE_CURRENT_LIST_DIR}/key_statistics.cc
  ${CMAKE_CURRENT_LIST_DIR}/kv.cc
  ${CMAKE_CURRENT_LIST_DIR}/kv_append.cc
  ${CMAKE_CURRENT_LIST_DIR}/kv_reference.cc
  ${CMAKE_CURRENT_LIST_DIR}/parallel.cc
  ${CMAKE_CURRENT_LIST_DIR}/quantize.cc
  ${CMAKE_CURRENT_LIST_DIR}/reference.cc
  ${CMAKE_CURRENT_LIST_DIR}/reference_backend.cc
  ${CMAKE_CURRENT_LIST_DIR}/reference_fp8.cc
  ${CMAKE_CURRENT_LIST_DIR}/split.cc)
set(PANTILE_CPU_ISA_SOURCES ${CMAKE_CURRENT_LIST_DIR}/isa/kernels.cc
  ${CMAKE_CURRENT_LIST_DIR}/isa/kernels_fp8.cc)
set(PANTILE_CPU_ISAS baseline)

# Never -ffast-math: it would fold the rounding of exp2 away and let NaN vanish. -O3 in every build
# type but Debug: the tiles live in registers only when everything is inlined and unrolled.
set(_kernel_flags -fno-math-errno -fno-trapping-math -ffp-contract=fast -fno-exceptions
  $<$<NOT:$<CONFIG:Debug>>:-O3>)
set(PANTILE_CPU_ISA_FLAGS_baseline ${_kernel_flags})

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND PANTILE_CPU_ISAS avx2 avx512)
  set(PANTILE_CPU_ISA_FLAGS_avx2 ${_kernel_flags} -mavx2 -mfma -mf16c)
  set(PANTILE_CPU_ISA_FLAGS_avx512 ${PANTILE_CPU_ISA_FLAGS_avx2}
    -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
endif()
