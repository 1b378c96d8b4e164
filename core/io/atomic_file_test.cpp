// SPDX-License-Identifier: Apache-2.0
#include "core/io/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace {
bool links_are_refused = false;
}

// In place of the C library's: some file systems make files without a name, and do not let them be named.
extern "C" int linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) noexcept {
  if (links_are_refused) {
    errno = EPERM;
    return -1;
  }
  return static_cast<int>(syscall(SYS_linkat, from_folder, from, to_folder, to, flags));
}

namespace tandem {
namespace {

TEST(AtomicFile, IsCompleteWhereAnUnnamedFileCannotBeNamed) {
  const TestFolder folder;
  std::string content(3'000'001, 'x');
  content.back() = 'y';
  folder.write("file", "old");
  ASSERT_EQ(::chmod((folder / "file").c_str(), 0666), 0);

  links_are_refused = true;
  write_file_atomically(folder / "file", content);
  links_are_refused = false;

  EXPECT_EQ(TestFolder::read(folder / "file"), content);
  EXPECT_EQ(folder.num_files(), 1U);
  struct stat status {};
  ASSERT_EQ(::stat((folder / "file").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 0666U);
}

TEST(AtomicFile, AppearsWithItsWholeContent) {
  const TestFolder folder;
  std::string content(3'000'001, 'x');
  content.back() = 'y';

  write_file_atomically(folder / "file", content);

  EXPECT_EQ(TestFolder::read(folder / "file"), content);
  EXPECT_EQ(folder.num_files(), 1U);
}

TEST(AtomicFile, ShowsNothingBeforeCommit) {
  const TestFolder folder;
  folder.write("file", "old");

  {
    AtomicFile file(folder / "file");
    file.write("new");
    file.finish();
    EXPECT_EQ(TestFolder::read(folder / "file"), "old");
  }

  EXPECT_EQ(TestFolder::read(folder / "file"), "old");
  EXPECT_EQ(folder.num_files(), 1U) << "the temporary file is left behind";
}

TEST(AtomicFile, AProcessThatIsKilledLeavesNothing) {
  const TestFolder folder;
  const int able = ::open(folder.path().c_str(), O_TMPFILE | O_WRONLY, 0666);
  if (able < 0) GTEST_SKIP() << "needs a file system with files that have no name";
  ::close(able);
  const pid_t writer = fork();
  if (writer == 0) {
    AtomicFile file(folder / "data");
    file.write("not yet whole");
    ::kill(::getpid(), SIGKILL);
  }
  ::waitpid(writer, nullptr, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(AtomicFile, ReplacesAnOlderFileAndKeepsItsPermissions) {
  const TestFolder folder;
  folder.write("file", "old and longer");
  std::filesystem::permissions(folder / "file", std::filesystem::perms(0640));

  write_file_atomically(folder / "file", "new");

  EXPECT_EQ(TestFolder::read(folder / "file"), "new");
  EXPECT_EQ(std::filesystem::status(folder / "file").permissions(), std::filesystem::perms(0640));
}

TEST(AtomicFile, WritesThroughASymbolicLink) {
  const TestFolder folder;
  folder.write("target", "old");
  std::filesystem::create_symlink(folder / "target", folder / "link");

  write_file_atomically(folder / "link", "new");

  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(TestFolder::read(folder / "target"), "new");
}

TEST(AtomicFile, LeavesADeviceADevice) {
  write_file_atomically("/dev/null", "gone");

  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST(AtomicFile, ReportsAFullDeviceWithPathAndReason) {
  if (!std::filesystem::is_character_file("/dev/full")) GTEST_SKIP() << "needs /dev/full";

  EXPECT_EQ(message_of<IoError>([] { write_file_atomically("/dev/full", "12345"); }),
            "cannot write /dev/full (5 bytes so far): No space left on device");
}

TEST(AtomicFile, KeepsTheOldFileWhenTheDiskIsFull) {
  const TestFolder folder;
  folder.write("file", "old");
  std::string message;

  {
    const FileSizeLimit full(100'000);
    message = message_of<IoError>([&] { write_file_atomically(folder / "file", std::string(5'000'000, 'x')); });
  }

  EXPECT_NE(message.find((folder / "file").string() + " (5000000 bytes so far): File too large"), std::string::npos) << message;
  EXPECT_EQ(TestFolder::read(folder / "file"), "old");
  EXPECT_EQ(folder.num_files(), 1U) << "the temporary file is left behind";
}

TEST(AtomicFile, NamesAMissingFolder) {
  EXPECT_EQ(message_of<IoError>([] { write_file_atomically("/nonexistent/file", "x"); }),
            "cannot create /nonexistent/file (0 bytes so far): No such file or directory");
}

TEST(AtomicFile, RefusesADirectoryAsTarget) {
  const TestFolder folder;

  EXPECT_NE(message_of<IoError>([&] { write_file_atomically(folder.path(), "x"); }).find("Is a directory"), std::string::npos);
}

TEST(AtomicFile, RefusesWritingAfterFinish) {
  const TestFolder folder;
  AtomicFile file(folder / "file");
  file.finish();

  EXPECT_THROW(file.write("late"), ContractError);
}

TEST(AtomicFile, WritersOfOneFolderDoNotDisturbEachOther) {
  const TestFolder folder;
  AtomicFile first(folder / "file");
  AtomicFile second(folder / "file");
  first.write("first");
  second.write("second");

  second.commit();
  first.commit();

  EXPECT_EQ(TestFolder::read(folder / "file"), "first");
  EXPECT_EQ(folder.num_files(), 1U);
}

TEST(ReadTextFile, ReturnsTheWholeFile) {
  const TestFolder folder;
  const std::string content(200'000, 'z');

  EXPECT_EQ(read_text_file(folder.write("file", content)), content);
  EXPECT_EQ(read_text_file(folder.write("empty", "")), "");
}

TEST(ReadTextFile, NamesAMissingFileAndADirectory) {
  const TestFolder folder;

  EXPECT_EQ(message_of<InputError>([] { (void)read_text_file("/nonexistent"); }),
            "cannot read /nonexistent: No such file or directory");
  EXPECT_NE(message_of<InputError>([&] { (void)read_text_file(folder.path()); }).find("it is a directory"), std::string::npos);
}

}  // namespace
}  // namespace tandem
