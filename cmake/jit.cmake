# Kernels that are compiled at run time, by NVRTC: the sources of cpp/jit, and generated/
# jit_headers.cc with the text of the device headers, so that the library needs no file beside it.

# The headers that a source given to pantile::jit may include, with all that they include.
set(PANTILE_JIT_ROOTS
  hopper/forward/kernel.cuh
  hopper/backward/kernel_paired.cuh
  hopper/backward/kernel_pipeline.cuh
  ampere/forward/kernel.cuh
  ampere/backward/kernel.cuh
  ampere/f32/forward.cuh
  ampere/f32/backward.cuh)

file(GLOB_RECURSE _headers CONFIGURE_DEPENDS
  cpp/core/*.h cpp/include/pantile/*.h cpp/jit/standard/* cuda/*.h cuda/*.cuh)
list(JOIN PANTILE_JIT_ROOTS "|" _roots)
set(_embedded ${PROJECT_BINARY_DIR}/generated/jit_headers.cc)
add_custom_command(OUTPUT ${_embedded}
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DGENERATED=${PROJECT_BINARY_DIR}/generated
    "-DROOTS=${_roots}" -DOUT=${_embedded} -P ${PROJECT_SOURCE_DIR}/cmake/embed_headers.cmake
  DEPENDS ${_headers} cmake/embed_headers.cmake ${PROJECT_BINARY_DIR}/generated/build_options.h
  COMMENT "Embedding the device headers" VERBATIM)

target_sources(pantile PRIVATE
  ${_embedded}
  cpp/jit/cache.cc
  cpp/jit/compile.cc
  cpp/jit/image.cc
  cpp/jit/kernel.cc
  cpp/jit/log.cc
  cpp/jit/nvrtc.cc
  cpp/jit/settings.cc
  cpp/jit/sha256.cc
  cpp/jit/store.cc
  $<IF:$<BOOL:${PANTILE_HAS_CUDA}>,cpp/jit/load_cuda.cc,cpp/jit/load_stub.cc>)
target_link_libraries(pantile PRIVATE ${CMAKE_DL_LIBS})
