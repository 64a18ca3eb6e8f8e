# Decides whether CUDA kernels are built. Sets PANTILE_HAS_CUDA and, when it is OFF, the reason in
# PANTILE_CUDA_REASON, which pantile::build_info() repeats at run time.
include(CheckLanguage)

set(PANTILE_HAS_CUDA OFF)
set(PANTILE_CUDA_REASON "")
string(TOUPPER "${PANTILE_CUDA}" _mode)
if(_mode MATCHES "^(OFF|0|FALSE|NO)$")
  set(PANTILE_CUDA_REASON "built with PANTILE_CUDA=OFF")
  return()
elseif(NOT _mode MATCHES "^(AUTO|ON|1|TRUE|YES)$")
  message(FATAL_ERROR "pantile: PANTILE_CUDA must be AUTO, ON or OFF, not '${PANTILE_CUDA}'")
endif()

# Without an architecture, enable_language compiles its probe for one that nvcc may not know.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80)
endif()
include(cmake/locate_nvcc.cmake)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  set(PANTILE_CUDA_REASON
    "no working nvcc on PATH, in CUDACXX, CUDA_HOME, /usr/local/cuda or a nvidia-cuda-nvcc wheel")
else()
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(PANTILE_CUDA_REASON "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.8")
  else()
    find_package(CUDAToolkit REQUIRED)
    set(PANTILE_HAS_CUDA ON)
  endif()
endif()

if(NOT PANTILE_HAS_CUDA)
  if(NOT _mode STREQUAL "AUTO")
    message(FATAL_ERROR "pantile: PANTILE_CUDA=${PANTILE_CUDA}, but ${PANTILE_CUDA_REASON}")
  endif()
  message(WARNING "pantile: ${PANTILE_CUDA_REASON}: building the CPU backend only. "
    "PANTILE_CUDA=ON makes this an error, OFF silences it.")
endif()
