// SPDX-License-Identifier: Apache-2.0
#include "core/io/indexed_dataset.h"

#include <array>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

using namespace std::string_literals;

constexpr std::size_t kSizesAt = 34;
constexpr std::size_t kPointersAt = kSizesAt + 3 * 4;
constexpr std::size_t kDocumentsAt = kPointersAt + 3 * 8;

/// Two documents, {10 11 12} + {20} and {30 31}, as 16-bit tokens.
void write_example(const std::filesystem::path& prefix) {
  IndexedDatasetWriter writer(prefix, DType::u16);
  writer.add_sequence(std::vector<std::int32_t>{10, 11, 12});
  writer.add_sequence(std::vector<std::int32_t>{20});
  writer.end_document();
  writer.add_sequence(std::vector<std::int32_t>{30, 31});
  writer.end_document();
  writer.commit();
}

template <class T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// The message of the InputError that the example gives after `damage` has changed its .idx; checks that it names the file.
template <class Damage>
std::string refusal_after(const Damage& damage) {
  const TestFolder folder;
  write_example(folder / "x");
  std::string idx = TestFolder::read(folder / "x.idx");
  damage(idx);
  folder.write("x.idx", idx);
  const std::string message = message_of<InputError>([&] { IndexedDataset(folder / "x").check(); });
  EXPECT_EQ(message.find((folder / "x").string()), 0U) << message;
  return message;
}

auto replace_at(std::size_t at, std::string bytes) {
  return [at, bytes = std::move(bytes)](std::string& idx) { idx.replace(at, bytes.size(), bytes); };
}

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

TEST(IndexedDataset, HasTheDocumentedBytes) {
  const TestFolder folder;

  write_example(folder / "x");

  const std::string expected = "MMIDIDX\0\0"s + bytes_of(std::uint64_t{1}) + "\x08" + bytes_of(std::uint64_t{3}) +
                               bytes_of(std::uint64_t{3}) + bytes_of(std::array<std::int32_t, 3>{3, 1, 2}) +
                               bytes_of(std::array<std::int64_t, 3>{0, 6, 8}) + bytes_of(std::array<std::int64_t, 3>{0, 2, 3});
  EXPECT_EQ(TestFolder::read(folder / "x.idx"), expected);
  EXPECT_EQ(TestFolder::read(folder / "x.bin"), bytes_of(std::array<std::uint16_t, 6>{10, 11, 12, 20, 30, 31}));
  EXPECT_EQ(folder.num_files(), 2U);
}

TEST(IndexedDataset, ReadsSequencesDocumentsAndTokens) {
  const TestFolder folder;
  write_example(folder / "x");

  const IndexedDataset dataset(folder / "x");
  std::vector<std::int32_t> middle(4);
  dataset.read(1, middle);

  EXPECT_EQ(dataset.dtype(), DType::u16);
  EXPECT_EQ(dataset.num_tokens(), 6);
  EXPECT_EQ(dataset.num_sequences(), 3);
  EXPECT_EQ(dataset.num_documents(), 2);
  EXPECT_EQ(dataset.sequence(1), (Interval{3, 4}));
  EXPECT_EQ(dataset.document_sequences(0), (Interval{0, 2}));
  EXPECT_EQ(dataset.document_begin(1), 4);
  EXPECT_EQ(dataset.document_begin(2), 6);
  EXPECT_EQ(middle, (std::vector<std::int32_t>{11, 12, 20, 30}));
  EXPECT_THROW(dataset.read(3, middle), ContractError);
}

TEST(IndexedDataset, KeepsEveryTokenDtype) {
  for (const DType dtype : {DType::u8, DType::i8, DType::u16, DType::i16, DType::i32, DType::i64}) {
    const TestFolder folder;
    IndexedDatasetWriter writer(folder / "x", dtype);
    writer.add_sequence(std::vector<std::int32_t>{0, 1, 127});
    writer.end_document();
    writer.commit();

    std::vector<std::int32_t> tokens(3);
    IndexedDataset(folder / "x").read(0, tokens);

    EXPECT_EQ(tokens, (std::vector<std::int32_t>{0, 1, 127})) << name(dtype);
    EXPECT_EQ(std::filesystem::file_size(folder / "x.bin"), 3 * size_bytes(dtype));
  }
}

TEST(IndexedDataset, AppendedPiecesAreOneSequence) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "x", DType::u8);
  writer.append(std::vector<std::uint8_t>{1, 2});
  writer.append(std::vector<std::uint8_t>{3});
  writer.end_sequence();
  writer.end_document();
  writer.commit();

  EXPECT_EQ(IndexedDataset(folder / "x").sequence(0), (Interval{0, 3}));
}

TEST(IndexedDataset, HoldsEmptyDocumentsAndNoDocumentsAtAll) {
  const TestFolder folder;
  IndexedDatasetWriter none(folder / "none", DType::u8);
  none.commit();
  IndexedDatasetWriter writer(folder / "x", DType::u8);
  writer.end_document();
  writer.append(std::vector<std::uint8_t>{1});
  writer.end_sequence();
  writer.end_document();
  writer.end_document();
  writer.commit();

  const IndexedDataset dataset(folder / "x");

  EXPECT_EQ(IndexedDataset(folder / "none").num_tokens(), 0);
  EXPECT_EQ(dataset.num_documents(), 3);
  EXPECT_EQ(dataset.document_begin(0), 0);
  EXPECT_EQ(dataset.document_begin(1), 0);
  EXPECT_EQ(dataset.document_begin(2), 1);
}

TEST(IndexedDataset, RefusesATokenBeyond32Bits) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "x", DType::i64);
  writer.add_sequence(std::vector<std::int32_t>{5, 6});
  writer.end_document();
  writer.commit();
  folder.write("x.bin", bytes_of(std::array<std::int64_t, 2>{5, std::int64_t{1} << 40}));
  std::vector<std::int32_t> tokens(2);

  EXPECT_SAYS(message_of<InputError>([&] { IndexedDataset(folder / "x").read(0, tokens); }), "token 1099511627776 at 1");
}

TEST(IndexedDatasetWriter, RefusesTokensThatDoNotFit) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "x", DType::u8);

  EXPECT_THROW(writer.add_sequence(std::vector<std::int32_t>{256}), ContractError);
  EXPECT_THROW(writer.add_sequence(std::vector<std::int32_t>{-1}), ContractError);
}

TEST(IndexedDatasetWriter, RefusesToCommitInsideADocument) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "x", DType::u16);
  writer.add_sequence(std::vector<std::int32_t>{1});

  EXPECT_THROW(writer.commit(), ContractError);
}

TEST(IndexedDatasetWriter, LeavesNothingWithoutCommit) {
  const TestFolder folder;
  { IndexedDatasetWriter writer(folder / "x", DType::u16); }

  EXPECT_EQ(folder.num_files(), 0U);
}

TEST(IndexedDatasetWriter, KeepsTheOldPairWhenTheDiskIsFull) {
  const TestFolder folder;
  write_example(folder / "x");
  std::string message;

  {
    const FileSizeLimit full(10'000);
    message = message_of<IoError>([&] {
      IndexedDatasetWriter writer(folder / "x", DType::u8);
      writer.append(std::vector<std::uint8_t>(100'000, 1));
      writer.end_sequence();
      writer.end_document();
      writer.commit();
    });
  }

  EXPECT_SAYS(message, "x.bin (100000 bytes so far): File too large");
  EXPECT_EQ(IndexedDataset(folder / "x").num_tokens(), 6);
  EXPECT_EQ(folder.num_files(), 2U);
}

TEST(IndexedDatasetDamage, MissingFiles) {
  const TestFolder folder;
  EXPECT_SAYS(message_of<InputError>([&] { IndexedDataset dataset(folder / "x"); }), "x.idx: No such file");

  write_example(folder / "x");
  std::filesystem::remove(folder / "x.bin");

  EXPECT_SAYS(message_of<InputError>([&] { IndexedDataset dataset(folder / "x"); }), "x.bin: No such file");
}

TEST(IndexedDatasetDamage, TruncatedHeader) {
  EXPECT_SAYS(refusal_after([](std::string& idx) { idx.resize(33); }), "33 bytes, the header alone takes 34");
}

TEST(IndexedDatasetDamage, WrongMagic) { EXPECT_SAYS(refusal_after(replace_at(0, "X")), "does not start with MMIDIDX"); }

TEST(IndexedDatasetDamage, WrongVersion) { EXPECT_SAYS(refusal_after(replace_at(9, "\x02")), "version 2, this program reads 1"); }

TEST(IndexedDatasetDamage, UnknownDtypeCode) {
  EXPECT_SAYS(refusal_after(replace_at(17, "\0"s)), "dtype code 0");
  EXPECT_SAYS(refusal_after(replace_at(17, "\x09")), "dtype code 9");
}

TEST(IndexedDatasetDamage, FloatingDtypeCode) {
  EXPECT_SAYS(refusal_after(replace_at(17, "\x06")), "dtype code 6 (fp64) does not hold tokens");
}

TEST(IndexedDatasetDamage, MoreSequencesThanTheFileHolds) {
  EXPECT_SAYS(refusal_after(replace_at(18, bytes_of(std::uint64_t{4}))), "4 sequences and 3 document entries do not fit");
}

TEST(IndexedDatasetDamage, CountsThatWouldWrapAround) {
  const std::uint64_t huge = std::numeric_limits<std::uint64_t>::max() / 12 + 2;

  EXPECT_SAYS(refusal_after(replace_at(18, bytes_of(huge))), "do not fit its");
  EXPECT_SAYS(refusal_after(replace_at(26, bytes_of(std::uint64_t{1} << 61))), "do not fit its");
}

TEST(IndexedDatasetDamage, BytesAfterTheIndex) {
  EXPECT_SAYS(refusal_after([](std::string& idx) { idx += "tail!"; }), "5 bytes follow the document index");
}

TEST(IndexedDatasetDamage, MultimodalIndex) {
  EXPECT_SAYS(refusal_after([](std::string& idx) { idx += "\0\0\0"s; }), "multimodal");
}

TEST(IndexedDatasetDamage, NegativeSize) {
  EXPECT_SAYS(refusal_after(replace_at(kSizesAt + 4, bytes_of(std::int32_t{-1}))), "sequence 1 has -1 tokens");
}

TEST(IndexedDatasetDamage, PointerThatDoesNotFollow) {
  EXPECT_SAYS(refusal_after(replace_at(kPointersAt + 8, bytes_of(std::int64_t{4}))),
              "sequence 1 starts at byte 4, the ones before it end at 6");
}

TEST(IndexedDatasetDamage, PointerBeyondTheFile) {
  EXPECT_SAYS(refusal_after(replace_at(kPointersAt + 16, bytes_of(std::int64_t{1} << 50))),
              "the last sequence, 2, starts at byte 1125899906842624");
}

TEST(IndexedDatasetDamage, SizeBeyondTheBin) {
  EXPECT_SAYS(refusal_after(replace_at(kSizesAt + 8, bytes_of(std::int32_t{3}))),
              "x.bin has 12 bytes, but by its .idx the last sequence, 2, starts at byte 8 and has 6");
}

/// Found where it is used, since only the ends are looked at before. Its bytes, 2^32, must not wrap around.
TEST(IndexedDatasetDamage, SequenceThatReachesFarBeyondTheBin) {
  const TestFolder folder;
  IndexedDatasetWriter writer(folder / "x", DType::i32);
  for (const std::int32_t token : {1, 2}) writer.add_sequence(std::vector<std::int32_t>{token});
  writer.end_document();
  writer.commit();
  std::string idx = TestFolder::read(folder / "x.idx");
  folder.write("x.idx", idx.replace(kSizesAt, 4, bytes_of(std::int32_t{1} << 30)));

  const IndexedDataset dataset(folder / "x");

  EXPECT_SAYS(message_of<InputError>([&] { (void)dataset.sequence(0); }), "sequence 0 has 1073741824 tokens from byte 0 on");
}

TEST(IndexedDatasetDamage, DocumentsThatDoNotStartAtZero) {
  EXPECT_SAYS(refusal_after(replace_at(kDocumentsAt, bytes_of(std::int64_t{1}))), "starts with 1, not with 0");
}

TEST(IndexedDatasetDamage, DocumentsThatRunBackwards) {
  EXPECT_SAYS(refusal_after(replace_at(kDocumentsAt + 8, bytes_of(std::int64_t{-2}))), "document 0 has sequences 0 to -2 of 3");
}

TEST(IndexedDatasetDamage, DocumentBeyondTheSequences) {
  EXPECT_SAYS(refusal_after(replace_at(kDocumentsAt + 8, bytes_of(std::int64_t{4}))), "document 0 has sequences 0 to 4 of 3");
}

TEST(IndexedDatasetDamage, DocumentsThatEndEarly) {
  EXPECT_SAYS(refusal_after(replace_at(kDocumentsAt + 16, bytes_of(std::int64_t{2}))), "its documents end at sequence 2 of 3");
}

TEST(IndexedDatasetDamage, NoDocumentIndex) {
  const auto damage = [](std::string& idx) {
    idx.resize(kDocumentsAt);
    idx.replace(26, 8, bytes_of(std::uint64_t{0}));
  };

  EXPECT_SAYS(refusal_after(damage), "the document index is empty");
}

TEST(IndexedDatasetDamage, BinThatIsShorterOrLonger) {
  const TestFolder folder;
  write_example(folder / "x");
  const std::string bin = TestFolder::read(folder / "x.bin");

  folder.write("x.bin", bin.substr(0, 11));
  EXPECT_SAYS(message_of<InputError>([&] { IndexedDataset dataset(folder / "x"); }), "x.bin has 11 bytes, but by its .idx");

  folder.write("x.bin", bin + "z");
  EXPECT_SAYS(message_of<InputError>([&] { IndexedDataset dataset(folder / "x"); }), "x.bin has 13 bytes, but by its .idx");
}

TEST(IndexedDatasetDamage, EveryTruncationOfTheIndexIsRefused) {
  const TestFolder folder;
  write_example(folder / "x");
  const std::size_t size = TestFolder::read(folder / "x.idx").size();

  for (std::size_t kept = 0; kept < size; ++kept) {
    EXPECT_FALSE(refusal_after([&](std::string& idx) { idx.resize(kept); }).empty()) << kept << " of " << size << " bytes";
  }
}

/// All that can be asked of a data set, whatever its index says; each answer must lie inside the .bin.
void read_everything(const IndexedDataset& dataset) {
  const Interval all = {0, dataset.num_tokens()};
  const auto inside = [&](std::int64_t position) { return position >= all.begin && position <= all.end; };
  const auto ask = [](const auto& question) {
    try {
      question();
    } catch (const InputError&) {
    }
  };
  for (std::int64_t i = 0; i < dataset.num_sequences(); ++i) {
    ask([&] {
      const Interval tokens = dataset.sequence(i);
      ASSERT_TRUE(inside(tokens.begin) && inside(tokens.end) && tokens.begin <= tokens.end);
      std::vector<std::int32_t> read(static_cast<std::size_t>(tokens.size()));
      dataset.read(tokens.begin, read);
    });
  }
  for (std::int64_t d = 0; d <= dataset.num_documents(); ++d) ask([&] { ASSERT_TRUE(inside(dataset.document_begin(d))); });
}

/// Opening looks at the ends alone: what is wrong in between is found where it is used, and by check().
TEST(IndexedDatasetDamage, IsFoundAtTheLatestWhereItIsUsed) {
  const TestFolder folder;
  write_example(folder / "x");
  const std::string good = TestFolder::read(folder / "x.idx");
  std::size_t opened = 0;

  for (std::size_t at = 0; at < good.size(); ++at) {
    for (const char flipped : {'\x01', '\x02', '\x80', '\xff'}) {
      std::string idx = good;
      idx[at] = static_cast<char>(idx[at] ^ flipped);
      folder.write("x.idx", idx);
      try {
        const IndexedDataset dataset(folder / "x");
        ++opened;
        read_everything(dataset);
        // Another end of a document is another data set, and a whole one.
        if (at < kDocumentsAt) {
          EXPECT_THROW(dataset.check(), InputError) << "byte " << at;
        }
      } catch (const InputError&) {
      }
    }
  }

  EXPECT_GT(opened, 20U) << "nothing in the middle was tried";
}

TEST(IndexedDatasetDamage, InTheMiddleNamesTheEntry) {
  const TestFolder folder;
  write_example(folder / "x");
  std::string idx = TestFolder::read(folder / "x.idx");
  replace_at(kPointersAt + 8, bytes_of(std::int64_t{1} << 50))(idx);
  replace_at(kDocumentsAt + 8, bytes_of(std::int64_t{7}))(idx);
  folder.write("x.idx", idx);

  const IndexedDataset dataset(folder / "x");

  EXPECT_SAYS(message_of<InputError>([&] { (void)dataset.sequence(1); }),
              "x.idx is not a valid index of a dataset: sequence 1 has 1 tokens from byte 1125899906842624 on, the .bin has 12");
  EXPECT_SAYS(message_of<InputError>([&] { (void)dataset.document_begin(1); }), "document 1 has sequences 7 to 3 of 3");
}

}  // namespace
}  // namespace tandem
