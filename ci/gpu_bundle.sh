#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packs what the CUDA build needs beside a compiler, CUDA, CMake and Ninja, for a machine with a GPU that has no network: the headers of
# the libraries that ci/setup.sh installs here and those of cuBLAS, NCCL and NVTX, for machines that have these libraries alone,
# GoogleTest's sources, and files by which CMake finds them. No compiled code: what is
# built there is built for there. Optional libraries (oneDNN, OpenBLAS, MPI, curl, SentencePiece) are left out; the build says so.
#
#   ci/gpu_bundle.sh                   makes build/gpu_bundle, which ci/gpu.sh uses where it is there
#   ci/gpu_bundle.sh --archive FILE    and packs it with the committed sources into one FILE.tar.gz to carry over:
#                                      tar xzf FILE.tar.gz && cd tandem && ci/gpu.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

limit_mebibytes=60
archive=''
if [[ ${1:-} == --archive ]]; then
  archive=$(realpath -m "${2:?"--archive needs a file"}")
elif (($#)); then
  fail "unknown option '$1'; use --archive FILE or none"
fi

bundle=$repository/build/gpu_bundle
rm -rf "$bundle"
mkdir -p "$bundle/include" "$bundle/cmake"

# Where the system has them; each is looked for, so that a missing one is named.
headers=(fmt nlohmann rapidjson cereal CLI xxhash.h)
for header in "${headers[@]}"; do
  found=/usr/include/$header
  [[ -e $found ]] || fail "$header is not in /usr/include; run ci/setup.sh first"
  cp -rL "$found" "$bundle/include/"
done
[[ -e /usr/include/xxh3.h ]] && cp /usr/include/xxh3.h "$bundle/include/"
[[ -e /usr/src/googletest/googletest/src/gtest-all.cc ]] || fail "GoogleTest's sources are not in /usr/src/googletest; run ci/setup.sh first"
mkdir -p "$bundle/googletest"
cp -rL /usr/src/googletest/googletest/{include,src} "$bundle/googletest/"

for header in cublasLt.h cublas_api.h nccl.h nvtx3; do
  for folder in ${CUDA_PATH:+"$CUDA_PATH/include"} /usr/local/cuda/include /usr/include; do
    [[ -e $folder/$header ]] || continue
    mkdir -p "$bundle/cuda_include"
    cp -rL "$folder/$header" "$bundle/cuda_include/"
    break
  done
done

# One file for each find_package() of the build, and a first cache that points to them.
cat >"$bundle/cmake/fmtConfig.cmake" <<'CMAKE'
if(NOT TARGET fmt::fmt)
  add_library(fmt::fmt INTERFACE IMPORTED)
  target_compile_definitions(fmt::fmt INTERFACE FMT_HEADER_ONLY)
endif()
CMAKE
for package in nlohmann_json CLI11; do  # by the names that find_package() looks for
  cat >"$bundle/cmake/${package}Config.cmake" <<CMAKE
if(NOT TARGET $package::$package)
  add_library($package::$package INTERFACE IMPORTED)
endif()
CMAKE
done
cat >"$bundle/cmake/GTestConfig.cmake" <<'CMAKE'
if(NOT TARGET GTest::gtest)
  find_package(Threads REQUIRED)
  get_filename_component(googletest "${CMAKE_CURRENT_LIST_DIR}/../googletest" ABSOLUTE)
  add_library(bundled_gtest STATIC ${googletest}/src/gtest-all.cc)
  add_library(bundled_gtest_main STATIC ${googletest}/src/gtest_main.cc)
  foreach(library bundled_gtest bundled_gtest_main)
    target_include_directories(${library} SYSTEM PUBLIC ${googletest}/include PRIVATE ${googletest})
    target_compile_options(${library} PRIVATE -w)
  endforeach()
  target_link_libraries(bundled_gtest PUBLIC Threads::Threads)
  target_link_libraries(bundled_gtest_main PUBLIC bundled_gtest)
  add_library(GTest::gtest ALIAS bundled_gtest)
  add_library(GTest::gtest_main ALIAS bundled_gtest_main)
endif()
CMAKE
cat >"$bundle/bundle.cmake" <<'CMAKE'
# cmake -C build/gpu_bundle/bundle.cmake ...: takes libraries from here, and none from the system but the compiler's own.
set(bundle "${CMAKE_CURRENT_LIST_DIR}")
foreach(package fmt nlohmann_json CLI11 GTest)
  set(${package}_DIR "${bundle}/cmake" CACHE PATH "")
endforeach()
set(RAPIDJSON_INCLUDE_DIR "${bundle}/include" CACHE PATH "")
set(includes "${bundle}/include")
if(NOT EXISTS /usr/local/cuda/include/cublasLt.h AND EXISTS "${bundle}/cuda_include")
  list(APPEND includes "${bundle}/cuda_include")
  set(TANDEM_CUBLASLT_INCLUDE "${bundle}/cuda_include" CACHE PATH "")
endif()
if(NOT EXISTS /usr/local/cuda/include/nccl.h AND EXISTS "${bundle}/cuda_include/nccl.h")
  list(APPEND includes "${bundle}/cuda_include")
  set(TANDEM_NCCL_INCLUDE "${bundle}/cuda_include" CACHE PATH "")
endif()
foreach(language CXX CUDA)
  set(CMAKE_${language}_STANDARD_INCLUDE_DIRECTORIES "${includes}" CACHE STRING "")
endforeach()
foreach(package PkgConfig OpenBLAS prometheus-cpp)
  set(CMAKE_DISABLE_FIND_PACKAGE_${package} ON CACHE BOOL "")
endforeach()
set(TANDEM_MPI OFF CACHE STRING "")
CMAKE

# There may be no history over there: the revision travels as a file, which cmake/build_info.cmake reads.
git rev-parse HEAD >"$bundle/revision" 2>/dev/null || rm -f "$bundle/revision"

mebibytes=$(($(du -sk "$bundle" | cut -f1) / 1024 + 1))
echo "gpu_bundle: $bundle, $mebibytes MiB in $(find "$bundle" -type f | wc -l) files"
((mebibytes <= limit_mebibytes)) || fail "more than $limit_mebibytes MiB"

if [[ -n $archive ]]; then
  git diff --quiet HEAD 2>/dev/null || echo "gpu_bundle: the tree has changes that are not committed; the archive has the last commit" >&2
  git archive --format=tar --prefix=tandem/ HEAD >"$bundle.tar"
  tar --append --file="$bundle.tar" --transform='s,^build/,tandem/build/,' --owner=0 --group=0 build/gpu_bundle
  gzip -9 -c "$bundle.tar" >"$archive"
  rm -f "$bundle.tar"
  echo "gpu_bundle: $archive, $(($(stat -c %s "$archive") / 1048576 + 1)) MiB"
fi
