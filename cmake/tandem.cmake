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

option(TANDEM_WERROR "Warnings are errors; OFF for compilers that know more of them" ON)
set(werror "")
if(TANDEM_WERROR)
  set(werror -Werror)
endif()
# -ffp-contract=off: a*b+c is rounded twice wherever it is written so; kernels that want a fused multiply-add say so.
# CUDA's compiler has options of its own (kernels/cuda).
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wshadow;${werror};-ffp-contract=off>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=600000>)  # KiB before the compiler tidies up its memory: a tenth of its time
endif()
option(TANDEM_ALL_TESTS "With a sanitizer, all its checks and all tests" OFF)
if(TANDEM_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1 -DNDEBUG")  # enough for line numbers, and a third faster to build
  add_compile_options(-fsanitize=${TANDEM_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${TANDEM_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # The checks that are added, and what is not optimized, make it see paths that do not exist.
    add_compile_options(-Wno-maybe-uninitialized -Wno-return-type)
  endif()
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
# what reads files, packs and cuts; not the engine's long compositions, whose parts have tests of their own, nor what the other has.
# Threads: only what has several.
if(TANDEM_SANITIZE STREQUAL "thread")
  set(TANDEM_LEFT_OUT /optimized/compression/ "/data_pipeline/(epoch_order|prepare|text_source|token_part)_test" /optimized/tensor_parallel/ /optimized/memory/
                      /optimized/loss_scaling/ /optimized/expert_parallel/ /optimized/context_parallel/
                      /optimized/collectives/ /optimized/pipeline_parallel/ /engine/lower_test /cpu/sum_in_order_test /engine/insert_behind
                      /engine/composition_test /engine/random_plans_test /checkpoint/checkpoint_layouts_test /checkpoint/piece_reader_test
                      # On the emulated GPU: four minutes of it (nightly has them).
                      /comm/device_ /engine/device_test /engine/reservations_test /recovery/faulty_device)
else()
  set(TANDEM_LEFT_OUT /engine/composition_test /engine/random_plans_test /engine/overlap_faults_test /engine/tensor_chunks_test
                      /engine/lower_test /checkpoint_layouts_test /optimized/comm/ /optimized/recovery/
                      /optimized/anomaly/ /optimized/monitoring/ /optimized/training/ /optimized/pipeline_parallel/
                      /engine/device_test /engine/reservations_test)
endif()

# TANDEM_UNITY: files are compiled a few at a time, so that headers are read once: half the time of a build from nothing.
option(TANDEM_UNITY "Compile several source files as one (needs Python)" ON)
set(TANDEM_UNITY_SIZE 12 CACHE STRING "At most so many files are compiled as one")
if(TANDEM_UNITY)
  find_package(Python3 COMPONENTS Interpreter QUIET)
  if(NOT Python3_FOUND)
    message(STATUS "tandem: every file compiled alone (no python3)")
  endif()
endif()

# tandem_unity(TARGET file...): these files of the target in groups, in which no two disturb each other (unity.py).
function(tandem_unity target)
  if(NOT TANDEM_UNITY OR NOT Python3_FOUND OR NOT ARGN)
    return()
  endif()
  execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/unity.py ${TANDEM_UNITY_SIZE} ${ARGN} OUTPUT_VARIABLE groups
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" groups "${groups}")
  foreach(line IN LISTS groups)
    string(REGEX MATCH "^([0-9]+) (.*)$" line "${line}")
    set_source_files_properties(${CMAKE_MATCH_2} PROPERTIES UNITY_GROUP ${target}_${CMAKE_MATCH_1})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # GCC takes an included file for a header, in which a class with members of an unnamed namespace would be several classes.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/unity.py)
endfunction()

# tandem_folder(NAME LINKS target...): library tandem_NAME of all .cpp files below this folder, but for *_test.cpp, *_bench.cpp
# and main.cpp; and the program NAME_test of its tests, each of them a CTest entry labelled NAME. Neither has files that match one of
# the expressions EXCLUDE. COLD: nothing in it takes time, so that a third of its build time is worth more than its speed;
# COLD_FILES: nothing in these (patterns). ALONE: no file is compiled together with others. PRIVATE_LINKS: for the library's own files.
# With a sanitizer not optimized at all, the tests' own files too: half the time of their build.
set(TANDEM_COLD $<$<CONFIG:Release>:-O1> CACHE STRING "Optimization of what takes no time")
mark_as_advanced(TANDEM_COLD)
if(TANDEM_SANITIZE)
  set(TANDEM_COLD -O0)
endif()
# A test's own files only ask and compare; but those of reference/ and kernels/ are loops, over templates and over elements.
set(TANDEM_TEST_FILES $<$<CONFIG:Release>:-O0> CACHE STRING "Optimization of the tests' own files")
mark_as_advanced(TANDEM_TEST_FILES)
function(tandem_folder name)
  cmake_parse_arguments(arg "COLD;ALONE" "" "LINKS;PRIVATE_LINKS;TEST_LINKS;EXCLUDE;COLD_FILES" ${ARGN})
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
  set(cold "")
  if(arg_COLD_FILES)
    list(TRANSFORM arg_COLD_FILES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    file(GLOB candidates ${arg_COLD_FILES})
    foreach(file IN LISTS candidates)
      if(file IN_LIST sources)
        list(APPEND cold ${file})
        list(REMOVE_ITEM sources ${file})
      endif()
    endforeach()
  endif()
  add_library(tandem_${name} STATIC ${sources})
  set(libraries tandem_${name})
  if(cold)
    add_library(tandem_${name}_cold OBJECT ${cold})
    target_compile_options(tandem_${name}_cold PRIVATE ${TANDEM_COLD})
    target_sources(tandem_${name} PRIVATE $<TARGET_OBJECTS:tandem_${name}_cold>)
    list(APPEND libraries tandem_${name}_cold)
  endif()
  foreach(library IN LISTS libraries)
    target_include_directories(${library} PUBLIC ${PROJECT_SOURCE_DIR})
    target_link_libraries(${library} PUBLIC fmt::fmt Threads::Threads ${arg_LINKS} PRIVATE ${arg_PRIVATE_LINKS})
  endforeach()
  if(arg_COLD)
    target_compile_options(tandem_${name} PRIVATE ${TANDEM_COLD})
  endif()
  if(NOT arg_ALONE)
    tandem_unity(tandem_${name} ${sources})
    tandem_unity(tandem_${name}_cold ${cold})
  endif()
  if(TANDEM_TESTS AND tests)
    tandem_test(${name}_test LABEL ${name} SOURCES ${tests} LINKS tandem_${name} ${arg_TEST_LINKS})
  endif()
endfunction()

# tandem_test(NAME LABEL label SOURCES file... LINKS target...): one test program. Each of its tests is a CTest entry, found when
# CTest runs; with TANDEM_TEST_SHARDS it is that many entries with many tests each, whose own reports ci/count_tests.py reads: starting
# a process takes longer than most tests, and far longer with a sanitizer. LEFT_OUT: tests that take too long with one (but see
# TANDEM_ALL_TESTS).
set(TANDEM_TEST_SHARDS "" CACHE STRING "CTest entries of a test program; empty: one for each test, with a sanitizer 8")
function(tandem_test name)
  cmake_parse_arguments(arg "" "LABEL" "SOURCES;LINKS;LEFT_OUT" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE ${arg_LINKS} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE TANDEM_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  if(TANDEM_SANITIZE OR arg_LABEL MATCHES "^(reference|kernels)$")
    target_compile_options(${name} PRIVATE ${TANDEM_COLD})
  else()
    target_compile_options(${name} PRIVATE ${TANDEM_TEST_FILES})
  endif()
  tandem_unity(${name} ${arg_SOURCES})
  if(TANDEM_UNITY)
    target_compile_options(${name} PRIVATE -Wno-shadow)  # a local name is free to be another file's private one
  endif()
  set(shards ${TANDEM_TEST_SHARDS})
  if(NOT shards AND TANDEM_SANITIZE)
    set(shards 8)
  endif()
  set(filter "*")
  if(TANDEM_SANITIZE AND arg_LEFT_OUT AND NOT TANDEM_ALL_TESTS)
    list(JOIN arg_LEFT_OUT ":" left_out)
    set(filter "-${left_out}")
  endif()
  if(NOT shards)
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST PROPERTIES LABELS ${arg_LABEL} TIMEOUT 300)
    return()
  endif()
  foreach(shard RANGE 1 ${shards})
    math(EXPR index "${shard} - 1")
    set(entry ${name}_${shard}_of_${shards})
    add_test(NAME ${entry} COMMAND ${name} --gtest_brief=1 --gtest_output=xml:${PROJECT_BINARY_DIR}/gtest/${entry}.xml)
    set_tests_properties(${entry} PROPERTIES LABELS ${arg_LABEL} TIMEOUT 600
                         ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${index};GTEST_FILTER=${filter}")
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
