// SPDX-License-Identifier: Apache-2.0
// Compiled with the flags that kernels/CMakeLists.txt gives this file.
#include "kernels/cpu/simd/tables.h"

#if defined(__x86_64__)
namespace tandem::cpu {

const VectorTables& avx512_tables() { return kTables; }

}  // namespace tandem::cpu
#endif
