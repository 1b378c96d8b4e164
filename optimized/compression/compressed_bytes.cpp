// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/compressed_bytes.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "core/io/hash.h"
#include "optimized/compression/block_quantize.h"
#include "optimized/compression/power_sgd.h"
#include "optimized/compression/sign.h"

namespace tandem {

bool sums_at_owners(const CompressionConfig& config) {
  return config.codec == "int8" || config.codec == "int4" || config.codec == "sign";
}

bool is_coded(const CompressionConfig& config, const CompressedTensor& tensor) {
  if (config.codec != "power_sgd") return config.codec != "none";
  return config.rank * (tensor.rows + tensor.columns) < tensor.elements();
}

std::int64_t sent_elements(const CompressionConfig& config, std::int64_t elements) {
  const std::int64_t wanted = std::llround(config.density * static_cast<double>(elements));
  return std::min(std::max<std::int64_t>(wanted, 1), elements);
}

std::int64_t random_k_key(std::string_view name) {
  return static_cast<std::int64_t>(hash64(std::as_bytes(std::span(name.data(), name.size()))) >> 1);
}

std::int64_t equivalent_bytes(const CompressionConfig& config, const CompressedTensor& tensor, int ranks) {
  const std::int64_t elements = tensor.elements();
  if (!is_coded(config, tensor)) return 4 * elements;
  if (config.codec == "int8") return BlockQuantizeCodec(8, config.block).payload_bytes(elements);
  if (config.codec == "int4") return BlockQuantizeCodec(4, config.block).payload_bytes(elements);
  if (config.codec == "sign") return SignCodec(config.block).payload_bytes(elements);
  if (config.codec == "power_sgd") return power_sgd_bytes({tensor.rows, tensor.columns, config.rank});
  // Indices and values of every rank go to every other; of random_k the values alone, summed.
  return sent_elements(config, elements) * (config.codec == "top_k" ? 4 * ranks : 4);
}

}  // namespace tandem
