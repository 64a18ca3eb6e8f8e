# The CPU backend: plain sources, and kernel sources compiled once for each instruction set with
# -DPANTILE_ISA=<name>. cpp/cpu/sources.cmake holds the lists and the flags.
include(cpp/cpu/sources.cmake)

target_sources(pantile PRIVATE ${PANTILE_CPU_SOURCES})
foreach(_isa IN LISTS PANTILE_CPU_ISAS)
  set(_target pantile_cpu_${_isa})
  add_library(${_target} OBJECT ${PANTILE_CPU_ISA_SOURCES})
  target_compile_features(${_target} PRIVATE cxx_std_17)
  target_include_directories(${_target} PRIVATE cpp cpp/include)
  target_compile_definitions(${_target} PRIVATE PANTILE_ISA=${_isa} PANTILE_STATIC)
  target_compile_options(${_target} PRIVATE ${PANTILE_CPU_ISA_FLAGS_${_isa}})
  set_target_properties(${_target} PROPERTIES CXX_EXTENSIONS OFF CXX_VISIBILITY_PRESET hidden)
  pantile_warnings(${_target})
  pantile_sanitize(${_target})
  target_sources(pantile PRIVATE $<TARGET_OBJECTS:${_target}>)
endforeach()
