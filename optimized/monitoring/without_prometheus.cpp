// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"
#include "optimized/monitoring/prometheus.h"

namespace tandem {

std::unique_ptr<PrometheusExposer> expose_prometheus(const std::string& /*address*/) {
  throw InputError(
      "this program was built without prometheus-cpp, which --prometheus needs: install prometheus-cpp-dev and build again, or "
      "use "
      "--metrics FILE");
}

}  // namespace tandem
