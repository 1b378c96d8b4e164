# SPDX-License-Identifier: Apache-2.0
# cmake --install: the program, the libraries with their headers for find_package(tandem), the data, the manual pages. Tests and
# benchmarks stay behind. Included at the end: it looks at what the build has found.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/tandem)
set(header_folder ${CMAKE_INSTALL_INCLUDEDIR}/tandem)
set(data_folder ${CMAKE_INSTALL_DATADIR}/tandem)
file(RELATIVE_PATH data_from_program ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_DATADIR}/tandem)

# What the program says of itself (cli/installation.cpp). A version that nobody knows is empty.
set(libraries "")
function(tandem_has name found version)
  if(found)
    string(REGEX REPLACE "\n.*" "" version "${version}")
    set(libraries "${libraries}    {\"${name}\", \"${version}\"},\n" PARENT_SCOPE)
  endif()
endfunction()
set(onednn_version "")
if(EXISTS ${TANDEM_ONEDNN_INCLUDE}/oneapi/dnnl/dnnl_version.h)
  file(STRINGS ${TANDEM_ONEDNN_INCLUDE}/oneapi/dnnl/dnnl_version.h lines REGEX "define DNNL_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX MATCHALL "[0-9]+" onednn_version "${lines}")
  list(JOIN onednn_version "." onednn_version)
endif()
find_package(OpenBLAS CONFIG QUIET)
find_package(prometheus-cpp CONFIG QUIET)
tandem_has(fmt TRUE "${fmt_VERSION}")
tandem_has(oneDNN "${TANDEM_ONEDNN_LIBRARY}" "${onednn_version}")
tandem_has(OpenBLAS "${OpenBLAS_FOUND}" "${OpenBLAS_VERSION}")
tandem_has(MPI "${TANDEM_WITH_MPI}" "${MPI_CXX_VERSION}")
tandem_has(CUDA "${TANDEM_WITH_CUDA}" "${CUDAToolkit_VERSION}")
if(CURL_FOUND AND PUGIXML_FOUND AND CRYPTO_FOUND)
  tandem_has(libcurl TRUE "${CURL_VERSION}")
endif()
tandem_has(SentencePiece "${SENTENCEPIECE_FOUND}" "${SENTENCEPIECE_VERSION}")
if(prometheus-cpp_FOUND AND HTTPLIB_FOUND)
  tandem_has(prometheus-cpp TRUE "${prometheus-cpp_VERSION}")
endif()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/cli/generated/tandem_installation.h CONTENT [[// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tandem::installation {

inline constexpr const char* kSourceFolder = R"(@PROJECT_SOURCE_DIR@)";
inline constexpr const char* kDataFolder = "@data_from_program@";  // seen from the program's folder
struct Library {
  const char* name;
  const char* version;
};
inline constexpr Library kLibraries[] = {
@libraries@};

}  // namespace tandem::installation
]] @ONLY)

if(TANDEM_SANITIZE)
  return()
endif()

install(TARGETS tandem RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY results/models results/clusters results/links results/published results/golden results/baselines
        DESTINATION ${data_folder})
install(FILES results/schema.json DESTINATION ${data_folder})
install(DIRECTORY docs/examples DESTINATION ${data_folder} PATTERN "build" EXCLUDE)
install(FILES LICENSE README.md CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
# Manual pages and completion are what the program says of itself.
if(Python3_EXECUTABLE AND NOT CMAKE_CROSSCOMPILING)
  install(CODE "execute_process(COMMAND ${Python3_EXECUTABLE} ${PROJECT_SOURCE_DIR}/ci/command_reference.py
    --program [[$<TARGET_FILE:tandem>]] --man \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_MANDIR}/man1\"
    --completion \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_DATADIR}/bash-completion/completions/tandem\"
    COMMAND_ERROR_IS_FATAL ANY)")
endif()

# One archive a room: tandem_X_cold and the kernels for GPUs are objects in them. Headers keep their folders, so that they are
# included as here: "core/plan.h".
set(rooms core kernels reference optimized scaling probe harness suites)
add_library(tandem_all INTERFACE)
set_target_properties(tandem_all PROPERTIES EXPORT_NAME tandem)
set(targets tandem_all)
foreach(room IN LISTS rooms)
  set_target_properties(tandem_${room} PROPERTIES EXPORT_NAME ${room} INTERFACE_INCLUDE_DIRECTORIES
                        "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>;$<INSTALL_INTERFACE:${header_folder}>")
  target_compile_features(tandem_${room} INTERFACE cxx_std_20)
  target_link_libraries(tandem_all INTERFACE tandem_${room})
  list(APPEND targets tandem_${room})
endforeach()
install(TARGETS ${targets} EXPORT tandem ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT tandem NAMESPACE tandem:: FILE tandemTargets.cmake DESTINATION ${package_folder})
foreach(folder core reference optimized harness suites)
  install(DIRECTORY ${folder} DESTINATION ${header_folder} FILES_MATCHING PATTERN "*.h" PATTERN "*test_support.h" EXCLUDE)
endforeach()
# Of kernels only what is for everybody: not those of one kind of device.
file(GLOB kernel_headers CONFIGURE_DEPENDS kernels/*.h)
list(FILTER kernel_headers EXCLUDE REGEX "test_support\\.h$")
install(FILES ${kernel_headers} DESTINATION ${header_folder}/kernels)

# What the archives need again where they are linked.
set(package_finds_mpi ${TANDEM_WITH_MPI})
set(package_finds_boost ${TANDEM_WITH_SIMT})
set(package_finds_cuda ${TANDEM_WITH_CUDA})
set(package_pkg_config "")
if(CURL_FOUND AND PUGIXML_FOUND AND CRYPTO_FOUND)
  string(APPEND package_pkg_config [[ "CURL libcurl" "PUGIXML pugixml" "CRYPTO libcrypto"]])
endif()
if(SENTENCEPIECE_FOUND)
  string(APPEND package_pkg_config [[ "SENTENCEPIECE sentencepiece"]])
endif()
set(package_finds_prometheus OFF)
if(prometheus-cpp_FOUND AND HTTPLIB_FOUND)
  set(package_finds_prometheus ON)
endif()
configure_package_config_file(cmake/tandemConfig.cmake.in ${PROJECT_BINARY_DIR}/tandemConfig.cmake
                              INSTALL_DESTINATION ${package_folder} PATH_VARS data_folder)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tandemConfig.cmake ${PROJECT_BINARY_DIR}/tandemConfigVersion.cmake
        DESTINATION ${package_folder})

# A Debian package of all this: cpack -G DEB in the build folder.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "the developers of tandem <tandem@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "techniques of large-scale LLM training, proven equal to their references and measured")
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "g++, cmake, libfmt-dev, nlohmann-json3-dev, libcereal-dev")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
include(CPack)
