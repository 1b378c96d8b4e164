// SPDX-License-Identifier: Apache-2.0
// Compiled with the flags that kernels/CMakeLists.txt gives this file.
#include "kernels/cpu/simd/tables.h"

namespace tandem::cpu {

const VectorTables& baseline_tables() { return kTables; }

}  // namespace tandem::cpu
