// SPDX-License-Identifier: Apache-2.0
// Spans as ranges of NVTX, whose functions do nothing unless a profiler has put its own in their place.
#include <cstdint>
#include <memory>
#include <string>

#include <nvtx3/nvToolsExt.h>

#include "core/timeline.h"
#include "kernels/cuda/backends.h"

namespace tandem::cuda_gpu {
namespace {

std::uint32_t colour_of(Activity activity) {  // alpha, red, green, blue
  switch (activity) {
    case Activity::compute: return 0xff4c9f38;
    case Activity::optimizer: return 0xff8e5bb5;
    case Activity::transfer: return 0xff2f7fc1;
    case Activity::wait: return 0xffc8452f;
    case Activity::data: return 0xffe0a526;
    case Activity::checkpoint: return 0xff8a6d4b;
    case Activity::step: return 0xff9a9a9a;
  }
  return 0xffffffff;
}

class NvtxObserver final : public SpanObserver {
 public:
  NvtxObserver() : domain_(nvtxDomainCreateA("tandem")) {}
  NvtxObserver(const NvtxObserver&) = delete;
  NvtxObserver& operator=(const NvtxObserver&) = delete;
  ~NvtxObserver() override { nvtxDomainDestroy(domain_); }

  void begin(const std::string& name, Activity activity) noexcept override {
    nvtxEventAttributes_t range = {};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.category = static_cast<std::uint32_t>(activity) + 1;  // 0 means none
    range.colorType = NVTX_COLOR_ARGB;
    range.color = colour_of(activity);
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = name.c_str();
    static_cast<void>(nvtxDomainRangePushEx(domain_, &range));
  }
  void end() noexcept override { static_cast<void>(nvtxDomainRangePop(domain_)); }

 private:
  nvtxDomainHandle_t domain_;
};

}  // namespace

std::unique_ptr<SpanObserver> make_nvtx_observer() { return std::make_unique<NvtxObserver>(); }

}  // namespace tandem::cuda_gpu
