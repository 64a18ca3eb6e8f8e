# Sets ENV{CUDACXX}, where CMake looks for nvcc besides PATH, when nvcc is in CUDA_HOME, CUDA_PATH,
# the usual toolkit folder, or the nvidia-cuda-nvcc wheel of the Python that runs the build.
if(DEFINED ENV{CUDACXX} OR DEFINED CMAKE_CUDA_COMPILER)
  return()
endif()

find_program(PANTILE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)

# The wheels keep libraries in lib/ and have no libcudart.so. This makes, in the build tree, the
# tree that nvcc and FindCUDAToolkit expect, out of symbolic links.
function(pantile_link_toolkit wheel tree)
  file(MAKE_DIRECTORY "${tree}/bin" "${tree}/lib64")
  foreach(_folder IN ITEMS include nvvm)
    file(CREATE_LINK "${wheel}/${_folder}" "${tree}/${_folder}" SYMBOLIC)
  endforeach()
  file(GLOB _programs "${wheel}/bin/*")
  foreach(_file IN LISTS _programs)
    cmake_path(GET _file FILENAME _name)
    file(CREATE_LINK "${_file}" "${tree}/bin/${_name}" SYMBOLIC)
  endforeach()
  file(GLOB _libraries "${wheel}/lib/lib*")
  foreach(_file IN LISTS _libraries)
    cmake_path(GET _file FILENAME _name)
    file(CREATE_LINK "${_file}" "${tree}/lib64/${_name}" SYMBOLIC)
    if(_name MATCHES "^libcudart\\.so\\.")
      file(CREATE_LINK "${_file}" "${tree}/lib64/libcudart.so" SYMBOLIC)
    endif()
  endforeach()
endfunction()

if(NOT PANTILE_NVCC)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  if(Python_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c [[
import glob, os, sysconfig
found = sorted(glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu1*", "bin", "nvcc")))
print(os.path.dirname(os.path.dirname(found[-1])) if found else "", end="")
]]
      OUTPUT_VARIABLE _wheel)
    if(_wheel)
      pantile_link_toolkit("${_wheel}" "${PROJECT_BINARY_DIR}/cuda-toolkit")
      set(PANTILE_NVCC "${PROJECT_BINARY_DIR}/cuda-toolkit/bin/nvcc" CACHE FILEPATH "nvcc" FORCE)
      message(STATUS "pantile: CUDA toolkit from Python wheels in ${_wheel}")
    endif()
  endif()
endif()
if(PANTILE_NVCC)
  set(ENV{CUDACXX} "${PANTILE_NVCC}")
endif()
