# PANTILE_SANITIZE=address,undefined and the like, for host code. The link option is public so that
# every executable that links the library brings the sanitizer's runtime.
function(pantile_sanitize target)
  if(NOT PANTILE_SANITIZE)
    return()
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${PANTILE_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  get_target_property(_type ${target} TYPE)
  if(NOT _type STREQUAL "OBJECT_LIBRARY")
    target_link_options(${target} PUBLIC -fsanitize=${PANTILE_SANITIZE})
  endif()
endfunction()
