// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace tandem {

/// CPU seconds that this machine has spent since it started on anything but this process and its children that have ended: other
/// programs, the kernel's interrupts and, on a virtual machine, its host (steal). Differences of it say how busy the machine was
/// while something was timed; a tick is 10 ms. 0 where /proc/stat cannot be read.
[[nodiscard]] double cpu_seconds_of_others();

}  // namespace tandem
