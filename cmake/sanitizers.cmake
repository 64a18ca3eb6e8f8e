# PANTILE_SANITIZE=address,undefined and the like, for host code. The link option is public so that
# every executable that links the library brings the sanitizer's runtime. The level, -O1 unless one
# is named, comes after the -O3 of the CPU kernels: with that a sanitized build takes several times
# as long to compile. -g1 (lines, no variables) comes after -g and saves a third of the rest.
function(pantile_sanitize target)
  if(NOT PANTILE_SANITIZE)
    return()
  endif()
  set(_level -O1)
  if(ARGC GREATER 1)
    set(_level ${ARGV1})
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PANTILE_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer;${_level};-g1>")
  get_target_property(_type ${target} TYPE)
  if(NOT _type STREQUAL "OBJECT_LIBRARY")
    target_link_options(${target} PUBLIC -fsanitize=${PANTILE_SANITIZE})
  endif()
endfunction()
