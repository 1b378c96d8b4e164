// SPDX-License-Identifier: Apache-2.0
// What others see of a folder while its checkpoints get their names, and lose them.
#include "optimized/checkpoint/publish.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/file_operations.h"
#include "core/io/test_folder.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/checkpoint_test_support.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

TEST(Publish, ACheckpointThatGetsItsNameBetweenTwoLooksIsNotMissed) {
  const TestFolder folder;
  const fs::path unfinished = unfinished_folder(folder.path(), 4);
  fs::create_directory(unfinished);
  EXPECT_TRUE(is_written_or_being_written(folder.path(), 4));
  const auto renamed_after_a_look = [&](const fs::path& path) {
    const bool seen = fs::exists(path);
    if (fs::exists(unfinished)) fs::rename(unfinished, folder / "step-00000004");
    return seen;
  };

  EXPECT_TRUE(is_written_or_being_written(folder.path(), 4, renamed_after_a_look));

  EXPECT_TRUE(is_written_or_being_written(folder.path(), 4));
  EXPECT_FALSE(is_written_or_being_written(folder.path(), 8));
}

// The program ends, so to speak, when a folder has lost its first file.
class HalfRemovingFiles final : public WrappedFiles {
 public:
  void remove(const fs::path& path) override {
    if (!fs::exists(path)) return;
    fs::remove(path / kManifestName);
    throw IoError("cannot remove " + path.string());
  }
};

TEST(Publish, HalfOfACheckpointThatIsRemovedIsNoDamagedOneAndGoesWithTheNext) {
  const TestFolder folder;
  for (const std::int64_t step : {1, 2}) save_trained(tiny_config(), folder.path(), step);
  HalfRemovingFiles files;

  EXPECT_THROW(prune_checkpoints(folder.path(), 1, files), IoError);

  ASSERT_EQ(list_checkpoints(folder.path()).size(), 1U);
  EXPECT_EQ(list_checkpoints(folder.path()).front().step, 2);
  EXPECT_EQ(folder.num_files(), 3U) << "step 2, latest, and what is left of step 1";
  save_trained(tiny_config(), folder.path(), 3);
  EXPECT_EQ(folder.num_files(), 3U) << "steps 2 and 3, latest";
}

}  // namespace
}  // namespace tandem
