# SPDX-License-Identifier: Apache-2.0
# Run at every build: writes OUTPUT, a header that says what was built from. Left untouched while nothing has changed, so that an
# unchanged tree compiles nothing.
#   cmake -DSOURCE_DIR=... -DOUTPUT=... -DVERSION=... -DCOMPILER=... -DBUILD_TYPE=... -P build_info.cmake

set(commit "unknown")
set(dirty "false")
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE_DIR} rev-parse HEAD OUTPUT_VARIABLE head RESULT_VARIABLE failed ERROR_QUIET
                  OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT failed)
    set(commit ${head})
    execute_process(COMMAND ${git} -C ${SOURCE_DIR} status --porcelain --untracked-files=no OUTPUT_VARIABLE changes ERROR_QUIET)
    if(NOT changes STREQUAL "")
      set(dirty "true")
    endif()
  endif()
endif()
# Sources that were carried over without their history (ci/gpu_bundle.sh).
if(commit STREQUAL "unknown" AND EXISTS ${SOURCE_DIR}/build/gpu_bundle/revision)
  file(STRINGS ${SOURCE_DIR}/build/gpu_bundle/revision commit LIMIT_COUNT 1)
endif()

set(text "// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tandem::build_info {

inline constexpr const char* kVersion = \"${VERSION}\";
inline constexpr const char* kGitCommit = \"${commit}\";
inline constexpr bool kGitDirty = ${dirty};
inline constexpr const char* kCompiler = \"${COMPILER}\";
inline constexpr const char* kBuildType = \"${BUILD_TYPE}\";

}  // namespace tandem::build_info
")
set(previous "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} previous)
endif()
if(NOT previous STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
