// SPDX-License-Identifier: Apache-2.0
// What the guards make of a folder that is not, or not yet, as it should be.
#include "core/error.h"
#include "core/io/file_operations.h"
#include "core/io/test_folder.h"
#include "optimized/anomaly/guard_test_support.h"
#include "optimized/checkpoint/catalogue.h"

namespace tandem {
namespace {

using namespace watched;

TEST(AnomalyGuard, AsksAgainForACheckpointThatHasNotBegunToBeWritten) {
  const TestFolder folder;
  on_ranks(2, [&](Communicator& comm) {
    const RunConfig config = tiny({.data = 2}, AnomalyAction::skip);
    Watched rank(comm, config, folder.path());
    rank.guard().saved(2);
    std::int64_t step = 2;
    for (; step < 2 + config.anomaly.confirm_steps; ++step) ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);
    EXPECT_EQ(rank.guard().ledger().newest_healthy(), std::nullopt) << "it is not there";
    if (comm.rank() == 0) std::filesystem::create_directory(folder / "step-00000002");

    ASSERT_EQ(rank.step(step), AnomalyDecision::go_on);

    EXPECT_EQ(rank.guard().ledger().newest_healthy(), 2) << "its steps have not to be done again";
  });
}

class StubbornFiles final : public WrappedFiles {
 public:
  void remove(const std::filesystem::path& path) override {
    if (path.filename() == "suspect-step-00000004") throw IoError("cannot remove " + path.string());
    WrappedFiles::remove(path);
  }
};

TEST(AnomalyGuard, ASuspectThatCannotBeRemovedEndsNoRunAndGoesWithTheNext) {
  const TestFolder folder;
  const auto make = [&](const char* name) { std::filesystem::create_directory(folder / name); };
  for (const char* const name : {"suspect-step-00000004", "step-00000008", "step-00000012", "step-00000016"}) make(name);
  StubbornFiles files;

  EXPECT_NO_THROW(set_aside_checkpoints_after(folder.path(), 0, files));

  EXPECT_TRUE(list_checkpoints(folder.path()).empty());
  EXPECT_TRUE(std::filesystem::exists(folder / "suspect-step-00000004"));
  make("step-00000020");
  set_aside_checkpoints_after(folder.path(), 0, system_files());
  EXPECT_FALSE(std::filesystem::exists(folder / "suspect-step-00000004"));
  EXPECT_FALSE(std::filesystem::exists(folder / "suspect-step-00000008"));
  EXPECT_EQ(folder.num_files(), 3U);
}

}  // namespace
}  // namespace tandem
