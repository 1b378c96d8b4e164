// SPDX-License-Identifier: Apache-2.0
#include "core/io/dataset_index.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <vector>

#include <gtest/gtest.h>

#include "core/io/indexed_dataset.h"
#include "core/io/test_folder.h"

namespace tandem {
namespace {

using namespace std::string_literals;

template <class T>
std::string bytes_of(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}

/// A file of `size` bytes that takes no place on the disk, but for the pieces that are put into it.
class SparseFile {
 public:
  SparseFile(const std::filesystem::path& path, std::uintmax_t size) : path_(path) {
    std::ofstream(path_, std::ios::binary).flush();
    std::filesystem::resize_file(path_, size);
  }
  void put(std::int64_t at, const std::string& bytes) const {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(at).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  /// Pages that the system has read.
  [[nodiscard]] std::size_t resident_pages() const {
    const MappedFile file(path_);
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    std::vector<unsigned char> pages((file.bytes().size() + page - 1) / page);
    EXPECT_EQ(::mincore(const_cast<std::byte*>(file.bytes().data()), file.bytes().size(), pages.data()), 0);
    return static_cast<std::size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1U) != 0; }));
  }

 private:
  std::filesystem::path path_;
};

/// 10.8 GB of index and 6 GiB of tokens: 540 million sequences that are empty but for the first and the last two. Their lengths
/// alone take more than 2^31 bytes.
class LargeDataset : public testing::Test {
 protected:
  static constexpr std::int64_t kSequences = 540'000'000;
  static constexpr std::int64_t kBinBytes = std::int64_t{6} << 30;
  static constexpr std::int64_t kPointers = 34 + kSequences * 4;
  static constexpr std::int64_t kDocuments = kPointers + kSequences * 8;

  LargeDataset()
      : idx_(folder_ / "x.idx", static_cast<std::uintmax_t>(kDocuments + (kSequences + 1) * 8)),
        bin_(folder_ / "x.bin", static_cast<std::uintmax_t>(kBinBytes)) {
    idx_.put(0, "MMIDIDX\0\0"s + bytes_of(std::uint64_t{1}) + "\x08" + bytes_of(std::uint64_t{kSequences}) +
                    bytes_of(std::uint64_t{kSequences} + 1));
    idx_.put(kPointers - 8, bytes_of(std::array<std::int32_t, 2>{2, 3}));
    idx_.put(kDocuments - 16, bytes_of(std::array<std::int64_t, 2>{kBinBytes - 10, kBinBytes - 6}));
    idx_.put(kDocuments + (kSequences - 1) * 8, bytes_of(std::array<std::int64_t, 2>{kSequences - 1, kSequences}));
    bin_.put(0, bytes_of(std::array<std::uint16_t, 2>{1, 2}));
    bin_.put((std::int64_t{1} << 32) - 2, bytes_of(std::array<std::uint16_t, 2>{3, 4}));
    bin_.put(kBinBytes - 10, bytes_of(std::array<std::uint16_t, 5>{5, 6, 7, 8, 9}));
  }

  TestFolder folder_;
  SparseFile idx_, bin_;
};

TEST_F(LargeDataset, OpensByLookingAtAFewPages) {
  const std::size_t before = idx_.resident_pages();

  const IndexedDataset dataset(folder_ / "x");

  EXPECT_LT(idx_.resident_pages(), before + 200) << "of " << (kDocuments + kSequences * 8) / 4096;
  EXPECT_EQ(dataset.num_documents(), kSequences);
}

TEST_F(LargeDataset, ReadsTokensBeyond4GiB) {
  const IndexedDataset dataset(folder_ / "x");
  std::vector<std::int32_t> tokens(4);

  EXPECT_EQ(dataset.num_tokens(), std::int64_t{3} << 30);
  EXPECT_EQ(dataset.document_begin(kSequences - 1), (std::int64_t{3} << 30) - 3);
  EXPECT_EQ(dataset.sequence(kSequences - 2), (Interval{(std::int64_t{3} << 30) - 5, (std::int64_t{3} << 30) - 3}));
  dataset.read(0, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{1, 2, 0, 0}));
  dataset.read((std::int64_t{1} << 31) - 2, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{0, 3, 4, 0}));
  dataset.read(dataset.document_begin(kSequences - 1) - 1, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int32_t>{6, 7, 8, 9}));
}

}  // namespace
}  // namespace tandem
