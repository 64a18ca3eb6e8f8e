# CTest items that use pantile as a C++ user does. The tree that was just built is installed and
# found by find_package; a second, shared build goes through add_subdirectory and is installed too.
# That build is of the type Debug: it compiles the whole library again, in a third of the time.

set(_work ${CMAKE_CURRENT_BINARY_DIR}/consumer)

# Configures, builds and runs a project in a fresh build folder.
function(pantile_project_test name source command)
  cmake_parse_arguments(PARSE_ARGV 3 _arg "" "TYPE" "OPTIONS")
  if(NOT _arg_TYPE)
    set(_arg_TYPE Release)
  endif()
  add_test(NAME ${name} COMMAND ${CMAKE_CTEST_COMMAND}
    --build-and-test ${source} ${_work}/${name}
    --build-generator ${CMAKE_GENERATOR} --build-makeprogram ${CMAKE_MAKE_PROGRAM}
    --build-options -DCMAKE_BUILD_TYPE=${_arg_TYPE} -DCMAKE_CXX_COMPILER=${CMAKE_CXX_COMPILER}
      ${_arg_OPTIONS}
    --test-command ${command})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 LABELS consumer)
endfunction()

add_test(NAME consumer.install COMMAND ${CMAKE_COMMAND}
  --install ${PROJECT_BINARY_DIR} --prefix ${_work}/prefix --component devel)
set_tests_properties(consumer.install PROPERTIES FIXTURES_SETUP static_install LABELS consumer)
pantile_project_test(consumer.find_package ${CMAKE_CURRENT_SOURCE_DIR}/consumer
  ${_work}/consumer.find_package/consumer
  OPTIONS -DCMAKE_PREFIX_PATH=${_work}/prefix)
pantile_project_test(consumer.engine ${PROJECT_SOURCE_DIR}/examples/cpp_engine
  "${_work}/consumer.engine/engine;12"
  OPTIONS -DCMAKE_PREFIX_PATH=${_work}/prefix)
pantile_project_test(consumer.page ${CMAKE_CURRENT_SOURCE_DIR}/consumer/page
  ${_work}/consumer.page/page
  OPTIONS -DCMAKE_PREFIX_PATH=${_work}/prefix)
set_tests_properties(consumer.find_package consumer.engine consumer.page PROPERTIES
  FIXTURES_REQUIRED static_install)

pantile_project_test(consumer.add_subdirectory ${CMAKE_CURRENT_SOURCE_DIR}/consumer
  ${_work}/consumer.add_subdirectory/consumer
  TYPE Debug
  OPTIONS -DPANTILE_SOURCE=${PROJECT_SOURCE_DIR} -DPANTILE_INSTALL=ON -DPANTILE_CUDA=OFF
    -DBUILD_SHARED_LIBS=ON)
add_test(NAME consumer.install_shared COMMAND ${CMAKE_COMMAND}
  --install ${_work}/consumer.add_subdirectory --prefix ${_work}/prefix-shared)
pantile_project_test(consumer.find_package_shared ${CMAKE_CURRENT_SOURCE_DIR}/consumer
  ${_work}/consumer.find_package_shared/consumer
  OPTIONS -DCMAKE_PREFIX_PATH=${_work}/prefix-shared)
set_tests_properties(consumer.add_subdirectory PROPERTIES FIXTURES_SETUP shared_build)
set_tests_properties(consumer.install_shared PROPERTIES
  FIXTURES_REQUIRED shared_build FIXTURES_SETUP shared_install LABELS consumer)
set_tests_properties(consumer.find_package_shared PROPERTIES FIXTURES_REQUIRED shared_install)
