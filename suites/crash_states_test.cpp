// SPDX-License-Identifier: Apache-2.0
#include "suites/crash_states.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

constexpr CrashVariant kProgramDied{LostData::none, LostNames::none};
constexpr CrashVariant kAllUnsyncedLost{LostData::unsynced, LostNames::unsynced};

class CrashStates : public testing::Test {
 protected:
  void apply(FileAction action, const std::string& path, const std::string& other = {}, std::string_view bytes = {}) {
    FileLog::Event event;
    event.action = action;
    event.path = path;
    event.other = other;
    for (const char byte : bytes) event.bytes.push_back(static_cast<std::byte>(byte));
    model_.apply(event);
  }
  void write(const std::string& path, std::string_view bytes) { apply(FileAction::write, path, {}, bytes); }
  [[nodiscard]] CrashedTree after(const CrashVariant& variant) const { return model_.after_crash(variant); }

  CrashModel model_;
};

TEST_F(CrashStates, BytesThatWereNotSyncedAreLostOrCutShort) {
  apply(FileAction::create, "f");
  write("f", "abcd");
  apply(FileAction::sync, "f");
  write("f", "efgh");
  EXPECT_EQ(after(kProgramDied), (CrashedTree{{"f", "abcdefgh"}}));
  EXPECT_EQ(after({LostData::unsynced, LostNames::none}), (CrashedTree{{"f", "abcd"}}));
  EXPECT_EQ(after({LostData::half_of_unsynced, LostNames::none}), (CrashedTree{{"f", "abcdef"}}));
}

TEST_F(CrashStates, ANameIsDurableOnceItsFolderIsSynced) {
  apply(FileAction::create, "f");
  write("f", "a");
  apply(FileAction::sync, "f");
  EXPECT_EQ(after(kAllUnsyncedLost), CrashedTree{});
  apply(FileAction::sync_folder, "");
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"f", "a"}}));
}

TEST_F(CrashStates, ARenameThatWasNotSyncedIsUndone) {
  for (const char* name : {"old", "new"}) {
    apply(FileAction::create, name);
    write(name, name);
    apply(FileAction::sync, name);
  }
  apply(FileAction::sync_folder, "");
  apply(FileAction::rename, "new", "old");
  EXPECT_EQ(after(kProgramDied), (CrashedTree{{"old", "new"}}));
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"new", "new"}, {"old", "old"}}));
  apply(FileAction::sync_folder, "");
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"old", "new"}}));
}

TEST_F(CrashStates, AFolderThatIsRenamedTakesItsFilesAlong) {
  apply(FileAction::make_folder, "d.unfinished");
  apply(FileAction::create, "d.unfinished/f");
  write("d.unfinished/f", "a");
  apply(FileAction::sync, "d.unfinished/f");
  apply(FileAction::rename, "d.unfinished", "d");
  apply(FileAction::sync_folder, "");
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"d/", ""}})) << "the folder's own names were never synced";
  apply(FileAction::sync_folder, "d");
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"d/", ""}, {"d/f", "a"}}));
}

TEST_F(CrashStates, AnExchangeSwapsAndARemovalThatWasNotSyncedComesBack) {
  for (const std::string folder : {"one", "two"}) {
    apply(FileAction::make_folder, folder);
    apply(FileAction::create, folder + "/" + folder);
    apply(FileAction::sync_folder, folder);
  }
  apply(FileAction::sync_folder, "");
  apply(FileAction::exchange, "one", "two");
  EXPECT_EQ(after(kProgramDied), (CrashedTree{{"one/", ""}, {"one/two", ""}, {"two/", ""}, {"two/one", ""}}));
  apply(FileAction::remove, "two");
  EXPECT_EQ(after(kProgramDied), (CrashedTree{{"one/", ""}, {"one/two", ""}}));
  EXPECT_EQ(after(kAllUnsyncedLost), (CrashedTree{{"one/", ""}, {"one/one", ""}, {"two/", ""}, {"two/two", ""}}));
}

TEST(FileLog, KeepsPathsRelativeToItsRootAndWhatHadBeenPromised) {
  FileLog log("/some/root");
  const HookedFiles::Hook record = log.recorder();
  record({FileAction::rename, "/some/root/a.unfinished", "/some/root/a"});
  log.promise(7);
  record({FileAction::sync_folder, "/some/root"});
  ASSERT_EQ(log.events().size(), 2U);
  EXPECT_EQ(log.events()[0].path, "a.unfinished");
  EXPECT_EQ(log.events()[0].other, "a");
  EXPECT_EQ(log.events()[0].promised, -1);
  EXPECT_EQ(log.events()[1].path, "");
  EXPECT_EQ(log.events()[1].promised, 7);
}

}  // namespace
}  // namespace tandem
