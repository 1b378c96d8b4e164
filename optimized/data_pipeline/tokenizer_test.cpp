// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/tokenizer.h"

#include <array>
#include <cstring>
#include <numeric>
#include <optional>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/hash.h"
#include "core/io/indexed_dataset.h"
#include "core/io/test_folder.h"
#include "core/rng.h"
#include "core/text.h"
#include "optimized/data_pipeline/documents.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/data_pipeline/prepare.h"

namespace tandem {
namespace {

using namespace std::string_literals;
using Paths = std::vector<std::filesystem::path>;

#define EXPECT_SAYS(message, part) EXPECT_NE((message).find(part), std::string::npos) << "says: " << (message)

/// Words of a small language, seldom a character beyond it.
std::string made_up_text(std::uint64_t seed, int words) {
  static const std::vector<std::string> kWords = {"the ", "of ",   "training ",  "tokens ", "über ", "  ",      "\n",   "\n\n",
                                                  "x",    "東京 ", "pipeline, ", "and\t",   "\r\n",  "model. ", "data "};
  CounterRng rng(seed, "test text");
  std::string text = "start ";
  for (int i = 0; i < words; ++i) text += kWords[rng.next_below(kWords.size())];
  return text;
}

/// Where the program is built with SentencePiece, a model of `vocabulary` pieces; else nothing.
std::optional<std::string> trained(std::int64_t vocabulary, const Paths& files, std::int64_t training_bytes = 1 << 20) {
  try {
    return train_bpe(vocabulary, files, training_bytes);
  } catch (const InputError& error) {
    if (std::string_view(error.what()).find("built without SentencePiece") == std::string_view::npos) throw;
    EXPECT_SAYS(std::string(error.what()), "libsentencepiece-dev");
    return std::nullopt;
  }
}

class Bpe : public testing::Test {
 protected:
  void SetUp() override {
    files_ = {folder_.write("a", made_up_text(1, 3000)), folder_.write("b", made_up_text(2, 500))};
    const auto model = trained(300, files_);
    if (!model) GTEST_SKIP() << "needs SentencePiece";
    tokenizer_ = sentencepiece_tokenizer("bpe:300", *model, "test");
  }

  [[nodiscard]] std::vector<std::int32_t> encode(std::string_view text) const {
    std::vector<std::int32_t> tokens;
    tokenizer_->encode(text, tokens);
    return tokens;
  }

  TestFolder folder_;
  Paths files_;
  std::shared_ptr<const TextTokenizer> tokenizer_;
};

TEST_F(Bpe, EveryTextComesBack) {
  std::string characters;  // every seventh that Unicode has
  for (std::uint32_t c = 1; c < 0x110000; c += c < 0x3000 ? 1 : 7) {
    if (c >= 0xD800 && c < 0xE000) continue;
    if (c < 0x80) {
      characters += static_cast<char>(c);
      continue;
    }
    const int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
    characters += static_cast<char>((0xF00U << (3 - more) >> 4U & 0xFFU) | (c >> (6 * more)));
    for (int i = more - 1; i >= 0; --i) characters += static_cast<char>(0x80U | (c >> (6 * i) & 0x3FU));
  }
  require_text(characters, "the test's characters");
  for (const std::string& text :
       {""s, " "s, "  two  spaces  "s, "\n\n \t\r\n"s, "</s><unk><0x41>\xE2\x96\x81 \xE2\x96\x81\xE2\x96\x81"s,
        std::string(5000, 'x'), std::string(5000, ' '), characters, made_up_text(3, 2000)}) {
    const std::vector<std::int32_t> tokens = encode(text);
    EXPECT_EQ(tokenizer_->decode(tokens), text);
    EXPECT_EQ(std::count(tokens.begin(), tokens.end(), tokenizer_->end_of_document()), 0);
    for (const std::int32_t token : tokens) ASSERT_LT(token, 300);
  }
}

TEST_F(Bpe, IsShorterThanBytesAndEndsDocumentsWithToken0) {
  const std::string text = made_up_text(3, 2000);

  EXPECT_LT(encode(text).size(), text.size() * 2 / 3);
  EXPECT_EQ(tokenizer_->vocabulary(), 300);
  EXPECT_EQ(tokenizer_->end_of_document(), 0);
  EXPECT_EQ(tokenizer_->bytes_of(0), "");
  EXPECT_THROW((void)tokenizer_->bytes_of(300), InputError);
  EXPECT_THROW((void)tokenizer_->bytes_of(-1), InputError);
}

TEST_F(Bpe, TheSameTextGivesTheSameModel) {
  EXPECT_EQ(*trained(300, files_), tokenizer_->model());
  EXPECT_NE(*trained(300, files_, 2000), tokenizer_->model()) << "the limit of what it is trained on has no effect";
}

TEST_F(Bpe, RefusesVocabulariesThatDoNotFitTheText) {
  const auto refusal = [&](std::string_view which) {
    return message_of<InputError>([&] { (void)make_tokenizer(which, files_); });
  };

  EXPECT_SAYS(refusal("bpe:"), "a number must follow bpe:");
  EXPECT_SAYS(refusal("bpe:3x"), "a number must follow bpe:");
  EXPECT_SAYS(refusal("bpe:259"), "the vocabulary must be between 260");
  EXPECT_SAYS(refusal("bpe:2000000"), "and 1000000");
  EXPECT_SAYS(refusal("bpe:261"), "bpe:261: the bytes and the characters of this text alone need a vocabulary of 2");
  EXPECT_SAYS(refusal("bpe:9000"), "bpe:9000: this text gives no more than ");
  EXPECT_SAYS(message_of<InputError>([&] { (void)make_tokenizer("bpe:300", {folder_.write("bad", "a\xFFz")}); }),
              "bad is not UTF-8: byte 0xff at offset 1");
}

TEST_F(Bpe, DataKeepsItsModelAndIsTheSameForAnyNumberOfThreads) {
  const TestFolder out;
  prepare_data(files_, "bpe:300", out / "one", DocumentRule::line);
  for (const int threads : {2, 3, 7}) {
    const DataSummary summary =
        prepare_data(files_, "bpe:300", out / "more", DocumentRule::line, {.threads = threads, .chunk_bytes = 500});
    EXPECT_EQ(summary.dtype, DType::u16);
    EXPECT_TRUE(summary.has_model);
    for (const std::string_view suffix : {".bin", ".idx", ".json", ".model"}) {
      EXPECT_EQ(TestFolder::read(out / fmt::format("more{}", suffix)), TestFolder::read(out / fmt::format("one{}", suffix)))
          << threads << " threads, " << suffix;
    }
  }

  const auto same = tokenizer_of(out / "one");
  const IndexedDataset dataset(out / "one");
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(dataset.num_tokens()));
  dataset.read(0, tokens);
  std::string text;
  for_each_document(files_, DocumentRule::line, [&](std::string_view line) { text += line; });
  EXPECT_EQ(same->name(), "bpe:300");
  EXPECT_EQ(same->decode(tokens), text);
  EXPECT_EQ(dataset.num_documents(), std::count(tokens.begin(), tokens.end(), 0));
}

TEST_F(Bpe, AModelOfAFileGivesTheSameTokens) {
  const std::string file = folder_.write("own.model", tokenizer_->model()).string();
  prepare_data(files_, "bpe:300", folder_ / "trained");

  EXPECT_EQ(prepare_data(files_, file, folder_ / "read").tokenizer, "own.model");

  EXPECT_EQ(TestFolder::read(folder_ / "read.bin"), TestFolder::read(folder_ / "trained.bin"));
  EXPECT_EQ(TestFolder::read(folder_ / "read.model"), tokenizer_->model());
  prepare_data(files_, "bytes", folder_ / "read");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "read.model")) << "the model of older data is left";
  EXPECT_EQ(tokenizer_of(folder_ / "read")->name(), "bytes");
}

TEST_F(Bpe, OldDataStaysWhereThereIsNoRoomForTheModelOfNew) {
  const TestFolder out;
  const auto text = folder_.write("short", "a short text\n");
  const auto model = folder_.write("bpe.model", *trained(300, files_));
  prepare_data({text}, "bytes", out / "p", DocumentRule::line);
  const std::string before = TestFolder::read(out / "p.json");

  {
    const FileSizeLimit limit(std::filesystem::file_size(model) - 1);
    EXPECT_THROW(prepare_data({text}, model.string(), out / "p", DocumentRule::line), IoError);
  }

  EXPECT_EQ(TestFolder::read(out / "p.json"), before);
  EXPECT_EQ(out.num_files(), 3U);
}

TEST_F(Bpe, DamageOfTheModelIsFound) {
  prepare_data(files_, "bpe:300", folder_ / "p");
  const std::string model(tokenizer_->model());
  folder_.write("cut.model", model.substr(0, model.size() / 2));
  folder_.write("empty.model", "");
  folder_.write("p.model", model + " ");

  EXPECT_SAYS(message_of<InputError>([&] { (void)make_tokenizer((folder_ / "cut.model").string(), {}); }),
              "cut.model is not a SentencePiece model, or it is damaged");
  EXPECT_SAYS(message_of<InputError>([&] { (void)make_tokenizer((folder_ / "empty.model").string(), {}); }),
              "is not a SentencePiece model");
  EXPECT_SAYS(message_of<InputError>([&] { (void)make_tokenizer((folder_ / "none.model").string(), {}); }), "No such file");
  EXPECT_SAYS(message_of<InputError>([&] { (void)tokenizer_of(folder_ / "p"); }), "p.model was altered or is of other data");
  EXPECT_SAYS(message_of<InputError>([&] { (void)inspect_data(folder_ / "p"); }), "p.model was altered or is of other data");
  std::filesystem::remove(folder_ / "p.model");
  EXPECT_SAYS(message_of<InputError>([&] { (void)tokenizer_of(folder_ / "p"); }), "p.model");
}

TEST(TokenizerOf, SaysWhereThereIsNone) {
  const TestFolder folder;
  EXPECT_SAYS(message_of<InputError>([&] { (void)tokenizer_of(folder / "p"); }), "p.json does not exist, so that the tokenizer");
  folder.write("p.json", to_json({"gpt2", 50257, 50256, "end_of_text", 1, 3, {1, 2}}));
  EXPECT_SAYS(message_of<InputError>([&] { (void)tokenizer_of(folder / "p"); }), "names the tokenizer 'gpt2', of which");
}

TEST(TokenDtype, IsTheNarrowestThatHoldsTheVocabulary) {
  EXPECT_EQ(token_dtype(256), DType::u8);
  EXPECT_EQ(token_dtype(257), DType::u16);
  EXPECT_EQ(token_dtype(65536), DType::u16);
  EXPECT_EQ(token_dtype(65537), DType::i32);
}

TEST(PieceBytes, CutsBetweenWordsOrCharacters) {
  EXPECT_EQ(piece_bytes("abc", 5), 3U);
  EXPECT_EQ(piece_bytes("ab cd ef", 6), 5U);
  EXPECT_EQ(piece_bytes("ab\ncdef", 6), 3U);
  EXPECT_EQ(piece_bytes("abcdef", 4), 4U);
  EXPECT_EQ(piece_bytes("abc\xF0\x9F\x98\x80", 6), 3U);
  EXPECT_EQ(piece_bytes("\x80\x80\x80\x80\x80\x80", 5), 5U) << "no text, but it must come to an end";
}

std::string llmc_bytes(const std::vector<std::uint16_t>& tokens) {
  std::array<std::int32_t, 256> header{20240520, 1, static_cast<std::int32_t>(tokens.size())};
  std::string bytes(reinterpret_cast<const char*>(header.data()), sizeof(header));
  return bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
}

TEST(LlmcFile, DocumentsBeginWithTheEndOfText) {
  const TestFolder folder;
  const std::vector<std::uint16_t> stored = {50256, 5, 6, 50256, 50256, 7};
  const auto file = folder.write("x.bin", llmc_bytes(stored));

  const auto tokens = open_stored_tokens(file);
  ASSERT_NE(tokens, nullptr);
  std::vector<std::int32_t> read(6);
  tokens->read(0, read);

  EXPECT_EQ(read, std::vector<std::int32_t>(stored.begin(), stored.end()));
  EXPECT_EQ(tokens->vocabulary(), 50257);
  ASSERT_EQ(tokens->num_documents(), 3);
  EXPECT_EQ(tokens->document_begin(0), 0);
  EXPECT_EQ(tokens->document_begin(1), 3);
  EXPECT_EQ(tokens->document_begin(2), 4);
  EXPECT_EQ(tokens->document_begin(3), 6);
  EXPECT_THROW(tokens->read(1, read), ContractError);
  EXPECT_EQ(inspect_data(file).longest_document_tokens, 3);
  EXPECT_EQ(LlmcTokens(folder.write("y.bin", llmc_bytes({1, 2, 50256, 3}))).num_documents(), 2) << "the first may have no mark";
  EXPECT_EQ(LlmcTokens(folder.write("z.bin", llmc_bytes({}))).num_documents(), 0);
}

TEST(LlmcFile, IsPreparedAsItIs) {
  const TestFolder folder;
  const std::vector<std::uint16_t> stored = {50256, 5, 6, 50256, 50256, 7};
  const auto file = folder.write("x.bin", llmc_bytes(stored));

  const DataSummary summary = prepare_data({file, file}, "", folder / "p");

  EXPECT_EQ(TestFolder::read(folder / "p.bin"), llmc_bytes(stored).substr(1024) + llmc_bytes(stored).substr(1024));
  EXPECT_EQ(summary.documents, 6);
  EXPECT_EQ(summary.tokenizer, "gpt2");
  EXPECT_EQ(summary.vocabulary, 50257);
  prepare_data({file}, "gpt2", folder / "q");
  EXPECT_EQ(open_stored_tokens(folder / "q")->identity(), open_stored_tokens(file)->identity());
  EXPECT_SAYS(message_of<InputError>([&] { prepare_data({file}, "bytes", folder / "r"); }), "holds tokens of gpt2 already");
  EXPECT_SAYS(message_of<InputError>([&] {
                prepare_data({file, folder.write("t", "text")}, "", folder / "r");
              }),
              "t is no token file of llm.c");
}

TEST(LlmcFile, DamageNamesFileAndNumbers) {
  const TestFolder folder;
  const std::string good = llmc_bytes({50256, 5, 6});
  const auto refusal = [&](const std::string& bytes) {
    const auto file = folder.write("x.bin", bytes);
    return message_of<InputError>([&] { LlmcTokens tokens(file); });
  };
  const auto with = [&](std::size_t at, std::int32_t value) {
    std::string bytes = good;
    std::memcpy(bytes.data() + at, &value, 4);
    return bytes;
  };

  EXPECT_EQ(refusal(good), "");
  EXPECT_SAYS(refusal(good.substr(0, 1000)), "x.bin is not a whole token file of llm.c: 1000 bytes, the header alone takes 1024");
  EXPECT_SAYS(refusal(good.substr(0, 1029)), "its header says 3 tokens, and 5 bytes of tokens follow it");
  EXPECT_SAYS(refusal(good + "zz"), "its header says 3 tokens, and 8 bytes");
  EXPECT_SAYS(refusal(with(0, 7)), "it begins with 7, not with 20240520");
  EXPECT_SAYS(refusal(with(4, 2)), "version 2, this program reads 1");
  EXPECT_SAYS(refusal(with(8, -1)), "its header says -1 tokens");
  EXPECT_SAYS(refusal(llmc_bytes({1, 50257})), "has token 50257 at 1, the vocabulary is 50257");
}

TEST(OpenStoredTokens, NamesTheFileThatIsMissing) {
  const TestFolder folder;
  prepare_data({folder.write("a", "text")}, "bytes", folder / "p");
  std::filesystem::remove(folder / "p.idx");

  for (const std::string_view path : {"p", "p.bin"}) {
    EXPECT_SAYS(message_of<InputError>([&] { (void)open_stored_tokens(folder / path); }), "p.idx does not exist, which ");
  }
  EXPECT_EQ(open_stored_tokens(folder / "a"), nullptr) << "text";
}

/// Texts in which anything may be wrong at any place; 5-byte chunks put every border somewhere.
TEST(PrepareInParallel, GivesTheBytesAndTheErrorsOfOneThread) {
  CounterRng rng(7, "damaged text");
  const std::vector<std::string> pieces = {
      "a", "bcd ", "\n", "\n\n", "é", "東", "😀", "\r\n", " ", "\xE6", "\xFF", "\0"s, "\x80\x80\x80\x80"};
  std::size_t refused = 0;
  for (int round = 0; round < 30; ++round) {
    const TestFolder folder;
    Paths inputs;
    for (int f = 0; f < 3; ++f) {
      std::string text;
      for (std::uint64_t i = 0, count = rng.next_below(40); i < count; ++i) {
        text += pieces[rng.next_below(rng.next_below(20) == 0 ? pieces.size() : 9)];
      }
      inputs.push_back(f == 1 && rng.next_below(10) == 0 ? folder / "missing" : folder.write(std::to_string(f), text));
    }
    const auto rule = static_cast<DocumentRule>(round % 3);
    std::string expected;
    const std::string refusal = message_of<InputError>(
        [&] { for_each_document(inputs, rule, [&](std::string_view document) { (expected += document) += '\0'; }); });
    refused += refusal.empty() ? 0 : 1;
    const std::size_t before = folder.num_files();
    for (const int threads : {1, 2, 3, 7}) {
      const auto prepare = [&] { prepare_data(inputs, "bytes", folder / "p", rule, {.threads = threads, .chunk_bytes = 5}); };
      EXPECT_EQ(message_of<InputError>(prepare), refusal) << "round " << round << ", " << threads << " threads";
      if (refusal.empty()) {
        EXPECT_EQ(TestFolder::read(folder / "p.bin"), expected) << "round " << round << ", " << threads << " threads";
      } else {
        EXPECT_EQ(folder.num_files(), before) << "something is left behind";
      }
    }
  }
  EXPECT_GT(refused, 8U);
  EXPECT_LT(refused, 25U);
}

TEST(PrepareInParallel, CutsLongDocumentsIntoSequences) {
  const TestFolder folder;
  const auto file = folder.write("a", std::string(25, 'x') + "\n" + std::string(10, 'y') + "\nz\n");
  for (const int threads : {1, 3}) {
    prepare_data({file}, "bytes", folder / "p", DocumentRule::line,
                 {.threads = threads, .sequence_tokens = 10, .chunk_bytes = 7});

    const IndexedDataset dataset(folder / "p");
    EXPECT_EQ(dataset.num_documents(), 3);
    EXPECT_EQ(dataset.document_sequences(0), (Interval{0, 3}));
    EXPECT_EQ(dataset.sequence(2), (Interval{20, 26}));
    EXPECT_EQ(dataset.sequence(3), (Interval{26, 37})) << "the end of a document needs no sequence of its own";
  }
}

TEST(PrepareInParallel, ReportsProgressUpToTheEnd) {
  const TestFolder folder;
  const auto file = folder.write("a", std::string(1000, 'x'));
  std::vector<std::int64_t> seen;
  PrepareProgress last;

  prepare_data(
      {file}, "bytes", folder / "p", DocumentRule::file,
      {.threads = 2, .progress = [&](const PrepareProgress& p) { seen.push_back((last = p).text_bytes); }, .chunk_bytes = 300});

  EXPECT_EQ(seen, (std::vector<std::int64_t>{300, 600, 900, 1000}));
  EXPECT_EQ(last.text_bytes_total, 1000);
  EXPECT_EQ(last.tokens, 1001);
}

TEST(PrepareInParallel, AnErrorOfTheCallerStopsIt) {
  const TestFolder folder;
  const auto file = folder.write("a", std::string(1000, 'x'));
  const auto stop = [](const PrepareProgress&) { throw IoError("stopped"); };

  EXPECT_EQ(message_of<IoError>([&] {
              prepare_data({file}, "bytes", folder / "p", DocumentRule::file,
                           {.threads = 3, .progress = stop, .chunk_bytes = 10});
            }),
            "stopped");
  EXPECT_EQ(folder.num_files(), 1U);
}

}  // namespace
}  // namespace tandem
