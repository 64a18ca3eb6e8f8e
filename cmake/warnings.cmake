# Warnings for host code; CUDA sources take only what nvcc's own generated code survives.
function(pantile_warnings target)
  set(_host -Wall -Wextra -Wconversion -Wshadow -Wempty-body)
  set(_cuda -Xcompiler=-Wall)
  if(PANTILE_WERROR)
    list(APPEND _host -Werror)
    list(APPEND _cuda --Werror=all-warnings)
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:${_host}>"
    "$<$<COMPILE_LANGUAGE:CUDA>:${_cuda}>")
endfunction()
