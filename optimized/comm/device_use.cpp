// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/device_use.h"

#include <utility>

namespace tandem {

void DeviceLanes::set_memory(Memory* memory) {
  Memory* const device = memory != nullptr && memory->on_host() ? nullptr : memory;
  if (device == memory_) return;
  memory_ = device;
  collectives_.reset();
  pool_ = std::make_shared<Pool>();
}

DeviceUse DeviceLanes::for_collective() {
  if (!collectives_) collectives_ = memory_->new_lane();
  return {collectives_, memory_->mark()};
}

DeviceUse DeviceLanes::for_message() {
  std::unique_ptr<Memory> lane;
  {
    const std::scoped_lock lock(pool_->mutex);
    if (!pool_->free.empty()) {
      lane = std::move(pool_->free.back());
      pool_->free.pop_back();
    }
  }
  if (!lane) lane = memory_->new_lane();
  const auto back_to_pool = [pool = pool_](Memory* used) {
    const std::scoped_lock lock(pool->mutex);
    pool->free.emplace_back(used);
  };
  return {std::shared_ptr<Memory>(lane.release(), back_to_pool), memory_->mark()};
}

DeviceUse DeviceLanes::in_rank_order() const { return {std::shared_ptr<Memory>(std::shared_ptr<Memory>(), memory_), nullptr}; }

}  // namespace tandem
