// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "optimized/comm/world.h"

namespace tandem {

/// run_world() of the threads transport.
void run_threads(const WorldOptions& options, const std::function<void(Communicator&)>& body);

/// From now on, `last_words` is called where a world of threads has failed and a rank has not come out of its body within the
/// deadline (at least 5 s) after that: it hangs, a thread cannot be ended, and run_threads() would wait for it for ever. Called
/// on another thread, with one line that names the rank; may end the process. Empty: it is waited for.
void on_hung_rank(std::function<void(const std::string& reason)> last_words);

}  // namespace tandem
