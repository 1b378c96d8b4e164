# SPDX-License-Identifier: Apache-2.0
# Compiler settings, and the two functions by which every folder declares its target.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(TANDEM_CCACHE ccache)
if(TANDEM_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TANDEM_CCACHE})
endif()
find_program(TANDEM_MOLD mold)
if(TANDEM_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# -ffp-contract=off: a*b+c is rounded twice wherever it is written so; kernels that want a fused multiply-add say so.
add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -Werror -ffp-contract=off)
option(TANDEM_ALL_TESTS "With a sanitizer, all its checks and all tests" OFF)
if(TANDEM_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1 -DNDEBUG")  # enough for line numbers, and a third faster to build
  add_compile_options(-fsanitize=${TANDEM_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TANDEM_SANITIZE})
  if(TANDEM_SANITIZE MATCHES undefined AND NOT TANDEM_ALL_TESTS)
    # A third of the build's time. A null pointer and an object that ends too early are found by the other sanitizer as well.
    add_compile_options(-fno-sanitize=vptr,null,object-size)
  endif()
endif()

if(TANDEM_TESTS)
  enable_testing()
  find_package(GTest REQUIRED)
  include(GoogleTest)
endif()
if(TANDEM_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()

# TANDEM_MPI: processes as ranks. AUTO is on where an MPI is found, but off in builds with sanitizers: the library is not built with
# them, so that its locks are not seen and its memory that is never freed is, and both would be reported as faults of ours.
set(TANDEM_MPI AUTO CACHE STRING "Ranks that are MPI processes: AUTO, ON or OFF")
set_property(CACHE TANDEM_MPI PROPERTY STRINGS AUTO ON OFF)
set(TANDEM_WITH_MPI OFF)
if(TANDEM_MPI STREQUAL "ON" OR (TANDEM_MPI STREQUAL "AUTO" AND NOT TANDEM_SANITIZE))
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI COMPONENTS CXX QUIET)
  if(MPI_CXX_FOUND)
    set(TANDEM_WITH_MPI ON)
  elseif(TANDEM_MPI STREQUAL "ON")
    message(FATAL_ERROR "TANDEM_MPI=ON, but no MPI was found; install libopenmpi-dev and openmpi-bin, or leave it at AUTO")
  endif()
endif()
if(TANDEM_WITH_MPI)
  message(STATUS "tandem: with MPI ${MPI_CXX_VERSION} (${MPIEXEC_EXECUTABLE})")
elseif(TANDEM_SANITIZE AND TANDEM_MPI STREQUAL "AUTO")
  message(STATUS "tandem: without MPI (sanitizers; TANDEM_MPI=ON for it all the same)")
else()
  message(STATUS "tandem: without MPI")
endif()

# With a sanitizer, the tests that tell the most about what it looks for; all of them with TANDEM_ALL_TESTS (nightly). Memory:
# not the engine's long compositions, whose parts have tests of their own, nor collectives, which the other has. Threads: only what has several.
if(TANDEM_SANITIZE STREQUAL "thread")
  set(TANDEM_LEFT_OUT /optimized/compression/ /optimized/data_pipeline/ /optimized/tensor_parallel/ /optimized/memory/
                      /optimized/loss_scaling/ /optimized/expert_parallel/ /optimized/context_parallel/
                      /optimized/collectives/ /optimized/pipeline_parallel/ /engine/lower_test /comm/sum_test /engine/insert_behind)
else()
  set(TANDEM_LEFT_OUT /engine/composition_test /engine/random_plans_test /engine/overlap_faults_test /engine/tensor_chunks_test
                      /engine/lower_test /checkpoint_layouts_test /comm/collectives_test /comm/adversary_order_test)
endif()

# tandem_folder(NAME LINKS target...): library tandem_NAME of all .cpp files below this folder, but for *_test.cpp, *_bench.cpp
# and main.cpp; and the program NAME_test of its tests, each of them a CTest entry labelled NAME. Neither has files that match one of
# the expressions EXCLUDE. COLD: nothing in it takes time, so that a third of its build time is worth more than its speed.
set(TANDEM_COLD $<$<CONFIG:Release>:-O1>)
function(tandem_folder name)
  cmake_parse_arguments(arg "COLD" "" "LINKS;TEST_LINKS;EXCLUDE" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cpp)
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "(_test|_bench|/main)\\.cpp$")
  foreach(pattern IN LISTS arg_EXCLUDE)
    list(FILTER sources EXCLUDE REGEX ${pattern})
    list(FILTER tests EXCLUDE REGEX ${pattern})
  endforeach()
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  if(TANDEM_SANITIZE AND NOT TANDEM_ALL_TESTS)
    foreach(pattern IN LISTS TANDEM_LEFT_OUT)
      list(FILTER tests EXCLUDE REGEX ${pattern})
    endforeach()
  endif()
  add_library(tandem_${name} STATIC ${sources})
  target_include_directories(tandem_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  if(arg_COLD)
    target_compile_options(tandem_${name} PRIVATE ${TANDEM_COLD})
  endif()
  target_link_libraries(tandem_${name} PUBLIC fmt::fmt Threads::Threads ${arg_LINKS})
  if(TANDEM_TESTS AND tests)
    tandem_test(${name}_test LABEL ${name} SOURCES ${tests} LINKS tandem_${name} ${arg_TEST_LINKS})
  endif()
endfunction()

# tandem_cold(pattern...): the same for some files of this folder.
function(tandem_cold)
  list(TRANSFORM ARGN PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
  file(GLOB files CONFIGURE_DEPENDS ${ARGN})
  set_source_files_properties(${files} PROPERTIES COMPILE_OPTIONS ${TANDEM_COLD})
endfunction()

# tandem_test(NAME LABEL label SOURCES file... LINKS target...): one test program, its tests discovered when CTest runs;
# with a sanitizer in a few parts.
function(tandem_test name)
  cmake_parse_arguments(arg "" "LABEL" "SOURCES;LINKS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINKS} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_compile_options(${name} PRIVATE ${TANDEM_COLD})
  if(NOT TANDEM_SANITIZE)
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST PROPERTIES LABELS ${arg_LABEL} TIMEOUT 300)
    return()
  endif()
  # A process with a sanitizer takes longer to start than most tests take: a few entries with many tests each.
  set(shards 8)
  foreach(shard RANGE 1 ${shards})
    math(EXPR index "${shard} - 1")
    add_test(NAME ${name}_${shard}_of_${shards} COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name}_${shard}_of_${shards} PROPERTIES LABELS ${arg_LABEL} TIMEOUT 600
                         ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${index}")
  endforeach()
endfunction()

# tandem_benchmark(NAME SOURCES file... LINKS target...): one Google Benchmark program.
function(tandem_benchmark name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINKS" ${ARGN})
  if(TANDEM_BENCHMARKS)
    add_executable(${name} ${arg_SOURCES})
    target_link_libraries(${name} PRIVATE ${arg_LINKS} benchmark::benchmark_main)
  endif()
endfunction()
