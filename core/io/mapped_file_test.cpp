// SPDX-License-Identifier: Apache-2.0
#include "core/io/mapped_file.h"

#include <sys/stat.h>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

std::string text_of(const MappedFile& file) { return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()}; }

TEST(MappedFile, ShowsTheBytesOfTheFile) {
  const TestFolder folder;
  const auto path = folder.write("data", std::string("a\0b", 3));

  const MappedFile file(path);

  EXPECT_EQ(text_of(file), std::string("a\0b", 3));
  EXPECT_EQ(file.path(), path);
}

TEST(MappedFile, MapsAnEmptyFileAsNoBytes) {
  const TestFolder folder;

  EXPECT_TRUE(MappedFile(folder.write("empty", "")).bytes().empty());
}

TEST(MappedFile, KeepsTheBytesWhenMoved) {
  const TestFolder folder;
  MappedFile first(folder.write("first", "first"));
  MappedFile second(folder.write("second", "second"));

  second = std::move(first);

  EXPECT_EQ(text_of(second), "first");
}

TEST(MappedFile, KeepsTheOldBytesWhenTheFileIsReplaced) {
  const TestFolder folder;
  const MappedFile file(folder.write("data", "old"));

  std::filesystem::rename(folder.write("new", "new bytes"), folder / "data");

  EXPECT_EQ(text_of(file), "old");
}

TEST(MappedFile, NamesAMissingFile) {
  EXPECT_EQ(message_of<InputError>([] { MappedFile("/nonexistent/data"); }),
            "cannot read /nonexistent/data: No such file or directory");
}

TEST(MappedFile, RefusesADirectory) {
  const TestFolder folder;

  EXPECT_NE(message_of<InputError>([&] { MappedFile file(folder.path()); }).find("it is a directory"), std::string::npos);
}

TEST(MappedFile, RefusesAPipeWithoutWaitingForAWriter) {
  const TestFolder folder;
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);

  EXPECT_NE(message_of<InputError>([&] { MappedFile file(folder / "pipe"); }).find("not a regular file"), std::string::npos);
}

}  // namespace
}  // namespace tandem
