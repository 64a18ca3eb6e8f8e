# What C++ users get: headers, the library, and find_package(pantile) -> pantile::pantile.
include(CMakePackageConfigHelpers)

set(_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pantile)
install(TARGETS pantile EXPORT pantile-targets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT devel
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT runtime NAMELINK_COMPONENT devel
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT runtime
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT devel)
install(EXPORT pantile-targets NAMESPACE pantile:: DESTINATION ${_cmake_dir} COMPONENT devel)
configure_package_config_file(cmake/pantile-config.cmake.in pantile-config.cmake
  INSTALL_DESTINATION ${_cmake_dir})
write_basic_package_version_file(pantile-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/pantile-config.cmake
  ${PROJECT_BINARY_DIR}/pantile-config-version.cmake
  DESTINATION ${_cmake_dir} COMPONENT devel)
