# Reads cuda/kernels.def, the list of GPU kernels, and writes into the build tree
#   generated/kernel_rows.inc        the same rows with their names, for cpp/host/kernel_table.cc,
#   generated/kernel_rows_<pass>.inc and those of one pass
#   generated/instances/<file>.cu    the kernel instances of rows that differ only in the mask, or in
#                                    bf16 or f16 (`16bit` in the name), each from
#                                    cuda/instance.cu.in: reading the headers takes as long as
#                                    compiling one instance, and machine code and PTX of two dtypes
#                                    compress better together
# Kernels that several rows share are in cuda/<family>/row_kernels.cu, and those of 8-bit caches in
# cuda/<family>/decode/codes_d<head dim>.cu.
# Files that are compiled for the same targets make one object library: those of the hopper
# family, the 16-bit ones of the ampere family, its fp32 ones, which a Hopper GPU runs too, and its
# FP8 ones, which need compute capability 8.9.

set(_generated "${PROJECT_BINARY_DIR}/generated")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cuda/kernels.def cuda/instance.cu.in)
set(PANTILE_CUDA_FAMILIES hopper ampere)
set(PANTILE_CUDA_GROUPS hopper ampere ampere_f32 ampere_fp8)
set(PANTILE_PASSES forward backward quantize decode append)
# For quick builds while one kernel is worked on: the table then holds these rows only.
set(PANTILE_KERNELS "" CACHE STRING
  "Compile only the kernels whose name matches this regular expression; empty: all of them")

function(pantile_read_kernels)
  file(STRINGS cuda/kernels.def _rows REGEX "^PANTILE_KERNEL")
  file(READ cuda/instance.cu.in _template)
  set(_table "")
  foreach(_row IN LISTS _rows)
    if(NOT _row MATCHES
        "^PANTILE_KERNEL\\(([a-z]+), ([a-z]+), ([a-z0-9]+), ([0-9]+), ([0-9]+), ([a-z]+), ([a-z0-9_]+)\\)$")
      message(FATAL_ERROR "pantile: cannot read this row of cuda/kernels.def: ${_row}")
    endif()
    set(backend ${CMAKE_MATCH_1})
    set(pass ${CMAKE_MATCH_2})
    set(dtype ${CMAKE_MATCH_3})
    set(head_dim ${CMAKE_MATCH_4})
    set(head_dim_v ${CMAKE_MATCH_5})
    set(mask ${CMAKE_MATCH_6})
    set(features ${CMAKE_MATCH_7})
    if(NOT backend IN_LIST PANTILE_CUDA_FAMILIES)
      message(FATAL_ERROR "pantile: unknown backend '${backend}' in cuda/kernels.def: ${_row}")
    endif()
    set(_dims d${head_dim})
    if(NOT head_dim EQUAL head_dim_v)
      string(APPEND _dims x${head_dim_v})
    endif()
    set(name ${backend}_${pass}_${dtype}_${_dims}_${mask})
    string(REGEX REPLACE "^b?f16$" "16bit" _width ${dtype})
    set(_file ${backend}_${pass}_${_width}_${_dims})
    if(PANTILE_KERNELS AND NOT name MATCHES "${PANTILE_KERNELS}")
      continue()
    endif()
    string(SUBSTRING ${pass} 0 1 _initial)
    string(TOUPPER ${_initial} _initial)
    string(SUBSTRING ${pass} 1 -1 Pass)
    string(PREPEND Pass ${_initial})
    # FP8 attention is another kernel, not another type of the same one.
    set(launcher ${pass})
    set(folder ${pass})
    if(pass STREQUAL "forward" AND dtype STREQUAL "e4m3")
      set(launcher forward_fp8)
      set(folder fp8)
    elseif(pass STREQUAL "backward" AND dtype STREQUAL "e4m3")
      set(launcher backward_fp8)
      set(folder fp8_backward)
    endif()
    set(Tensors ${Pass}Tensors)
    if(pass MATCHES "^(decode|append)$")
      set(Tensors KvTensors)
    endif()
    string(APPEND _table_${pass}
      "PANTILE_KERNEL_ROW(${name}, ${backend}, ${pass}, ${dtype}, ${head_dim}, ${head_dim_v}, ${mask}, ${features})\n")
    string(CONFIGURE "${_template}" _instance @ONLY)
    string(APPEND _text_${_file} "${_instance}")
    list(APPEND _files ${_file})
    set(_group ${backend})
    if(backend STREQUAL "ampere" AND (dtype STREQUAL "e4m3" OR pass STREQUAL "quantize"))
      set(_group ampere_fp8)
    elseif(backend STREQUAL "ampere" AND dtype STREQUAL "f32")
      set(_group ampere_f32)
    endif()
    list(APPEND _instances_${_group} ${_generated}/instances/${_file}.cu)
    if(backend STREQUAL "hopper" AND NOT dtype STREQUAL "e4m3" AND NOT pass STREQUAL "quantize")
      list(APPEND _instances_hopper ${PROJECT_SOURCE_DIR}/cuda/hopper/mask_lists.cu)
    endif()
    if(pass STREQUAL "backward" AND NOT dtype MATCHES "^(f32|e4m3)$")
      list(APPEND _instances_${_group} ${PROJECT_SOURCE_DIR}/cuda/${backend}/row_kernels.cu)
    endif()
    if(pass STREQUAL "forward")
      # For every target that a forward of the family runs on: those of the fp32 ones.
      set(_all_targets ${backend})
      if(backend STREQUAL "ampere")
        set(_all_targets ampere_f32)
      endif()
      list(APPEND _instances_${_all_targets} ${PROJECT_SOURCE_DIR}/cuda/${backend}/split.cu)
    endif()
    set(_codes ${PROJECT_SOURCE_DIR}/cuda/${backend}/${pass}/codes_d${head_dim}.cu)
    if(EXISTS ${_codes})
      list(APPEND _instances_${_group} ${_codes})
    endif()
  endforeach()
  if(_files)
    list(REMOVE_DUPLICATES _files)
  endif()
  foreach(_file IN LISTS _files)
    file(CONFIGURE OUTPUT ${_generated}/instances/${_file}.cu CONTENT "${_text_${_file}}" @ONLY)
  endforeach()
  foreach(_pass IN LISTS PANTILE_PASSES)
    file(CONFIGURE OUTPUT ${_generated}/kernel_rows_${_pass}.inc CONTENT "${_table_${_pass}}" @ONLY)
    string(APPEND _table "${_table_${_pass}}")
  endforeach()
  file(CONFIGURE OUTPUT ${_generated}/kernel_rows.inc CONTENT "${_table}" @ONLY)
  foreach(_group IN LISTS PANTILE_CUDA_GROUPS)
    if(_instances_${_group})
      list(REMOVE_DUPLICATES _instances_${_group})
    endif()
    set(PANTILE_INSTANCES_${_group} "${_instances_${_group}}" PARENT_SCOPE)
  endforeach()
endfunction()

# What a group is compiled for. fp32 is what a Hopper GPU takes of the ampere family by itself.
set(_archs_hopper ${PANTILE_HOPPER_ARCHS})
set(_archs_ampere ${PANTILE_AMPERE_ARCHS})
set(_archs_ampere_f32 ${PANTILE_AMPERE_ARCHS} 90-real)
set(_archs_ampere_fp8 ${PANTILE_AMPERE_FP8_ARCHS})
if(PANTILE_AMPERE_ON_HOPPER)
  list(APPEND _archs_ampere 90-real)
  list(APPEND _archs_ampere_fp8 90-real)
endif()
list(REMOVE_DUPLICATES _archs_ampere_fp8)
list(REMOVE_DUPLICATES _archs_ampere)
list(REMOVE_DUPLICATES _archs_ampere_f32)

function(pantile_cuda_group group archs)
  set(_target pantile_${group})
  add_library(${_target} OBJECT ${ARGN})
  set(_launcher ${PROJECT_SOURCE_DIR}/cmake/nvcc_log.sh ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(${_target} PROPERTIES
    CUDA_ARCHITECTURES "${archs}" CUDA_SEPARABLE_COMPILATION OFF
    CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY Static JOB_POOL_COMPILE pantile_nvcc
    CUDA_COMPILER_LAUNCHER "${_launcher}")
  target_include_directories(${_target} PRIVATE cpp cpp/include cuda ${_generated})
  target_compile_definitions(${_target} PRIVATE PANTILE_STATIC)
  target_compile_options(${_target} PRIVATE
    # As a flag, because CMake 3.25 does not know that nvcc has C++20.
    -std=c++20 --expt-relaxed-constexpr --compress-mode=size -Xptxas=-v
    # Both families have instances of the kernels of cuda/common, for different targets: each calls
    # its own. The default from CUDA 13 on.
    -static-global-template-stub=true)
  target_link_libraries(${_target} PRIVATE CUDA::cudart_static)
  pantile_warnings(${_target})
  target_sources(pantile PRIVATE $<TARGET_OBJECTS:${_target}>)
endfunction()

pantile_read_kernels()
target_sources(pantile PRIVATE
  cuda/common/bias.cc cuda/common/expressions.cc cuda/common/fp8_rules.cc
  cuda/common/stored_mask.cc
  cuda/hopper/forward/plan.cc cuda/hopper/backward/plan.cc cuda/hopper/fp8/plan.cc
  cuda/hopper/fp8_backward/plan.cc
  cuda/hopper/mask.cc cuda/hopper/requests.cc cuda/hopper/variant.cc cuda/hopper/variant_text.cc
  cuda/ampere/requests.cc
  cuda/ampere/variant.cc cuda/ampere/forward/plan.cc cuda/ampere/forward/tuned.cc
  cuda/ampere/fp8/plan.cc
  cuda/ampere/backward/plan.cc
  cuda/decode/plan.cc cuda/hopper/decode/plan.cc cuda/ampere/decode/plan.cc)

if(PANTILE_HAS_CUDA)
  cmake_host_system_information(RESULT _cores QUERY NUMBER_OF_LOGICAL_CORES)
  set(PANTILE_NVCC_JOBS ${_cores} CACHE STRING "How many nvcc run at a time (Ninja)")
  set_property(GLOBAL APPEND PROPERTY JOB_POOLS pantile_nvcc=${PANTILE_NVCC_JOBS})
  foreach(_group IN LISTS PANTILE_CUDA_GROUPS)
    if(PANTILE_INSTANCES_${_group})
      pantile_cuda_group(${_group} "${_archs_${_group}}" ${PANTILE_INSTANCES_${_group}})
    endif()
  endforeach()
  target_sources(pantile PRIVATE cuda/backend.cc)
  target_link_libraries(pantile PRIVATE CUDA::cudart_static)
endif()
