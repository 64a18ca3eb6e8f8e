# cmake -DNM=<nm> -DOBJECTS=<a|b|...> -P no_weak_symbols.cmake
# Fails when an object defines a weak symbol. A function that the compiler did not inline in a file
# built for AVX-512 would be weak, might be the copy that the linker keeps, and would then stop
# older processors in code that asked for nothing.
string(REPLACE "|" ";" _objects "${OBJECTS}")
foreach(_object IN LISTS _objects)
  execute_process(COMMAND ${NM} -C ${_object} OUTPUT_VARIABLE _symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" _weak "${_symbols}")
  if(_weak)
    list(JOIN _weak "\n  " _weak)
    message(SEND_ERROR "${_object} defines weak symbols:\n  ${_weak}")
  endif()
endforeach()
