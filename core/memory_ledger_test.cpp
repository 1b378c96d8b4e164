// SPDX-License-Identifier: Apache-2.0
#include "core/memory_ledger.h"

#include <numeric>
#include <set>
#include <string>

#include <gtest/gtest.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::size_t kParameters = static_cast<std::size_t>(MemoryCategory::parameters);
constexpr std::size_t kActivations = static_cast<std::size_t>(MemoryCategory::activations);

std::int64_t sum(const BytesByCategory& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::int64_t{0}); }

TEST(MemoryLedger, KeepsEachCategorysOwnPeakAndThatOfTheTotal) {
  MemoryLedger ledger;
  ledger.allocated(MemoryCategory::activations, 100);
  ledger.freed(MemoryCategory::activations, 100);
  ledger.allocated(MemoryCategory::parameters, 80);
  ledger.allocated(MemoryCategory::activations, 30);
  ledger.freed(MemoryCategory::activations, 10);

  EXPECT_EQ(ledger.current()[kParameters], 80);
  EXPECT_EQ(ledger.current()[kActivations], 20);
  EXPECT_EQ(ledger.peak()[kActivations], 100);
  EXPECT_EQ(ledger.peak_total(), 110);
}

TEST(MemoryLedger, PeaksStartAnewFromWhatIsAllocated) {
  MemoryLedger ledger;
  ledger.allocated(MemoryCategory::parameters, 50);
  ledger.allocated(MemoryCategory::activations, 100);
  ledger.freed(MemoryCategory::activations, 100);

  ledger.reset_peaks();
  EXPECT_EQ(ledger.peak_total(), 50);
  EXPECT_EQ(ledger.peak()[kActivations], 0);

  ledger.allocated(MemoryCategory::activations, 7);
  EXPECT_EQ(ledger.peak_total(), 57);
}

TEST(MemoryLedger, RefusesToFreeMoreThanWasAllocated) {
  MemoryLedger ledger;
  ledger.allocated(MemoryCategory::gradients, 10);

  EXPECT_THROW(ledger.freed(MemoryCategory::gradients, 11), ContractError);
  EXPECT_THROW(ledger.freed(MemoryCategory::parameters, 1), ContractError);
  EXPECT_EQ(sum(ledger.current()), 10);
}

TEST(MemoryLedger, CategoriesHaveDistinctNames) {
  std::set<std::string> names;
  for (std::size_t i = 0; i < kMemoryCategories; ++i) names.insert(std::string(name(static_cast<MemoryCategory>(i))));
  EXPECT_EQ(names, (std::set<std::string>{"parameters", "gradients", "optimizer", "activations", "communication", "workspace"}));
}

}  // namespace
}  // namespace tandem
