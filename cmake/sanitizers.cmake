# PANTILE_SANITIZE=address,undefined and the like, for host code. The link option is public so that
# every executable that links the library brings the sanitizer's runtime. -O1 comes after the -O3 of
# the CPU kernels: with it a sanitized build takes several times as long to compile.
function(pantile_sanitize target)
  if(NOT PANTILE_SANITIZE)
    return()
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PANTILE_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer;-O1>")
  get_target_property(_type ${target} TYPE)
  if(NOT _type STREQUAL "OBJECT_LIBRARY")
    target_link_options(${target} PUBLIC -fsanitize=${PANTILE_SANITIZE})
  endif()
endfunction()
