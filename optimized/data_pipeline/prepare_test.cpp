// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/prepare.h"

#include <stdexcept>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/indexed_dataset.h"
#include "core/io/test_folder.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/token_store.h"
#include "reference/data_pipeline.h"

namespace tandem {
namespace {

using namespace std::string_literals;

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

TEST(Documents, AreThoseOfTheReference) {
  for (const std::string text :
       {"a", "\n", "a\n", "a\n\nb", "\n\na\nb\n\n\n\r\nc\r\n\r\nd\n", "\r\n\r\n", "x\r", "a\n \nb\n", "\r"}) {
    for (const DocumentRule rule : {DocumentRule::file, DocumentRule::paragraph, DocumentRule::line}) {
      std::vector<std::string> found;
      for_each_document(std::string_view(text), rule, [&](std::string_view document) { found.emplace_back(document); });
      EXPECT_EQ(found, reference::split_documents(text, rule)) << name(rule) << " of '" << text << "'";
    }
  }
}

TEST(PrepareData, WritesTokensDocumentsAndSummary) {
  const TestFolder folder;

  const DataSummary summary =
      prepare_data({folder.write("a", "ab\n\nc"), folder.write("b", "é")}, "bytes", folder / "p", DocumentRule::line);

  EXPECT_EQ(TestFolder::read(folder / "p.bin"), "ab\0c\0\xC3\xA9\0"s);
  EXPECT_EQ(summary.tokenizer, "bytes");
  EXPECT_EQ(summary.document_rule, "line");
  EXPECT_EQ(summary.vocabulary, 256);
  EXPECT_EQ(summary.dtype, DType::u8);
  EXPECT_EQ(summary.documents, 3);
  EXPECT_EQ(summary.sequences, 3);
  EXPECT_EQ(summary.tokens, 8);
  EXPECT_EQ(summary.shortest_document_tokens, 2);
  EXPECT_EQ(summary.longest_document_tokens, 3);
  EXPECT_EQ(summary.bin_bytes, 8);
  EXPECT_EQ(summary.idx_bytes, 34 + 3 * 12 + 4 * 8);
  EXPECT_EQ(inspect_data(folder / "p").bin_hash, summary.bin_hash);
}

TEST(PrepareData, ReplacesOlderData) {
  const TestFolder folder;
  prepare_data({folder.write("a", "old text")}, "bytes", folder / "p");

  prepare_data({folder.write("b", "new")}, "bytes", folder / "p");

  EXPECT_EQ(inspect_data(folder / "p").tokens, 4);
  EXPECT_EQ(folder.num_files(), 5U) << "two texts and three files of data";
}

std::string refusal(const TestFolder& folder, const std::vector<std::filesystem::path>& inputs,
                    DocumentRule rule = DocumentRule::file) {
  const std::size_t before = folder.num_files();
  const std::string message = message_of<InputError>([&] { prepare_data(inputs, "bytes", folder / "p", rule); });
  EXPECT_EQ(folder.num_files(), before) << "something is left behind";
  return message;
}

TEST(PrepareData, NamesAMissingInput) {
  const TestFolder folder;
  EXPECT_EQ(refusal(folder, {folder.write("a", "ok"), "/nonexistent.txt"}),
            "cannot read /nonexistent.txt: No such file or directory");
}

TEST(PrepareData, RefusesADirectory) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(folder, {folder.path()}), "it is a directory");
}

TEST(PrepareData, RefusesAnEmptyFile) {
  const TestFolder folder;
  EXPECT_EQ(refusal(folder, {folder.write("a", "")}), (folder / "a").string() + " is empty");
}

TEST(PrepareData, GivesTheOffsetOfTheFirstBadByte) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(folder, {folder.write("a", std::string(70'000, 'a') + "\xE9t")}),
              "a is not UTF-8: byte 0xe9 at offset 70000");
}

TEST(PrepareData, RefusesABinaryFile) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(folder, {folder.write("a",
                                            "\x7F"
                                            "ELF\0\0"s)}),
              "is not text: byte 0x00 at offset 4");
}

TEST(PrepareData, RefusesAFileWithoutDocuments) {
  const TestFolder folder;
  EXPECT_SAYS(refusal(folder, {folder.write("a", "\n\r\n\n")}, DocumentRule::paragraph), "a has no document");
}

TEST(PrepareData, RefusesNoInputAndAnUnknownTokenizer) {
  const TestFolder folder;
  EXPECT_EQ(refusal(folder, {}), "no text file is named");
  EXPECT_EQ(
      message_of<InputError>([&] { prepare_data({folder.write("a", "x")}, "words", folder / "p"); }),
      "tokenizer 'words' does not exist; there is: bytes, bpe:N (N pieces, trained on the input), FILE.model (SentencePiece)");
}

TEST(PrepareData, NamesAMissingOutputFolder) {
  const TestFolder folder;
  EXPECT_SAYS(message_of<IoError>([&] { prepare_data({folder.write("a", "x")}, "bytes", folder / "none/p"); }),
              "none/p.bin (0 bytes so far): No such file or directory");
}

/// The smaller text fits the buffers and fails when they are made durable, the larger one while it is written.
TEST(PrepareData, KeepsTheOldDataWhenTheDiskIsFull) {
  for (const std::size_t size : {200'000U, 3'000'000U}) {
    const TestFolder folder;
    prepare_data({folder.write("a", "old")}, "bytes", folder / "p");
    const auto large = folder.write("b", std::string(size, 'b'));
    std::string message;

    {
      const FileSizeLimit full(100'000);
      message = message_of<IoError>([&] { prepare_data({large}, "bytes", folder / "p"); });
    }

    EXPECT_SAYS(message, "p.bin");
    EXPECT_SAYS(message, "File too large");
    EXPECT_EQ(inspect_data(folder / "p").tokens, 4);
    EXPECT_EQ(folder.num_files(), 5U);
  }
}

/// Above all a token file of llm.c, x.bin, that is made a pair named x.
TEST(PrepareData, NeverWritesOverItsInputs) {
  const TestFolder folder;
  for (const char* const name : {"p.bin", "p.idx", "p.json", "p.model"}) {
    const auto input = folder.write(name, "text");
    std::filesystem::create_symlink(input, folder / "link");

    EXPECT_SAYS(refusal(folder, {folder / "link"}), fmt::format("{} is an input, and would be overwritten", name));
    EXPECT_EQ(TestFolder::read(input), "text");
    EXPECT_EQ(folder.num_files(), 2U);
    std::filesystem::remove(folder / "link");
    std::filesystem::remove(input);
  }
}

TEST(PrepareData, NeedsANameForItsFiles) {
  const TestFolder folder;
  const auto text = folder.write("a", "text");
  for (const std::filesystem::path& prefix : {std::filesystem::path(), folder / "", folder / "."}) {
    EXPECT_SAYS(message_of<InputError>([&] { prepare_data({text}, "bytes", prefix); }), "is no prefix for the names of files");
  }
  EXPECT_EQ(folder.num_files(), 1U);
}

TEST(PrepareData, KeepsTheOldDataWhenItIsStopped) {
  const TestFolder folder;
  prepare_data({folder.write("a", "old")}, "bytes", folder / "p");
  const auto text = folder.write("b", std::string(1000, 'b'));
  for (const int threads : {1, 3}) {
    PrepareOptions options;
    options.threads = threads;
    options.chunk_bytes = 10;
    options.progress = [](const PrepareProgress& progress) {
      if (progress.text_bytes > 300) throw std::runtime_error("stop");
    };

    EXPECT_THROW(prepare_data({text}, "bytes", folder / "p", DocumentRule::file, options), std::runtime_error);

    EXPECT_EQ(inspect_data(folder / "p").tokens, 4);
    EXPECT_EQ(folder.num_files(), 5U);
  }
}

TEST(InspectData, TakesTheNameOfAFile) {
  const TestFolder folder;
  prepare_data({folder.write("a", "hello")}, "bytes", folder / "p");

  EXPECT_EQ(inspect_data(folder / "p.idx").tokens, 6);
  EXPECT_EQ(inspect_data(folder / "p.bin").tokens, 6);
}

TEST(InspectData, SaysWhereANegativeTokenIs) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "p", DType::i32);
  writer.add_sequence(std::vector<std::int32_t>{7, 2, 3, 4});
  writer.end_document();
  writer.commit();
  folder.write("p.bin", "\1\0\0\0\1\0\0\0\xFE\xFF\xFF\xFF\1\0\0\0"s);

  EXPECT_SAYS(message_of<InputError>([&] { (void)inspect_data(folder / "p"); }), "p.bin has token -2 at 2");
}

TEST(InspectData, FindsAnAlteredToken) {
  const TestFolder folder;
  prepare_data({folder.write("a", "hello")}, "bytes", folder / "p");
  folder.write("p.bin", "hallo\0"s);

  EXPECT_SAYS(message_of<InputError>([&] { (void)inspect_data(folder / "p"); }), "p.bin was altered");
}

TEST(InspectData, FindsADescriptionOfOtherData) {
  const TestFolder folder;
  prepare_data({folder.write("a", "hello")}, "bytes", folder / "p");
  prepare_data({folder.write("b", "hello you")}, "bytes", folder / "q");
  std::filesystem::copy_file(folder / "q.json", folder / "p.json", std::filesystem::copy_options::overwrite_existing);

  EXPECT_SAYS(message_of<InputError>([&] { (void)inspect_data(folder / "p"); }), "1 documents and 10 tokens, the index 1 and 6");
  EXPECT_SAYS(message_of<InputError>([&] { PreparedTokens tokens(folder / "p"); }), "prepare the data again");
}

TEST(InspectData, DescribesDataOfAnotherProgram) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "p", DType::u16);
  writer.add_sequence(std::vector<std::int32_t>{7, 50256, 3});
  writer.end_document();
  writer.commit();

  const DataSummary summary = inspect_data(folder / "p");

  EXPECT_EQ(summary.tokenizer, "unknown");
  EXPECT_EQ(summary.vocabulary, 50257);
  EXPECT_EQ(summary.dtype, DType::u16);
}

TEST(InspectData, FindsATokenBeyondTheVocabulary) {
  const TestFolder folder;
  DataSummary summary = prepare_data({folder.write("a", "az")}, "bytes", folder / "p");
  folder.write("p.json", to_json({"bytes", 100, 0, "file", 1, 3, summary.bin_hash}));

  EXPECT_SAYS(message_of<InputError>([&] { (void)inspect_data(folder / "p"); }), "p.bin has token 122, the vocabulary is 100");
}

TEST(Manifest, DamageNamesFileAndField) {
  const TestFolder folder;
  const auto refusal_of = [&](std::string_view json) {
    folder.write("p.json", json);
    return message_of<InputError>([&] { (void)read_manifest(folder / "p"); });
  };
  const std::string good = to_json({"bytes", 256, 0, "file", 1, 3, {1, 2}});
  const auto with = [&](std::string_view from, std::string_view to) {
    std::string changed = good;
    return changed.replace(changed.find(from), from.size(), to);
  };

  EXPECT_EQ(refusal_of(good), "");
  EXPECT_SAYS(refusal_of("{"), "p.json is not a JSON object");
  EXPECT_SAYS(refusal_of("[]"), "p.json is not a JSON object");
  EXPECT_SAYS(refusal_of("{}"), "p.json has no field 'format'");
  EXPECT_SAYS(refusal_of(with("tandem-data", "other")), "format 'other', version 1; this program reads");
  EXPECT_SAYS(refusal_of(with("256", "\"many\"")), "p.json: field 'vocabulary' has \"many\"");
  EXPECT_SAYS(refusal_of(with("256", "0")), "field 'vocabulary' is 0");
  EXPECT_FALSE(read_manifest(folder / "absent").has_value());
}

}  // namespace
}  // namespace tandem
